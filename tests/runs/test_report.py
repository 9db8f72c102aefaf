"The report of a run: right numbers, readable whatever samples hold, of a live or killed run too"

import json
import math
import os
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as hs
from markdown_it import MarkdownIt

from compassrl.runs.curves import column, plot_curves, read_metrics, running_mean, step_seconds
from compassrl.runs.eval_sets import eval_lines
from compassrl.runs.evaluate import EvalResult, EvalSample, mean_stderr
from compassrl.runs.report import _code, markdown_table, report_markdown, write_report
from compassrl.runs.summary import (
    hard_prompts,
    machine_info,
    pick_samples,
    read_curves,
    run_summary,
)
from course.evaluation import gain

# ---- a made-up run, with evaluations that are real EvalResults


@dataclass
class Made:
    before: EvalResult
    after: EvalResult


def evaluation(seed, skill=0.0, num_prompts=12, k=4):
    rng = random.Random(seed)
    samples = []
    for i in range(num_prompts):
        for j in range(k):
            ok = rng.random() < 1 / (1 + math.exp(4 * i / num_prompts - 2 - skill))
            samples.append(
                EvalSample(
                    f'p{i}',
                    'ab'[i % 2],
                    j,
                    f'{i}+1=',
                    str(i + 1),
                    str(i + 1 + (not ok)),
                    ok,
                    'ok',
                    '',
                    'stop' if j else 'length',
                    3,
                )
            )

    def of(samples):
        ids = dict.fromkeys(s.prompt_id for s in samples)
        rates = [statistics.fmean(s.correct for s in samples if s.prompt_id == p) for p in ids]
        avg, err = mean_stderr(rates)
        return dict(
            num_prompts=len(ids),
            avg=avg,
            avg_stderr=err,
            pass_at_k=statistics.fmean(r > 0 for r in rates),
        )

    whole = of(samples)
    return EvalResult(
        k,
        num_prompts,
        whole['avg'],
        whole['avg_stderr'],
        {1: whole['avg'], k: whole['pass_at_k']},
        {d: of([s for s in samples if s.domain == d]) for d in 'ab'},
        3.0,
        {'stop': 0.75, 'length': 0.25},
        0.0,
        samples,
    )


def row(i):
    return dict(
        step=i,
        reward_mean=0.5,
        correct_frac=0.4,
        zero_variance_frac=i / 100,
        zero_variance_first_frac=i / 50,
        group_size_mean=9.0,
        routes_agree_frac=1.0,
        response_tokens_mean=20.0,
        truncated_frac=0.1,
        loss=0.0,
        grad_norm=1 / i,
        clip_frac=0.0,
        approx_kl=1e-3,
        entropy=1.0,
        rollout_train_gap=1e-7,
        lr=1e-3,
        tokens=1000,
        time_rollout_s=1.0,
        time_reward_s=0.1,
        time_log_probs_s=0.2,
        time_update_s=0.5,
        time_sync_s=0.1,
        time_step_s=2.0,
        **(
            dict(eval_avg=0.3, eval_avg_stderr=0.02, eval_pass=0.5, time_checkpoint_s=0.5)
            if i % 5 == 0
            else {}
        ),
    )


def lines(rows):
    return ''.join(json.dumps(r) + '\n' for r in rows)


def make_run(folder, steps=20, planned=20):
    folder.mkdir()
    m = Made(evaluation(1), evaluation(2, 1.5))
    (folder / 'config.json').write_text(
        json.dumps(
            dict(
                steps=planned,
                seed=3,
                init_from='/home/someone/models/start',
                data=dict(path='C:\\Users\\me\\d.jsonl'),
                optim=dict(lr=1e-3, betas=[0.9, 0.99]),
            )
        )
    )
    (folder / 'metrics.jsonl').write_text(lines(map(row, range(1, steps + 1))))
    (folder / 'cold_start.jsonl').write_text(
        lines(dict(step=i, loss=2 / i, tokens=10) for i in range(1, 9))
    )
    (folder / 'eval_before.json').write_text(json.dumps(m.before.as_dict()))
    if steps == planned:
        (folder / 'eval_after.json').write_text(json.dumps(m.after.as_dict()))
    return m


