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
On its own seeds that was one of thirty: `start_by_length`.
The control must be seen: plain GRPO ends far above its cold start, in sums of three digits as well.
About 40 core-minutes.
usage: make study NAME=learnable, python benchmarks/studies/learnable.py [--processes 2] [--quick]
"""

from dataclasses import replace
from statistics import fmean

import judged
from _runner import Curve, cold_started, engines

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


def start(study, rows):
    "Held-out rates after the cold start by the length of the prompt, means over seeds"
    found = {}
    for seed in study.seeds:
        cfg = study.config('grpo', seed)
        engine, rollout = engines(cfg, cold_started(study, seed))
        heldout = study.prompts(MIX, study.num_heldout, seed, 'heldout')
        curve = Curve(study, cfg, rollout, engine, heldout)
        curve.evaluate()
        for n, rate in curve.by_length.items():
            found.setdefault(n, []).append(rate)
    return dict(start_by_length={n: fmean(rates) for n, rates in found.items()})


if __name__ == '__main__':
    judged.on_another_mix(STUDY, CONTRASTS, __doc__, start)
