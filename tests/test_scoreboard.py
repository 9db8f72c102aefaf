"nbs/scoreboard.yml, its page and README's tables against the stored results, computed again here"

import importlib
import itertools
import json
import math
import re
import statistics

import numpy as np
import pytest
import yaml

from tests.support import ROOT, front_page
from tests.test_toc import COURSE

GROUPS = yaml.safe_load((ROOT / 'nbs' / 'scoreboard.yml').read_text())['groups']
ROWS = [row for g in GROUPS for row in g['rows']]
MEASURED = [r for r in ROWS if 'effect' in r]
KINDS = {'effect', 'cannot', 'missing'}
KEYS = KINDS | set('claim theirs source lesson side than reach flip form measured scale'.split())
PAGE = ROOT / 'nbs' / 'studies' / 'scoreboard.ipynb'
WORDS = {'holds here', 'not seen here', 'not reached here', 'the reverse here'}
WORDS |= {'not testable on a CPU'}
WORDS |= {'not measured yet'}


def result(name):
    return json.loads((ROOT / 'benchmarks' / 'results' / f'{name}.json').read_text())


def value(name, where):
    found = result(name)
    for key in where.split('.'):
        found = found[key]
    return found


def signed(row):
    "Mean, low and high of what the claim is about; a result without an interval is three times it"
    found = value(*row['effect'])
    mean, low, high = found if isinstance(found, list) else [found] * 3
    return (-mean, -high, -low) if row.get('flip') else (mean, low, high)


def limit(row):
    found = row['reach'] if 'reach' in row else row.get('than', 0)
    return value(*found['key']) if isinstance(found, dict) else found


def expected(row):
    "The verdict, by another road than the page's: which of the three regions holds the interval"
    if 'cannot' in row:
        return 'not testable on a CPU'
    if 'missing' in row:
        return 'not measured yet'
    mean, low, high = signed(row)
    regions = {
        'above' if x > limit(row) else 'below' if x < limit(row) else '' for x in (low, high)
    }
    if regions == {row['side']}:
        return 'holds here'
    if 'reach' in row and '' not in regions and len(regions) == 1:
        return 'not reached here'
    if len(regions) == 1 and '' not in regions and low != high:
        return 'the reverse here'
    return 'not seen here'


def said(row):
    "The sentence with its numbers"
    if 'effect' not in row:
        return row.get('cannot') or row['missing']
    shown = [format(x, row['form']) for x in signed(row)]
    text = shown[0] if len({*signed(row)}) == 1 else '{} [{}, {}]'.format(*shown)
    return row['measured'].format(effect=text, than=format(limit(row), row['form']))


@pytest.mark.parametrize('row', ROWS, ids=lambda r: r['claim'][:40])
def test_a_row_says_what_it_must(row):
    assert set(row) <= KEYS and len(KINDS & set(row)) == 1
    assert row['source'] in {'quoted', 'second-hand', 'our reading'}
    if 'theirs' in row:
        assert row['source'] != 'our reading', 'a number of the paper is quoted or second-hand'
    if 'lesson' in row:
        assert row['lesson'] in COURSE.paths
    if 'effect' in row:
        assert {'side', 'form', 'measured', 'scale', 'lesson'} <= set(row)
        assert '{effect}' in row['measured']
        typed = re.findall(r'\d+\.\d+|\d+ ?%', re.sub(r'{\w+}', '', row['measured']))
        assert typed == [], 'numbers come from stored results'


# ---- the page, and the front page


def tables(text):
    "Claim -> the other cells of its line, in all tables of a Markdown text"
    lines = [x.strip('|').split(' | ') for x in text.splitlines() if x.startswith('| ')]
    return {cells[0].strip(): [c.strip() for c in cells[1:]] for cells in lines}


def shown(cells):
    outputs = [o for c in cells for o in c.get('outputs', [])]
    return '\n'.join(''.join(o.get('data', {}).get('text/markdown', '')) for o in outputs)


