"""Five losses with clip ranges that act equally often. In the study `losses` each has the range of
its own paper, and those clip from no token to three in ten: a difference may be one of the ranges.

grpo, dapo, gspo, espo, cispo   each with the range of its own paper
NAME_1                          the same loss with the range that clips 1 % of its tokens

A step has 8 updates, as in `losses`. A range is the paper's times one factor (for ESPO alpha and
the floor), found on two seeds of its own by a line through logarithms; `factors` has each with the
share that it clipped there, `table` the share in the trials. CISPO clips a weight and no gradient:
its share is that of the tokens whose weight is cut.
Every arm has the learning rate 4e-4: in the tuning of `losses` it is within a point of the best of
four for each of the five losses.

The number of seeds is given: 24. `expected` says before the run which half-width that number gives
each contrast that earlier trials have.
The control must be seen: GRPO over GSPO, each with its paper's range, was found on other seeds.
About 30 core-minutes.
usage: make study NAME=matched, python benchmarks/studies/matched.py [--processes 2] [--quick]
"""

import json
import statistics
import tempfile
from dataclasses import replace
from functools import partial
from math import log
from pathlib import Path

import judged
import losses
from _evidence import half_width, seeds_needed
from _runner import run_all
from _tables import clipped, few_prompts, flags, show, summary

from compassrl.algo.losses import LossConfig
from compassrl.algo.losses.espo import EspoConfig
from compassrl.runs.summary import machine_info

NAMES = 'grpo', 'dapo', 'gspo', 'espo', 'cispo'
TARGETS = {'_1': 0.01}
SEEDS = tuple(range(1600, 1624))
TUNING = 1690, 1691
CONTROL = 'grpo_gspo'
TRIES = 8
PAIRS = (('grpo', 'gspo'), ('espo', 'gspo'), ('espo', 'grpo'), ('dapo', 'grpo'), ('cispo', 'grpo'))
CONTRASTS = {
    f'{a}_{b}{end}': ('matched', a + end, b + end) for end in ('', *TARGETS) for a, b in PAIRS
}


def scaled(name, factor):
    "The loss with so many times its paper's range"
    if name == 'espo':
        base = EspoConfig()
        return losses.arm(name, alpha=min(factor * base.alpha, 1), eps_min=factor * base.eps_min)
    low, high = LossConfig(name).resolve().clip
    return losses.arm(name, min(factor * low, 1.0), factor * high)


def study_of(factors, seeds):
    "`factors` has the factor of each arm"
    arms = {m: scaled(m.partition('_')[0], f) for m, f in factors.items()}
    rates = dict.fromkeys(arms, judged.LR)
    tasks = dict(matched=losses.STUDY.tasks['sums'])
    more = dict(arms=arms, learning_rates=rates, seeds=seeds, tasks=tasks)
    return replace(losses.STUDY, name='matched', **more)


def next_factor(tried, target):
    "Between the (factor, share) on either side, on a line through logarithms; or five times on"
    narrow = [x for x in tried if x[1] > target]  # a wider range clips less
    wide = [x for x in tried if x[1] <= target]
    if not narrow:
        return min(wide)[0] / 5
    if not wide:
        return max(narrow)[0] * 5
    (f, s), (g, u) = max(narrow), min(wide)
    return f * (g / f) ** (log(s / target) / log(s / max(u, 1e-6)))


def factor_for(target, share_of, tries=TRIES):
    "The factor that clips such a share, within a tenth of it; and each (factor, share) tried"
    tried = []
    while len(tried) < tries and not any(abs(s / target - 1) < 0.1 for _, s in tried):
        factor = next_factor(tried, target) if tried else 1.0
        tried.append((factor, share_of(factor)))
    return min(tried, key=lambda x: abs(x[1] - target))[0], tried


def share_of(factor, name, small, processes):
    "Share of its tokens that a loss clips with a factor, on the two seeds for that"
    study = small(replace(study_of({name: factor}, TUNING), marks=1, eval_k=1, num_heldout=8))
    rows = run_all(study, [('matched', name, s) for s in study.seeds], processes)
    return statistics.fmean(clipped(r) for r in rows)


def expected():
    "Per contrast at the papers' ranges: sd of earlier trials, half-width now, seeds for 0.6 points"
    path = Path(__file__).parents[1] / 'results/losses.json'
    runs = json.loads(path.read_text())['runs']
    end = {(r['arm'], r['seed']): 100 * r['evals'][-1][1] for r in runs}
    out = {}
    for name, (_, a, b) in CONTRASTS.items():
        gaps = [v - end[b, s] for (m, s), v in end.items() if m == a and (b, s) in end]
        if gaps:
            sd = statistics.stdev(gaps)
            n, needed = len(SEEDS), seeds_needed(sd, judged.WANTED)
            out[name] = dict(sd=sd, half=half_width(sd, n), needed=needed)
    return out


def main():
    a = flags(__doc__)
    processes = 0 if a.quick else a.processes
    names = ('grpo', 'gspo') if a.quick else NAMES
    with tempfile.TemporaryDirectory() as folder:

        def small(study):
            if not a.quick:
                return study
            fewer = dict(runs=Path(folder), budget=600, marks=1, num_heldout=8, cold_steps=4)
            arms = {m: few_prompts(arm) for m, arm in study.arms.items()}
            return replace(study, arms=arms, seeds=study.seeds[:2], **fewer)

        factors, found = dict.fromkeys(names, 1.0), {}
        for end in TARGETS:
            for m in names:
                share = partial(share_of, name=m, small=small, processes=processes)
                tries = 2 if a.quick else TRIES
                factors[m + end], found[m + end] = factor_for(TARGETS[end], share, tries)
                print(m + end, ' '.join(f'{f:.3g}: {s:.2%}' for f, s in found[m + end]))
        study = small(study_of(factors, SEEDS))
        trials = [('matched', m, s) for s in study.seeds for m in factors]
        rows = run_all(study, trials, processes)
    rows = [r | dict(budget=study.budget) for r in rows]
    show(table := summary(rows, study.tasks, factors, 'grpo'), 'grpo')
    contrasts = judged.contrasts(rows, 2 if a.quick else 6, CONTRASTS)
    settings = dict(seeds=study.seeds, tuning=TUNING, lr=judged.LR, quick=a.quick)
    settings |= dict(budget=study.budget, targets=TARGETS, control=CONTROL, contrasts=CONTRASTS)
    settings |= dict(expected=expected(), wanted_half=judged.WANTED)
    out = dict(name='matched', ratio=round(contrasts[CONTROL]['points'][0], 3))
    out |= dict(units="points that GRPO has over GSPO with its paper's range: the control")
    out |= dict(table=table, contrasts=contrasts, factors=factors, tried=found, runs=rows)
    print(json.dumps(out | dict(settings=settings, machine=machine_info())))


if __name__ == '__main__':
    main()
