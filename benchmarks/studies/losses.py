"""Which loss learns most from the same tokens, where ratios matter? ESPO, GSPO, GMPO, GRPO, DAPO,
CISPO, and what ESPO is without one of its parts.

A step has 32 prompts and 8 updates, so seven of eight updates meet ratios that are not 1. In no arm
do silent groups add anything, nor grow, nor are there penalties: arms differ by the loss alone.
Sums of two and three digits, half and half, from the cold start of `tiny-cpu`.

espo, gspo, gmpo, grpo, dapo, cispo   each with the clip range and the average of its own paper
wide        ESPO with alpha 0.5 in place of 0.02: wide ranges do well in the study of alpha
`wide` with one change:
fixed       one clip range for all groups, whatever their entropy: 0.05
fixed_narrow, fixed_wide   the same with about the paper's two fixed ranges, which are not
            symmetric: 0.00035 for (0.0003, 0.0004), 0.24 for (0.2, 0.28)
one_group   a response is one group
token_wise  a token is a group of its own
top10, top40   that share of the tokens in the high-entropy group, in place of 20 %
filter      only the high-entropy group learns
literal     equation 9 as printed

The learning rate falls on a straight line to a twentieth while the tokens are spent. Each arm has
the lowest of four peaks that ends within a point of its best one, in runs of the same length on
seeds 100 and 101, which are not among those compared. `rates` has what each peak brought.
Last line: one JSON object; `ratio` is the gain with ESPO over that with GSPO.
usage: make study NAME=losses, python benchmarks/studies/losses.py [--processes 2] [--quick]
"""

from dataclasses import replace
from functools import partial

from _runner import OFF, Study
from _tables import final, flags, report, run_quick, tuned

from compassrl.algo.losses import LossConfig
from compassrl.algo.losses.espo import EspoConfig
from compassrl.runs.presets import tiny_cpu


def changed(cfg, loss, low, high, espo):
    optim = replace(cfg.optim, num_mini_batches=8, final_lr_frac=0.05)
    cfg = replace(cfg, prompts_per_step=32, zero_variance=OFF, optim=optim)
    return replace(cfg, loss=LossConfig(loss, low, high), espo=EspoConfig(**espo))


def arm(loss, low=None, high=None, **espo):
    "What an arm changes in `tiny-cpu`; another process can be told of it"
    return partial(changed, loss=loss, low=low, high=high, espo=espo)


LOSSES = {name: arm(name) for name in ('espo', 'gspo', 'gmpo', 'grpo', 'dapo', 'cispo')}
WIDE = dict(alpha=0.5)
LOSSES |= dict(wide=arm('espo', **WIDE))
PARTS = dict(
    fixed=arm('espo', alpha=0.0, eps_min=0.05),
    fixed_narrow=arm('espo', alpha=0.0, eps_min=3.5e-4),
    fixed_wide=arm('espo', alpha=0.0, eps_min=0.24),
    one_group=arm('espo', top_frac=1.0, **WIDE),
    # one bin for each token that a response can have
    token_wise=arm('espo', groups='bins', num_bins=tiny_cpu().rollout.max_tokens, **WIDE),
    top10=arm('espo', top_frac=0.1, **WIDE),
    top40=arm('espo', top_frac=0.4, **WIDE),
    filter=arm('espo', low_entropy_weight=0.0, **WIDE),
    literal=arm('espo', ratio='literal', **WIDE),
)
STUDY = Study(
    'losses',
    dict(sums=(('arithmetic', 1.5, 1.0),)),
    LOSSES | PARTS,
    {},
    seeds=tuple(range(6, 12)),
    budget=48_000,
    marks=3,
    eval_k=4,
)
RATES = 1e-4, 2e-4, 4e-4, 8e-4
TUNING = replace(STUDY, name='losses_rates', seeds=(100, 101), marks=1)


def main():
    a = flags(__doc__)
    ratio = 'espo', 'gspo'
    if a.quick:
        return run_quick(STUDY, 'espo', ratio)
    study, rates = tuned(STUDY, TUNING, RATES, a.processes, final)
    report(study, 'espo', ratio, False, rates, a.processes, also=['wide'])


if __name__ == '__main__':
    main()