def test_the_page_shows_every_claim_with_stored_numbers_and_its_verdict():
    found = tables(shown(json.loads(PAGE.read_text())['cells']))
    for row in ROWS:
        theirs, measured, verdict, where = found[row['claim']]
        run = 'run `python tools/execute_nbs.py nbs/studies/scoreboard.ipynb`'
        assert measured.startswith(said(row)), f'{row["claim"]}: {run}'
        assert verdict == f'**{expected(row)}**', row['claim']
        assert row.get('theirs', '') in theirs and row['source'] in theirs
        assert bool(where) == ('lesson' in row)
    assert {v.strip('*') for r in ROWS for v in found[r['claim']][2:3]} <= WORDS


def test_each_idea_names_its_lesson_and_its_code():
    found = tables(front_page())
    for idea in COURSE.data['ideas']:
        lesson, code = found[f'**{idea["idea"]}.** {idea["says"]}']
        assert f']({COURSE.paths[idea["lesson"]]})' in lesson
        module, _, name = idea['code'].rpartition('.')
        assert code == f'[`{name}`](../compassrl/{module.replace(".", "/")}.py)'
        assert callable(getattr(importlib.import_module(f'compassrl.{module}'), name))
    assert len(COURSE.data['ideas']) == 10


# ---- the tables of the studies, from their runs


def half_width(values):
    "Of the 95 % interval of a mean, Student's t by integrating its density"
    n = len(values) - 1
    norm = math.gamma((n + 1) / 2) / math.sqrt(n * math.pi) / math.gamma(n / 2)
    area, t, dt = 0.0, 0.0, 1e-4
    while area < 0.475:
        area += norm * (1 + (t + dt / 2) ** 2 / n) ** (-(n + 1) / 2) * dt
        t += dt
    return t * statistics.stdev(values) / math.sqrt(n + 1)


def mean_height(run, budget):
    "Of the curve, a straight line between evaluations, up to the budget"
    total = 0.0
    for (a, u), (b, v) in zip(run['evals'], run['evals'][1:]):
        end = min(b, budget)
        top = u + (v - u) * (end - a) / (b - a)
        total += (end - a) * (u + top) / 2
    return total / min(run['evals'][-1][0], budget)


MEASURES = dict(
    final=lambda run, budget: run['evals'][-1][1],
    area=mean_height,
    clip=lambda run, budget: run['means']['clip_frac'],
)


STUDIES = ['recipe', 'recipe_tried', 'parts', 'losses', 'alpha', 'forks', 'stages', 'phases']
STUDIES += ['residual']


@pytest.mark.parametrize('name', STUDIES)
def test_the_tables_of_a_study_follow_from_its_runs(name):
    found = result(name)
    assert follows(found, found['settings']) >= 4


@pytest.mark.parametrize('name', ['parts', 'stages', 'phases', 'losses', 'labels'])
def test_each_arm_has_the_lowest_learning_rate_that_is_near_its_best(name):
    found, near = result(name), 0.05 if name == 'labels' else 0.01
    table = found['table'] if name == 'labels' else next(iter(found['table'].values()))
    assert found['rates'].keys() == table.keys()
    for arm, of in found['rates'].items():
        by_rate = sorted((float(lr), value) for lr, value in of.items())
        best = max(value for _, value in by_rate)
        assert table[arm]['lr'] == next(lr for lr, value in by_rate if value > best - near), arm


def test_the_arm_that_ran_again_was_the_best_of_those_tried():
    found = result('recipe_tried')
    mean = {arm: [] for arm in found['table']['default']}
    for r in found['runs']:
        mean[r['arm']].append(r['evals'][-1][1])
    rates = {arm: statistics.fmean(v) for arm, v in mean.items() if arm != 'grpo'}
    again = found['again']
    assert all(
        list(arms) == ['grpo', max(rates, key=rates.get)] for arms in again['table'].values()
    )
    assert not set(again['seeds']) & set(found['settings']['seeds'])
    assert follows(again, found['settings'] | dict(seeds=again['seeds'])) >= 4


def follows(found, settings):
    "How many differences of its table were computed again"
    budget, compared = settings['budget'], 0
    for task, arms in found['table'].items():
        for arm, row in arms.items():
            for key in [k for k in row if '_against_' in k]:
                measure, _, other = key.partition('_against_')
                per = {
                    (r['arm'], r['seed']): 100 * MEASURES[measure](r, budget)
                    for r in found['runs']
                    if r['task'] == task
                }
                gaps = [per[arm, s] - per[other, s] for s in settings['seeds']]
                want = statistics.fmean(gaps), half_width(gaps)
                mean, low, high = row[key]
                assert (mean, (high - low) / 2) == pytest.approx(want, rel=1e-2, abs=1e-3), key
                compared += 1
    return compared


