"""What was tried for a better recipe: sixteen arms against plain GRPO, at equal response tokens.

grpo       plain GRPO, 16 prompts a step, 8 responses each
dapo       DAPO
recipe     ESPO, penalties and RL-ZVP

Of plain GRPO: 8 or 32 prompts a step (grpo_8, grpo_32), two updates a step (grpo_two).
Of the recipe: RL-ZVP five and ten times as strong (zvp_5, zvp_10), dynamic sampling in place of
RL-ZVP (refill), two updates a step with alpha 0.5 (two), growth (growth), growth and GRPO's loss
(grpo_loss), growth from groups of 4 to 16 with 32 prompts a step (four).
Of the recipe, other ways to choose what is asked (_choice.py): a first wave of four, and four more
where they differ (probe); prompts by what became of prompts of their length (length); 256 prompts
that come back in turn (few), and those by what became of each (skip).

The tasks and the falling learning rate are those of recipe.py; the seeds are others. All arms have
one learning rate, which is the tuned one of plain GRPO, DAPO, recipe and growth. `again`: the arm
with the highest mean gain, picked among so many, ran once more on fresh seeds, with plain GRPO.
Last line: one JSON object; `ratio` is the gain with the recipe over that with plain GRPO.
usage: make study NAME=recipe_tried, python benchmarks/studies/recipe_tried.py [--quick]
"""

from dataclasses import replace
from functools import partial
from statistics import fmean

from _choice import Asked, Probe
from _runner import run_all
from _tables import final, flags, report, run_quick, show, summary
from recipe import STUDY as RECIPE
from recipe import dapo, falling, grpo
from recipe import turn as recipe

from compassrl.algo.losses import LossConfig
from compassrl.algo.losses.espo import EspoConfig


def updates(arm, num, cfg):
    "An arm with so many updates a step"
    cfg = arm(cfg)
    return replace(cfg, optim=replace(cfg.optim, num_mini_batches=num))


growth = partial(recipe, sampling='adaptive')
ARMS = dict(
    grpo=partial(falling, grpo),
    dapo=partial(falling, dapo),
    recipe=partial(falling, recipe),
    grpo_8=partial(falling, grpo, prompts_per_step=8),
    grpo_32=partial(falling, grpo, prompts_per_step=32),
    grpo_two=partial(falling, partial(updates, grpo, 2)),
    zvp_5=partial(falling, partial(recipe, zvp_alpha=0.5)),
    zvp_10=partial(falling, partial(recipe, zvp_alpha=1.0)),
    refill=partial(falling, partial(recipe, sampling='refill', zvp_alpha=0)),
    two=partial(falling, partial(updates, recipe, 2), espo=EspoConfig(alpha=0.5)),
    growth=partial(falling, growth),
    grpo_loss=partial(falling, growth, loss=LossConfig('grpo')),
    four=partial(falling, partial(growth, max_group_size=16), group_size=4, prompts_per_step=32),
    probe=partial(falling, growth, group_size=4),
    length=partial(falling, recipe),
    few=partial(falling, recipe),
    skip=partial(falling, recipe),
)
WAYS = dict(probe=Probe(4), length=Asked('length'), few=Asked('turn', 256))
WAYS |= dict(skip=Asked('silence', 256))
STUDY = replace(
    RECIPE,
    name='recipe_tried',
    arms=ARMS,
    ways=WAYS,
    learning_rates=dict.fromkeys(ARMS, 4e-4),
    seeds=tuple(range(100, 106)),
    marks=5,
)
AGAIN = replace(STUDY, name='recipe_again', seeds=tuple(range(200, 206)))


def best(trials, base):
    "The arm whose mean rate over tasks and seeds is highest at the end"
    rates = {m: fmean(final(r) for r in trials if r['arm'] == m) for m in ARMS if m != base}
    return max(rates, key=rates.get)


def once_more(processes, base, trials):
    "The best arm and `base` on other seeds"
    arms = base, best(trials, base)
    pairs = [(t, m, s) for s in AGAIN.seeds for t in AGAIN.tasks for m in arms]
    rows = [r | dict(budget=AGAIN.budget) for r in run_all(AGAIN, pairs, processes)]
    table = summary(rows, AGAIN.tasks, arms, base)
    show(table, base)
    return dict(again=dict(table=table, runs=rows, seeds=AGAIN.seeds))


def main():
    a = flags(__doc__)
    if a.quick:
        return run_quick(STUDY, 'probe', ('skip', 'probe'))
    more = dict(processes=a.processes, also=('recipe', 'few'))
    more |= dict(more=partial(once_more, a.processes, 'grpo'))
    report(STUDY, 'grpo', ('recipe', 'grpo'), False, **more)


if __name__ == '__main__':
    main()
