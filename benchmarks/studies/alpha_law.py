"""When does ESPO silence a group? A law, and what it predicts, against what happens.

The mean log-ratio of a group of n tokens has a spread of about sigma / sqrt(n), where sigma is that
of a token. So what decides is x = eps / (sigma / sqrt(n)), the clip range in units of that spread.
If log-ratios are normal, a share erfc(x / sqrt(2)) of the groups that have an advantage is clipped
in an update. And if one x is best, then alpha = x sigma log V / (sqrt(n) H), H the mean entropy.

Four settings of the study `alpha`, whose best alpha is known, and three more: a quarter and twice
of the step size, and answers of four digits. Each runs with three alphas. A spy in the
loss keeps, update by update, sigma, n, H and the spread of the means of
both groups, of responses with an advantage.
A group is clipped only if it moved the way of its advantage, so a share `toward` of them can be.

`clip`   per setting, group and alpha: share of the tokens with an advantage that are clipped;
         `formula`: toward erfc(x / sqrt(2)), x from sigma and n of the same update;
         `spread`: the same from the spread of the means (what is left is the shape alone);
         `ahead`: sigma, n and H of the first step with alpha 1, sigma in proportion to the
         learning rate from then on: what could be known before
`best`   per setting of `alpha`: x at its best alpha, the alpha that the others predict by a
         common x, and how far behind the best it ends in the runs of `alpha`
About five minutes on two idle cores.
Last line: one JSON object; `ratio` is the correlation of predicted and measured shares of the
uncertain group, `formula`.
usage: make study NAME=alpha_law, python benchmarks/studies/alpha_law.py [--processes 2] [--quick]
"""

import json
import math
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import alpha
from _evidence import ROOT, interval
from _runner import rounded, run, run_all
from _tables import flags

from compassrl.algo.losses import espo
from compassrl.runs.summary import machine_info

TRIED = 0.02, 0.2, 1.0
SEEDS = (1100,)
SETTINGS = 'two', 'three', 'slow', 'fast', 'letters', 'small', 'four'
KEYS = 'tokens', 'groups', 'delta', 'mean', 'eps', 'toward', 'clipped', 'formula', 'spread'


def nothing(batch):
    return {}


def tail(eps, sd):
    "Share of a normal variable outside of its clip range"
    return math.erfc(eps / sd / 2**0.5) if sd else 0.0


@dataclass(frozen=True)
class Spied:
    "Runs an arm and keeps what its loss met: per step, sums over the updates but the first"

    def __call__(self, cfg, pools, rollout, engine, curve):
        met, last = {}, {}
        ratio_of, surrogate, add = espo.group_ratio, espo.clipped_surrogate, curve.on_step

        def group_ratio(delta, groups, mask, literal=False):
            last.update(delta=delta.detach(), groups=groups)
            return ratio_of(delta, groups, mask, literal)

        def clipped_surrogate(ratio, advantages, mask, low, high):
            found = surrogate(ratio, advantages, mask, low, high)
            if last['delta'].any():  # in the first update of a step all ratios are 1
                for g in (0, 1):
                    of = mask & (last['groups'] == g) & (advantages != 0)
                    if of.any():
                        self.count(met, g, of, last['delta'], ratio, advantages, low, found)
            return found

        def on_step(step, metrics, *args):
            try:
                add(step, metrics, *args)
            finally:
                seen = {f'{k}{g}': met.get(f'{k}{g}', 0.0) for k in KEYS for g in (0, 1)}
                curve.rows[-1]['seen'] = seen | dict(lr=metrics['lr'])
                met.clear()

        curve.on_step = on_step
        with patch.multiple(espo, group_ratio=group_ratio, clipped_surrogate=clipped_surrogate):
            run(cfg, pools, rollout, engine, curve)

    def count(self, met, g, of, delta, ratio, advantages, eps, found):
        "Adds a group of tokens of one batch; all are sums over its tokens"
        mean, num = ratio.detach().log()[of], int(of.sum())
        n = num / int(of.any(1).sum())
        sigma, spread = float(delta[of].std(correction=0)), float(mean.square().mean() ** 0.5)
        width = float(eps[of].mean())
        toward = float((mean * advantages[of] > 0).float().mean())
        row = dict(tokens=1, groups=1 / n, delta=sigma**2, mean=spread**2, eps=width)
        row |= dict(toward=toward, clipped=float((found[1] | found[2])[of].float().mean()))
        row |= dict(formula=toward * tail(width, sigma / n**0.5))
        row |= dict(spread=toward * tail(width, spread))
        for k, v in row.items():
            met[f'{k}{g}'] = met.get(f'{k}{g}', 0.0) + num * v


