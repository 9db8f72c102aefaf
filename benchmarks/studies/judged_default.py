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

from dataclasses import replace

import judged
import recipe

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


if __name__ == '__main__':
    judged.on_another_mix(STUDY, CONTRASTS, __doc__)
