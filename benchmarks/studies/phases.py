"""Do two phases of RL, reasoning and then domains, beat one with as many tokens?

one      all four kinds of prompt from the first step to the last, an equal share of each half
one_mix  the same with 75 % reasoning, about what two_mix has in all: on seed 0, 75 % of the prompts
         and 60 % of the tokens, where one_mix has 76 and 63 %
two      reasoning (sums, instructions) for half of the tokens, then domains (tool calls, edits of
         words) alone
two_mix  the same, but three in ten prompts of the second half are of reasoning, as in the pipeline
         of `tiny-cpu`

All arms are asked the same held-out questions, half of them of reasoning, and all have plain GRPO,
16 prompts and one update a step: they differ by the order and the shares of prompts, two_mix from
one_mix by little more than the order. Each seed has one cold start for all arms, on all four kinds.
Each arm has the lowest constant learning rate that ends within a point of its best one, on seeds
100 and 101, which are not compared. All domains have verifiers: the generative reward model of the
paper's second phase is not part of this study.
Last line: one JSON object; `ratio` is the gain with `two_mix` over that with `one_mix`.
usage: make study NAME=phases, python benchmarks/studies/phases.py [--processes 2] [--quick]
"""

from dataclasses import replace

from _runner import OFF, Study
from _tables import final, flags, report, run_quick, tuned

from compassrl.algo.losses import LossConfig

REASONING = ('arithmetic', 1.0, 0.75), ('instructions', 1.0, 0.25)
DOMAINS = ('tools', 1.0, 0.75), ('strings', 1.0, 0.25)


def mix(reasoning):
    "With this share of reasoning"
    shares = (reasoning, REASONING), (1 - reasoning, DOMAINS)
    return tuple((d, level, share * part) for share, of in shares for d, level, part in of)


def grpo(cfg):
    return replace(cfg, zero_variance=OFF, loss=LossConfig('grpo'))


BOTH = mix(0.5)
PHASES = dict(one=(BOTH,), one_mix=(mix(0.75),))
PHASES |= dict(two=(REASONING, DOMAINS), two_mix=(REASONING, mix(0.3)))
RATES = 5e-5, 1e-4, 2e-4, 4e-4
STUDY = Study(
    'phases',
    dict(both=BOTH),
    dict.fromkeys(PHASES, grpo),
    {},
    seeds=tuple(range(6)),
    budget=200_000,
    marks=10,
    cold_steps=1200,
    cold=BOTH,
    stages=PHASES,
)
TUNING = replace(STUDY, name='phases_rates', seeds=(100, 101), marks=1, eval_k=4)


def main():
    a = flags(__doc__)
    compared = 'two_mix', 'one_mix'
    if a.quick:
        return run_quick(STUDY, 'one_mix', compared)
    study, rates = tuned(STUDY, TUNING, RATES, a.processes, final)
    report(study, 'one_mix', compared, False, rates, a.processes, also=('one',))


if __name__ == '__main__':
    main()
