"""ESPO against GSPO with the ranges of their papers, on enough seeds for six tenths of a point.

`judged` found ESPO behind GSPO, with 24 seeds and an interval of 1.4 points to either side. Its
pairs have a standard deviation of 3.3 points, and 2.8 once a line through the rate of the cold
start is taken off: where more is known, ESPO falls back further. The line leaves the mean as it is.
With 100 other seeds that makes half an interval of 0.56 points, and of 0.65 without the line; both
are reported, and the first one decides.

espo      ESPO with alpha 0.02
gspo      GSPO with its paper's clip range

All else is as in `judged`: sums of two and three digits, 8 updates a step, the learning rate 4e-4
for both, 48,000 response tokens, each seed from a cold start of its own.
The control must be seen: GSPO ends far above its cold start.
About 80 core-minutes, most of them cold starts.
usage: make study NAME=espo_gspo,
       python benchmarks/studies/espo_gspo.py [--processes 2] [--quick]
"""

from dataclasses import replace

import judged
from _evidence import adjusted

ARMS = {m: judged.LOSSES[m] for m in ('espo', 'gspo')}
STUDY = replace(
    judged.LEARNED,
    name='espo_gspo',
    arms=ARMS,
    learning_rates=dict.fromkeys(ARMS, judged.LR),
    seeds=tuple(range(2000, 2100)),
    marks=1,
)
CONTRASTS = dict(espo_gspo=('learned', 'espo', 'gspo'))


def from_the_start(study, trials):
    "The gap in points, once a line through the rate of the cold start is taken off"
    if len(study.seeds) < 3:  # a quick run
        return {}
    ends = {(r['arm'], r['seed']): 100 * r['evals'][-1][1] for r in trials}
    starts = {r['seed']: 100 * r['evals'][0][1] for r in trials}
    gaps = [ends['espo', s] - ends['gspo', s] for s in starts]
    return dict(adjusted=dict(espo_gspo=adjusted(gaps, list(starts.values()))))


if __name__ == '__main__':
    judged.on_another_mix(STUDY, CONTRASTS, __doc__, from_the_start, base='gspo')