@pytest.fixture
def run(tmp_path):
    m = make_run(tmp_path / 'run-1')
    return tmp_path / 'run-1', m


# ---- metrics


def test_a_growing_file_reads_at_every_byte(tmp_path):
    rows = [row(i) for i in range(1, 5)]
    whole = lines(rows).encode()
    ends = [len(lines(rows[:n]).encode()) for n in range(5)]
    for n in range(len(whole) + 1):
        (tmp_path / 'metrics.jsonl').write_bytes(whole[:n])
        got = read_metrics(tmp_path)
        assert got == rows[: len(got)] and len(got) in {
            sum(e <= n for e in ends) - 1,
            sum(e - 1 <= n for e in ends) - 1,
        }


@pytest.mark.parametrize(
    'bad',
    [
        '{"step": 2, "x"',
        '[]',
        '3',
        'null',
        '{}',
        '{"step": null}',
        '{"step": "x"}',
        '{"step": 1}{"step": 2}',
        '\x00\x00',
    ],
)
def test_a_damaged_line_is_named(tmp_path, bad):
    (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\n' + bad + '\n{"step": 3}\n')
    with pytest.raises(ValueError, match='^metrics.jsonl line 2: .*remove it$') as e:
        read_metrics(tmp_path)
    assert '\n' not in str(e.value)
    (tmp_path / 'metrics.jsonl').write_text(
        '{"step": 1}\n' + bad
    )  # at the end it is a line in the making
    assert read_metrics(tmp_path) == [dict(step=1)]


def test_resumed_runs(tmp_path):
    tries = [(1, 0), (2, 0), (3, 0), (4, 0), (3, 1), (2, 2), (3, 2), (4, 2)]
    (tmp_path / 'metrics.jsonl').write_text(lines(dict(step=s, t=t) for s, t in tries))
    assert [(r['step'], r['t']) for r in read_metrics(tmp_path)] == [(1, 0), (2, 2), (3, 2), (4, 2)]
    assert [r['resumed_from'] for r in read_metrics(tmp_path) if 'resumed_from' in r] == [1]
    (tmp_path / 'metrics.jsonl').write_text(
        lines([dict(step=1), dict(step=2, resumed_from=1), dict(step=3)])
    )
    facts = run_summary(tmp_path)
    assert facts['resumed_from'] == [1] and 'resumed from step 1.' in report_markdown(facts)


def test_nothing_yet(tmp_path):
    assert read_metrics(tmp_path) == []
    (tmp_path / 'metrics.jsonl').write_text('')
    assert read_metrics(tmp_path) == []
    with pytest.raises(ValueError, match='nowhere: no such run directory: check the path'):
        read_metrics(tmp_path / 'nowhere')


@settings(deadline=None)
@given(
    hs.lists(hs.floats(-1e6, 1e6), min_size=1, max_size=40),
    hs.integers(0, 30).map(lambda n: 2 * n + 1),
)
def test_running_mean(ys, window):
    got = running_mean(ys, window)
    assert len(got) == len(ys) and all(min(ys) - 1e-6 <= y <= max(ys) + 1e-6 for y in got)
    assert running_mean(ys, 1) == ys
    h = window // 2
    for i, y in enumerate(got):
        assert y == pytest.approx(
            sum(ys[max(0, i - h) : i + h + 1]) / len(ys[max(0, i - h) : i + h + 1]), abs=1e-6
        )
    assert running_mean(ys[::-1], window) == pytest.approx(
        got[::-1], abs=1e-6
    )  # no side is preferred


def test_column_keeps_finite_numbers():
    odd = [
        dict(step=1, x=1),
        dict(step=2, x='1'),
        dict(step=3, x=None),
        dict(step=4, x=float('inf')),
        dict(step=5),
        dict(step=6, x=0.0),
    ]
    assert column(odd, 'x') == ([1, 6], [1.0, 0.0])


# ---- numbers


def test_facts(run):
    folder, m = run
    f = run_summary(folder)
    assert (f['run'], f['steps'], f['steps_planned'], f['finished'], f['resumed_from']) == (
        'run-1',
        20,
        20,
        True,
        [],
    )
    assert f['seconds'] == pytest.approx(20 * 2 + 4 * 0.5) and f['tokens'] == 20_000
    assert f['tokens_per_s'] == pytest.approx(dict(rollout=1000, end_to_end=20_000 / 42))
    assert f['training']['zero_variance_frac'] == pytest.approx(
        dict(mean=0.105, first=0.03, last=0.18)
    )
    assert {p: x['seconds'] for p, x in f['phases'].items()} == pytest.approx(
        dict(rollout=20, reward=2, log_probs=4, update=10, sync=2, checkpoint=2, other=2)
    )
    assert sum(x['share'] for x in f['phases'].values()) == pytest.approx(1)
    assert (
        f['cold_start']['steps'] == 8
        and f['cold_start']['tokens'] == 80
        and f['cold_start']['loss']['last'] == pytest.approx((2 / 7 + 2 / 8) / 2)
    )
    h = f['held_out']
    assert [h['gain_points'], h['gain_stderr_points']] == pytest.approx(
        [100 * x for x in gain(m.before, m.after)]
    )
    assert (h['k'], h['num_prompts'], h['before'], h['after']) == (4, 12, m.before.avg, m.after.avg)
    assert (
        h['pass_at_k'] == dict(before=m.before.pass_at_k, after=m.after.pass_at_k)
        and h['truncated_frac']['after'] == 0.25
    )


@pytest.mark.parametrize('domain', 'ab')
def test_gain_of_a_domain_is_paired(run, domain):
    folder, m = run
    h = run_summary(folder)['held_out']['by_domain'][domain]

    def only(r):
        return EvalResult(
            r.k,
            6,
            0.0,
            0.0,
            {r.k: 0.0},
            {},
            0.0,
            {},
            0.0,
            [s for s in r.samples if s.domain == domain],
        )

    assert [h['gain_points'], h['gain_stderr_points']] == pytest.approx(
        [100 * x for x in gain(only(m.before), only(m.after))]
    )


@pytest.mark.parametrize('cut', ['no samples', 'some samples', 'other prompts'])
def test_gain_without_all_samples_takes_both_errors(run, cut):
    folder, m = run
    d = m.after.as_dict()
    d['samples'] = dict(
        [
            ('no samples', []),
            ('some samples', d['samples'][:-3]),
            ('other prompts', [s | dict(prompt_id='x' + s['prompt_id']) for s in d['samples']]),
        ]
    )[cut]
    (folder / 'eval_after.json').write_text(json.dumps(d))
    h = run_summary(folder)['held_out']
    assert h['gain_stderr_points'] == pytest.approx(
        100 * math.hypot(m.before.avg_stderr, m.after.avg_stderr)
    )
    assert h['gain_points'] == pytest.approx(100 * (m.after.avg - m.before.avg))


def test_phases_that_overlap_or_lack_the_step():
    overlapping = [row(1) | dict(time_step_s=1.0)]
    assert step_seconds(overlapping[0]) == 1.0 and step_seconds(
        {k: v for k, v in row(1).items() if k != 'time_step_s'}
    ) == pytest.approx(1.9)
    assert step_seconds({}) == 0.0


def test_samples_are_paired_counted_and_spread():
    def make(right):
        return [
            dict(
                prompt_id=f'p{i}',
                prompt=f'q{i}',
                answer='a',
                response=f'r{i}.{j}',
                correct=ok if j == 0 else not ok,
            )
            for i, ok in enumerate(right)
            for j in range(2)
        ]

    right_before, right_after = (
        [0] * 10 + [1] * 4 + [0] * 3 + [1],
        [1] * 10 + [0] * 4 + [0] * 3 + [1],
    )
    picked, counts = pick_samples(make(right_before), make(right_after))
    assert counts == {'fixed': 10, 'still wrong': 3, 'broke': 4, 'kept': 1}
    assert [(s['kind'], s['prompt_id']) for s in picked] == [
        ('fixed', 'p0'),
        ('fixed', 'p3'),
        ('fixed', 'p6'),
        ('still wrong', 'p14'),
        ('still wrong', 'p15'),
        ('broke', 'p10'),
        ('broke', 'p12'),
        ('kept', 'p17'),
    ]
    assert all(
        s['before'].endswith('.0') and s['after'].endswith('.0') for s in picked
    )  # the first response, not the best
    shuffled = make(right_after)
    order = list(range(0, len(shuffled), 2))
    random.Random(0).shuffle(order)
    assert pick_samples(make(right_before), [shuffled[i + j] for i in order for j in (0, 1)]) == (
        picked,
        counts,
    )
    assert pick_samples(make([1, 0]), make([1]))[1] == {
        'fixed': 0,
        'still wrong': 0,
        'broke': 0,
        'kept': 1,
    }
    assert pick_samples([], make([1]))[0] == []


# ---- the page

MD = MarkdownIt('commonmark').enable('table')


def cell_text(page):  # what a reader sees in the second cell of the first row
    cells, inside = [], False
    for t in MD.parse(page):
        if t.type == 'td_open':
            inside = True
        if t.type == 'inline' and inside:
            cells.append(t.children)
            inside = False
    return [''.join('\n' if c.type == 'html_inline' else c.content for c in cell) for cell in cells]


@pytest.mark.parametrize(
    'name', ['`x` <script>alert(1)<', '![x](x:y)', '**b** | # c', '``', '<!--', 'a\\`b']
)
def test_the_name_of_a_folder_is_no_markup_in_the_heading(tmp_path, name):
    make_run(tmp_path / name)
    write_report(tmp_path / name)
    page = (tmp_path / name / 'report.md').read_text()
    first, heading, *_ = MD.parse(page)
    assert (first.type, first.tag) == ('heading_open', 'h1')
    shown = [(t.type, t.content) for t in heading.children]
    assert shown == [('text', 'Run '), ('code_inline', name)]


@settings(max_examples=400, deadline=None)
@given(
    hs.text(
        hs.sampled_from('ab12 |`\\*_<>&$#[]()!~\n-') | hs.characters(codec='utf-8'), max_size=30
    )
)
def test_any_text_survives_in_a_table_cell(text):
    page = markdown_table(['kind', 'text', 'end'], [['x', _code(text), 'y']], right=3)
    cells = cell_text(page)
    assert len(cells) == 3 and cells[2] == 'y'
    printable = ''.join(c if c.isprintable() or c == '\n' else '\N{MIDDLE DOT}' for c in text)
    shown = '\n'.join(line if line.strip() else '' for line in printable.split('\n'))
    assume('\\|' not in shown)  # a backslash before a pipe is the one thing that tables cannot say

    def strip(s):
        return '\n'.join(line.strip() for line in s.split('\n'))

    assert strip(cells[1]) == (strip(shown) if shown.strip('\n') else '(empty)')


def test_long_responses_are_cut():
    assert '700 more characters' in _code('x' * 1000) and len(_code('x' * 1000)) < 350


def test_page(run, monkeypatch):
    monkeypatch.setenv('PICTURES', '1')
    folder, m = run
    write_report(folder)
    page = (folder / 'report.md').read_text()
    html = MD.render(page)
    g, e = (100 * x for x in gain(m.before, m.after))
    assert (
        f'a gain of **+{g:.1f} ± {e:.1f} points**' in page
        and f'avg@4 on 12 prompts: **{100 * m.before.avg:.1f} ±' in page
    )
    for part in (
        '![curves](curves.png)',
        '## Before and after',
        '## Time',
        '## Training',
        '## Samples',
        '## Settings',
        '## Reproduce',
        'zero variance frac',
        '1,000 tokens/s in the rollout, 476 end to end',
        'compassrl train config.json',
        machine_info()['torch'],
        'Cold start from `start`: 8 steps',
    ):
        assert part in page
    assert html.count('<table>') == 6 and 'not finished' not in page and 'resumed' not in page
    saved = json.loads(
        (folder / 'report.json').read_text(),
        parse_constant=lambda x: pytest.fail(f'{x} is not JSON'),
    )
    assert saved['held_out']['after'] == m.after.avg and saved['samples']
    for secret in ('/home', 'someone', 'Users', str(folder.parent)):
        assert secret not in page + json.dumps(saved)
    for kept in ('start', 'd.jsonl', 'betas'):
        assert kept in page


def test_names_of_domains_and_sets_keep_to_their_cell(run):
    folder, _ = run
    facts = run_summary(folder)
    of_one = next(iter(facts['held_out']['by_domain'].values()))
    names = ['a|b', '</td>![x](http://x)', '**big**', '# a\n\n# b']
    facts['held_out'] |= dict(
        by_domain={n: of_one for n in names}, by_set={n: of_one for n in names}
    )
    page = report_markdown(facts)
    table = page[page.index('## Before and after') : page.index('## Time')]
    cells = cell_text(table)
    shown = cells[0::4]
    assert shown[2:10] == [f'{n}, %' for n in names] + [f'{n}: avg@4, %' for n in names]


def test_loss_is_shown_as_such(run):
    folder, m = run
    (folder / 'eval_after.json').write_text(json.dumps(m.before.as_dict()))
    (folder / 'eval_before.json').write_text(json.dumps(m.after.as_dict()))
    facts = run_summary(folder)
    page = report_markdown(facts)
    assert f'a gain of **-{100 * (m.after.avg - m.before.avg):.1f} ±' in page
    facts['held_out'] |= dict(before=0.6, after=0.5, stderr_before=0.01, stderr_after=0.01)
    assert 'The policy is worse than at the start' in report_markdown(facts)
    facts['held_out'] |= dict(after=0.57)
    assert 'The policy is worse' not in report_markdown(facts)
    facts['held_out'] |= dict(after=0.0, stderr_before=0.5)
    assert 'The policy is worse' in report_markdown(facts), 'nothing is left of it'
    good, bad = (dict(k=1, avg=avg, avg_stderr=0.01) for avg in (0.6, 0.5))
    assert 'worse than before RL: go back to `here`, lower' in eval_lines(good, bad, '`here`')[0]
    assert 'worse' not in eval_lines(good, good)[0]


def test_a_collapsed_router_is_named(run):
    facts = run_summary(run[0])
    facts['training']['expert_busiest_frac'] = dict(mean=0.9, first=0.4, last=0.99)
    assert 'its router has collapsed' in report_markdown(facts)
    facts['training']['expert_busiest_frac']['last'] = 0.9
    assert 'collapsed' not in report_markdown(facts)


def test_same_files_same_report(run, monkeypatch):
    monkeypatch.setenv('PICTURES', '1')
    folder, _ = run

    def read():
        return [(folder / n).read_bytes() for n in ('report.md', 'report.json', 'curves.png')]

    write_report(folder)
    first = read()
    write_report(folder)
    assert read() == first and first[2][:8] == b'\x89PNG\r\n\x1a\n' and len(first[2]) > 20_000


# ---- runs that are not whole


def test_unfinished(tmp_path):
    make_run(tmp_path / 'r', steps=7, planned=20)
    f = write_report(tmp_path / 'r')
    page = (tmp_path / 'r' / 'report.md').read_text()
    assert (
        not f['finished']
        and '**This run is not finished**: step 7 of 20.' in page
        and '** at step 5.' in page
        and f['held_out'] is None
    )


def test_programs_without_isolation_are_told_of(run):
    folder, _ = run
    config = json.loads((folder / 'config.json').read_text())
    for unsafe in (False, True):
        config['rewards'] = dict(unsafe=unsafe)
        (folder / 'config.json').write_text(json.dumps(config))
        assert ('isolated no program' in report_markdown(run_summary(folder))) == unsafe


def test_an_evaluation_of_an_earlier_end_does_not_count(run):
    folder, m = run  # finished with 20 steps, resumed for 50, killed at 20-something
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps(config | dict(steps=50)))
    f = run_summary(folder)
    assert (
        not f['finished'] and f['held_out'] is None and read_curves(folder)[-1]['eval_avg'] == 0.3
    )


