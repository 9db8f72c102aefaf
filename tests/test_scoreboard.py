"nbs/scoreboard.yml, its page and README's tables against the stored results, computed again here"

import importlib
import itertools
import json
import math
import random
import re
import statistics
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import yaml

from course import board
from tests.support import ROOT, front_page
from tests.test_toc import COURSE

BOARD = yaml.safe_load((ROOT / 'nbs' / 'scoreboard.yml').read_text())
GROUPS = BOARD['groups']
ROWS = [row for g in GROUPS for row in g['rows']]
MEASURED = [r for r in ROWS if 'effect' in r]
KINDS = {'effect', 'cannot', 'missing'}
KEYS = KINDS | set('claim theirs source lesson side than reach flip form measured scale'.split())
OURS = 'our reading', 'our question'
KEYS |= set('size unit n built fails control until step short'.split())
POINTS = {'accuracy', 'tokens', 'groups', 'pairs'}
LEVELS = {'factor': 'a factor of', 'share': 'a share of', 'percent': ''}
UNITS = POINTS | {*LEVELS, 'quality'}
STEPS = {r['step'] for r in ROWS if 'step' in r}
STUDY_CODE = ROOT / 'benchmarks' / 'studies'
LEDGER = yaml.safe_load((STUDY_CODE / 'seeds.yml').read_text())
PAGE = ROOT / 'nbs' / 'studies' / 'scoreboard.ipynb'
WORDS = {'holds here', 'not seen here', 'not reached here', 'the reverse here'}
WORDS |= {'not testable on a CPU', 'not measured yet', 'cannot tell', 'by construction'}


def result(name):
    return json.loads((ROOT / 'benchmarks' / 'results' / f'{name}.json').read_text())


def value(name, where):
    "None for what is not stored"
    if not (ROOT / 'benchmarks' / 'results' / f'{name}.json').exists():
        return None
    found = result(name)
    for key in where.split('.'):
        found = found.get(key) if isinstance(found, dict) else None
    return found


for _row in ROWS:
    if 'until' in _row and value(*_row['effect']) is None:
        _row |= _row['until']
        _row.pop('control', None)


def signed(row):
    "Mean, low and high of what the claim is about; a result without an interval is three times it"
    found = value(*row['effect'])
    mean, low, high = found if isinstance(found, list) else [found] * 3
    return (-mean, -high, -low) if row.get('flip') else (mean, low, high)


def limit(row):
    found = row['reach'] if 'reach' in row else row.get('than', 0)
    return value(*found['key']) if isinstance(found, dict) else found


def expected(row):
    "The verdict, by another road than the page's: which of the regions of a line hold the interval"
    if 'cannot' in row:
        return 'not testable on a CPU'
    if 'missing' in row or value(*row['effect']) is None:
        return 'not measured yet'
    if 'control' in row and not value(*row['control'])[1] > 0:
        return 'not measured yet'
    if 'built' in row:
        return 'by construction'
    alone = not isinstance(value(*row['effect']), list)
    _, low, high = signed(row)
    ends = {'above' if x > limit(row) else 'below' if x < limit(row) else '' for x in (low, high)}
    if alone:
        behind = 'reach' in row and row['side'] not in ends
        return 'not reached here' if behind else 'cannot tell'
    if ends == {row['side']}:
        return 'holds here'
    if len(ends) == 1 and '' not in ends:
        return 'not reached here' if 'reach' in row else 'the reverse here'
    matters = row.get('size', BOARD['size'])
    there = limit(row) + (matters if row['side'] == 'above' else -matters)
    inside = low <= there <= high
    return 'cannot tell' if inside or 'reach' in row else 'not seen here'


def power(half, n):
    "The effect that a t test of n pairs sees four times in five, from the quantile by integration"
    return half * (1 + quantile(0.8, n - 1) / quantile(0.975, n - 1))


def left_open(row):
    "What a verdict leaves open, as the page has it"
    word = expected(row)
    if word not in ('not seen here', 'cannot tell'):
        return None
    if not isinstance(value(*row['effect']), list):
        return 'no interval'
    _, low, high = signed(row)
    if word == 'not seen here':
        x = high - limit(row) if row['side'] == 'above' else limit(row) - low
        said = 'excludes'
    elif 'reach' in row:
        x, said = 0, 'whether it reaches'
    else:
        name, where = row['effect']
        n = value(name, f'{where.rpartition(".")[0]}.n') or row.get('n')
        x = power((high - low) / 2, n or len(result(name)['settings']['seeds']))
        said = 'would see'
    if row.get('unit', BOARD['unit']) in LEVELS:  # the value itself
        x = limit(row) + (x if row['side'] == 'above' else -x)
    return said, x


def said(row):
    "The sentence with its numbers"
    if 'effect' not in row or value(*row['effect']) is None:
        return row.get('cannot') or row.get('missing') or 'The result is not stored yet.'
    shown = [format(x, row['form']) for x in signed(row)]
    text = shown[0] if len({*signed(row)}) == 1 else '{} [{}, {}]'.format(*shown)
    return row['measured'].format(effect=text, than=format(limit(row), row['form']))


@pytest.mark.parametrize('row', ROWS, ids=lambda r: r['claim'][:40])
def test_a_row_says_what_it_must(row):
    assert set(row) <= KEYS and len(KINDS & set(row)) == 1
    assert row['source'] in {'quoted', 'second-hand', *OURS}
    if 'theirs' in row:
        assert row['source'] not in OURS, 'a number of the paper is quoted or second-hand'
    if 'lesson' in row:
        assert row['lesson'] in COURSE.paths
    if 'effect' in row:
        assert {'side', 'form', 'measured', 'scale', 'lesson'} <= set(row)
        assert '{effect}' in row['measured']
        assert 'built' in row or expected(row) != 'holds here' or row.get('fails'), 'could it fail?'
        assert not ('built' in row and 'fails' in row)
        typed = re.findall(r'\d+\.\d+|\d+ ?%', re.sub(r'{\w+}', '', row['measured']))
        assert typed == [], 'numbers come from stored results'
        unit = row.get('unit', BOARD['unit'])
        assert unit in UNITS
        assert (
            unit not in POINTS or 'points' in row['measured'] or 'of a hundred' in row['measured']
        )
        assert (unit in ('share', 'percent')) == ('%' in row['form'] + row['measured']), row[
            'claim'
        ]
    assert not {'unit', 'size'} & set(row) or 'effect' in row
    neighbours = r'^(They|These|It|The same)\b|\b(more still|next row|find them|that selection,)'
    assert not re.search(neighbours, f'{row["claim"]} {row.get("measured", "")}'), 'it stands alone'


