"avg@k, pass@k, their errors, and the evaluation as a whole"

import json
import math
import random
import statistics
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compassrl.data.prompts import make_prompts
from compassrl.data.tasks import verifiers
from compassrl.data.tokenizer import EOS_ID, PAD_ID, build_tokenizer, encode
from compassrl.records import RolloutEngine, Sample, SamplingParams, Verdict
from compassrl.runs.eval_sets import domain_lines, eval_json, interval
from compassrl.runs.evaluate import EvalResult, evaluate, mean_stderr, pass_at_k
from course.evaluation import gain

tok = build_tokenizer()
params = SamplingParams(max_tokens=32, stop_ids=(EOS_ID,))


class Oracle(RolloutEngine):
    "Right with a known probability; `change` may spoil the list of samples"

    def __init__(self, prompts, rates, change=lambda samples: samples):
        self.known, self.change = {p.id: (p, r) for p, r in zip(prompts, rates)}, change

    def respond(self, r):
        p, rate = self.known[r.prompt_id]
        ids = encode(tok, p.solution if random.Random(r.seed).random() < rate else '#?') + [EOS_ID]
        return Sample(p.id, r.index, p.token_ids, ids, torch.zeros(len(ids)), None, None, 'stop', 0)

    def generate(self, requests, whole_groups=False):
        return iter(self.change([self.respond(r) for r in requests]))


@pytest.fixture(scope='module')
def prompts():
    return make_prompts('arithmetic', 30, 1, 0, 'heldout', tok) + make_prompts(
        'strings', 20, 0, 0, 'heldout', tok
    )


def enumerate_pass(n, c, k):
    subsets = list(combinations([1] * c + [0] * (n - c), k))
    return sum(map(any, subsets)) / len(subsets)


def test_pass_at_k_is_the_enumeration():
    for n in range(1, 11):
        for c in range(n + 1):
            for k in range(1, n + 1):
                assert pass_at_k(n, c, k) == pytest.approx(enumerate_pass(n, c, k), abs=1e-13)


def test_mutants_of_pass_at_k_are_caught():
    mutants = [
        lambda n, c, k: 1 - (1 - c / n) ** k,
        lambda n, c, k: 1 - math.comb(n - c, k) / math.comb(n, c),
        lambda n, c, k: c / n,
        lambda n, c, k: float(c > 0),
        lambda n, c, k: math.comb(n - c, k) / math.comb(n, k),
    ]
    for m in mutants:
        assert any(
            abs(m(n, c, k) - enumerate_pass(n, c, k)) > 1e-3
            for n in (3, 5)
            for c in range(n + 1)
            for k in range(1, n + 1)
        )


@settings(deadline=None)
@given(st.integers(1, 60), st.floats(0, 1), st.data())
def test_pass_at_k_is_unbiased(n, p, data):
    k = data.draw(st.integers(1, n))
    mean = sum(
        math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1)
    )
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-9)


@settings(deadline=None)
@given(st.integers(1, 10**6), st.data())
def test_pass_at_k_is_stable(n, data):
    c, k = data.draw(st.integers(0, min(n, 2000))), data.draw(st.integers(1, n))
    v = pass_at_k(n, c, k)
    assert 0 <= v <= 1 and (v > 0) == (c > 0)
    if c:
        assert v >= pass_at_k(n, c - 1, k) - 1e-15 and v >= c / n * (
            1 - 1e-9
        )  # more right ones, more tries: never less
    assert pass_at_k(n, 1, k) == pytest.approx(k / n, rel=1e-9)
    if k > 1:
        assert v >= pass_at_k(n, c, k - 1) - 1e-12