def test_curves_begin_and_end_with_the_evaluations(run):
    folder, m = run
    rows = read_curves(folder)
    assert (
        (rows[0]['step'], rows[0]['eval_avg']) == (0, m.before.avg)
        and (rows[-1]['step'], rows[-1]['eval_avg']) == (20, m.after.avg)
        and len(rows) == 21
    )


@pytest.mark.parametrize('have', range(32))
def test_any_subset_of_the_files(tmp_path, have):
    make_run(tmp_path / 'r')
    for i, n in enumerate(
        ['config.json', 'metrics.jsonl', 'eval_before.json', 'eval_after.json', 'cold_start.jsonl']
    ):
        if not have >> i & 1:
            (tmp_path / 'r' / n).unlink()
    if not have & 3:
        with pytest.raises(
            ValueError,
            match='neither metrics.jsonl nor the config.json of a run.*give a run directory',
        ):
            run_summary(tmp_path / 'r')
    else:
        report_markdown(run_summary(tmp_path / 'r'))


@pytest.mark.parametrize('key', sorted(set(row(5)) - {'step'}))
def test_any_metric_may_be_missing_or_odd(key):
    rows = [row(i) for i in (5, 10, 15, 20, 25, 30)]
    for r, value in zip(rows, (None, float('nan'), float('inf'), 0.0, -1.0)):
        r[key] = value  # the last stays as it is
    plot_curves(rows)
    without = [{k: v for k, v in r.items() if k != key} for r in rows]
    plot_curves([r | {key: float('nan')} if i % 2 else r for i, r in enumerate(without)])


