"""Which weight of the long-CoT model is best? Merges of two children of one base, asked what both
can do (open question 2 of the paper).

One base reads sums and strings, most of the sums with their answers alone. From it grow a reasoner
(sums with their working: the long chains of thought) and a model of the domain (strings). They are
merged with each weight of the reasoner, by TIES and by the mean of weights (with weights that sum
to 1, the sum of changes is the same), the routers merged or taken from one parent. Every merged
model answers held-out sums and strings. Dense models and mixtures of two sizes, whose children took
small steps; and one pair whose children took more and larger ones, and so are far apart.

Every model that was trained and every evaluation is kept in `benchmarks/studies/.runs/merge`.
`sums_by_weight`: how many points more of the sums are right with a weight of 0.9 than with 0.1,
mean over the pairs and 95 % interval.
Last line: one JSON object; `ratio` is the mean rate of the best merge over that of the better
parent, the least of the pairs with small steps.
usage: make study NAME=merge, python benchmarks/studies/merge.py [--quick]
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from _runner import RUNS, digest, prompts_of
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
ROUTERS = {'routers of the reasoner': 1, 'routers of the domain': 2}


class Work:
    "One pair: models are trained once, every evaluation is kept"

    def __init__(self, root, shape, steps, child, num_heldout, eval_k):
        self.shape, self.steps, self.child = shape, steps, child
        self.num, self.k = num_heldout, eval_k
        self.home = root / digest(shape, steps, child, SUMS, STRINGS, num_heldout, eval_k)
        self.home.mkdir(parents=True, exist_ok=True)

    def trained(self, name, mix, steps, lr, hasty, start=None):
        path = self.home / name
        if not path.exists():
            policy = from_pretrained(start) if start else Policy(self.shape, 0)
            cfg = SFTConfig(steps=steps, lr=lr, num_solutions=4096, hasty_frac=hasty)
            engine = TorchTrain(policy, OptimConfig(lr=cfg.lr, num_mini_batches=1), replay='off')
            prompts = prompts_of(mix, 4096, 0, 'train')
            for _ in tqdm(cold_start(engine, prompts, cfg, build_tokenizer(), 0), name, steps):
                pass
            new = path.with_suffix('.tmp')
            save_pretrained(engine.policy, new)
            save_tokenizer(build_tokenizer(), new)
            new.replace(path)
        return path

    def grow(self):
        "Base, reasoner, domain"
        base = self.trained('base', BOTH, self.steps, 5e-3, 0.7)
        reasoner = self.trained('reasoner', SUMS, *self.child, 0.0, base)
        return base, reasoner, self.trained('domain', STRINGS, *self.child, 0.0, base)

    def rates(self, name, folder):
        "Held-out avg@k of both domains with 95 % intervals, from a file or measured now"
        path = self.home / f'{name}.json'
        if not path.exists():
            write_json(path, self.measured(folder()))
        return json.loads(path.read_text())

    def measured(self, folder):
        policy, cfg, tok, out = from_pretrained(folder), tiny_cpu(), build_tokenizer(), {}
        engine = TorchRollout(policy.config, cfg.rollout.num_slots)
        engine.load_weights(hf_weights(policy), 0)
        params = cfg.rollout.params(policy.config.eos_ids)
        for domain, mix in dict(sums=SUMS, strings=STRINGS).items():
            prompts = prompts_of(mix, self.num, 0, 'heldout')
            found = evaluate(engine, prompts, self.k, params, tok, 0)
            out[domain] = [round(x, 5) for x in (found.avg, *interval(found))]
        return out

    def merged(self, models, base, weight, settings):
        with tempfile.TemporaryDirectory() as tmp:
            cfg = MergeConfig(weights=(weight, 1 - weight), **settings)
            merge_checkpoints(models, Path(tmp) / 'model', cfg, base)
            return self.measured(Path(tmp) / 'model')

    def curve(self, way, settings, weights, base, models):
        out = []
        for w in tqdm(weights, way):
            path = self.home / f'{way} {w}.json'
            if not path.exists():
                write_json(path, self.merged(models, base, w, settings))
            out.append(json.loads(path.read_text()))
        return out


def mean(rates):
    return sum(r[0] for r in rates.values()) / len(rates)


def sweep(work, weights, ways):
    base, *models = work.grow()
    parents = dict(zip(('base', 'reasoner', 'domain'), (base, *models)))
    out = dict(parents={n: work.rates(n, lambda f=f: f) for n, f in parents.items()})
    routers = {}
    if work.shape.mlp_only_layers == ():
        routers = {n: dict(method='linear', router_from=i) for n, i in ROUTERS.items()}
    for way, settings in (ways | routers).items():
        out[way] = work.curve(way, settings, weights, base, models)
    return out


def best_of(found, weights):
    "The merge with the highest mean of both domains: way, weight, that mean"
    points = [
        (mean(p), w, way) for way in found if way != 'parents' for w, p in zip(weights, found[way])
    ]
    value, weight, way = max(points)
    better = max(mean(found['parents'][n]) for n in ('reasoner', 'domain'))
    return dict(way=way, weight=weight, mean=round(value, 4), better_parent=round(better, 4))


def sums_by_weight(table, weights, low, high):
    "Sums that are right with the one weight of the reasoner more than with the other, in points"
    a, b = weights.index(low), weights.index(high)
    out = {}
    for way in (w for w in WAYS if all(w in found for found in table.values())):
        gaps = [100 * (f[way][b]['sums'][0] - f[way][a]['sums'][0]) for f in table.values()]
        mean = over(gaps) if len(gaps) > 1 else gaps * 3
        out[way.replace('.', '').replace(' ', '_')] = [round(x, 3) for x in mean]
    return out


def show(table, weights):
    for pair, found in table.items():
        p = found['parents']
        print(f'\n{pair}: ' + ', '.join(f'{n} {mean(r):.1%}' for n, r in p.items()))
        print(f'{"weight of the reasoner":26}' + ''.join(f'{w:7g}' for w in weights))
        for way, points in found.items():
            if way not in ('parents', 'best'):
                print(f'{way:26}' + ''.join(f'{100 * mean(r):7.1f}' for r in points))
        print('best: {way}, weight {weight}: {mean:.1%}'.format(**found['best']))


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    a = p.parse_args()
    torch.set_num_threads(1)
    pairs, weights, ways, steps, num, k = PAIRS, WEIGHTS, WAYS, 700, 128, 4
    low, high = 0.1, 0.9
    with tempfile.TemporaryDirectory() as tmp:
        root = RUNS / 'merge'
        if a.quick:
            root, pairs, weights = Path(tmp), {'small, mixture': (SMALL, (3, 1e-3))}, (0.0, 0.5)
            ways, steps, num, k = {'linear': WAYS['linear']}, 4, 6, 1
            low, high = weights
        table = {}
        for name, (shape, child) in pairs.items():
            table[name] = sweep(Work(root, shape, steps, child, num, k), weights, ways)
            table[name]['best'] = best_of(table[name], weights)
    show(table, weights)
    bests = [found['best'] for name, found in table.items() if 'far' not in name]
    ratio = min(b['mean'] / b['better_parent'] if b['better_parent'] else 1.0 for b in bests)
    settings = dict(steps=steps, heldout=num, eval_k=k, weights=weights, quick=a.quick)
    units = 'held-out avg@k, mean of both domains: best merge / better parent, least of all'
    found = dict(name='merge', ratio=round(ratio, 3), units=units, table=table)
    found['sums_by_weight'] = sums_by_weight(table, weights, low, high)
    print(json.dumps(found | dict(settings=settings, machine=machine_info())))


if __name__ == '__main__':
    main()
