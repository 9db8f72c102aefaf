"""Which part of the recipe earns its tokens, where most groups are silent?

A quarter of the prompts are sums of two digits, which the cold start of `tiny-cpu` gets right every
other time, a quarter have three digits, and half have four, which it hardly ever gets right: more
than half of the groups are silent.

grpo       plain GRPO: a silent group adds nothing
penalties  and the penalties for length and repetition, with the floor under the std
zvp        and RL-ZVP: silent groups get an advantage per token
growth     and growth: silent groups are asked for more responses
refill     and DAPO's dynamic sampling: silent groups are thrown away, other prompts are asked
recipe     the default of all: growth, penalties, RL-ZVP, and ESPO instead of GRPO's loss

Each arm but the last changes one thing in plain GRPO. All else is common: 16 prompts of 8 responses
and one update a step. The learning rate is constant. It is the one that suits each arm: the lowest
whose mean held-out rate, over runs of the same length, is within a point of the best one, on seeds
100 to 103, which are not compared.
Last line: one JSON object; `ratio` is the gain with the recipe over that with plain GRPO.
usage: make study NAME=parts, python benchmarks/studies/parts.py [--processes 2] [--quick]
"""

from dataclasses import replace
from functools import partial

from _runner import OFF, SILENT, Study
from _tables import flags, report, run_quick, tuned

from compassrl.algo.losses import LossConfig
from compassrl.algo.zero_variance import ZeroVarianceConfig

DEFAULT = ZeroVarianceConfig()


def changed(cfg, loss, changes):
    return replace(cfg, loss=LossConfig(loss), zero_variance=replace(OFF, **changes))


def arm(loss='grpo', **changes):
    "What an arm changes in `tiny-cpu`; another process can be told of it"
    return partial(changed, loss=loss, changes=changes)


def of_default(*names):
    return {name: getattr(DEFAULT, name) for name in names}


PENALTIES = of_default('length_weight', 'repetition_weight', 'std_floor')
ARMS = dict(
    grpo=arm(),
    penalties=arm(**PENALTIES),
    zvp=arm(**of_default('zvp_alpha')),
    growth=arm(**of_default('sampling')),
    refill=arm(sampling='refill'),
    recipe=arm('espo', **PENALTIES, **of_default('zvp_alpha', 'sampling')),
)
STUDY = Study('parts', dict(silent=SILENT), ARMS, {}, seeds=tuple(range(6)), budget=48_000, marks=6)
RATES = 2e-4, 4e-4, 8e-4, 1.6e-3
TUNING = replace(STUDY, name='parts_rates', seeds=(100, 101, 102, 103), eval_k=4)


def main():
    a = flags(__doc__)
    if a.quick:
        return run_quick(STUDY, 'grpo', ('recipe', 'grpo'))
    study, rates = tuned(STUDY, TUNING, RATES, a.processes)
    report(study, 'grpo', ('recipe', 'grpo'), False, rates, a.processes)


if __name__ == '__main__':
    main()
