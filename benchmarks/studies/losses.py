"""Which loss learns most from the same tokens, where ratios matter? ESPO, GSPO, GRPO, DAPO, CISPO.

A step has 32 prompts and 8 updates, so seven of eight updates meet ratios that are not 1. In no arm
do silent groups add anything, nor grow, nor are there penalties: arms differ by the loss alone.
Sums of two and three digits, half and half, from the cold start of `tiny-cpu`.

espo, gspo, grpo, dapo, cispo   each with the clip range and the average of its own paper

All have the learning rate 2e-4. At 4e-4 some seeds fell below their start with every loss, and a
choice between the two for each loss on two further seeds (kept as `rates`) hung on one point.
Last line: one JSON object; `ratio` is the gain with ESPO over that with GSPO.
usage: make study NAME=losses, python benchmarks/studies/losses.py [--processes 2] [--quick]
"""

from dataclasses import replace
from functools import partial

from _runner import OFF, Study
from _tables import flags, rates_of, report, run_quick

from compassrl.algo.espo import EspoConfig
from compassrl.algo.losses import LossConfig


def changed(cfg, loss, low, high, espo):
    optim = replace(cfg.optim, num_mini_batches=8)
    cfg = replace(cfg, prompts_per_step=32, zero_variance=OFF, optim=optim)
    return replace(cfg, loss=LossConfig(loss, low, high), espo=EspoConfig(**espo))


def arm(loss, low=None, high=None, **espo):
    "What an arm changes in `tiny-cpu`; another process can be told of it"
    return partial(changed, loss=loss, low=low, high=high, espo=espo)


LOSSES = {name: arm(name) for name in ('espo', 'gspo', 'grpo', 'dapo', 'cispo')}
STUDY = Study(
    'losses',
    dict(sums=(('arithmetic', 1.5, 1.0),)),
    LOSSES,
    {},
    seeds=tuple(range(6)),
    budget=48_000,
    marks=3,
    num_heldout=160,
)
RATES = 2e-4, 4e-4
TUNING = replace(
    STUDY, name='losses_rates', seeds=(100, 101), budget=32_000, marks=2, num_heldout=192
)


def main():
    a = flags(__doc__)
    ratio = 'espo', 'gspo'
    if a.quick:
        return run_quick(STUDY, 'espo', ratio)
    found = rates_of(TUNING, LOSSES, RATES, a.processes)
    study = replace(STUDY, learning_rates=dict.fromkeys(LOSSES, RATES[0]))
    report(study, 'espo', ratio, False, found, a.processes)


if __name__ == '__main__':
    main()