# ---- the page, and the front page


def tables(text):
    "Claim -> the other cells of its line, in all tables of a Markdown text"
    lines = [x.strip('|').split(' | ') for x in text.splitlines() if x.startswith('| ')]
    return {cells[0].strip(): [c.strip() for c in cells[1:]] for cells in lines}


def shown(cells):
    "What the cells show in Markdown, one text for each"
    outputs = [o for c in cells for o in c.get('outputs', [])]
    return [''.join(o.get('data', {}).get('text/markdown', '')) for o in outputs]


def on_page(start):
    "The one output of the page that starts so"
    found = [t for t in shown(json.loads(PAGE.read_text())['cells']) if t.startswith(start)]
    assert len(found) == 1, f'{start}: {len(found)} outputs'
    return found[0]


def test_the_page_shows_every_claim_with_stored_numbers_and_its_verdict():
    found = tables(on_page('| claim | what the paper'))
    fails = tables(on_page('<a id="what-fails"></a>\n\n| claim | verdict'))
    for row in ROWS:
        theirs, measured, verdict = found[row['claim']]
        verdict = re.sub(r'( ★)?( <span .*)?$', '', verdict)
        run = 'run `python tools/execute_nbs.py nbs/studies/scoreboard.ipynb`'
        assert measured.startswith(said(row)), f'{row["claim"]}: {run}'
        assert verdict.split('**')[1] == expected(row), row['claim']
        opens = left_open(row)
        if isinstance(opens, tuple):
            opened = r'.*\*\* \((excludes|would see|whether it reaches) \D*([\d.]+)(.*)\)'
            words, x, after = re.fullmatch(opened, verdict).groups()
            share = 100 if '%' in verdict else 1
            assert words == opens[0] and float(x) == pytest.approx(
                share * opens[1], abs=0.06 * share**0.5
            )
            unit = row.get('unit', BOARD['unit'])
            assert (unit in POINTS) == (after == ' points') and (unit == 'share') == (after == '%')
            assert f'{words} {LEVELS.get(unit, "")}'.strip() in verdict
        else:
            assert verdict.endswith('**' if opens is None else f'** ({opens})')
        could_fail = fails.get(row['claim'], ['', ''])[1]
        assert bool(could_fail) == (expected(row) in ('holds here', 'by construction'))
        assert row.get('fails', row.get('built', '')) in could_fail or not could_fail
        if 'built' in row:
            side = 'above' if signed(row)[0] >= limit(row) else 'below'
            against = side != row['side']
            assert could_fail.startswith('it cannot hold: ' if against else 'nothing: ')
        if 'effect' in row and value(*row['effect']) is not None:
            assert ('†' in measured) == (row['effect'][0] in LEDGER['shaped'])
        assert theirs == of_paper(row)
        assert measured.endswith('.ipynb)') == ('lesson' in row)
    assert {found[r['claim']][2].split('**')[1] for r in ROWS} <= WORDS
    assert 'No.</b> No' not in PAGE.read_text(), 'the Predict says No by itself'


def of_paper(row):
    "What stands for the paper: its number and where it is from, or whose words the claim has"
    if 'theirs' in row:
        return f'{row["theirs"]} ({row["source"]})'
    return row['source'] if row['source'] in OURS else f'no number ({row["source"]})'


def drawn(html):
    "What a drawing shows, read off its labels as a reader would: marks, and the labels themselves"
    labels = {}
    for text, at in re.findall(r'<i data-says="([^"]+)" style="--at:([\d.]+)%"></i>', html):
        labels[float(at)] = float(text.rstrip('%')) / (100 if text.endswith('%') else 1)
    return labels, {
        name: tuple(map(float, re.search(rf'"{name}" x1="([\d.]+)%" x2="([\d.]+)%', html).groups()))
        for name in ('value', 'range', 'axis')
        if f'class="{name}"' in html
    }


def test_each_drawing_shows_the_numbers_of_its_row():
    "A place on the axis becomes a number by the two outermost labels; both sides of it are stored"
    found = tables(on_page('| claim | what the paper'))
    looks = {'holds here': 'good', 'the reverse here': 'bad', 'not reached here': 'bad'}
    looks |= {'not seen here': 'unseen', 'cannot tell': 'unsure'}
    axes, seen = {}, 0
    for row in ROWS:
        html = found[row['claim']][2].partition(' <span')[2]
        assert bool(html) == (expected(row) in looks), row['claim']
        if not html:
            continue
        assert html.startswith(f' class="interval {looks[expected(row)]}" aria-hidden="true">')
        assert re.sub(r'<[^>]*>', '', f'<span{html}') == '', 'all text stands in the row'
        unit = row.get('unit', BOARD['unit'])
        labels, marks = drawn(html)
        left, right = min(labels), max(labels)
        share = 100 if unit == 'percent' else 1  # its labels are hundredths of what is stored
        a, b = share * labels[left], share * labels[right]

        def number(at):
            part = (at - left) / (right - left)
            return a * (b / a) ** part if unit == 'factor' else a + (b - a) * part

        def near(at, x):  # a tenth of a percent of the axis, and what a label leaves out
            ends = sorted((number(at - 0.15), number(at + 0.15)))
            slack = 0.005 * abs(x)
            return ends[0] - slack <= x <= ends[1] + slack

        alone = not isinstance(value(*row['effect']), list)
        mean, low, high = signed(row)
        assert marks['axis'] == (0, 100)
        assert marks['value'][0] == marks['value'][1] and near(marks['value'][0], limit(row))
        assert labels[marks['value'][0]] * share == pytest.approx(limit(row), rel=0.005)
        assert ('range' in marks) == (not alone)
        beyond = low < number(0) and not near(0, low), high > number(100) and not near(100, high)
        for x, at, out, side in zip((low, high), marks.get('range', (0, 100)), beyond, (0, 100)):
            assert (f'class="more drawing" x="{side}%"' in html) == out
            assert alone or (at == side if out else near(at, x)), (row['claim'], at, x)
        assert not any(beyond) or unit == 'accuracy'
        dot = re.search(r'<circle cx="([\d.]+)%"', html)
        assert near(float(dot[1]), mean) if dot else not number(0) <= mean <= number(100)
        start, width = re.search(r'class="side" x="([\d.]+)%" width="([\d.]+)%"', html).groups()
        side = (float(start), float(start) + float(width))
        wants = (marks['value'][0], 100) if row['side'] == 'above' else (0, marks['value'][0])
        assert side == pytest.approx(wants, abs=0.11)
        chapter = next(g['name'] for g in GROUPS if row in g['rows'])
        ends = axes.setdefault((chapter, unit), (number(0), number(100)))
        assert (number(0), number(100)) == pytest.approx(ends, rel=0.02, abs=0.02 * (b - a))
        seen += 1
    assert seen >= 50


