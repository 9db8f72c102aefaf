"""Does the recipe pay? Default recipe, plain GRPO and DAPO from common cold starts, with equal
response tokens.

grpo    GRPO's loss; a group whose rewards are equal adds nothing
dapo    DAPO: clip 0.2 / 0.28, mean over tokens, overlong penalty, dynamic sampling (silent
        groups are thrown away, other prompts are asked until the batch is full)
recipe  the default of `tiny-cpu`: ESPO, penalties, RL-ZVP, prompts selected by length
growth  the same, and silent groups grow
turn    the recipe with all prompts in turn
chosen  plain GRPO with prompts selected by length
refill  the recipe with dynamic sampling in place of RL-ZVP, so that no silent group is left

In all of these the learning rate falls on a straight line to a twentieth while the tokens are
spent. Three arms more have a constant rate, on the default task: grpo_constant, dapo_constant,
growth_constant.

`default` is the task of `tiny-cpu`, sums of two and three digits. `silent` is the mix of the study
of parts: a quarter have two digits, a quarter three, half four, and most groups are silent.
All is that of `tiny-cpu` but for what an arm changes: a step has 32 prompts of 4 responses and one
update. Each arm has the lowest learning rate that ends within a point of its best one, in runs of
the same length on the default task, on seeds 100 and 101, which are not among those compared: two
seeds tell no more.
`fast` has runs of grpo, dapo, recipe and growth with the highest rate.
What else was tried is in recipe_tried.py.
Last line: one JSON object; `ratio` is the recipe's gain over that of plain GRPO.
usage: make study NAME=recipe, python benchmarks/studies/recipe.py [--arms ..] [--quick]
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from _runner import OFF, SILENT, Study, against, interval, run_all
from _tables import early, final, lowest

from compassrl.algo.losses import LossConfig
from compassrl.algo.zero_variance import ZeroVarianceConfig
from compassrl.runs.presets import tiny_cpu
from compassrl.runs.summary import machine_info

DYNAMIC = ZeroVarianceConfig('refill', repetition_weight=0, zvp_alpha=0)
LEFT = 0.05  # share left of a learning rate that falls


def grpo(cfg):
    return replace(cfg, loss=LossConfig('grpo'), zero_variance=OFF)


def dapo(cfg):
    return replace(cfg, loss=LossConfig('dapo'), zero_variance=DYNAMIC)


def turn(cfg, sampling='uniform', **more):
    "The recipe with prompts in turn; `more` are other settings of `ZeroVarianceConfig`"
    return replace(cfg, zero_variance=replace(cfg.zero_variance, sampling=sampling, **more))


def by_length(arm, cfg):
    "An arm whose prompts are selected by their length"
    cfg = arm(cfg)
    return replace(cfg, data=replace(cfg.data, select_by='length'))


def falling(arm, cfg, **more):
    "An arm whose learning rate falls; `more` are other settings of the run"
    cfg = arm(cfg)
    return replace(cfg, optim=replace(cfg.optim, final_lr_frac=LEFT), **more)


def as_default(arm, cfg):
    "An arm with the prompts a step, responses and warm-up of `tiny-cpu`"
    base, cfg = tiny_cpu(), arm(cfg)
    optim = replace(cfg.optim, warmup_steps=base.optim.warmup_steps)
    step = dict(prompts_per_step=base.prompts_per_step, group_size=base.group_size)
    return replace(cfg, optim=optim, **step)


recipe = partial(by_length, turn)
growth = partial(by_length, partial(turn, sampling='adaptive'))
FALLING = dict(grpo=grpo, dapo=dapo, recipe=recipe, growth=growth)
refill = partial(by_length, partial(turn, sampling='refill', zvp_alpha=0))
FALLING |= dict(turn=turn, chosen=partial(by_length, grpo), refill=refill)
CHANGES = {name: partial(falling, arm) for name, arm in FALLING.items()}
CHANGES |= dict(grpo_constant=grpo, dapo_constant=dapo, growth_constant=growth)
ARMS = {name: partial(as_default, arm) for name, arm in CHANGES.items()}
# domain, difficulty, share
TASKS = dict(default=(('arithmetic', 1.25, 1.0),), silent=SILENT)
RATES = 2e-4, 4e-4, 8e-4
STUDY = Study('recipe', TASKS, ARMS, {}, seeds=tuple(range(6)), budget=250_000)
TUNING = replace(STUDY, name='recipe_rates', seeds=(100, 101), marks=1, eval_k=4)


def needed(trial, rate):
    "Share of the budget after which a trial first has this held-out rate; 1 where it never has"
    for (n, v), (m, w) in pairwise(trial['evals']):
        if v >= rate:
            return n / trial['budget']
        if w >= rate:
            return min((n + (m - n) * (rate - v) / (w - v)) / trial['budget'], 1.0)
    return 1.0


def step_tokens(trials, task, arm, other):
    "Per seed, response tokens of a step over those of another arm's"
    tokens = {(r['arm'], r['seed']): r['means']['tokens'] for r in trials if r['task'] == task}
    seeds = sorted(seed for name, seed in tokens if name == arm)
    return [tokens[arm, seed] / tokens[other, seed] for seed in seeds]


def summary(trials, tasks, arms):
    "Per task and arm: held-out avg@8 before and after, and the paired differences of arms"
    out = {}
    for task in tasks:
        dapo = {r['seed']: final(r) for r in trials if (r['task'], r['arm']) == (task, 'dapo')}
        there = [arm for arm in arms if any((r['task'], r['arm']) == (task, arm) for r in trials)]
        for arm in there:
            mine = [r for r in trials if (r['task'], r['arm']) == (task, arm)]
            means = [r['means'] for r in mine]
            row = dict(
                lr=mine[0]['lr'],
                before=interval([100 * r['evals'][0][1] for r in mine]),
                after=interval([100 * final(r) for r in mine]),
                silent=statistics.fmean(m['zero_variance_first_frac'] for m in means),
                silent_shaped=statistics.fmean(m['zero_variance_frac'] for m in means),
                steps=statistics.fmean(m['steps'] for m in means),
                seconds=statistics.fmean(r['seconds'] for r in mine),
            )
            if 'recipe' in there:
                row['step_to_recipe'] = interval(step_tokens(trials, task, arm, 'recipe'))
            others = {'grpo', 'dapo', 'recipe', 'turn', f'{arm}_constant'} & {*there} - {arm}
            for other in sorted(others):
                for name, measure in dict(final=final, area=early).items():
                    row[f'{name}_against_{other}'] = against(trials, task, arm, other, measure)
            if dapo:
                row['to_dapo'] = interval([needed(r, dapo[r['seed']]) for r in mine])
                row['tokens_to_dapo'] = row['to_dapo'][0]
            out.setdefault(task, {})[arm] = row
    return out


def show(table):
    for task, arms in table.items():
        print(
            f'\n{task:16}{"lr":>8}{"before":>8}{"after":>8}{"after - grpo":>24}{"mean - grpo":>24}'
        )
        for arm, row in arms.items():
            line = f'{arm:16}{row["lr"]:8g}{row["before"][0]:8.1f}{row["after"][0]:8.1f}'
            for k in ('final_against_grpo', 'area_against_grpo'):
                if k in row:
                    line += '{:+8.1f} [{:+6.1f}, {:+6.1f}]'.format(*row[k])
            print(line)


def tuned(arms, processes):
    "The learning rate of each arm, and what each rate has brought on the seeds for that"
    trials = [('default', m, s, lr) for s in TUNING.seeds for m in arms for lr in RATES]
    rows = run_all(TUNING, trials, processes)

    def mean(arm, lr):
        return statistics.fmean(final(r) for r in rows if (r['arm'], r['lr']) == (arm, lr))

    found = {m: {f'{lr:g}': round(mean(m, lr), 4) for lr in RATES} for m in arms}
    return {m: lowest(row) for m, row in found.items()}, found


def compare(a):
    if a.quick:
        a.seeds, a.arms, tasks = [0, 1], ['grpo', 'recipe'], ['default']
        study = replace(STUDY, runs=Path(a.folder), budget=600, marks=1, num_heldout=4)
        study = replace(study, cold_steps=4, learning_rates=dict.fromkeys(a.arms, 4e-4))
        processes, rates, fast = 0, {}, []
    else:
        processes, tasks = 2, list(TASKS)
        best, rates = tuned(a.arms, processes)
        study = replace(STUDY, learning_rates=best)
        quickest = [('default', m, s, RATES[-1]) for s in a.seeds for m in list(FALLING)[:4]]
        fast = run_all(study, quickest, processes)
    trials = [
        (t, m, s) for t in tasks for s in a.seeds for m in a.arms if t == 'default' or m in FALLING
    ]
    rows = [r | dict(budget=study.budget) for r in run_all(study, trials, processes)]
    show(table := summary(rows, tasks, a.arms))
    ratio = 1.0
    if {'grpo', 'recipe'} <= set(a.arms):
        gains = {m: table['default'][m] for m in ('recipe', 'grpo')}
        recipe_gain, plain = (g['after'][0] - g['before'][0] for g in gains.values())
        ratio = round(recipe_gain / plain, 3) if plain else 1.0
    settings = dict(budget=study.budget, seeds=a.seeds, heldout=study.num_heldout, eval_k=8)
    settings |= dict(tasks=TASKS, quick=a.quick)
    units = 'gain of held-out avg@8 with the recipe / with plain GRPO, same tokens'
    found = dict(name='recipe', ratio=ratio, units=units, table=table, rates=rates, runs=rows)
    fast = [{k: r[k] for k in ('arm', 'seed', 'evals')} for r in fast]
    found |= dict(fast=fast)
    print(json.dumps(found | dict(settings=settings, machine=machine_info())))


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--arms', nargs='+', default=list(ARMS), choices=ARMS)
    p.add_argument('--seeds', nargs='+', type=int, default=list(STUDY.seeds))
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as a.folder:
        compare(a)


if __name__ == '__main__':
    main()