def test_what_five_settings_choose_for_the_sixth_follows_from_the_runs():
    found = result('alpha')
    seeds = found['settings']['seeds']
    gains = {}  # setting -> alpha -> seed -> points
    for r in found['runs']:
        gain = 100 * (r['evals'][-1][1] - r['evals'][0][1])
        gains.setdefault(r['task'], {}).setdefault(int(r['arm'][1:]) / 1000, {})[r['seed']] = gain
    means = {t: {a: statistics.fmean(x.values()) for a, x in of.items()} for t, of in gains.items()}
    assert len(means) == 6 and all(len(of) == 8 for of in means.values())
    for rule, of in found['rules'].items():
        for task, row in of.items():
            mine, others = means[task], [m for t, m in means.items() if t != task]
            assert row['best'] == max(mine, key=mine.get)
            if rule == 'alpha':
                shares = {a: sum(m[a] / max(m.values()) for m in others) for a in mine}
                assert row['wanted'] == row['alpha'] == max(shares, key=shares.get)
            best, got = gains[task][row['best']], gains[task][row['alpha']]
            gaps = [best[s] - got[s] for s in seeds]
            mean, low, high = row['behind']
            want = statistics.fmean(gaps), half_width(gaps)
            assert (mean, (high - low) / 2) == pytest.approx(want, rel=1e-2, abs=1e-3), task


def test_tokens_until_the_rate_of_dapo_follow_from_the_runs():
    "A fine grid over the curve, where the library's study solves for the crossing"
    found = result('recipe')
    budget, grid = found['settings']['budget'], np.linspace(0, 1, 20_001)
    ends = {(r['task'], r['seed']): r['evals'][-1][1] for r in found['runs'] if r['arm'] == 'dapo'}
    for task, arms in found['table'].items():
        for arm, row in arms.items():
            shares = []
            for r in [r for r in found['runs'] if (r['task'], r['arm']) == (task, arm)]:
                marks, rates = zip(*r['evals'])
                at = np.union1d(grid, [n / budget for n in marks if n <= budget])  # also peaks
                there = at[np.interp(at * budget, marks, rates) >= ends[task, r['seed']]]
                shares.append(there[0] if len(there) else 1)
            assert row['tokens_to_dapo'] == pytest.approx(statistics.fmean(shares), abs=1e-3)


def test_the_tokens_of_a_step_follow_from_the_runs():
    found = result('recipe')
    seeds, tokens = found['settings']['seeds'], {}
    for r in found['runs']:
        tokens[r['task'], r['arm'], r['seed']] = r['means']['tokens']
    for task, arms in found['table'].items():
        for arm, row in arms.items():
            ratios = [tokens[task, arm, s] / tokens[task, 'recipe', s] for s in seeds]
            mean, low, high = row['step_to_recipe']
            want = statistics.fmean(ratios), half_width(ratios)
            assert (mean, (high - low) / 2) == pytest.approx(want, rel=1e-2, abs=1e-3), (task, arm)


def test_rates_of_silent_groups_follow_from_the_runs():
    found = result('parts')
    for arm, row in found['table']['silent'].items():
        means = [r['means'] for r in found['runs'] if r['arm'] == arm]
        grown = [100 * (m['zero_variance_first_frac'] - m['zero_variance_raw_frac']) for m in means]
        left = [100 * m['zero_variance_frac'] for m in means]
        falls = row['silent_falls']
        assert falls['more'][0] == pytest.approx(statistics.fmean(grown), abs=1e-6), arm
        assert falls['left'][0] == pytest.approx(statistics.fmean(left), abs=1e-6), arm


