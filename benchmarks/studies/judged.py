"""The contrasts that decide what the scoreboard says, on seeds that shaped nothing.

`learned` compares losses as the study `losses` does (8 updates a step, 48,000 tokens):
espo         ESPO with alpha 0.02
gspo         GSPO with its paper's clip range
espo_wide    ESPO with alpha 0.5, 25 times the paper's
gspo_wide    GSPO with 50 times its paper's range: the same courtesy

`silent` compares recipes as the study `recipe` does (32 prompts of 4, 250,000 tokens):
grpo         plain GRPO: the control that the others are held against
chosen       plain GRPO with prompts selected by length: the selection alone, which is ours
turn         penalties, RL-ZVP and ESPO, all prompts in turn
recipe       both: the default of `tiny-cpu`
refill       the recipe with dynamic sampling in place of RL-ZVP
paper        what the paper combines: growth, penalties, RL-ZVP, ESPO, all prompts in turn
n2 n8 n16 n32   grpo, and that many responses of each prompt in a step of as many responses: the
             paper's first stage, one larger N for all groups, at equal tokens

Every arm has the learning rate 4e-4: in the tuning of `losses` (16 arms, 4 rates) and of `recipe`
(7 arms, 3 rates) it is the best rate in the mean over all arms, inside the grid. No arm has more.
`rates` is the recipe's tuning of the arms that had none: what 4e-4 costs them.
The number of seeds is given: 24. An interval of 0.6 points to either side is wanted; `expected`
says before the run which half-width that number gives each contrast that earlier trials have, by
their standard deviation. For ESPO minus GSPO (2.8 points) that is 1.2: 24 seeds are too few there.
The losses of all seeds come first, then the recipes. `--seeds 12` stores the first twelve from the
trials that are there, and says how many were planned.

The control must win: `chosen` over `grpo` on `silent` was found on two sets of other seeds.
About 80 core-minutes, cold starts included: 40 minutes on two idle cores, more on busy ones.
usage: make study NAME=judged, python benchmarks/studies/judged.py [--seeds 24] [--quick]
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import losses
import recipe
from _evidence import ROOT, half_width, seeds_needed, would_see
from _runner import against, run_all
from _tables import MEASURES, few_prompts, flags, show, summary

from compassrl.runs.summary import machine_info

PLANNED = tuple(range(1000, 1024))
WANTED = 0.6  # points: half an interval
LR = 4e-4
FIRST = 12  # seeds of the arms that cost much
QUICK = 'espo', 'gspo', 'grpo', 'chosen'


def of_each(arm, num):
    "An arm that asks each prompt so often, in a step of as many responses"
    return partial(_of_each, arm=arm, num=num)


def _of_each(cfg, arm, num):
    cfg = arm(cfg)
    step = cfg.prompts_per_step * cfg.group_size
    return replace(cfg, group_size=num, prompts_per_step=step // num)


GSPO = 50 * 3e-4, 50 * 4e-4
LOSSES = dict(
    espo=losses.arm('espo'),
    gspo=losses.arm('gspo'),
    espo_wide=losses.arm('espo', **losses.WIDE),
    gspo_wide=losses.arm('gspo', *GSPO),
)
PAPER = partial(recipe.turn, sampling='adaptive')
RECIPES = {m: recipe.ARMS[m] for m in ('grpo', 'chosen', 'turn', 'recipe', 'refill')}
RECIPES |= dict(paper=partial(recipe.as_default, partial(recipe.falling, PAPER)))
SIZES = {f'n{n}': of_each(recipe.ARMS['grpo'], n) for n in (2, 8, 16, 32)}
LEARNED = replace(
    losses.STUDY,
    name='judged',
    tasks=dict(learned=losses.STUDY.tasks['sums']),
    arms=LOSSES,
    learning_rates=dict.fromkeys(LOSSES, LR),
    seeds=PLANNED,
)
ARMS = RECIPES | SIZES
TUNED = replace(recipe.TUNING, name='judged', arms=ARMS)
MIXED = replace(
    recipe.STUDY,
    name='judged',
    tasks=dict(silent=recipe.TASKS['silent']),
    arms=ARMS,
    learning_rates=dict.fromkeys(ARMS, LR),
    seeds=PLANNED,
    marks=2,
)
CONTRASTS = dict(
    espo_gspo=('learned', 'espo', 'gspo'),
    wide_gspo_espo=('learned', 'gspo_wide', 'espo_wide'),
    wide_espo_gspo=('learned', 'espo_wide', 'gspo'),
    selection_grpo=('silent', 'chosen', 'grpo'),
    recipe_grpo=('silent', 'recipe', 'grpo'),
    recipe_selection=('silent', 'recipe', 'chosen'),
    turn_grpo=('silent', 'turn', 'grpo'),
    paper_grpo=('silent', 'paper', 'grpo'),
    growth=('silent', 'paper', 'turn'),
    refill_recipe=('silent', 'refill', 'recipe'),
    refill_turn=('silent', 'refill', 'turn'),
    **{f'{m}_grpo': ('silent', m, 'grpo') for m in SIZES},
)
CONTROL = 'selection_grpo'
UNIT = dict(grpo='plain GRPO', gspo='GSPO')
EARLIER = dict(  # the same contrasts in stored trials, on other seeds
    espo_gspo=('losses', 'sums', 'espo', 'gspo'),
    wide_espo_gspo=('losses', 'sums', 'wide', 'gspo'),
    selection_grpo=('recipe', 'silent', 'chosen', 'grpo'),
    recipe_grpo=('recipe', 'silent', 'recipe', 'grpo'),
    recipe_selection=('recipe', 'silent', 'recipe', 'chosen'),
    turn_grpo=('recipe', 'silent', 'turn', 'grpo'),
    refill_recipe=('recipe', 'silent', 'refill', 'recipe'),
    refill_turn=('recipe', 'silent', 'refill', 'turn'),
)


def expected(seeds=len(PLANNED)):
    "Per contrast: sd of earlier trials in points, half-width with so many seeds, seeds for WANTED"
    out = {}
    for name, (study, task, *arms) in EARLIER.items():
        runs = json.loads((ROOT / 'benchmarks/results' / f'{study}.json').read_text())['runs']
        end = {(r['task'], r['arm'], r['seed']): 100 * r['evals'][-1][1] for r in runs}
        of = [{s: v for (t, m, s), v in end.items() if (t, m) == (task, arm)} for arm in arms]
        sd = statistics.stdev(v - of[1][s] for s, v in of[0].items())
        out[name] = dict(sd=sd, half=half_width(sd, seeds), needed=seeds_needed(sd, WANTED))
    return out


def contrasts(trials, least=6, of=CONTRASTS):
    "Points at the end, with what each could have seen; fewer seeds than `least` say nothing"
    found = {}
    for name, (task, arm, other) in of.items():
        seeds = {r['seed'] for r in trials if (r['task'], r['arm']) == (task, arm)}
        others = {r['seed'] for r in trials if (r['task'], r['arm']) == (task, other)}
        if len(seeds & others) < least:
            continue
        mean, low, high = against(trials, task, arm, other, MEASURES['final'])
        half = (high - low) / 2
        n = len(seeds & others)
        row = dict(points=[mean, low, high], n=n, half=half)
        found[name] = row | dict(would_see=would_see(half, n))
    return found


def by_length(trials):
    "Held-out rates by the length of the prompt, which tells how hard it is; means over seeds"
    out = {}
    for r in trials:
        for n, rate in r['by_length'].items():
            out.setdefault(r['task'], {}).setdefault(r['arm'], {}).setdefault(n, []).append(rate)
    return {
        t: {m: {n: sum(v) / len(v) for n, v in of.items()} for m, of in arms.items()}
        for t, arms in out.items()
    }


def tuning(study, arms, processes):
    "Points per rate as the recipe's own tuning finds them: on its task, its seeds, its budget"
    trials = [('default', m, s, lr) for s in study.seeds for m in arms for lr in recipe.RATES]
    points = {}
    for r in run_all(study, trials, processes):
        points.setdefault((r['arm'], r['lr']), []).append(100 * MEASURES['final'](r))
    return {m: {f'{lr:g}': statistics.fmean(points[m, lr]) for lr in recipe.RATES} for m in arms}


def plan(seeds):
    "Each seed whole, then the next; the sizes of groups on the first ones"
    for seed in seeds:
        yield from ((LEARNED, 'learned', m, seed) for m in LOSSES)
        yield from ((MIXED, 'silent', m, seed) for m in RECIPES)
    for seed in seeds[:FIRST]:
        yield from ((MIXED, 'silent', m, seed) for m in SIZES)


def smaller(study, folder):
    "A case of seconds, to see that it runs"
    fewer = dict(runs=Path(folder), budget=200, marks=1, pool=64, num_heldout=8, cold_steps=4)
    return replace(study, arms={m: few_prompts(a) for m, a in study.arms.items()}, **fewer)


def on_another_mix(study, contrasts_of, doc, more=lambda study, rows: {}, base='grpo'):
    "Arms of this study on the one mix of another: the trials, and the line that is kept"
    a, [task] = flags(doc), study.tasks
    with tempfile.TemporaryDirectory() as folder:
        if a.quick:
            study = replace(smaller(study, folder), seeds=study.seeds[:2])
        trials = [(task, m, s) for s in study.seeds for m in study.arms]
        rows = run_all(study, trials, 0 if a.quick else a.processes)
        extra = more(study, rows)
    rows = [r | dict(budget=study.budget) for r in rows]
    show(table := summary(rows, study.tasks, study.arms, base), base)
    found = contrasts(rows, 2 if a.quick else 6, contrasts_of)
    gain = table[task][base]['after'][0] - table[task][base]['before'][0]
    settings = dict(seeds=study.seeds, lr=LR, budget=study.budget, quick=a.quick)
    settings |= dict(mix=study.tasks[task], cold_steps=study.cold_steps, wanted_half=WANTED)
    settings |= dict(contrasts=contrasts_of, heldout=study.num_heldout)
    out = dict(name=study.name, ratio=round(gain, 3))
    out |= dict(units=f'points that {UNIT[base]} ends above its cold start: the control')
    out |= dict(table=table, contrasts=found, by_length=by_length(rows), runs=rows) | extra
    print(json.dumps(out | dict(settings=settings, machine=machine_info())))


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--seeds', type=int, default=len(PLANNED), help='how many of the planned ones')
    p.add_argument('--processes', type=int, default=2, help='trials at a time; 0 = in this one')
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    a = p.parse_args()
    seeds = PLANNED[: 2 if a.quick else a.seeds]
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        studies = LEARNED, MIXED, TUNED
        if a.quick:
            studies = tuple(smaller(s, folder) for s in studies)
        asked = list(plan(seeds))
        for study, like in zip(studies, (LEARNED, MIXED)):
            mine = [tuple(t) for s, *t in asked if s is like and (not a.quick or t[1] in QUICK)]
            done = run_all(study, mine, 0 if a.quick else a.processes)
            rows += [r | dict(budget=study.budget) for r in done]
        of = ['paper'] if a.quick else ['paper', *SIZES]
        rates = tuning(studies[-1], of, 0 if a.quick else a.processes)
    tables = {}
    for study, arms, base in ((LEARNED, LOSSES, 'gspo'), (MIXED, ARMS, 'grpo')):
        there = [m for m in arms if any(r['arm'] == m for r in rows)]
        table = summary(rows, study.tasks, there, base)
        show(table, base)
        tables |= table
    found = contrasts(rows, 2 if a.quick else 6)
    for name, row in found.items():
        print(f'{name:18}', ' '.join(f'{x:+.2f}' for x in row['points']), f'n={row["n"]}')
    settings = dict(seeds=seeds, planned=len(PLANNED), wanted_half=WANTED, lr=LR)
    settings |= dict(expected=expected(len(seeds)), control=CONTROL, quick=a.quick)
    settings |= dict(budget={s.name + t: s.budget for s in (LEARNED, MIXED) for t in s.tasks})
    settings |= dict(contrasts=CONTRASTS, heldout=MIXED.num_heldout)
    out = dict(name='judged', ratio=round(found[CONTROL]['points'][0], 3))
    out |= dict(units='points that the selection alone has over plain GRPO: the control')
    out |= dict(table=tables, contrasts=found, by_length=by_length(rows), runs=rows)
    out |= dict(rates=rates)
    print(json.dumps(out | dict(settings=settings, machine=machine_info())))


if __name__ == '__main__':
    main()