def tail(t, df):
    "Two-sided p of Student's t, by trapezes"
    norm = math.gamma((df + 1) / 2) / math.sqrt(df * math.pi) / math.gamma(df / 2)
    x = np.linspace(0, abs(t), 200_001)
    return 1 - 2 * np.trapezoid(norm * (1 + x**2 / df) ** (-(df + 1) / 2), x)


def test_a_star_stands_where_a_verdict_survives_the_correction():
    "Holm's correction, by another road: reject the smallest p of all that are left, and go on"
    left = {}
    for row in ROWS:
        word = expected(row)
        if word not in ('holds here', 'the reverse here', 'not seen here', 'cannot tell'):
            continue
        if 'n' in row or not isinstance(value(*row['effect']), list):
            continue
        name, where = row['effect']
        n = value(name, f'{where.rpartition(".")[0]}.n') or len(result(name)['settings']['seeds'])
        mean, low, high = signed(row)
        t = (mean - limit(row)) / ((high - low) / 2 / quantile(0.975, n - 1))
        left[row['claim']] = tail(t, n - 1)
    stars = set()
    while left and min(left.values()) <= 0.05 / len(left):
        stars.add(first := min(left, key=left.get))
        del left[first]
    found = tables(on_page('| claim | what the paper'))
    assert {claim for claim, cells in found.items() if '★' in cells[-1]} == stars
    kinds = [expected(r) for r in ROWS if r['claim'] in stars]
    text = on_page(f'Of {len(ROWS)} claims').split('\n\n')[2]
    holds, reverse = (kinds.count(v) for v in ('holds here', 'the reverse here'))
    assert f'{len(stars)} of them remain: {holds} hold and {reverse} are reversed' in text
    assert holds + reverse == len(stars) >= 8


def test_the_figure_has_all_rows_of_accuracy_on_fresh_seeds():
    short = [r['claim'] for r in ROWS if 'short' in r]
    assert short == [
        r['claim']
        for r in MEASURED
        if r.get('unit', BOARD['unit']) == 'accuracy' and 'fresh seeds' in r['scale']
    ]
    names = [r['short'] for r in ROWS if 'short' in r]
    assert len(set(names)) == len(names) <= 14 and all(' − ' in s or ', ' in s for s in names)


def test_the_counts_of_the_page_add_up():
    "First all claims and those with an interval, then the verdicts of these; then the others"
    first, others, *_ = on_page(f'Of {len(ROWS)} claims').split('\n\n')
    claims, free, *parts = map(int, re.findall(r'\d+', first))
    assert claims == len(ROWS) and sum(parts) == free and len(parts) == 5
    rest, *parts = map(int, re.findall(r'\d+', others))
    assert free + rest == claims and sum(parts) == rest and len(parts) == 4
    words = [expected(r) for r in ROWS]
    for n, verdict in zip(
        parts[1:], ('by construction', 'not measured yet', 'not testable on a CPU')
    ):
        assert n == words.count(verdict), verdict
    for verdict, said_so in (('holds here', 'hold here'), ('the reverse here', 'are reversed')):
        assert f'{words.count(verdict)} {said_so}' in first


def test_the_module_judges_as_the_oracle_does():
    rows = [row for group in board.read_board() for row in group['rows']]
    assert [r['claim'] for r in rows] == [r['claim'] for r in ROWS]
    for mine, row in zip(rows, ROWS):
        assert board.verdict(mine) == expected(row), row['claim']
        assert board.result(mine).startswith(said(row)), row['claim']


@pytest.mark.parametrize('step', sorted(STEPS))
def test_a_step_shows_its_claims_what_was_learned_first(step):
    text = board.verdicts(step).data
    found = tables(text)
    mine = [r for r in ROWS if r.get('step') == step]
    assert len(found) == len(mine) + 2 and 1 <= len(mine) <= 5  # the head, and the line below it
    for row in mine:
        paper, measured, verdict = found[row['claim']]
        assert paper == of_paper(row)
        assert measured.startswith(said(row)) and verdict.startswith(f'**{expected(row)}**')
        assert ('†' in measured) == (row['effect'][0] in LEDGER['shaped'])
    seen_before = any(r['effect'][0] in LEDGER['shaped'] for r in mine)
    assert [x.count('†:') for x in text.split('<details>')] == [seen_before, 0], 'outside the fold'
    for says in ('excludes', 'would see'):  # what these words mean stands below the table
        assert (f'“{says.capitalize()} x”' in text) == (f'({says} ' in text)
    learned = [r.get('unit', BOARD['unit']) in ('accuracy', 'quality') for r in mine]
    shown_first = [*found][2 : 2 + sum(learned)]
    assert {*shown_first} == {r['claim'] for r, learns in zip(mine, learned) if learns}
    page = COURSE.nbs / COURSE.paths[step]
    (link,) = re.findall(r'\[scoreboard\]\((.+?)\)', text)
    assert (page.parent / link).resolve() == PAGE.resolve()


def test_steps_with_rows_are_notebooks_and_others_are_refused():
    assert STEPS <= COURSE.paths.keys() and len(STEPS) >= 5
    with pytest.raises(ValueError, match="step='algo/none': .* use one of .*judges/genrm"):
        board.verdicts('algo/none')


def test_an_effect_is_said_with_its_unit():
    row = dict(unit='accuracy', side='above', form='+.1f')
    assert board.in_unit(row, 1.94) == '1.9 points'
    assert board.in_unit(row | dict(unit='quality', form='+.2f'), 0.05) == '0.05 of quality'
    factor = row | dict(unit='factor', form='.2f', than=1.3)
    assert board.in_unit(factor, 0.28) == 'a factor of 1.58'
    below = row | dict(unit='share', form='.0%', than=0.5, side='below')
    assert board.in_unit(below, 0.19) == 'a share of 31%'


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


@cache
def quantile(p, n):
    "Of Student's t with n degrees of freedom, by integrating its density"
    norm = math.gamma((n + 1) / 2) / math.sqrt(n * math.pi) / math.gamma(n / 2)
    area, t, dt = 0.5, 0.0, 1e-4
    while area < p:
        area += norm * (1 + (t + dt / 2) ** 2 / n) ** (-(n + 1) / 2) * dt
        t += dt
    return t


