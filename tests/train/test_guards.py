"A run that cannot learn ends, one that can goes on: against a loop over what happened"

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compassrl.records import Sample, Verdict
from compassrl.runs.log import Log, json_text
from compassrl.train import guards as real
from compassrl.train.checkpoint import save_checkpoint
from compassrl.train.guards import Guard, GuardConfig, RunFailed, last_good, or_nan, weights_finite
from tests.support.faults import planted
from tests.support.loss_laws import random

NO_VERDICT = ('failed', 'timeout')


def judged(statuses):
    return [
        Sample(
            f'p{i}',
            i,
            [1],
            [5],
            torch.zeros(1),
            None,
            None,
            'stop',
            0,
            verdict=Verdict(0.0, False, status, f'said {i}'),
        )
        for i, status in enumerate(statuses)
    ]


def walk(m, cfg, steps, start):
    "(step, message, good) of the end, or None; steps: (skipped_frac, statuses)"
    guard = m.Guard(cfg, start=start)
    for step, (skipped, statuses) in enumerate(steps, start + 1):
        if skipped is not None:  # None: a silent step has no update
            guard.updated(step, dict(skipped_frac=skipped, lr=1.0))
        try:
            guard.ended(step, judged(statuses), step == start + len(steps))
        except m.RunFailed as e:
            return step, str(e), e.good
    return None


def expected(cfg, steps, start):
    "The same from the whole history, by counting; a run that goes on has had good steps before"
    lost, mostly = [], []
    for skipped, statuses in steps:
        mostly.append(sum(s in NO_VERDICT for s in statuses) > cfg.max_failed_frac * len(statuses))
        lost.append(skipped == 1 or mostly[-1])
        row = next((i for i, x in enumerate(reversed(lost)) if not x), len(lost))
        whole = not start and len(lost) == len(steps) and all(lost)
        many = cfg.max_lost_steps and (row == cfg.max_lost_steps or whole)
        if many or mostly == [True] and not start:
            return start + len(lost), start + len(lost) - row
    return None


def law_history(m):
    @settings(random, max_examples=150)
    @given(
        st.integers(0, 3),
        st.sampled_from([0, 0, 4]),
        st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        st.lists(
            st.tuples(
                st.sampled_from([None, 0.0, 0.5, 1.0, 1.0]),
                st.lists(
                    st.sampled_from(['ok', 'ok', 'ok', 'wrong', 'failed', 'timeout']),
                    min_size=1,
                    max_size=4,
                ),
            ),
            min_size=1,
            max_size=12,
        ),
    )
    def check(most, start, share, steps):
        cfg = GuardConfig(most, share)
        got, want = walk(m, cfg, steps, start), expected(cfg, steps, start)
        assert (got and (got[0], got[2])) == want
        if got:
            statuses = steps[got[0] - start - 1][1]
            first = next((i for i, s in enumerate(statuses) if s in NO_VERDICT), None)
            mostly = sum(s in NO_VERDICT for s in statuses) > share * len(statuses)
            assert got[1].startswith(f'step {got[0]}: ')
            assert (f'said {first}' in got[1]) == mostly

    check()


def test_the_guard_against_a_count_of_the_history():
    law_history(real)


@pytest.mark.parametrize(
    'old, new',
    [
        ('if self.skipped or unjudged else 0', 'if self.skipped or unjudged else self.lost'),
        ('if self.skipped or unjudged else 0', 'if self.skipped else 0'),
        ("('failed', 'timeout')", "('failed',)"),
        ("metrics.get('skipped_frac') == 1", "metrics.get('skipped_frac') > 0"),
        ('self.skipped = False', 'self.skipped = self.skipped'),
        ('self.lost, self.skipped = start, 0', 'self.lost, self.skipped = 0, 0'),
        ('if unjudged and self.seen == 1 or many', 'if many'),
        ('or last and self.lost == self.seen', ''),
        ('or last and self.lost == self.seen', 'or last and self.lost'),
        ('many = limit and (', 'many = ('),
        ('good=step - self.lost', 'good=step'),
    ],
)
def test_faults_are_noticed(old, new):
    with pytest.raises(AssertionError):
        law_history(planted(real, old, new))


@random
@given(st.floats(allow_nan=True, allow_infinity=True, width=32), st.floats(-9, 9, width=32))
def test_a_finite_loss_keeps_every_bit_and_a_bad_one_loses_its_gradient(constant, x):
    x = torch.tensor(x, requires_grad=True)
    plain = 3 * x + constant
    value = or_nan(plain)
    value.backward()
    if plain.isfinite():
        assert value.item() == plain.item() and x.grad.item() == 3
    else:
        assert x.grad.isnan()


@pytest.mark.parametrize('dtype', [torch.float, torch.double, torch.bfloat16])
@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf, 1e30, 1e15])
def test_weights(dtype, bad):
    "One number in the last of several; 1e15 is large, and its square is a number"
    weights = [
        torch.ones(3, 4, dtype=dtype),
        torch.zeros(0, dtype=dtype),
        torch.ones(5, dtype=dtype),
    ]
    assert weights_finite(weights)
    weights[-1][2] = bad
    wanted = bad == 1e15 or (bad == 1e30 and dtype is torch.double)  # 1e60 is a number there
    assert weights_finite(iter(weights)) == wanted