def settings():
    "Name -> study; its three arms, its learning rate, its cold start from `alpha`"
    stored = json.loads((ROOT / 'benchmarks' / 'results' / 'alpha.json').read_text())
    rates = stored['settings']['lr']
    arms = {alpha.name_of(a): alpha.ARMS[alpha.name_of(a)] for a in TRIED}
    found = {next(iter(s.tasks)): s for s in alpha.SETTINGS}
    rates |= dict(slow=rates['two'] / 4, fast=2 * rates['two'], four=rates['three'])
    found |= dict(slow=alpha.setting('slow'), fast=alpha.setting('fast'))
    found['four'] = alpha.setting('four', difficulty=3.0, cold=(('arithmetic', 3.0, 1.0),))
    found = {k: found[k] for k in SETTINGS}
    own = dict(arms=arms, seeds=SEEDS, num_heldout=64, look=nothing)
    own |= dict(name='alpha_law', ways=dict.fromkeys(arms, Spied()))
    return {
        k: replace(s, **own, learning_rates=dict.fromkeys(arms, rates[k])) for k, s in found.items()
    }


def sums(rows):
    "Means over the tokens of each group, from the sums of some steps"
    out = []
    for g in (0, 1):
        total = {k: sum(r[f'{k}{g}'] for r in rows) for k in KEYS}
        num = total['tokens'] or 1.0
        out.append({k: v if k == 'tokens' else v / num for k, v in total.items()})
    return out


def steps_of(trial):
    "The steps of a trial, each with what the spy has seen"
    seen = trial['seen']
    return [{k: v[i] for k, v in seen.items()} for i in range(len(seen['lr']))]


def first_of(trial):
    "The first step that moved anything"
    steps = steps_of(trial)
    return next((s for s in steps if s['lr'] and s['tokens0']), steps[0])


def ahead(first, steps, g, alpha_of, alpha_seen):
    "Share of a group that is clipped, as the first step of another run foresees it"
    of, parts, total = sums([first])[g], 0.0, 0.0
    for row in steps:
        sigma = of['delta'] ** 0.5 * row['lr'] / (first['lr'] or 1.0)
        eps = of['eps'] * alpha_of / alpha_seen
        parts += row[f'tokens{g}'] * of['toward'] * tail(eps, sigma * of['groups'] ** 0.5)
        total += row[f'tokens{g}']
    return parts / (total or 1.0)


GROUPS = 'uncertain', 'sure'


def shares(trials, study, name):
    "Per group of tokens and alpha: share clipped of those with an advantage, and its predictions"
    out = {}
    for g, group in enumerate(GROUPS):
        for a in TRIED:
            rows = []
            for seed in study.seeds:
                of = {r['arm']: r for r in trials if (r['task'], r['seed']) == (name, seed)}
                steps, widest = steps_of(of[alpha.name_of(a)]), of[alpha.name_of(TRIED[-1])]
                row = {k: sums(steps)[g][k] for k in ('clipped', 'formula', 'spread')}
                row['ahead'] = ahead(first_of(widest), steps, g, a, TRIED[-1])
                rows.append(row)
            means = {k: statistics.fmean(r[k] for r in rows) for k in rows[0]}
            out.setdefault(group, {})[f'{a:g}'] = means
    return out