def half_width(values):
    "Of the 95 % interval of a mean"
    return quantile(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


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
STUDIES += ['residual', 'stale', 'learnable', 'judged_default']


@pytest.mark.parametrize('name', STUDIES)
def test_the_tables_of_a_study_follow_from_its_runs(name):
    found = result(name)
    assert follows(found, found['settings']) >= 4


@pytest.mark.parametrize('name', ['parts', 'stages', 'phases', 'losses', 'stale'])
def test_each_arm_has_the_lowest_learning_rate_that_is_near_its_best(name):
    found, near = result(name), 0.01
    table = next(iter(found['table'].values()))
    assert found['rates'].keys() == table.keys()
    for arm, of in found['rates'].items():
        by_rate = sorted((float(lr), value) for lr, value in of.items())
        best = max(value for _, value in by_rate)
        assert table[arm]['lr'] == next(lr for lr, value in by_rate if value > best - near), arm


def test_rates_by_length_at_the_start_give_the_mean_that_all_runs_begin_with():
    found = result('learnable')
    shares = [share for *_, share in found['settings']['mix']]
    begins = statistics.fmean(r['evals'][0][1] for r in found['runs'] if r['arm'] == 'grpo')
    parts = zip(shares, found['start_by_length'].values(), strict=True)
    assert sum(share * rate for share, rate in parts) == pytest.approx(begins, abs=1e-4)


def test_what_age_costs_follows_from_the_runs():
    found = result('stale')
    end = {(r['arm'], r['seed']): 100 * r['evals'][-1][1] for r in found['runs']}
    seeds = found['settings']['seeds']
    assert len(found['lost']) == 48 and len(end) == 48 * len(seeds) == 288
    for arm, row in found['lost'].items():
        loss, age, *how = arm.split('_')
        base = f'{loss}_0' + '_mended' * (how == ['mended'])
        gaps = [end[arm, s] - end[base, s] for s in seeds]
        mean, low, high = row['points']
        want = statistics.fmean(gaps), half_width(gaps)
        assert (mean, (high - low) / 2) == pytest.approx(want, rel=1e-2, abs=1e-3), arm
        ess = [r['means']['rollout_train_ess'] for r in found['runs'] if r['arm'] == arm]
        assert row['rollout_train_ess'] == pytest.approx(statistics.fmean(ess), abs=1e-4)
        assert (row['rollout_train_gap'] < 1e-5) == (age == '0')


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
    compared = 0
    for task, arms in found['table'].items():
        for arm, row in arms.items():
            for key in [k for k in row if '_against_' in k]:
                measure, _, other = key.partition('_against_')
                per = {
                    (r['arm'], r['seed']): 100
                    * MEASURES[measure](r, r.get('budget', settings['budget']))
                    for r in found['runs']
                    if r['task'] == task
                }
                gaps = [per[arm, s] - per[other, s] for s in row.get('seeds', settings['seeds'])]
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
            mean, low, high = row['to_dapo']
            want = statistics.fmean(shares), half_width(shares)
            assert (mean, (high - low) / 2) == pytest.approx(want, abs=2e-3)


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
    assert len(arms) == 9 and all(list(x) == list(range(3200, 3212)) for x in arms.values())
    assert {r['lr'] for r in found['runs']} == {4e-4}
    for arm, of in found['rates'].items():
        assert max(of, key=of.get) == '0.0004' != next(iter(of)) and '0.0008' in of, arm


def differ(gaps, level=0.05):
    "Arms that Holm's test of all together tells apart: the least sure of those kept is sure enough"
    size = {a: abs(statistics.fmean(v)) / half_width(v) * quantile(0.975, len(v) - 1)
            for a, v in gaps.items()}  # fmt: skip
    kept = set()
    for i, arm in enumerate(sorted(size, key=size.get, reverse=True)):
        if size[arm] < quantile(1 - level / 2 / (len(size) - i), len(gaps[arm]) - 1):
            break
        kept.add(arm)
    return kept


def test_what_an_ensemble_and_a_schedule_do_follows_from_the_runs():
    "Which arms hold when all are tested together, and what the arms with own code have measured"
    found, end, told, rest = result('residual'), {}, {}, {}
    for r in found['runs']:
        end.setdefault(r['arm'], {})[r['seed']] = 100 * r['evals'][-1][1]
        seen = r['seen']
        if 'pairs' in seen:
            told.setdefault(r['arm'], []).append(100 * seen['ordered'] / seen['pairs'])
        for key in {'spread', 'heat'} & set(seen):
            rest.setdefault((r['arm'], key), []).append(seen[key])
        assert r['means']['rollout_train_gap'] < 1e-5, 'log-probs at the temperature of the draw'
    for base, kept in found['holm'].items():
        gaps = {a: [v - end[base][s] for s, v in x.items()] for a, x in end.items() if a != base}
        assert differ(gaps) == set(kept), base
    assert told.keys() == {'ensemble', 'disagree'}
    rows = {(arm, 'order'): v for arm, v in told.items()} | rest
    assert len(rows) == 5
    for (arm, key), values in rows.items():
        mean, low, high = found['measured'][arm][key]
        want = statistics.fmean(values), half_width(values)
        assert (mean, (high - low) / 2) == pytest.approx(want, rel=1e-2, abs=1e-3), (arm, key)
        assert low > (50 if key == 'order' else 1 if key == 'heat' else 0)
    awake = [r['means']['zero_variance_frac'] for r in found['runs'] if r['arm'] in told]
    asleep = [r['means']['zero_variance_frac'] for r in found['runs'] if r['arm'] == 'none']
    assert max(awake) < min(asleep), 'an ensemble wakes groups'


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
    for name, (one, other) in found['settings']['contrasts'].items():
        gaps = [after(one, s) - after(other, s) for s in seeds]
        mean, low, high = found['contrasts'][name]
        want = statistics.fmean(gaps), half_width(gaps)
        assert (mean, (high - low) / 2) == pytest.approx(want, rel=1e-2, abs=1e-3), name
    assert found['contrasts']['control'] == found['table']['oracle']['after_against_bt']
    assert found['contrasts']['control'][1] > 0, 'the true quality must win'


def test_each_rate_of_labels_is_the_best_and_inside_its_grid():
    found = result('labels')
    assert found['rates'].keys() == found['table'].keys()
    for arm, of in found['rates'].items():
        tried = sorted(map(float, of))
        best = float(max(of, key=of.get))
        assert found['table'][arm]['lr'] == best and tried[0] < best < tried[-1], arm


def test_scores_of_a_group_within_a_band_become_ties(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY_CODE))
    with_ties = importlib.import_module('_shop_judges').with_ties
    by_hand = [0.9, 0.9, 0.52, 0.15, 0.15, 0.52]
    assert with_ties([1.0, 0.8, 0.65, 0.2, 0.1, 0.39], 0.3) == pytest.approx(by_hand)
    rng = random.Random(0)
    for _ in range(100):
        scores, band = [rng.gauss(0, 1) for _ in range(8)], rng.choice([0.0, 0.3, 1.0])
        made = with_ties(scores, band)
        assert statistics.fmean(made) == pytest.approx(statistics.fmean(scores))
        for (a, x), (b, y) in itertools.combinations(zip(scores, made), 2):
            assert (a - b) * (x - y) >= 0  # tied or in order
            assert x != y or abs(a - b) <= band
            assert band or (x, y) == (a, b)


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