def test_blown_weights_end_a_run_and_the_metric_stays_out_of_the_row():
    guard, metrics = Guard(GuardConfig()), dict(lr=0.5, weights_finite=1.0, skipped_frac=0.0)
    guard.updated(1, metrics)
    assert metrics == dict(lr=0.5, skipped_frac=0.0)
    with pytest.raises(RunFailed, match='^cold start step 7: the update with lr=0.5 ') as e:
        Guard(GuardConfig(), 'cold start step').updated(7, dict(lr=0.5, weights_finite=0.0))
    assert e.value.good == 6


def told(log_probs, version=6, **fields):
    ids = [*range(len(log_probs))]
    said = torch.tensor(log_probs)
    return Sample('p', 0, [1], ids, said, None, None, 'stop', version, **fields)


def test_the_oldest_weights_that_drew_a_bad_token_are_named():
    "Responses may be drawn in parts, by weights of several steps; what a tool wrote has no say"
    guard, bad = Guard(GuardConfig()), (-0.5, math.nan, math.inf)
    masked = dict(policy_mask=torch.tensor([True, False, False]))
    guard.sampled(7, [told(bad, **masked), told((-1.0, -0.5, 0.0))])
    parts = dict(token_versions=torch.tensor([2, 4, 5]))
    with pytest.raises(RunFailed, match='^step 7: 3 of 9 sampled tokens ') as e:
        guard.sampled(7, [told((-1.0,) * 3, 1), told(bad, **parts), told((-0.5, -1.0, -math.inf))])
    assert e.value.good == 3


@pytest.mark.parametrize('start', [0, 1])
def test_a_policy_that_tells_no_token_apart_any_more_has_overflowed(start):
    "A new one may never have told any apart, one that is sure has log-probs of about 0"
    flat, even = [told((-4.6, -4.6)), told((-4.6,), 3)], [told((-4.6, -4.5))]
    guard = Guard(GuardConfig(), start=start)
    guard.sampled(7, [told((-1e-7, -1e-7))])
    guard = Guard(GuardConfig(), start=start)
    if not start:
        guard.sampled(7, flat)
        guard.sampled(7, even)
    with pytest.raises(RunFailed, match='^step 8: all 3 sampled tokens are equally') as e:
        guard.sampled(8, flat)
    assert e.value.good == 2
    guard.sampled(9, [replace(told((-4.6, -4.6)), response_ids=[5, 5])])


@pytest.mark.parametrize('good', [-1, 0, 3, 4, 7, 9, math.inf])
def test_the_last_good_checkpoint_is_named(tmp_path, good):
    "Against a search over all steps; the one that is still being written is waited for"
    root, steps = tmp_path / 'checkpoints', [0, 4, 8]

    def wait():
        for step in steps:
            save_checkpoint(root, step, {}, keep=9)

    with pytest.raises(RunFailed) as e, last_good(root, wait):
        raise RunFailed('step 9: why', good)
    named = [s for s in range(10) if f'is {root}/step-{s:06}' in str(e.value)]
    assert named == [s for s in steps if s <= good][-1:]
    assert str(e.value).startswith('step 9: why; ') and e.value.good == good
    assert named or str(e.value).endswith('no checkpoint is good')
    (tmp_path / 'start').mkdir()
    with pytest.raises(RunFailed) as e, last_good(root, lambda: None):
        raise RunFailed('step 9: why', good)
    assert (f'{tmp_path}/start holds the weights before RL' in str(e.value)) == (not named)


# ---- what is not finite and is written down


def strict(text):
    def refuse(word):
        raise AssertionError(f'{word} is not JSON')

    return json.loads(text, parse_constant=refuse)


def test_rows_are_always_json(tmp_path):
    log = Log(tmp_path, 0, 2)
    fine = dict(step=1, loss=0.5, eval_avg=None, time_checkpoint_s=0.0)
    log.row(fine)
    log.row(fine | dict(step=2, loss=math.nan, gap=-math.inf))
    log.batch([dict(step=2, samples=[dict(log_probs=[0.5, math.inf])])])
    log.close()
    rows = [strict(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert rows[0] == fine | dict(num_not_finite=0.0)
    assert (rows[1]['loss'], rows[1]['gap'], rows[1]['num_not_finite']) == (None, None, 2.0)
    trace = strict((tmp_path / 'trace.jsonl').read_text())
    assert trace['samples'] == [dict(log_probs=[0.5, None])]


@settings(deadline=None)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
        lambda x: st.one_of(st.lists(x), st.dictionaries(st.text(), x)),
        max_leaves=8,
    )
)
def test_any_value_becomes_json(x):
    back = strict(json_text(x))
    try:
        assert back == json.loads(json.dumps(x, allow_nan=False))
    except ValueError:
        assert 'null' in json_text(x)
