"""Which weight of the long-CoT model is best? Merges of two children of one base, asked what both
can do (open question 2 of the paper); weights from a grid, and weights that are learned.

One base reads sums and strings, most of the sums with their answers alone. From it grow a reasoner
(sums with their working: the long chains of thought) and a model of the domain (strings). They are
merged with each weight of the reasoner, by TIES and by the mean of weights (with weights that sum
to 1, the sum of changes is the same), the routers merged or taken from one parent. Every merged
model answers held-out sums and strings. Dense models and mixtures of two sizes, whose children took
small steps; and one pair whose children took more and larger ones, and so are far apart. This is
`table`, one seed of each pair (3300 of the first two, 0 of the others). Its curves are of 128
prompts of each kind. These also choose the best merge, and 512 others judge it: in an earlier
version the first did both, which flatters.

Learned (`runs`): W = base + sum of c * change of a child, each c from 0.5, by Adam. From the loss
of 128 written solutions of each kind (train split, none shown to the base or a child): one weight
(w, 1 - w); one c per child; one per child and tensor. Without labels, from the entropy of the
merged model's own answers to the same prompts: one per child; one per child and tensor. Beside
them the grid: linear, TIES 0.2, TIES 0.5, and linear with the changes 1.5 times as large, 11
weights each. 128 held-out prompts of each kind choose the best of the 11 linear ones, of all 44,
and the better parent. 512 others judge, four answers each, in points of the mean of both kinds;
differences are paired by seed. Five seeds of the two small pairs, 3300 to 3304.

Equal effort: 11 evaluations of a grid are 11,264 answers; learning reads 120 steps of 32 solutions
and goes back through each, which costs two passes more: 11,520. Both read 256 problems. CPU
seconds of both are stored. Without labels 1,280 answers are drawn in addition.
Controls: `joint`, a child that read both kinds for as many steps as both children together, must
be above the better parent; else there is nothing that a merge could win. `all weights`: the same
solutions and steps teach every weight of the merge with halves. If that does as well, then a
coefficient is only one more way to train.

Rates (`RATES`) and design were made on seed 3390 of both small pairs, 512 prompts of each kind:
`--rates`. Means of both pairs, %: one weight 55.3 to 55.5 and one per child 56.3 to 56.5 at all
rates from 0.01 to 0.3 (0.03 taken); per tensor 58.8 at 0.03, 61.2 at 0.1, 62.7 at 0.3, 64.9 at 1,
60.0 at 3; all weights 55.0 at 1e-5, 55.1, 54.9, 55.5 at 3e-4, 54.3, 41.8 at 3e-3, 13.9 at 1e-2;
without labels one per child 55.6 to 55.9 at all, per tensor 56.3 at 0.01, 56.0, 55.4, 56.8 at 0.3,
50.8 at 1, 0.0 at 3. Each is within its tried rates. The rates up to 0.3 were tried with problems of
which some had been shown to the children; the others, and what is judged, with unseen ones.
Five seeds: with a standard deviation of 2 points between seeds the half-width is 2.5; on seed 3390
coefficients per tensor were about 6 and 8 points above the best linear merge, the others within 2.

Every model that was trained and every evaluation is kept in `benchmarks/studies/.runs/merge`.
`sums_by_weight`: how many points more of the sums are right with a weight of 0.9 than with 0.1,
mean over the pairs and 95 % interval. About 21 core-minutes.
Last line: one JSON object; `ratio` is the mean rate of the best merge over that of the better
parent, the least of the pairs with small steps.
usage: make study NAME=merge, python benchmarks/studies/merge.py [--quick]
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from _evidence import allowed, chance, holm, library, would_see
from _merge_weights import ARMS, FORMS, Blend, Effort, learn
from _runner import RUNS, digest, prompts_of, rounded
from _runner import interval as over
from tqdm import tqdm

from compassrl.data.tokenizer import build_tokenizer, save_tokenizer
from compassrl.model.merge import MergeConfig, merge_checkpoints
from compassrl.model.policy import Policy
from compassrl.model.pretrained import from_pretrained, hf_weights, save_pretrained
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.eval_sets import interval
from compassrl.runs.evaluate import evaluate
from compassrl.runs.log import write_json
from compassrl.runs.presets import tiny_cpu
from compassrl.runs.summary import machine_info
from compassrl.train.sft import SFTConfig, cold_start
from compassrl.train.torch_train import OptimConfig, TorchTrain

SUMS, STRINGS = (('arithmetic', 1.0, 1.0),), (('strings', 0.0, 1.0),)
BOTH = tuple((d, hard, 0.5) for d, hard, _ in (*SUMS, *STRINGS))
KINDS = dict(sums=SUMS, strings=STRINGS)
SMALL = replace(tiny_cpu().policy, max_position_embeddings=128)
LARGE = replace(SMALL, hidden_size=128, num_hidden_layers=3, moe_intermediate_size=96)


def dense(shape):
    "As wide as the experts that a token meets in the mixture"
    wide = shape.num_experts_per_tok * shape.moe_intermediate_size
    layers = tuple(range(shape.num_hidden_layers))
    return replace(shape, mlp_only_layers=layers, intermediate_size=wide)


GENTLE, FAR = (200, 5e-4), (500, 3e-3)  # steps of a child and their learning rate
PAIRS = {
    'small, mixture': (SMALL, GENTLE),
    'small, dense': (dense(SMALL), GENTLE),
    'large, mixture': (LARGE, GENTLE),
    'large, dense': (dense(LARGE), GENTLE),
    'small, mixture, far apart': (SMALL, FAR),
}
WEIGHTS = tuple(i / 10 for i in range(11))
WAYS = {
    'TIES 0.2': dict(density=0.2),
    'TIES 0.5': dict(density=0.5),
    'linear': dict(method='linear'),
}
LARGER = {'changes x 1.5': dict(method='task_arithmetic', scale=1.5)}
ROUTERS = {'routers of the reasoner': 1, 'routers of the domain': 2}
SEEDS, RATE_SEED = allowed(range(3300, 3305)), allowed([3390])[0]
SEVERAL = 'small, mixture', 'small, dense'
RATES = {  # see `explored`
    'labels, one weight': 0.03,
    'labels, one per child': 0.03,
    'labels, one per child and tensor': 1.0,
    'labels, all weights': 3e-4,
    'no labels, one per child': 0.03,
    'no labels, one per child and tensor': 0.3,
}


@dataclass(frozen=True)
class Size:
    "How much is trained and asked"

    steps: int = 700  # length of the base's training
    choose: int = 128  # held-out prompts of each kind that choose a merge
    judge: int = 512  # and others that judge it
    k: int = 4  # answers to each
    weights: tuple[float, ...] = WEIGHTS
    ways: tuple[str, ...] = tuple(WAYS | LARGER)
    effort: Effort = Effort()


class Work:
    "One pair of one seed: models are trained once, every evaluation is kept"

    def __init__(self, root, pair, seed, size):
        (self.shape, self.child), self.seed, self.size = pair, seed, size
        self.home = root / digest(self.shape, size, self.child, SUMS, STRINGS, seed)
        self.home.mkdir(parents=True, exist_ok=True)
        self.seen = {}  # prompts by set and kind

    def trained(self, name, mix, steps, lr, hasty, start=None):
        path, seed = self.home / name, self.seed
        if not path.exists():
            policy = from_pretrained(start) if start else Policy(self.shape, seed)
            cfg = SFTConfig(steps=steps, lr=lr, num_solutions=4096, hasty_frac=hasty)
            engine = TorchTrain(policy, OptimConfig(lr=cfg.lr, num_mini_batches=1), replay='off')
            prompts = prompts_of(mix, 4096, seed, 'train')
            for _ in tqdm(cold_start(engine, prompts, cfg, build_tokenizer(), seed), name, steps):
                pass
            new = path.with_suffix('.tmp')
            save_pretrained(engine.policy, new)
            save_tokenizer(build_tokenizer(), new)
            new.replace(path)
        return path

    def grow(self, control=False):
        "Base, reasoner, domain; and the control"
        base = self.trained('base', BOTH, self.size.steps, 5e-3, 0.7)
        (steps, lr), of = self.child, dict(base=base)
        for name, mix in dict(reasoner=SUMS, domain=STRINGS).items():
            of[name] = self.trained(name, mix, steps, lr, 0.0, base)
        if control:
            of['joint'] = self.trained('joint', BOTH, 2 * steps, lr, 0.0, base)
        return of

    def prompts(self, part, mix):
        "`choose` and `judge` have no held-out prompt in common; the learned were never shown"
        size, seed = self.size, self.seed
        if part == 'learn':
            shown = {p.id for m in (mix, BOTH) for p in prompts_of(m, 4096, seed, 'train')}
            more = prompts_of(mix, 2048, seed + 10**6, 'train')
            return [p for p in more if p.id not in shown][: size.effort.problems]
        choose = prompts_of(mix, size.choose, seed, 'heldout')
        if part == 'choose':
            return choose
        known = {p.id for p in choose}
        rest = prompts_of(mix, size.choose + size.judge, seed, 'heldout')
        return [p for p in rest if p.id not in known][: size.judge]

    def kept(self, name, make):
        path = self.home / f'{name}.json'
        if not path.exists():
            write_json(path, make())
        return json.loads(path.read_text())

    def measured(self, policy, part):
        "Held-out avg@k of both kinds with 95 % intervals"
        cfg, tok, out = tiny_cpu(), build_tokenizer(), {}
        engine = TorchRollout(policy.config, cfg.rollout.num_slots)
        engine.load_weights(hf_weights(policy), 0)
        params = cfg.rollout.params(policy.config.eos_ids)
        for kind, mix in KINDS.items():
            found = evaluate(engine, self.prompts(part, mix), self.size.k, params, tok, self.seed)
            out[kind] = [round(x, 5) for x in (found.avg, *interval(found))]
        return out

    def rates(self, name, folder, part='choose'):
        return self.kept(f'{name} {part}', lambda: self.measured(from_pretrained(folder), part))

    def merged(self, parents, weight, settings, part='choose'):
        base, models = parents['base'], [parents[n] for n in ('reasoner', 'domain')]

        def make():
            began = time.process_time()
            with tempfile.TemporaryDirectory() as tmp:
                cfg = MergeConfig(weights=(weight, 1 - weight), **settings)
                merge_checkpoints(models, Path(tmp) / 'model', cfg, base)
                found = self.measured(from_pretrained(Path(tmp) / 'model'), part)
            return found | dict(seconds=time.process_time() - began)

        found = self.kept(f'{sorted(settings.items())} {weight} {part}', make)
        return {kind: found[kind] for kind in KINDS}, found['seconds']

    def learned(self, parents, arm, lr, parts=('choose', 'judge')):
        def make():
            base, *children = (from_pretrained(parents[n]) for n in ('base', 'reasoner', 'domain'))
            kinds = [self.prompts('learn', mix) for mix in KINDS.values()]
            blend = Blend(base, children)
            policy, c, loss, s = learn(blend, arm, lr, kinds, self.size.effort, self.seed)
            found = {part: first(self.measured(policy, part)) for part in parts}
            c = None if c is None else c.tolist()
            return rounded(found | dict(c=c, loss=loss, seconds=s, lr=lr))

        return self.kept(f'{arm} {lr} {"".join(parts)}', make)


def first(rates):
    "Of both kinds, without their intervals"
    return [r[0] for r in rates.values()]


def mean(rates):
    return statistics.fmean(first(rates))


# ---- the grid of one seed of each pair


def sweep(work, names):
    parents, size = work.grow(), work.size
    out = dict(parents={n: work.rates(n, f) for n, f in parents.items()})
    ways, routers = {n: WAYS[n] for n in names}, {}
    if work.shape.mlp_only_layers == ():
        routers = {n: dict(method='linear', router_from=i) for n, i in ROUTERS.items()}
    for way, settings in (ways | routers).items():
        points = tqdm(size.weights, way)
        out[way] = [work.merged(parents, w, settings)[0] for w in points]
    out['best'] = best_of(work, parents, out, ways | routers)
    return out


def best_of(work, parents, found, ways):
    """The merge that the first prompts call best (way, weight, mean), and what others say of it and
    of the better parent: mean of both kinds. `between`: of those with weights between 0 and 1"""
    better = max(('reasoner', 'domain'), key=lambda n: mean(found['parents'][n]))
    parent = mean(work.rates(better, parents[better], 'judge'))
    points = [(mean(p), w, way) for way in ways for w, p in zip(work.size.weights, found[way])]

    def judged(points):
        seen, weight, way = max(points)
        value = mean(work.merged(parents, weight, ways[way], 'judge')[0])
        return dict(way=way, weight=weight, chosen_at=round(seen, 4), mean=round(value, 4))

    between = judged([p for p in points if 0 < p[1] < 1] or points)
    return judged(points) | dict(better_parent=round(parent, 4), between=between)


def sums_by_weight(table, weights, low, high):
    "Sums that are right with the one weight of the reasoner more than with the other, in points"
    a, b = weights.index(low), weights.index(high)
    out = {}
    for way in (w for w in WAYS if all(w in found for found in table.values())):
        gaps = [100 * (f[way][b]['sums'][0] - f[way][a]['sums'][0]) for f in table.values()]
        gap = over(gaps) if len(gaps) > 1 else gaps * 3
        out[way.replace('.', '').replace(' ', '_')] = [round(x, 3) for x in gap]
    return out


# ---- the grid against learning


def trial(work, pair, arms):
    "Of one pair and seed: rates of sums and strings"
    parents, size, ways = work.grow(control=True), work.size, WAYS | LARGER
    grid, seconds = {}, 0.0
    for way in size.ways:
        points = [work.merged(parents, w, ways[way]) for w in size.weights]
        grid[way] = {kind: [p[kind][0] for p, _ in points] for kind in KINDS}
        seconds += sum(s for _, s in points) * (way == 'linear')
    out = dict(pair=pair, seed=work.seed, library=library(), grid=grid, grid_seconds=seconds)
    for part in ('choose', 'judge'):
        out[part] = {n: first(work.rates(n, folder, part)) for n, folder in parents.items()}
    for name, among in dict(linear=('linear',), all=size.ways).items():
        weight, way = best_point(grid, among, size.weights)
        found, _ = work.merged(parents, weight, ways[way], 'judge')
        out[f'best_{name}'] = dict(way=way, weight=weight, judge=first(found))
    named = tqdm(arms, f'{pair} {work.seed}')
    learned = {a: brief(work.learned(parents, a, RATES[a])) for a in named}
    return rounded(out | dict(learned=learned))


def brief(row):
    "With the mean, the least and the largest coefficient of each child in place of all tensors'"
    if row['c'] and isinstance(row['c'][0], list):
        ends = [[min(c), max(c)] for c in row['c']]
        return row | dict(c=[statistics.fmean(c) for c in row['c']], c_range=ends)
    return row


def best_point(grid, among, weights):
    means = {way: map(statistics.fmean, zip(*grid[way].values())) for way in among}
    return max((m, w, way) for way in among for w, m in zip(weights, means[way]))[1:]


def better_parent(run):
    return max(('reasoner', 'domain'), key=lambda n: statistics.fmean(run['choose'][n]))


def values(run):
    "What is compared: judged means of both kinds, in points"
    found = {f'best_{n}': run[f'best_{n}']['judge'] for n in ('linear', 'all')}
    found |= dict(parent=run['judge'][better_parent(run)], joint=run['judge']['joint'])
    found |= {arm: row['judge'] for arm, row in run['learned'].items()}
    return {name: 100 * statistics.fmean(both) for name, both in found.items()}


def differences(runs):
    "Of the runs of several seeds: by pair, and of the mean of both pairs"
    of = {(r['pair'], r['seed']): values(r) for r in runs}
    seeds, out = sorted({s for _, s in of}), {}
    arms = [a for a in ARMS if all(a in v for v in of.values())]
    wanted = [(a, b) for a in arms for b in ('best_linear', 'best_all', 'parent')]
    wanted += [(b, 'parent') for b in ('best_linear', 'best_all', 'joint')]
    full = 'labels, all weights'
    wanted += [(a, full) for a in arms if a != full and full in arms]
    for a, b in wanted:
        gaps = {p: [of[p, s][a] - of[p, s][b] for s in seeds] for p in SEVERAL}
        gaps['both'] = [statistics.fmean(x) for x in zip(*gaps.values())]
        out[f'{a} - {b}'] = {p: row_of(x) for p, x in gaps.items()}
    keys = [f'{a} - best_linear' for a in arms]
    kept = holm([out[k]['both']['p'] for k in keys])
    return dict(seeds=seeds, rows=out, holm=[keys[i] for i in sorted(kept)])


def row_of(gaps):
    if len(gaps) < 2:
        return dict(mean=gaps * 3, sees=0.0, p=1.0)
    found = over(gaps)
    half = (found[2] - found[1]) / 2
    return rounded(dict(mean=found, sees=would_see(half, len(gaps)), p=chance(found, len(gaps))))


def explored(works):
    "Judged mean of each learning rate over both small pairs of the seed for rates"
    found = {}
    for arm, (_, form) in ARMS.items():
        for lr in FORMS[form].rates:
            each = [w.learned(w.grow(), arm, lr, ('judge',))['judge'] for w in works]
            found.setdefault(arm, {})[lr] = statistics.fmean(map(statistics.fmean, each))
            print(arm, lr, f'{found[arm][lr]:.2%}', flush=True)
    return found


# ---- all of it


def show(table, weights, runs, diffs):
    for pair, found in table.items():
        p = found['parents']
        print(f'\n{pair}: ' + ', '.join(f'{n} {mean(r):.1%}' for n, r in p.items()))
        print(f'{"weight of the reasoner":26}' + ''.join(f'{w:7g}' for w in weights))
        for way, points in found.items():
            if way not in ('parents', 'best'):
                print(f'{way:26}' + ''.join(f'{100 * mean(r):7.1f}' for r in points))
        best = '{way}, weight {weight}: {mean:.1%}, better parent {better_parent:.1%}'
        print('best: ' + best.format(**found['best']))
    for run in runs:
        print(run['pair'], run['seed'], {k: round(v, 1) for k, v in values(run).items()})
    for name, row in diffs['rows'].items():
        print(f'{name:60}', {p: [round(x, 1) for x in r['mean']] for p, r in row.items()})


def small_case():
    "For `--quick`: two pairs, one seed, two arms"
    effort = Effort(problems=4, steps=2, each=2, draws=1)
    size = Size(4, 2, 2, 1, (0.0, 0.5), ('linear',), effort)
    pairs = {p: (shape, (3, 1e-3)) for p, (shape, _) in list(PAIRS.items())[:2]}
    return size, pairs, ('linear',), SEEDS[:1], tuple(ARMS)[2:5:2], (0.0, 0.5)


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    p.add_argument('--rates', action='store_true', help='only the search for learning rates')
    a = p.parse_args()
    torch.set_num_threads(1)
    size, pairs, ways, seeds, arms, ends = Size(), PAIRS, tuple(WAYS), SEEDS, ARMS, (0.1, 0.9)
    with tempfile.TemporaryDirectory() as tmp:
        root = RUNS / 'merge'
        if a.quick:
            root, (size, pairs, ways, seeds, arms, ends) = Path(tmp), small_case()
        work = partial(Work, root, size=size)
        if a.rates:
            return print(json.dumps(explored([work(pairs[p], RATE_SEED) for p in SEVERAL])))
        runs = [trial(work(pairs[p], s), p, arms) for s in seeds for p in SEVERAL]
        of = {name: SEEDS[0] if name in SEVERAL else 0 for name in pairs}
        table = {name: sweep(work(pairs[name], of[name]), ways) for name in pairs}
    diffs = differences(runs)
    show(table, size.weights, runs, diffs)
    bests = [found['best'] for name, found in table.items() if 'far' not in name]
    ratio = min(b['mean'] / b['better_parent'] if b['better_parent'] else 1.0 for b in bests)
    settings = dict(steps=size.steps, heldout=size.choose, judge=size.judge, eval_k=size.k)
    settings |= dict(weights=size.weights, quick=a.quick, seeds=seeds, rate_seed=RATE_SEED)
    settings |= dict(rates=RATES, effort=vars(size.effort))
    units = 'held-out avg@k, mean of both domains: best merge / better parent, least of all'
    found = dict(name='merge', ratio=round(ratio, 3), units=units, table=table)
    found |= dict(sums_by_weight=sums_by_weight(table, size.weights, *ends), runs=runs)
    found |= dict(differences=diffs)
    print(json.dumps(found | dict(settings=settings, machine=machine_info())))


if __name__ == '__main__':
    main()