@pytest.mark.parametrize('part', ['', 'views'], ids=['arms', 'views'])
def test_the_table_of_several_turns_follows_from_its_runs(part):
    found, rates = result('turns'), {}
    found = found[part] if part else found
    for r in found['runs']:
        rates[r['arm'], r['seed']] = [100 * row['avg'] for row in r['after']]
    seeds, against = found['settings']['seeds'], 'several_against_'
    assert len(rates) == len(found['table']) * len(seeds)
    several = {k: statistics.fmean(x[1:]) for k, x in rates.items()}
    for arm, row in found['table'].items():
        mine = [rates[arm, s] for s in seeds]
        gaps = [x[0] - x[-1] for x in mine]
        wanted = [(row['after'][i], [x[i] for x in mine]) for i in range(4)]
        wanted.append((row['gap_after'], gaps))
        others = [k.removeprefix(against) for k in row if k.startswith(against)]
        assert ('mix' in others) == (arm != 'mix')
        for other in others:
            differ = [several[arm, s] - several[other, s] for s in seeds]
            wanted.append((row[against + other], differ))
        for (mean, low, high), values in wanted:
            want = statistics.fmean(values), half_width(values)
            assert (mean, (high - low) / 2) == pytest.approx(want, rel=1e-2, abs=1e-2), arm


def test_the_lead_with_noise_and_the_forks_found_follow_from_the_runs():
    found = result('forks')
    end = {(r['task'], r['arm'], r['seed']): 100 * r['evals'][-1][1] for r in found['runs']}
    leads = [
        [end[t, 'espo', s] - end[t, 'gspo', s] for t in ('noise', 'forks')]
        for s in found['settings']['seeds']
    ]
    mean, low, high = found['lead_with_noise']['gspo']
    gaps = [noise - forks for noise, forks in leads]
    want = statistics.fmean(gaps), half_width(gaps)
    assert (mean, (high - low) / 2) == pytest.approx(want, rel=1e-2, abs=1e-3)
    for task, arms in found['grouping'].items():
        for arm, row in arms.items():
            mine = [r for r in found['runs'] if (r['task'], r['arm']) == (task, arm)]
            shares = [100 * statistics.fmean(r['seen']['recall']) for r in mine]
            assert row['recall_mean'][0] == pytest.approx(statistics.fmean(shares)), (task, arm)


def test_groups_left_and_noise_follow_from_the_runs():
    found, arms = result('residual'), {}
    for r in found['runs']:
        m = r['means']
        arms.setdefault(r['arm'], {})[r['seed']] = dict(
            left=100 * m['zero_variance_frac'],
            noise=100 * m['gradient_noise'],
            final=100 * r['evals'][-1][1],
        )
    tables = [(found['residual'], 'none', '_against_none'), (found['against_zvp'], 'zvp', '')]
    for table, other, end in tables:
        for arm, row in table.items():
            for key in ('left', 'noise', 'final'):
                if key + end in row and arm != other:
                    gaps = [x[key] - arms[other][s][key] for s, x in arms[arm].items()]
                    mean, low, high = row[key + end]
                    want = statistics.fmean(gaps), half_width(gaps)
                    assert (mean, (high - low) / 2) == pytest.approx(want, rel=1e-2, abs=1e-2), arm
    assert len(arms) == 6 and all(len(x) == 6 for x in arms.values())


def test_the_table_of_labels_follows_from_its_runs():
    found = result('labels')
    seeds, runs = found['settings']['seeds'], {(r['arm'], r['seed']): r for r in found['runs']}
    assert len(runs) == len(found['table']) * len(seeds) and len(seeds) >= 6

    def after(arm, seed):
        return runs[arm, seed]['evals'][-1][1]

    def inverted(arm, seed):
        steps = runs[arm, seed]['steps']
        pairs = [sum(steps[k]) for k in ('right', 'tied', 'inverted')]
        return 100 * pairs[-1] / sum(pairs)

    for arm, row in found['table'].items():
        for name, of in dict(after=after, inverted=inverted).items():
            values = [of(arm, s) for s in seeds]
            gaps = [v - of('bt', s) for v, s in zip(values, seeds)]
            for key, want in {name: values, f'{name}_against_bt': gaps}.items():
                mean, low, high = row[key]
                want = statistics.fmean(want), half_width(want)
                assert (mean, (high - low) / 2) == pytest.approx(want, rel=1e-2, abs=1e-3), (
                    arm,
                    key,
                )
    for arm in ('oracle', 'oracle_labels'):
        assert found['table'][arm]['inverted'][0] == 0