def mean_of_both(rates):
    "In points, of the rates of sums and strings"
    return 100 * statistics.fmean(rates)


def best_points(grid, weights):
    "(mean of both kinds, weight, way) of every merge"
    for way, kinds in grid.items():
        for i, w in enumerate(weights):
            yield statistics.fmean([kinds['sums'][i], kinds['strings'][i]]), w, way


def test_what_learned_coefficients_win_follows_from_the_runs():
    found = result('merge')
    weights, seeds = found['settings']['weights'], found['settings']['seeds']
    judged = {}
    for r in (r for r in found['runs'] if r['seed'] in seeds):
        for name, ways in dict(linear=['linear'], all=list(r['grid'])).items():
            points = best_points({w: r['grid'][w] for w in ways}, weights)
            best, told = max(points), r[f'best_{name}']
            assert (told['weight'], told['way']) == best[1:]
        better = max(('reasoner', 'domain'), key=lambda n: sum(r['choose'][n]))
        values = dict(parent=r['judge'][better], joint=r['judge']['joint'])
        values |= {f'best_{n}': r[f'best_{n}']['judge'] for n in ('linear', 'all')}
        values |= {arm: x['judge'] for arm, x in r['learned'].items()}
        judged[r['pair'], r['seed']] = {n: mean_of_both(v) for n, v in values.items()}
        assert r['learned']['labels, one weight']['c'] == pytest.approx(
            [w := r['learned']['labels, one weight']['c'][0], 1 - w], abs=1e-4
        )
        told = [x['loss'] for arm, x in r['learned'].items() if arm.startswith('labels')]
        assert all(after < before for before, after in told)
    pairs = sorted({p for p, _ in judged})
    assert len(judged) == len(pairs) * len(seeds) == 10
    beats = {}
    for name, row in found['differences']['rows'].items():
        a, b = name.split(' - ')
        gaps = {p: [judged[p, s][a] - judged[p, s][b] for s in seeds] for p in pairs}
        gaps['both'] = [statistics.fmean(x) for x in zip(*gaps.values())]
        for pair, values in gaps.items():
            mean, low, high = row[pair]['mean']
            want = statistics.fmean(values), half_width(values)
            assert (mean, (high - low) / 2) == pytest.approx(want, rel=1e-2, abs=1e-2), name
        if b == 'best_linear':
            beats[name] = gaps['both']
    assert len(beats) == 6 and differ(beats) == set(found['differences']['holm'])
    control = found['differences']['rows']['joint - parent']
    assert all(row['mean'][1] > 0 for row in control.values()), 'there is something to win'


def test_the_best_merge_is_chosen_by_other_prompts_than_those_that_judge_it():
    found = result('merge')
    weights, ratios = found['settings']['weights'], []
    for pair, of in found['table'].items():
        grid = {
            way: {k: [p[k][0] for p in points] for k in ('sums', 'strings')}
            for way, points in of.items()
            if way not in ('parents', 'best')
        }
        points = list(best_points(grid, weights))
        between = [p for p in points if 0 < p[1] < 1]
        for told, among in ((of['best'], points), (of['best']['between'], between)):
            assert (told['weight'], told['way']) == max(among)[1:], pair
            assert told['chosen_at'] == pytest.approx(max(among)[0], abs=1e-4)
        if 'far' not in pair:
            ratios.append(of['best']['mean'] / of['best']['better_parent'])
    assert found['ratio'] == pytest.approx(min(ratios), abs=1e-3)


def test_prompts_that_choose_a_merge_judge_it_and_teach_it_are_apart(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(STUDY_CODE))
    study = importlib.import_module('merge')
    work = study.Work(tmp_path, study.PAIRS['small, dense'], 3300, study.Size())
    for mix in study.KINDS.values():
        parts = {n: {p.text for p in work.prompts(n, mix)} for n in ('choose', 'judge', 'learn')}
        assert {n: len(x) for n, x in parts.items()} == dict(choose=128, judge=512, learn=128)
        shown = [study.prompts_of(m, 4096, 3300, 'train') for m in (mix, study.BOTH)]
        parts['shown'] = {p.text for prompts in shown for p in prompts}
        assert not any(a & b for a, b in itertools.combinations(parts.values(), 2))


def test_the_rule_by_hand():
    judged = board.judged
    assert judged((2, 1, 3), 'above') == judged((2, 1, 3), 'below', 4) == 'holds here'
    assert judged((2, 1, 3), 'below') == judged((2, 1, 3), 'above', 3.5) == 'the reverse here'
    for side in ('above', 'below'):  # 1.5 from the value to either end
        assert judged((2, 0.5, 3.5), side, 2, size=1.4) == 'cannot tell'
        assert judged((2, 0.5, 3.5), side, 2, size=1.6) == 'not seen here'
        assert judged((2, 1, 3), side, 2, amount=True, size=9) == 'cannot tell'
        assert judged((2, None, None), side, 1 if side == 'above' else 3) == 'cannot tell'
    # a large effect against the claim is not excluded, only one for it
    assert judged((-1, -3.2, 1.2), 'above', size=2) == 'not seen here'
    assert judged((1, -1.2, 3.2), 'above', size=2) == 'cannot tell'
    for found in ((2, 1, 3), (2, None, None)):
        assert judged(found, 'above', 5, amount=True) == 'not reached here'
    assert judged((2, 1, 3), 'below', 5, amount=True) == 'holds here'
    assert judged((2, None, None), 'below', 5, amount=True) == 'cannot tell'


# ---- the rules that all studies share


def seeds_of(text):
    ends = [list(map(int, part.split('-'))) for part in str(text).split(',')]
    return {i for x in ends for i in range(x[0], x[-1] + 1)}


