"""Does rising difficulty help? Sums of two, three and four digits: easy first, mixed, hard first.

mixed     all three from the first step to the last, a third of the prompts each
staged    two digits for a third of the tokens, then three, then four (Compass-Thinker's stages)
reversed  four digits first, two last

All arms are asked the same held-out questions, a third of each length, and all have plain GRPO,
16 prompts and 4 updates a step: they differ by the order of prompts, and by the constant learning
rate that suits each: the lowest whose mean held-out rate, over runs of the same length, is within a
point of the best one, on seeds 100 and 101, which are not compared. Each seed has one cold start
for all arms, on all three lengths. One of 400 steps left 1 % right and no arm learned; its 2000
steps, and the 40 points below, were set after that and two runs of seed 0.
`reached`: response tokens until the held-out rate is 40 points above its start, or the whole budget
where it never is.
Last line: one JSON object; `ratio` is the gain with `staged` over that with `mixed`.
usage: make study NAME=stages, python benchmarks/studies/stages.py [--processes 2] [--quick]
"""

from dataclasses import replace

from _runner import OFF, Study, against, interval
from _tables import flags, report, run_quick, tuned

from compassrl.algo.losses import LossConfig

DIGITS = tuple((('arithmetic', level, 1.0),) for level in (1.0, 2.0, 3.0))
MIX = tuple((domain, level, 1 / 3) for ((domain, level, _),) in DIGITS)
GAIN = 0.4  # gain of held-out avg@k


def grpo(cfg):
    optim = replace(cfg.optim, num_mini_batches=4)
    return replace(cfg, zero_variance=OFF, optim=optim, loss=LossConfig('grpo'))


ORDERS = dict(staged=DIGITS, mixed=(MIX,), reversed=DIGITS[::-1])
STUDY = Study(
    'stages',
    dict(digits=MIX),
    dict.fromkeys(ORDERS, grpo),
    {},
    seeds=tuple(range(6)),
    budget=150_000,
    marks=12,
    cold_steps=2000,
    cold=MIX,
    stages=ORDERS,
)
RATES = 1e-4, 2e-4, 4e-4, 8e-4
TUNING = replace(STUDY, name='stages_rates', seeds=(100, 101), marks=6, eval_k=4)


def reached(trial):
    "Response tokens until the curve, straight between evaluations, is `GAIN` above its start"
    (before, start), *rest = trial['evals']
    target = start + GAIN
    value = start
    for tokens, rate in rest:
        if rate >= target:
            return before + (tokens - before) * (target - value) / (rate - value)
        before, value = tokens, rate
    return trial['budget']


def more(trials):
    found = {}
    for arm in ORDERS:
        mine = [r for r in trials if r['arm'] == arm]
        if mine:
            tokens = [reached(r) for r in mine]
            found[arm] = dict(
                tokens=interval(tokens), seeds=sum(t < r['budget'] for t, r in zip(tokens, mine))
            )
            if arm != 'mixed':
                gap = against(trials, 'digits', arm, 'mixed', reached)
                found[arm]['tokens_against_mixed'] = [x / 100 for x in gap]  # no points: tokens
    return dict(reached=found, gain=round(100 * GAIN))


def main():
    a = flags(__doc__)
    compared = 'staged', 'mixed'
    if a.quick:
        return run_quick(STUDY, 'mixed', compared, more)
    study, rates = tuned(STUDY, TUNING, RATES, a.processes)
    report(study, 'mixed', compared, False, rates, a.processes, more)


if __name__ == '__main__':
    main()