def test_a_strange_run_still_gets_a_report(tmp_path):
    odd = [
        dict(step=1),
        dict(step=5, reward_mean=float('nan'), tokens=float('inf'), new_metric=1, time_step_s=None),
        dict(step=6, entropy=None),
    ]
    (tmp_path / 'metrics.jsonl').write_text(lines(odd) + '{"step": 7, "ent')
    (tmp_path / 'config.json').write_text(
        '{"clip": Infinity, "none": null, "nested": {"empty": {}}}'
    )
    (tmp_path / 'eval_before.json').write_text(
        '{"k": 2, "avg": 0.5, "avg_stderr": NaN, "samples": []}'
    )
    (tmp_path / 'eval_after.json').write_text(
        '{"k": 2, "avg": 0.5, "avg_stderr": NaN, "samples": [], "by_domain": {}}'
    )
    assert write_report(tmp_path)['steps'] == 6
    json.loads(
        (tmp_path / 'report.json').read_text(),
        parse_constant=lambda x: pytest.fail(f'{x} is not JSON'),
    )
    assert (
        'avg@2: **50.0 % → 50.0 %**, a gain of **+0.0 points**'
        in (tmp_path / 'report.md').read_text()
    )


def test_float_rewards_are_shown_beside_the_share_that_is_right(run):
    folder, _ = run
    means = dict(before=-0.21, after=-0.19)
    for when, mean in means.items():
        path = folder / f'eval_{when}.json'
        path.write_text(json.dumps(json.loads(path.read_text()) | dict(reward_mean=mean)))
    rows = [row(i) | {'reward/a': i / 10, 'reward/b': 1.0} for i in range(1, 21)]
    (folder / 'metrics.jsonl').write_text(lines(rows))
    page = report_markdown(run_summary(folder))
    assert 'Held-out mean reward: **-0.21 → -0.19**' in page
    assert '| mean reward | -0.21 | -0.19 | +0.02 |' in page
    assert '| reward/a | 1.05 | 0.3 | 1.8 |' in page and '| reward/b | 1 | 1 | 1 |' in page
    for when in means:  # rewards of 0 and 1 say it already
        path = folder / f'eval_{when}.json'
        found = json.loads(path.read_text())
        path.write_text(json.dumps(found | dict(reward_mean=found['avg'])))
    assert 'mean reward |' not in report_markdown(run_summary(folder)).split('## Training')[0]