def test_seeds_that_shaped_a_default_do_not_judge_and_some_are_kept():
    "The ledger has every study with seeds, as its stored result has them"
    used = {}
    for part, of in LEDGER.items():
        for name, row in of.items():
            keys = {'seeds', 'rates', 'again'} & set(row)
            used[part, name] = set().union(*(seeds_of(row[k]) for k in keys))
            stored = value(name, 'settings.seeds') or value(name, 'seeds')
            if stored and not isinstance(stored[0], dict):
                assert set(stored) <= seeds_of(row['seeds']), name
    for path in (ROOT / 'benchmarks' / 'results').glob('*.json'):
        stored = json.loads(path.read_text()).get('settings')
        if isinstance(stored, dict) and 'seeds' in stored:
            assert any(n == path.stem for _, n in used), f'{path.stem}: not in seeds.yml'
    shaped = set().union(*(s for (part, _), s in used.items() if part == 'shaped'))
    for (part, name), seeds in used.items():
        assert not seeds & set(range(400, 500)), f'{name}: these judge from outside'
        assert part != 'judged' or not seeds & shaped, name


def test_a_study_refuses_kept_seeds_and_trials_of_another_library(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(STUDY_CODE))
    evidence = importlib.import_module('_evidence')
    runner = importlib.import_module('_runner')
    with pytest.raises(ValueError, match='seed 401: 400 to 499 judge from outside'):
        runner.Study('x', {}, {}, {}, (3, 401), 1)
    study = runner.Study('x', dict(t=runner.SILENT), dict(a=lambda c: c), dict(a=1.0), (3,), 1)
    study = replace(study, runs=tmp_path)
    study.folder.mkdir()
    name = runner.name_of(study, 't', 'a', 3)
    (study.folder / f'{name}-0123abcd.json').write_text('{}')
    with pytest.raises(SystemExit, match='trials of library 0123abcd, this is .* start over'):
        runner.run_all(study, [('t', 'a', 3)], processes=0)
    rows = [dict(library='a'), dict(library='b')]
    with pytest.raises(SystemExit, match='2 versions of the library'):
        evidence.version(dict(name='x', runs=rows))
    assert evidence.version(dict(name='x', runs=rows[:1]))['library'] == 'a'


def test_the_hash_of_the_library_sees_code_alone(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(STUDY_CODE))
    library = importlib.import_module('_evidence').library
    texts = ['x = 1', 'x = 1  # why', '"About"\nx = 1', 'x = 2']
    found = []
    for i, text in enumerate(texts):
        path = tmp_path / str(i) / 'compassrl' / 'algo' / 'a.py'
        path.parent.mkdir(parents=True)
        path.write_text(text)
        found.append(library(tmp_path / str(i)))
    assert found[0] == found[1] == found[2] != found[3]


def test_quantiles_power_and_holm(monkeypatch):
    "Tables of Student's t (Fisher and Yates), an oracle by integration, and Holm by hand"
    monkeypatch.syspath_prepend(str(STUDY_CODE))
    e = importlib.import_module('_evidence')
    known = {1: 12.7062, 2: 4.3027, 5: 2.5706, 9: 2.2622, 23: 2.0687}
    for n, t in known.items():
        assert e.t_quantile(0.975, n) == pytest.approx(t, abs=1e-4)
        assert e.p_value(t, n) == pytest.approx(0.05, abs=1e-4)
        assert e.t_quantile(0.8, n) == pytest.approx(quantile(0.8, n), abs=1e-3)
    n = e.seeds_needed(1.3, 0.6)
    assert e.half_width(1.3, n) <= 0.6 < e.half_width(1.3, n - 1)
    assert e.would_see(0.6, n) == pytest.approx(power(0.6, n), rel=1e-3)
    assert e.holm([0.03, 0.001, 0.02, 0.5]) == {1}
    assert e.holm([0.012, 0.001, 0.016, 0.5]) == {0, 1, 2}


UNDATED = dict(families='a table of yes and no, which tests/model/test_hf_config.py makes again')


def test_every_result_says_of_what_it_is_and_all_are_small():
    results, size = ROOT / 'benchmarks' / 'results', 0
    for path in results.rglob('*.json'):
        size += path.stat().st_size
        found = json.loads(path.read_text())
        if path.parent.name == 'gpu':  # a copy of another machine's, which has no git
            assert all(found[k] for k in ('commit', 'date', 'machine', 'versions')), path
        elif path.stem not in UNDATED:
            of = found['version']
            assert set(of) == {'commit', 'date', 'library', 'config'} and all(of.values()), path
    assert {p.stem for p in results.glob('*.json')} >= UNDATED.keys()
    assert size < 6e6


SAME, OTHER = "TRL's recipe here", 'TRL, beta2 0.999'
RACES = dict(
    time_to_accuracy=dict(
        both=('TRL', 'default'),
        engine=('TRL', SAME),
        recipe=(SAME, 'default'),
        beta2=(OTHER, 'TRL'),
        other=(OTHER, 'default'),
    ),
    two_cores=dict(
        both=('TRL', 'ahead'), threads=('TRL, two threads', 'ahead'), one_core=('default', 'ahead')
    ),
)


@pytest.mark.parametrize('race', RACES)
def test_the_factors_of_a_race_follow_from_its_curves(race):
    "First evaluation at the goal, by the running maximum of a curve; all of the time without one"
    unit = 'cpu_seconds' if race == 'time_to_accuracy' else 'seconds'
    for task, of in result(race)['tasks'].items():
        ends = [np.mean([r['avg'] for r in s['curves']['TRL']][-5:]) for s in of['seeds']]
        start = [s['before'] for s in of['seeds']]
        moving = [0.7] * len(ends) if task == 'default' else ends
        goals = dict(factors=moving, fixed=[x + 0.05 for x in start])
        for key, goal in goals.items():
            spent = {}
            for s, rate in zip(of['seeds'], goal):
                for name, rows in s['curves'].items():
                    best = np.maximum.accumulate([r['avg'] for r in rows])
                    i = min(np.searchsorted(best, rate - 1e-9), len(rows) - 1)
                    spent.setdefault(name, []).append(math.log(rows[i][unit]))
            for k, (slow, fast) in RACES[race].items():
                if key not in of:  # by the clock there is no fixed goal
                    continue
                gaps = list(np.subtract(spent[slow], spent[fast]))
                mean, low, high = map(math.log, of[key][k])
                want = statistics.fmean(gaps), half_width(gaps)
                assert (mean, (high - low) / 2) == pytest.approx(want, rel=1e-2, abs=1e-3), k


def test_what_is_spent_on_guaranteed_prompts_follows_from_the_trials():
    found = result('guaranteed')
    spent = {True: 0, False: 0}
    for x in found['audit']:
        for kind, of in x['kinds'].items():
            assert of['shaped'] <= of['silent'] <= of['groups'], 'penalties only wake'
            if kind != 'sums':
                assert of['silent'] == of['groups'], 'paid always or never'
            if x['arm'] == 'growth':
                spent[kind == 'sums'] += of['responses']
    assert found['ratio'] == pytest.approx(spent[False] / spent[True], abs=1e-3)
    assert follows(found, found['settings']) >= 4
    for arm, row in found['table']['half'].items():
        ends = [100 * r['evals'][-1][1] for r in found['runs'] if r['arm'] == arm]
        want = statistics.fmean(ends), half_width(ends)
        mean, low, high = row['after']
        assert (mean, (high - low) / 2) == pytest.approx(want, rel=1e-2, abs=1e-2), arm


