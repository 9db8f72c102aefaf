"""The recipe against the selection alone on the task of `tiny-cpu`, on seeds that shaped nothing.

`judged` asks this where most groups are silent. Here the task is the default one, sums of two and
three digits, on which the recipe was chosen.

grpo      plain GRPO
chosen    plain GRPO with prompts selected by length: the selection alone, which is ours
recipe    selection, penalties, RL-ZVP and ESPO: the default of `tiny-cpu`

All else is as in `judged`: 32 prompts of 4, the learning rate 4e-4 for every arm, falling, 250,000
response tokens a run, 24 seeds. By the trials of `recipe` (a standard deviation of 1.1 points) an
interval of half a point to either side was expected before the run.
The control must be seen: plain GRPO ends far above its cold start.
About 40 core-minutes.
usage: make study NAME=judged_default,
       python benchmarks/studies/judged_default.py [--processes 2] [--quick]
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import judged
import recipe
from _runner import run_all
from _tables import few_prompts, flags, show, summary

from compassrl.runs.summary import machine_info

ARMS = {m: judged.RECIPES[m] for m in ('grpo', 'chosen', 'recipe')}
STUDY = replace(
    judged.MIXED,
    name='judged_default',
    tasks=dict(default=recipe.TASKS['default']),
    arms=ARMS,
    learning_rates=dict.fromkeys(ARMS, judged.LR),
    seeds=tuple(range(1800, 1824)),
)
CONTRASTS = {
    f'{a}_{b}': ('default', a, b)
    for a, b in (('recipe', 'grpo'), ('chosen', 'grpo'), ('recipe', 'chosen'))
}


def small(folder):
    fewer = dict(runs=Path(folder), budget=200, marks=1, pool=64, num_heldout=8, cold_steps=4)
    arms = {m: few_prompts(arm) for m, arm in ARMS.items()}
    return replace(STUDY, arms=arms, seeds=STUDY.seeds[:2], **fewer)


def main():
    a = flags(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        study = small(folder) if a.quick else STUDY
        trials = [('default', m, s) for s in study.seeds for m in ARMS]
        rows = run_all(study, trials, 0 if a.quick else a.processes)
    rows = [r | dict(budget=study.budget) for r in rows]
    show(table := summary(rows, study.tasks, ARMS, 'grpo'), 'grpo')
    found = judged.contrasts(rows, 2 if a.quick else 6, CONTRASTS)
    settings = dict(seeds=study.seeds, lr=judged.LR, budget=study.budget, quick=a.quick)
    settings |= dict(contrasts=CONTRASTS, wanted_half=judged.WANTED, heldout=study.num_heldout)
    gain = table['default']['grpo']['after'][0] - table['default']['grpo']['before'][0]
    out = dict(name=study.name, ratio=round(gain, 3))
    out |= dict(units='points that plain GRPO ends above its cold start: the control')
    out |= dict(table=table, contrasts=found, runs=rows)
    print(json.dumps(out | dict(settings=settings, machine=machine_info())))


if __name__ == '__main__':
    main()
