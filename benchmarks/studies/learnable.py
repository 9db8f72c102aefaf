"""The recipe where the hard part can be learned. In the mix of `judged` the sums of four digits are
never right, before or after, so that mix measures who stops asking them. Here the hard part begins
at a few per cent.

grpo      plain GRPO
chosen    plain GRPO with prompts selected by length: the selection alone, which is ours
recipe    selection, penalties, RL-ZVP and ESPO: the default of `tiny-cpu`
paper     what the paper combines: growth, penalties, RL-ZVP, ESPO, all prompts in turn

A quarter of the prompts are sums of two digits, the others of three. The cold start has 800 steps,
after which sums of three digits are right in about one response of fifty (on two other seeds). All
else is as in `judged`: 32 prompts of 4, the learning rate 4e-4 for every arm, falling, 24 seeds
that shaped nothing. 120,000 response tokens a run.
The control must be seen: plain GRPO ends far above its cold start, in sums of three digits as well.
About 40 core-minutes.
usage: make study NAME=learnable, python benchmarks/studies/learnable.py [--processes 2] [--quick]
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import judged
from _runner import run_all
from _tables import few_prompts, flags, show, summary

from compassrl.runs.summary import machine_info

ARMS = {m: judged.RECIPES[m] for m in ('grpo', 'chosen', 'recipe', 'paper')}
MIX = ('arithmetic', 1.0, 0.25), ('arithmetic', 2.0, 0.75)
STUDY = replace(
    judged.MIXED,
    name='learnable',
    tasks=dict(learnable=MIX),
    arms=ARMS,
    learning_rates=dict.fromkeys(ARMS, judged.LR),
    seeds=tuple(range(1700, 1724)),
    cold_steps=800,
    budget=120_000,
)
CONTRASTS = {
    f'{a}_{b}': ('learnable', a, b)
    for a, b in (('chosen', 'grpo'), ('recipe', 'grpo'), ('recipe', 'chosen'), ('paper', 'grpo'))
}


def small(folder):
    fewer = dict(runs=Path(folder), budget=200, marks=1, pool=64, num_heldout=8, cold_steps=4)
    arms = {m: few_prompts(arm) for m, arm in ARMS.items()}
    return replace(STUDY, arms=arms, seeds=STUDY.seeds[:2], **fewer)


def main():
    a = flags(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        study = small(folder) if a.quick else STUDY
        trials = [('learnable', m, s) for s in study.seeds for m in ARMS]
        rows = run_all(study, trials, 0 if a.quick else a.processes)
    rows = [r | dict(budget=study.budget) for r in rows]
    show(table := summary(rows, study.tasks, ARMS, 'grpo'), 'grpo')
    contrasts = judged.contrasts(rows, 2 if a.quick else 6, CONTRASTS)
    gain = table['learnable']['grpo']['after'][0] - table['learnable']['grpo']['before'][0]
    settings = dict(seeds=study.seeds, lr=judged.LR, budget=study.budget, quick=a.quick, mix=MIX)
    settings |= dict(contrasts=CONTRASTS, wanted_half=judged.WANTED, cold_steps=study.cold_steps)
    out = dict(name='learnable', ratio=round(gain, 3))
    out |= dict(units='points that plain GRPO ends above its cold start: the control')
    out |= dict(table=table, contrasts=contrasts, by_length=judged.by_length(rows), runs=rows)
    print(json.dumps(out | dict(settings=settings, machine=machine_info())))


if __name__ == '__main__':
    main()