@pytest.mark.parametrize('n,c,k', [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0), (0, 0, 1)])
def test_pass_at_k_refuses(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def test_errors():
    assert mean_stderr([0.25]) == (0.25, 0.5) and mean_stderr([1, 1, 1]) == (1, 0)
    assert mean_stderr([0, 1]) == (0.5, pytest.approx(0.5))
    rng, hits = random.Random(0), 0
    for _ in range(500):
        avg, err = mean_stderr(
            [
                sum(rng.random() < p for _ in range(8)) / 8
                for p in (rng.betavariate(0.5, 0.5) for _ in range(50))
            ]
        )
        hits += abs(avg - 0.5) < 2 * err
    assert 0.92 < hits / 500 < 0.975


def test_evaluate_on_an_oracle(prompts):
    rng = random.Random(1)
    rates = [rng.random() for _ in prompts]
    results = [
        evaluate(Oracle(prompts, rates), prompts, 6, params, tok, seed) for seed in range(40)
    ]
    for k in (1, 2, 4, 6):
        mean, err = mean_stderr([r.pass_at[k] for r in results])
        assert abs(mean - statistics.fmean(1 - (1 - p) ** k for p in rates)) < 4 * err
    for r in results:
        assert (
            r.pass_at[1] == pytest.approx(r.avg)
            and list(r.pass_at) == [1, 2, 4, 6]
            and list(r.pass_at.values()) == sorted(r.pass_at.values())
        )
        assert (
            r.avg == pytest.approx(statistics.fmean(s.correct for s in r.samples))
            and len(r.samples) == 300
        )
        assert (
            r.by_domain['arithmetic']['num_prompts'] == 30
            and r.by_domain['strings']['num_prompts'] == 20
        )
        assert r.avg == pytest.approx(
            0.6 * r.by_domain['arithmetic']['avg'] + 0.4 * r.by_domain['strings']['avg']
        )
    assert results[0] == evaluate(Oracle(prompts, rates), prompts, 6, params, tok, 0) != results[1]


def test_order_of_samples_does_not_matter(prompts):
    rates = [0.5] * 50
    shuffled = Oracle(prompts, rates, lambda s: random.Random(5).sample(s, len(s)))
    assert evaluate(shuffled, prompts, 4, params, tok, 0) == evaluate(
        Oracle(prompts, rates), prompts, 4, params, tok, 0
    )
    r = evaluate(shuffled, prompts, 4, params, tok, 0)
    assert [(s.prompt_id, s.index) for s in r.samples] == [
        (p.id, i) for p in prompts for i in range(4)
    ]


def test_incomplete_evaluations_are_errors(prompts):
    for change, message in (
        (lambda s: s[1:], '199 of 200'),
        (lambda s: s + s[:1], 'twice'),
        (lambda s: s[1:] + s[1:2], 'twice'),
        (lambda s: [], '0 of 200'),
    ):
        with pytest.raises(RuntimeError, match=message):
            evaluate(Oracle(prompts, [0.5] * 50, change), prompts, 4, params, tok, 0)
    for bad in (dict(k=0), dict(prompts=[]), dict(prompts=prompts[:2] + prompts[:1])):
        with pytest.raises(ValueError):
            evaluate(
                **dict(
                    engine=Oracle(prompts, [0.5] * 50),
                    prompts=prompts,
                    k=4,
                    params=params,
                    tokenizer=tok,
                    seed=0,
                )
                | bad
            )


def test_what_is_judged(prompts):
    "One final stop token is dropped; truncation, padding and failed verdicts are seen"
    p = replace(prompts[0], answer='75', solution='#75')

    def result(ids, reason='stop', prompt=p):  # result of one response with these tokens
        engine = Oracle(
            [prompt], [1], lambda s: [replace(x, response_ids=ids, finish_reason=reason) for x in s]
        )
        return evaluate(engine, [prompt], 1, params, tok, 0)

    right = encode(tok, '#75')
    assert (
        result(right + [EOS_ID]).samples[0].response == '#75' and result(right + [EOS_ID]).avg == 1
    )
    assert (
        result(right, 'length').truncated_frac == 1 and result(right + [EOS_ID]).truncated_frac == 0
    )
    assert (
        result(right + [EOS_ID, EOS_ID]).avg == 0
        and result(right[:2] + [PAD_ID] + right[2:] + [EOS_ID]).avg == 0
    )
    assert (
        result([EOS_ID]).samples[0].response == ''
        and result(right + [EOS_ID]).response_tokens_mean == 4
    )
    lost = result(right + [EOS_ID], prompt=replace(p, verifier='no such verifier'))
    assert (lost.failed_frac, lost.avg, lost.samples[0].status) == (1, 0, 'failed')


def test_a_verifier_that_takes_too_long_has_given_no_verdict(prompts, monkeypatch):
    def slow(text, answer):
        return Verdict(0.0, False, 'timeout' if text == '#?' else 'wrong')

    monkeypatch.setitem(verifiers, 'slow', slow)
    late = [replace(p, verifier='slow') for p in prompts[:8]]
    result = evaluate(Oracle(late, [1] * 6 + [0] * 2), late, 2, params, tok, 0)
    assert result.failed_frac == 2 / 8


def test_a_domain_counts_like_an_evaluation_of_its_own(prompts):
    rates = [i % 5 / 5 for i in range(len(prompts))]
    both = evaluate(Oracle(prompts, rates), prompts, 4, params, tok, 0)
    assert len(both.by_domain) == 2
    for domain, found in both.by_domain.items():
        own = [(p, r) for p, r in zip(prompts, rates) if p.domain == domain]
        alone = evaluate(Oracle(*zip(*own)), [p for p, _ in own], 4, params, tok, 0)
        assert found == dict(
            num_prompts=len(own),
            avg=alone.avg,
            avg_stderr=alone.avg_stderr,
            pass_at_k=alone.pass_at_k,
        )
        assert alone.pass_at_k > alone.pass_at[1], 'k is not 1 here'
        written = eval_json(dict(heldout=(both, {})))['by_domain'][domain]
        assert written == found | dict(interval=interval(alone))
        assert any(domain in x and f'{len(own)} prompts' in x for x in domain_lines(both))
        assert domain_lines(alone) == []


def test_gain_is_paired(prompts):
    rates = [i / 49 * 0.8 for i in range(50)]
    before = evaluate(Oracle(prompts, rates), prompts, 8, params, tok, 0)
    after = evaluate(Oracle(prompts, [r + 0.2 for r in rates]), prompts, 8, params, tok, 0)
    value, err = gain(before, after)
    assert (
        value == pytest.approx(after.avg - before.avg)
        and abs(value - 0.2) < 4 * err
        and err < math.hypot(before.avg_stderr, after.avg_stderr) / 2
    )
    assert gain(before, before) == (0, 0) and gain(after, before)[0] == pytest.approx(-value)
    with pytest.raises(ValueError, match='1 prompts are in one evaluation only'):
        gain(before, evaluate(Oracle(prompts, rates), prompts[1:], 8, params, tok, 0))


def test_as_dict_is_json(prompts):
    d = evaluate(Oracle(prompts, [0.5] * 50), prompts, 8, params, tok, 0).as_dict()
    again = json.loads(json.dumps(d, allow_nan=False))
    assert {
        'k',
        'avg',
        'avg_stderr',
        'pass_at_k',
        'by_domain',
        'response_tokens_mean',
        'truncated_frac',
        'samples',
    } <= set(again)
    assert {'prompt_id', 'prompt', 'answer', 'response', 'correct'} <= set(again['samples'][0])
    one = evaluate(Oracle(prompts, [0.5] * 50), prompts[:1], 1, params, tok, 0)
    assert isinstance(one, EvalResult) and json.dumps(one.as_dict(), allow_nan=False)


def test_real_engine(prompts):
    "The embedded engine: batch size and order of prompts change nothing"
    from compassrl.model.policy import Policy, PolicyConfig
    from compassrl.model.pretrained import hf_weights
    from compassrl.rollout.torch_rollout import TorchRollout

    results = []
    for slots, ps in ((7, prompts[:6]), (64, prompts[5::-1])):
        engine = TorchRollout(PolicyConfig(), num_slots=slots, dtype=torch.float64)
        engine.load_weights(hf_weights(Policy(PolicyConfig(), seed=1)), 1)
        r = evaluate(engine, ps, 3, params, tok, 0)
        results.append({(s.prompt_id, s.index): s for s in r.samples})
        assert r.response_tokens_mean <= 32 and sum(r.finish_reasons.values()) == 1
    assert results[0] == results[1]