def test_machine_of_the_run_wins(run):
    folder, _ = run
    (folder / 'machine.json').write_text(json.dumps(dict(cpu='a big one')))
    assert 'Machine: cpu a big one.' in report_markdown(run_summary(folder))


@pytest.mark.parametrize(
    'name', ['config.json', 'eval_before.json', 'eval_after.json', 'machine.json']
)
def test_a_damaged_file_is_named(run, name):
    folder, _ = run
    (folder / name).write_text('{"a": ')
    with pytest.raises(ValueError, match=f'/{name} is not JSON .*write it again or remove it$'):
        write_report(folder)


# ---- figures


def test_panels():
    fig = plot_curves([row(i) for i in range(1, 31)], 'name')
    titles = [ax.get_title() for ax in fig.axes]
    assert (
        len(titles) == 12
        and fig.get_suptitle() == 'name'
        and not any('not logged' in t.get_text() for ax in fig.axes for t in ax.texts)
    )
    labels = [t.get_text() for ax in fig.axes for t in ax.get_legend().get_texts()]
    for label in (
        'average',
        'any of k',
        'mean reward',
        'correct',
        'first wave',
        'responses truncated',
        'by the loss: 0',
        'rollout / train gap',
        'rollout',
        'checkpoint',
        'whole step',
    ):
        assert label in labels
    assert fig.axes[9].get_yscale() == 'log' and fig.axes[2].get_yscale() == 'linear'
    empty = plot_curves([])
    assert sum('not logged' in t.get_text() for ax in empty.axes for t in ax.texts) == 12
    resumed = plot_curves([row(1), row(2) | dict(resumed_from=1)])
    assert (
        sum(line.get_linestyle() == ':' for ax in resumed.axes for line in ax.lines) == 11
    )  # there is no evaluation yet


