"""What studies of arms have in common: rates for the arms, a table against one of them, one JSON
line."""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from _runner import against, area, interval, run_all

from compassrl.runs.summary import machine_info


def final(trial):
    return trial['evals'][-1][1]


def early(trial):
    return area(trial['evals'], trial['budget'])


def clipped(trial):
    return trial['means']['clip_frac']


MEASURES = dict(final=final, area=early, clip=clipped)


def mean_of(means, key):
    found = [m[key] for m in means if key in m]
    return statistics.fmean(found) if found else None


SHOWN = dict(  # column -> of a trial's means
    silent='zero_variance_first_frac',
    silent_raw='zero_variance_raw_frac',
    silent_shaped='zero_variance_frac',
    silent_after='zero_variance_residual_frac',
    gradient_tokens='gradient_token_frac',
    clip_frac='clip_frac',
    entropy='entropy',
    response_tokens='response_tokens_mean',
    steps='steps',
)


def summary(trials, tasks, arms, *bases):
    "Per task and arm: held-out rate before and after, and the paired differences from `bases`"
    out = {}
    for task in tasks:
        for arm in arms:
            mine = [r for r in trials if (r['task'], r['arm']) == (task, arm)]
            row = dict(lr=mine[0]['lr'], seeds=[r['seed'] for r in mine])
            row |= dict(before=interval([100 * r['evals'][0][1] for r in mine]))
            row |= dict(after=interval([100 * final(r) for r in mine]))
            row |= dict(area=interval([100 * early(r) for r in mine]))
            row |= {k: mean_of([r['means'] for r in mine], v) for k, v in SHOWN.items()}
            row |= dict(seconds=mean_of(mine, 'seconds'), groups=totals(mine))
            row |= dict(silent_falls=falls(mine))
            for base in [b for b in bases if b != arm and b in arms]:
                for name, measure in MEASURES.items():
                    row[f'{name}_against_{base}'] = against(trials, task, arm, base, measure)
            out.setdefault(task, {})[arm] = row
    return out


def falls(trials):
    "Points by which each stage lowers the rate of silent groups; growth also in percent of it"
    seen = [[100 * r['means'][SHOWN[k]] for k in SHOWN if k.startswith('silent')] for r in trials]
    stages = zip(('more', 'penalties', 'zvp'), range(3))
    found = {k: interval([row[i] - row[i + 1] for row in seen]) for k, i in stages}
    share = [100 * (row[0] - row[1]) / max(row[0], 1e-9) for row in seen]
    return found | dict(left=interval([row[2] for row in seen]), more_share=interval(share))


def totals(trials):
    "Groups of a run: in its batches, with a gradient, woken by what; and what a run generated"
    found = {k: statistics.fmean(r['groups'][k] for r in trials) for k in trials[0]['groups']}
    return found | dict(tokens=statistics.fmean(r['tokens'] for r in trials))


def show(table, base):
    for task, arms in table.items():
        head = f'{"before":>8}{"after":>8}{f"after - {base}":>26}{f"mean - {base}":>26}'
        print(f'\n{task:12}{"lr":>8}{head}')
        for arm, row in arms.items():
            line = f'{arm:12}{row["lr"]:8g}{row["before"][0]:8.1f}{row["after"][0]:8.1f}'
            for k in (f'final_against_{base}', f'area_against_{base}'):
                if k in row:
                    line += '{:+10.1f} [{:+6.1f}, {:+6.1f}]'.format(*row[k])
            print(line)


def rates_of(tuning, arms, rates, processes, measure=early):
    "Held-out rate that each learning rate has brought each arm, on the seeds for that"
    pairs = [(task, s) for s in tuning.seeds for task in tuning.tasks]
    trials = [(task, m, s, lr) for task, s in pairs for m in arms for lr in rates]
    rows = [r | dict(budget=tuning.budget) for r in run_all(tuning, trials, processes)]
    found = {m: {f'{lr:g}': [] for lr in rates} for m in arms}
    for r in rows:
        found[r['arm']][f'{r["lr"]:g}'].append(measure(r))
    return {m: {k: statistics.fmean(v) for k, v in of.items()} for m, of in found.items()}


def lowest(rates, within=0.01):
    "The lowest learning rate that is as near to the best as this, by default a point"
    return min(float(lr) for lr, rate in rates.items() if rate > max(rates.values()) - within)


def tuned(study, tuning, rates, processes, measure=early):
    "A study whose arms have a learning rate of their own, and what each rate has brought"
    found = rates_of(tuning, study.arms, rates, processes, measure)
    best = {m: lowest(of) for m, of in found.items()}
    return replace(study, learning_rates=best), found


def few_prompts(arm):
    def changed(cfg):
        cfg = arm(cfg)
        return replace(cfg, prompts_per_step=8, rollout=replace(cfg.rollout, max_tokens=16))

    return changed


def small(study, compared, folder):
    "Two arms, two seeds, a few small steps: does it run?"
    arms = {m: few_prompts(study.arms[m]) for m in compared}
    fewer = dict(budget=200, marks=1, pool=64, num_heldout=4, cold_steps=4)
    fewer |= dict(seeds=(0, 1), learning_rates=dict.fromkeys(arms, 4e-4))
    return replace(study, runs=Path(folder), arms=arms, **fewer)


def report(study, base, ratio, quick, rates=None, processes=2, more=lambda trials: {}, also=()):
    "Makes the trials; the table, and the line that is kept"
    tasks, (one, other) = study.tasks, ratio
    trials = [(t, m, s) for s in study.seeds for t in tasks for m in study.arms]
    rows = [r | dict(budget=study.budget) for r in run_all(study, trials, processes)]
    show(table := summary(rows, tasks, study.arms, base, *also), base)
    gains = [
        of['after'][0] - of['before'][0] for of in (table[next(iter(tasks))][m] for m in ratio)
    ]
    settings = dict(budget=study.budget, seeds=study.seeds, heldout=study.num_heldout)
    settings |= dict(eval_k=study.eval_k, tasks=tasks, quick=quick)
    found = dict(name=study.name, ratio=round(gains[0] / gains[1], 3) if gains[1] else 1.0)
    found |= dict(units=f'gain of held-out avg@{study.eval_k} with {one} / with {other}')
    found |= dict(table=table, rates=rates or {}, runs=rows, settings=settings) | more(rows)
    print(json.dumps(found | dict(machine=machine_info())))


def flags(doc):
    p = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--processes', type=int, default=2, help='trials at a time')
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    return p.parse_args()


def run_quick(study, base, ratio, more=lambda trials: {}):
    with tempfile.TemporaryDirectory() as folder:
        report(small(study, ratio, folder), base, ratio, True, processes=0, more=more)