def scale(trials, study, name):
    "alpha = x * this: sigma log V / (sqrt(n) H) of the uncertain group with the widest alpha"
    found = []
    for r in trials:
        if (r['task'], r['arm']) == (name, alpha.name_of(TRIED[-1])):
            top = sums(steps_of(r))[0]
            spread = (top['delta'] * top['groups']) ** 0.5
            found.append(TRIED[-1] * spread / top['eps'] if top['eps'] else 0.0)
    return statistics.fmean(found)


def best(scales):
    "x at the best alpha of each setting of `alpha`, and what the others' x would have chosen"
    stored = json.loads((ROOT / 'benchmarks' / 'results' / 'alpha.json').read_text())
    gains = {}
    for r in stored['runs']:
        gain = 100 * (r['evals'][-1][1] - r['evals'][0][1])
        gains.setdefault(r['task'], {}).setdefault(int(r['arm'][1:]) / 1000, []).append(gain)
    means = {t: {a: statistics.fmean(v) for a, v in of.items()} for t, of in gains.items()}
    top = {t: max(of, key=of.get) for t, of in means.items()}
    x = {t: math.log(a / scales[t]) for t, a in top.items() if t in scales}
    out = {}
    for t, of in gains.items():
        if t not in scales:
            continue
        wanted = scales[t] * math.exp(statistics.fmean(v for o, v in x.items() if o != t))
        got = min(of, key=lambda a: abs(math.log(a / wanted)))
        behind = [b - g for b, g in zip(of[top[t]], of[got])]
        out[t] = dict(best=top[t], x=math.exp(x[t]), wanted=wanted, alpha=got)
        out[t] |= dict(scale=scales[t], behind=interval(behind))
    return out


def correlation(pairs):
    a, b = zip(*pairs)
    return statistics.correlation(a, b) if len(set(a)) > 1 < len(set(b)) else 0.0


def main():
    a = flags(__doc__)
    studies = settings()
    with tempfile.TemporaryDirectory() as folder:
        if a.quick:
            fewer = dict(runs=Path(folder), budget=9000, num_heldout=4, cold_steps=4)
            studies = {k: replace(studies[k], **fewer) for k in ('two',)}
        runs = []
        for name, s in studies.items():
            trials = [(name, m, seed) for seed in s.seeds for m in s.arms]
            runs += run_all(s, trials, 0 if a.quick else a.processes)
    table = {k: shares(runs, s, k) for k, s in studies.items()}
    scales = {k: scale(runs, s, k) for k, s in studies.items()}
    fit = {}
    for group in GROUPS:
        cells = [c for of in table.values() for c in of[group].values()]
        for k in ('formula', 'spread', 'ahead'):
            misses = [abs(c[k] - c['clipped']) for c in cells]
            pairs = [(c[k], c['clipped']) for c in cells]
            row = dict(correlation=correlation(pairs), worst=max(misses))
            fit.setdefault(group, {})[k] = row | dict(mean_error=statistics.fmean(misses))
    for k, of in table.items():
        for group in GROUPS:
            for al, c in of[group].items():
                print(f'{k:8} {group:10} {al:>5}', ' '.join(f'{n} {v:.3f}' for n, v in c.items()))
    found = dict(name='alpha_law', ratio=round(fit['uncertain']['formula']['correlation'], 3))
    found |= dict(
        units='correlation of predicted and measured clip share, uncertain group', fit=fit
    )
    found |= dict(clip=table, scales=scales, best={} if a.quick else best(scales))
    print(json.dumps(fit), json.dumps(found['best']), sep='\n')
    kept = [
        {k: r[k] for k in ('task', 'arm', 'seed', 'lr', 'library', 'evals')}
        | dict(first=first_of(r), total=sums(steps_of(r)))
        for r in runs
    ]
    found |= dict(runs=rounded(kept), settings=dict(seeds=SEEDS, alphas=TRIED, quick=a.quick))
    print(json.dumps(rounded(found) | dict(machine=machine_info())))


if __name__ == '__main__':
    main()