FRESH = ['judged', 'matched', 'learnable', 'judged_default', 'espo_gspo']


@pytest.mark.parametrize('study', FRESH)
def test_the_contrasts_that_decide_follow_from_their_runs(study):
    found = result(study)
    end = {(r['task'], r['arm'], r['seed']): 100 * r['evals'][-1][1] for r in found['runs']}
    for name, (task, arm, other) in found['settings']['contrasts'].items():
        seeds = [s for t, a, s in end if (t, a) == (task, arm)]
        if name not in found['contrasts']:
            assert len(seeds) < 6
            continue
        row = found['contrasts'][name]
        gaps = [end[task, arm, s] - end[task, other, s] for s in seeds]
        want = statistics.fmean(gaps), half_width(gaps)
        mean, low, high = row['points']
        assert (mean, (high - low) / 2) == pytest.approx(want, rel=1e-2, abs=1e-3), name
        assert row['n'] == len(seeds) and row['half'] == pytest.approx(want[1], rel=1e-2)
        assert row['would_see'] == pytest.approx(power(row['half'], len(seeds)), rel=1e-2)
        wanted = found['settings']['wanted_half']
        print(f'{name:18} half-width {want[1]:.2f} points, wanted {wanted}, {len(seeds)} seeds')


def test_ranges_that_act_equally_often_were_found_before_and_clip_as_told():
    found = result('matched')
    for arm, tried in found['tried'].items():
        nearest = min(tried, key=lambda x: abs(x[1] - 0.01))
        assert found['factors'][arm] == nearest[0] and 0.009 <= nearest[1] <= 0.011
    assert not {*found['settings']['tuning']} & {r['seed'] for r in found['runs']}
    for arm, row in found['table']['matched'].items():
        shares = [r['means']['clip_frac'] for r in found['runs'] if r['arm'] == arm]
        assert row['clip_frac'] == pytest.approx(statistics.fmean(shares), rel=1e-3)
        assert len(shares) == 24 and (not arm.endswith('_1') or 0.01 < row['clip_frac'] < 0.02)


def test_the_tables_that_decide_follow_from_their_runs():
    "Differences of all measures, rates before and after, and rates by the length of the prompt"
    found = result('judged')
    for task, arms in found['table'].items():
        assert arms.keys() == {r['arm'] for r in found['runs'] if r['task'] == task}
        for arm, row in arms.items():
            mine = [r for r in found['runs'] if (r['task'], r['arm']) == (task, arm)]
            assert row['seeds'] == sorted({r['seed'] for r in mine}) and len(mine) == len(
                {*row['seeds']}
            )
            for key, at in (('before', 0), ('after', -1)):
                rates = [100 * r['evals'][at][1] for r in mine]
                want = statistics.fmean(rates), half_width(rates)
                mean, low, high = row[key]
                assert (mean, (high - low) / 2) == pytest.approx(want, rel=1e-2, abs=1e-3), arm
            lengths = sorted({n for r in mine for n in r['by_length']})
            assert sorted(found['by_length'][task][arm]) == lengths
            for n in lengths:
                rates = np.array([r['by_length'][n] for r in mine])
                assert found['by_length'][task][arm][n] == pytest.approx(rates.mean(), abs=1e-4)
    assert follows(found, found['settings']) >= 12


def test_espo_against_gspo_with_and_without_the_start_follows_from_the_runs():
    found = result('espo_gspo')
    of = {(r['arm'], r['seed']): [100 * r['evals'][i][1] for i in (0, -1)] for r in found['runs']}
    seeds = sorted({s for _, s in of})
    gaps = np.array([of['espo', s][1] - of['gspo', s][1] for s in seeds])
    start = np.array([of['gspo', s][0] for s in seeds])
    assert [of['espo', s][0] for s in seeds] == [*start] and len(seeds) == 100
    rest = gaps - np.polyval(np.polyfit(start, gaps, 1), start)
    half = quantile(0.975, 98) * ((rest**2).sum() / 98 / 100) ** 0.5
    told = found['adjusted']['espo_gspo']
    want = [gaps.mean(), gaps.mean() - half, gaps.mean() + half]
    assert told['points'] == pytest.approx(want, rel=1e-4)
    assert told['half'] == pytest.approx(half, rel=1e-4) and told['n'] == 100
    assert found['contrasts']['espo_gspo']['points'][0] == pytest.approx(gaps.mean(), abs=1e-3)


@pytest.mark.parametrize('n', [5, 12, 100])
def test_the_chance_of_an_interval_is_one_in_twenty_where_it_ends_at_0(n, monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY_CODE))
    chance = importlib.import_module('_evidence').chance
    assert chance([1, 0, 2], n) == pytest.approx(0.05, rel=1e-3)
    for mean in (0.5, 1.5, -2.0):  # in half-widths
        p = chance([mean, mean - 1, mean + 1], n)
        t = abs(mean) * quantile(0.975, n - 1)
        assert quantile(1 - p / 2, n - 1) == pytest.approx(t, rel=1e-3)


def test_a_line_through_the_start_leaves_the_mean_and_narrows_the_interval(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY_CODE))
    adjusted = importlib.import_module('_evidence').adjusted
    rng = np.random.default_rng(0)
    start = rng.uniform(20, 50, 40)
    gaps = -4 - 0.2 * (start - 35) + rng.normal(0, 2, 40)
    told = adjusted([*gaps], [*start])
    columns = np.stack([np.ones(40), start - start.mean()], 1)
    (mean, slope), left, *_ = np.linalg.lstsq(columns, gaps, rcond=None)
    half = quantile(0.975, 38) * (left[0] / 38 / 40) ** 0.5
    assert told['points'] == pytest.approx([mean, mean - half, mean + half])
    assert told['slope'] == pytest.approx(slope) and told['n'] == 40
    assert told['half'] < 0.9 * half_width(gaps)