def test_the_tables_of_replay_follow_from_its_runs():
    found = result('replay')
    seeds = found['settings']['seeds']
    of = {(r['arm'], r['seed']): r for r in found['runs']}
    assert len(of) == len(found['runs']) == len(found['table']) * len(seeds)
    wanted = []
    changes = dict(fp8=('fp8-', 'bfloat16-'), replay=('-R3-', '-off-'), tis=('-truncate', '-off'))
    changes |= dict(r2=('-R2-', '-off-'), vllm=('vllm-', 'wide-'))
    for arm, row in found['table'].items():
        first, last = ([100 * of[arm, s]['evals'][i] for s in seeds] for i in (0, 1))
        wanted += [(row['after'], last), (row['gain'], [b - a for a, b in zip(first, last)])]
        gaps = [x for s in seeds for x in of[arm, s]['series']['gap']]
        assert row['gap'] == pytest.approx(statistics.fmean(gaps), rel=1e-3), arm
        rewards = [of[arm, s]['series']['reward'] for s in seeds]
        falls = sum(any(b < a / 2 for a, b in itertools.combinations(r, 2)) for r in rewards)
        assert row['collapses'] == falls, arm
    for name, part in found['differences'].items():
        new, old = changes[name]
        each = []
        for arm, row in part.items():
            if arm != 'all':
                other = arm.replace(new, old)
                ends = [[100 * of[a, s]['evals'][1] for a in (arm, other)] for s in seeds]
                each.append([a - b for a, b in ends])
                wanted.append((row, each[-1]))
        wanted.append((part['all'], [statistics.fmean(x) for x in zip(*each)]))
    for name, row in found['pairs'].items():
        r3 = name.replace('-', '-R3-', 1)
        logs = []
        for s in seeds:
            live, replayed = (of[r3, s]['probes'][k]['k3'] for k in ('live', 'replayed'))
            late = len(live) // 3
            logs.append(math.log(sum(live[-late:]) / sum(replayed[-late:])))
        wanted.append((list(map(math.log, row['k3_same_late'])), logs))
    for (mean, low, high), values in wanted:
        assert mean == pytest.approx(statistics.fmean(values), rel=1e-3, abs=1e-3)
        assert (high - low) / 2 == pytest.approx(half_width(values), rel=1e-2, abs=1e-2)


def test_what_a_weight_does_to_a_merge_follows_from_the_pairs():
    found = result('merge')
    low, high = (found['settings']['weights'].index(w) for w in (0.1, 0.9))
    for way in ('TIES 0.2', 'TIES 0.5', 'linear'):
        rates = [[points['sums'][0] for points in pair[way]] for pair in found['table'].values()]
        gaps = [100 * (r[high] - r[low]) for r in rates]
        mean, *ends = found['sums_by_weight'][way.replace('.', '').replace(' ', '_')]
        want = statistics.fmean(gaps), half_width(gaps)
        assert (mean, (ends[1] - ends[0]) / 2) == pytest.approx(want, rel=1e-3, abs=1e-2), way


def test_the_rule_is_that_of_the_page():
    "The page's own function on intervals on, beside and across the value"
    cells = json.loads(PAGE.read_text())['cells']
    source = next(''.join(c['source']) for c in cells if 'def judged(' in ''.join(c['source']))
    here = {}
    exec(source.split('for found in')[0], here)
    judged = here['judged']
    assert judged((2, 1, 3), 'above') == judged((2, 1, 3), 'below', 4) == 'holds here'
    assert judged((2, 1, 3), 'below') == judged((2, 1, 3), 'above', 3.5) == 'the reverse here'
    assert judged((2, 1, 3), 'above', 1.5) == judged((2, 1, 3), 'below', 1.5) == 'not seen here'
    assert judged((2, None, None), 'above', 1) == 'holds here'
    assert judged((2, None, None), 'below', 1) == 'not seen here'
    for found in ((2, 1, 3), (2, None, None)):
        assert judged(found, 'above', 5, amount=True) == 'not reached here'
        assert judged(found, 'below', 5, amount=True) == 'holds here'
    assert judged((2, 1, 3), 'above', 2, amount=True) == 'not seen here'