def test_a_curve_under_another_stays_in_sight():
    "Equal curves take turns: one is whole, the other dashed; curves apart are both whole"

    def styles(reward):
        rows = [dict(step=i, correct_frac=i / 9, reward_mean=i / 9 + reward) for i in range(1, 9)]
        lines = plot_curves(rows).axes[1].lines
        return [x.get_linestyle() for x in lines if not x.get_label().startswith('_')]

    assert styles(0) == styles(0.01) == ['-', '--'] and styles(0.3) == ['-', '-']


def test_addresses_stay_and_folders_go(run):
    folder, _ = run
    address, place = 'http://localhost:8000/v1', '/data/somebody/a.jsonl'
    config = json.loads((folder / 'config.json').read_text())
    config |= dict(rewards=dict(genrm=dict(base_url=address)), data=dict(path=place))
    config |= dict(vllm=dict(urls='https://a.b:1/c/d/'))
    (folder / 'config.json').write_text(json.dumps(config))
    page = report_markdown(run_summary(folder))
    assert f'base_url={address}`' in page and 'urls=https://a.b:1/c/d/`' in page
    assert 'path=a.jsonl`' in page and 'somebody' not in page


def test_no_display_and_no_pyplot_state(run):
    code = f"""import sys
from compassrl.runs.report import write_report
write_report({str(run[0])!r})
assert 'matplotlib.pyplot' not in sys.modules"""
    env = {k: v for k, v in os.environ.items() if k not in ('DISPLAY', 'WAYLAND_DISPLAY')} | dict(
        MPLBACKEND='qtagg'
    )
    r = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr


@pytest.mark.parametrize(
    'config, names',
    [
        ({}, ''),
        ({'zero_variance.sampling': 'uniform', 'data.select_by': 'turn'}, ''),
        ({'data.select_by': 'length'}, '(data.select_by)'),
        ({'zero_variance.sampling': 'refill'}, '(zero_variance.sampling)'),
        ({'zero_variance.screen_samples': 8}, '(zero_variance.screen_samples)'),
    ],
)
def test_a_falling_reward_is_explained_where_prompts_are_selected(config, names):
    said = hard_prompts(config)
    assert bool(said) == bool(names) and names in said