def test_what_a_study_says_beforehand_of_its_intervals_follows_from_stored_trials(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY_CODE))
    told = importlib.import_module('judged').expected()
    for name, (study, task, arm, other) in dict(
        espo_gspo=('losses', 'sums', 'espo', 'gspo'), turn_grpo=('recipe', 'silent', 'turn', 'grpo')
    ).items():
        rows = [r for r in result(study)['runs'] if r['task'] == task]
        ends = [
            {r['seed']: 100 * r['evals'][-1][1] for r in rows if r['arm'] == m}
            for m in (arm, other)
        ]
        sd = np.std([ends[0][s] - ends[1][s] for s in ends[0]], ddof=1)
        half = quantile(0.975, 23) * sd / 24**0.5
        assert told[name]['half'] == pytest.approx(half, rel=1e-3)
        n = told[name]['needed']
        halves = [quantile(0.975, k - 1) * sd / k**0.5 for k in (n - 1, n)]
        assert halves[1] <= 0.6 < halves[0], name


def test_shares_and_ratios_of_trials_follow_from_the_runs():
    "Of DAPO's tokens by the means that another test has, growth in percent, factors of replay"
    found = result('parts')
    for arm, row in found['table']['silent'].items():
        means = [r['means'] for r in found['runs'] if r['arm'] == arm]
        first, raw = ([m[f'zero_variance_{k}_frac'] for m in means] for k in ('first', 'raw'))
        shares = [100 * (1 - b / a) for a, b in zip(first, raw)]
        mean, low, high = row['silent_falls']['more_share']
        want = statistics.fmean(shares), half_width(shares)
        assert (mean, (high - low) / 2) == pytest.approx(want, rel=1e-2, abs=1e-3), arm
    found = result('replay_gap')
    for name, row in found['table'].items():
        for key, (mean, low, high) in row['factors'].items():
            logs = [math.log(r[name]['off'][key] / r[name]['R3'][key]) for r in found['runs']]
            want = statistics.fmean(logs), half_width(logs)
            got = math.log(mean), math.log(high / low) / 2
            assert got == pytest.approx(want, rel=1e-2, abs=1e-3), (name, key)


@pytest.mark.skipif(value('flip_size', 'runs') is None, reason='not stored')
def test_factors_of_mixtures_follow_from_their_runs():
    found, of = result('flip_size'), {}
    for r in found['runs']:
        name = f'{r["layers"]}x{r["experts"]}_{r["top_k"]}' + '_trained' * r['trained']
        of.setdefault(name, []).append(r)
        assert r['floor'] < 1e-5, 'two float32 engines differ by rounding alone'
    assert of.keys() == found['by_shape'].keys()
    for name, runs in of.items():
        for key in ('gap', 'k3'):
            logs = [math.log(r['float32_off'][key] / r['float32_R3'][key]) for r in runs]
            mean, low, high = found['by_shape'][name][key]
            got = math.log(mean), math.log(high / low) / 2
            want = statistics.fmean(logs), half_width(logs)
            assert got == pytest.approx(want, rel=2e-2, abs=1e-2), (name, key)


@pytest.mark.skipif(value('alpha_law', 'runs') is None, reason='not stored')
def test_how_well_the_law_of_alpha_fits_follows_from_its_runs():
    "The measured shares from the sums that the spy kept, and the error of the formula"
    found = result('alpha_law')
    for g, group in enumerate(('uncertain', 'sure')):
        misses, seen = [], {}
        for r in found['runs']:
            key = r['task'], f'{int(r["arm"][1:]) / 1000:g}'
            seen.setdefault(key, []).append(r['total'][g])
        for (task, alpha), rows in seen.items():
            cell = found['clip'][task][group][alpha]
            for k in ('clipped', 'formula'):
                mean = statistics.fmean(x[k] for x in rows)
                assert cell[k] == pytest.approx(mean, abs=1e-3), (task, alpha, k)
            misses.append(abs(cell['formula'] - cell['clipped']))
        fit = found['fit'][group]['formula']
        assert fit['mean_error'] == pytest.approx(statistics.fmean(misses), abs=1e-3)
        assert fit['worst'] == pytest.approx(max(misses), abs=1e-3)
        assert len(found['clip']) >= 6


def test_a_verdict_on_an_amount_says_what_is_open():
    open_ones = [r for r in board.read_board() for r in r['rows'] if 'reach' in r]
    says = {
        r['claim'].split(',')[0]: board.said(r) for r in open_ones if expected(r) == 'cannot tell'
    }
    assert '**cannot tell** (whether it reaches a factor of 10.0)' in says.values()
    assert not [text for text in says.values() if 'would see' in text]


# ---- the filters of the page


def test_the_filters_of_the_board_follow_the_keyboard(browser, tmp_path):
    "Two chapters; without the script all rows show, with it those of a verdict and a chapter"

    def line(claim, verdict='', star=''):
        look = f'<b class="verdict">{verdict}</b> (excludes 2){star}' if verdict else ''
        return f'<tr><td>{claim}</td><td></td><td></td><td>{look}</td></tr>'

    body = [line('A'), line('a1', 'holds here', ' ★'), line('a2', 'cannot tell')]
    body += [line('B'), line('b1', 'cannot tell')]
    script = (ROOT / 'docs' / '_static' / 'board.js').read_text()
    table = f'<table><thead><tr><th>claim</th></tr></thead><tbody>{"".join(body)}</tbody></table>'
    page = browser.new_page()

    def left():
        rows = page.locator('tbody tr')
        return [r.locator('td').first.inner_text() for r in rows.all() if r.is_visible()]

    for code in ('', f'<script>{script}</script>'):
        (tmp_path / 'page.html').write_text(f'{code}<section id="the-board">{table}</section>')
        page.goto((tmp_path / 'page.html').as_uri())
        assert left() == ['A', 'a1', 'a2', 'B', 'b1']
    page.get_by_role('button', name='cannot tell 2').press('Enter')
    assert left() == ['A', 'a2', 'B', 'b1']
    page.get_by_role('button', name='B 1').press('Space')
    assert left() == ['B', 'b1'] and page.get_by_role('status').inner_text().startswith('1 of 3')
    pressed = page.locator('button[aria-pressed="true"]').all_inner_texts()
    assert pressed == ['cannot tell 1', 'B 1', 'all 1']
    off = page.locator('button:disabled').all_inner_texts()
    assert off == ['holds here 0', '★ 0'], 'nothing would be left'
    page.get_by_role('button', name='B 1').press('Enter')  # once more: all chapters
    assert left() == ['A', 'a2', 'B', 'b1']
    assert page.get_by_role('button', name='★ 0').is_disabled()
    page.get_by_role('button', name='cannot tell').press('Enter')
    page.get_by_role('button', name='★ 1').press('Enter')
    assert left() == ['A', 'a1']
    page.get_by_role('button', name='★ 1').press('Enter')
    assert left() == ['A', 'a1', 'a2', 'B', 'b1']
    page.close()
