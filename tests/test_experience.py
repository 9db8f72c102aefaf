"What a step brings home: the right prompts, waves in budget, rows in order, rewards shaped once"

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compassrl.algo.zero_variance import ZeroVarianceConfig
from compassrl.config import TrainConfig
from compassrl.data.selection import PromptSelection, prompts_of_step
from compassrl.data.tokenizer import EOS_ID, build_tokenizer, encode
from compassrl.experience import collect, grade, in_order, next_wave
from compassrl.judges.serial import Judge, SerialJudge, judge_sample, sample_columns, task_rewards
from compassrl.records import (
    Prompt,
    RolloutEngine,
    Sample,
    SamplingParams,
    Verdict,
    as_requests,
    collate,
)
from compassrl.rollout.requests import requests_of
from tests.rollout.test_torch_rollout import make_engine, make_policy

TOKENIZER = build_tokenizer()
ZERO, ONE = encode(TOKENIZER, '01')
PARAMS = SamplingParams(max_tokens=6, stop_ids=(EOS_ID,))


def questions(n):
    return [Prompt(f'p{i}', 'test', f'{i}', [2], '1', 'exact') for i in range(n)]


class Coin(RolloutEngine):
    "A rollout engine with known pass rates; wrong answers are longer"

    def __init__(self, rate=lambda i: 0.1 if i % 2 else 0.5):
        self.rate, self.waves = rate, []

    def generate(self, requests, whole_groups=False):
        self.waves.append(list(requests))
        for r in sorted(requests, key=lambda r: r.seed):
            right = torch.rand((), generator=torch.Generator().manual_seed(r.seed)) < self.rate(
                int(r.prompt_id[1:])
            )
            ids = [ONE, EOS_ID] if right else [ZERO, ZERO, ZERO, EOS_ID]
            yield Sample(
                r.prompt_id,
                r.index,
                list(r.prompt_ids),
                ids,
                torch.zeros(len(ids)),
                None,
                None,
                'stop',
                0,
            )


def config(sampling='adaptive', prompts=12, **kw):
    return TrainConfig(
        prompts_per_step=prompts,
        group_size=4,
        zero_variance=ZeroVarianceConfig(sampling, **({'max_group_size': 16} | kw)),
    )


def take(cfg, engine=None, prompts=None, step=0):
    prompts, engine = prompts or questions(72), engine or Coin()
    judge = SerialJudge(prompts, TOKENIZER, EOS_ID)
    found = collect(engine, prompts, step, cfg, judge, EOS_ID)
    judge.settle(found[1])
    return engine, *found


def rewards_by_prompt(samples):
    out = {}
    for s in samples:
        out.setdefault(s.prompt_id, []).append(s.verdict.reward)
    return out


def silent(rewards):
    return len(set(rewards)) == 1


# ---- which prompts

sizes = dict(n=st.integers(1, 40), num=st.integers(1, 50), seed=st.integers(0, 5))


@settings(max_examples=100, deadline=None)
@given(**sizes, steps=st.integers(1, 12))
def test_every_prompt_once_per_epoch(n, num, seed, steps):
    prompts = questions(n)
    stream = [p.id for s in range(steps) for p in prompts_of_step(prompts, s, num, seed)]
    assert len(stream) == num * steps
    epochs = [stream[i : i + n] for i in range(0, len(stream), n)]
    for e in epochs:
        assert len(set(e)) == len(e)
    if n > 12 and len(epochs) > 2:
        assert epochs[0] != epochs[1], 'each epoch has an order of its own'


@settings(max_examples=60, deadline=None)
@given(**sizes, order=st.permutations(range(6)))
def test_prompts_are_a_pure_function_of_the_step(n, num, seed, order):
    prompts = questions(n)
    first = {s: prompts_of_step(prompts, s, num, seed) for s in range(6)}
    torch.manual_seed(seed + 1)
    random.seed(seed)
    assert {s: prompts_of_step(prompts, s, num, seed) for s in order} == first
    one_by_one = (
        [prompts_of_step(prompts, s, 1, seed)[0] for s in range(6 * num)] if num < 8 else None
    )
    if one_by_one:
        assert one_by_one == [p for s in range(6) for p in first[s]], (
            'nor of how the stream is cut into steps'
        )


def test_runs_with_other_seeds_see_other_orders():
    assert (
        len({tuple(p.id for p in prompts_of_step(questions(10), 0, 10, seed)) for seed in range(8)})
        == 8
    )


# ---- requests


@settings(max_examples=60, deadline=None)
@given(nums=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=4))
def test_requests_in_any_number_of_waves(nums):
    prompts, asked = questions(3), Counter()
    waves = [requests_of(prompts, num, asked, PARAMS, 0, 7) for num in nums]
    at_once = requests_of(prompts, [sum(n) for n in zip(*nums)], Counter(), PARAMS, 0, 7)
    assert sorted(sum(waves, []), key=str) == sorted(at_once, key=str)
    assert [r.index for r in at_once if r.prompt_id == 'p1'] == list(range(sum(n[1] for n in nums)))
    for w in waves:
        assert [r.prompt_id for r in w] == sorted(r.prompt_id for r in w), 'side by side'
    assert asked == {f'p{i}': sum(n[i] for n in nums) for i in range(3)}


def test_seeds_differ_between_steps_runs_prompts_and_samples():
    parts = itertools.product(range(20), range(3))
    seeds = [
        r.seed
        for step, seed in parts
        for r in requests_of(questions(4), [4] * 4, Counter(), PARAMS, seed, step)
    ]
    assert len(set(seeds)) == len(seeds) == 20 * 3 * 16


# ---- waves


def test_uniform_is_one_wave():
    engine, requests, samples, m = take(config('uniform'))
    assert len(engine.waves) == 1 == m['waves'] and len(requests) == len(samples) == 48
    assert m['tokens'] == sum(len(s.response_ids) for s in samples)


@pytest.mark.parametrize('step', range(6))
def test_adaptive_grows_silent_groups_in_blocks(step):
    engine, requests, samples, m = take(config(token_budget=100.0), step=step)
    seen = Counter()
    for k, wave in enumerate(engine.waves):
        new = Counter(r.prompt_id for r in wave)
        if k:
            assert all(n == seen[id] for id, n in new.items()), 'doubled'
        so_far = {
            id: [x.verdict.reward for x in samples if x.prompt_id == id and x.index < seen[id]]
            for id in new
        }
        assert not k or all(silent(r) for r in so_far.values()), 'only what is silent'
        seen += new
    assert all(not silent(r) or len(r) == 16 for r in rewards_by_prompt(samples).values())
    assert max(seen.values()) <= 16 and len(samples) == len(requests) == sum(seen.values())
    first = rewards_by_prompt([s for s in samples if s.index < 4])
    assert m['time_reward_s'] > 0 and m['zero_variance_first_frac'] == pytest.approx(
        sum(map(silent, first.values())) / 12
    )


@pytest.mark.parametrize('budget', [0.0, 0.3, 1.0])
def test_the_token_budget_holds(budget):
    engine, _, samples, m = take(
        config(token_budget=budget), Coin(lambda i: 0.0)
    )  # all wrong: a constant price
    first = 48 * 4
    assert m['tokens'] <= first * (1 + budget) and (budget or len(engine.waves) == 1)
    assert budget < 1 or m['tokens'] == 2 * first


@pytest.mark.parametrize('step', range(4))
def test_refill_trains_on_awake_groups_alone_and_counts_the_others(step):
    engine, requests, samples, m = take(config('refill'), step=step)
    groups = rewards_by_prompt(samples)
    assert (
        not any(map(silent, groups.values()))
        and len(groups) == 12
        and {len(r) for r in groups.values()} == {4}
    )
    everything = [r for w in engine.waves for r in w]
    assert len({r.prompt_id for r in everything}) * 4 == len(everything), 'no prompt twice'
    assert (
        m['tokens'] > sum(len(s.response_ids) for s in samples)
        and m['waves'] == len(engine.waves) > 1
    )


def test_refill_gives_up_quietly():
    hopeless = Coin(lambda i: 0.0)
    engine, requests, samples, m = take(config('refill', max_refills=2), hopeless)
    assert len(engine.waves) == 3 and len(samples) == len(requests) == 3 * 48, (
        'all are kept where none is awake'
    )
    engine, *_ = take(config('refill'), Coin(lambda i: 0.0), questions(12))
    assert len(engine.waves) == 1, 'there is nobody else to ask'


def test_no_hidden_random_state():
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate()
    for sampling in ('adaptive', 'refill'):
        assert take(config(sampling))[1] == take(config(sampling))[1]
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


def test_failed_verifiers_do_not_wake_a_group():
    samples = [
        Sample(
            'p0',
            i,
            [5],
            [ONE],
            torch.zeros(1),
            None,
            None,
            'stop',
            0,
            verdict=Verdict(r, r > 0, status),
        )
        for i, (r, status) in enumerate(
            [(1.0, 'ok'), (1.0, 'ok'), (0.0, 'timeout'), (0.0, 'failed')]
        )
    ]
    assert task_rewards(samples)[1].tolist() == [True, True, False, False]
    assert next_wave(samples, Counter(p0=4), [4], questions(1), 0, config(token_budget=9.0)) == [
        ('p0', 4)
    ]


def test_each_step_refills_in_an_order_of_its_own():
    "Equal first waves, other prompts: a seed that forgot the step would ask the same again"
    flat = [
        Sample(
            'p0', i, [5], [ONE], torch.zeros(1), None, None, 'stop', 0, verdict=Verdict(1.0, True)
        )
        for i in range(4)
    ]
    cfg = config('refill', prompts=6)
    asked = [next_wave(flat, Counter(p0=4), [4], questions(40), step, cfg) for step in (0, 1, 0)]
    assert asked[0] == asked[2] != asked[1] and len(asked[0]) == 6
    later = next_wave(flat, Counter(p0=4), [4, 0], questions(40), 0, cfg)
    assert later != asked[0], 'nor would a wave repeat the one before'


# ---- the batch


def test_partial_credit_is_not_correct():
    samples = [
        Sample('p0', i, [5], [ONE], torch.zeros(1), None, None, 'stop', 0, verdict=v)
        for i, v in enumerate((Verdict(0.4, False, 'wrong'), Verdict(1.0, True)))
    ]
    for s in samples:
        s.timings = dict(reward_start=0.0, reward_end=0.0)
    batch = replace(collate(samples), entropy=torch.ones(2, 2))
    assert grade(batch, samples, config())[1]['correct_frac'] == 0.5


def test_a_batch_by_hand():
    s = Sample(
        'p0', 0, [5], encode(TOKENIZER, '1') + [EOS_ID], torch.zeros(2), None, None, 'stop', 0
    )
    other = replace(
        s,
        index=1,
        response_ids=encode(TOKENIZER, '000') + [EOS_ID],
        rollout_log_probs=torch.zeros(4),
        timings={},
    )
    for x in (s, other):
        assert (
            judge_sample(x, questions(1)[0], TOKENIZER, EOS_ID) is x
            and x.timings['reward_end'] >= x.timings['reward_start']
        )
    requests = requests_of(questions(1), [2], Counter(), PARAMS)
    cfg = config(length_weight=0.2, overlong_frac=1.0, repetition_weight=0.0)
    cfg = replace(cfg, rollout=replace(cfg.rollout, max_tokens=8))
    samples = [other, s]
    samples = in_order(requests, samples)
    batch = collate(samples)
    assert samples == [s, other] and batch.token_ids[0, 1] == ONE, 'in the order of the requests'
    assert batch.group.tolist() == [0, 0]
    batch = replace(batch, entropy=torch.ones(batch.token_ids.shape))
    batch, m = grade(batch, samples, cfg)
    assert m['entropy'] == 1 and m['failed_frac'] == 0
    assert [x.reward for x in samples] == pytest.approx(batch.rewards.tolist())
    assert batch.advantages[0, 1] > 0 > batch.advantages[1, 1]
    assert batch.rewards.tolist() == pytest.approx([1 - 0.2 * 2 / 8, -0.2 * 4 / 8])
    assert m['reward_mean'] == 0.5 == m['correct_frac'] and m['penalty_mean'] == pytest.approx(
        0.2 * 6 / 16
    )
    assert (
        m['truncated_frac'] == 0
        and m['response_tokens_mean'] == 3
        and m['group_size_mean'] == 2 == m['samples']
    )


def test_rows_of_a_group_stand_side_by_side_whatever_wave_they_came_from():
    _, requests, samples, _ = take(config(token_budget=100.0))
    assert [r.prompt_id for r in requests] != sorted(
        (r.prompt_id for r in requests),
        key=list(dict.fromkeys(r.prompt_id for r in requests)).index,
    )
    random.Random(0).shuffle(samples)
    samples = in_order(requests, samples)
    batch = collate(samples)
    assert batch.group.tolist() == sorted(batch.group.tolist())
    assert [(s.prompt_id, s.index) for s in samples] == [
        (id, i) for id, n in Counter(r.prompt_id for r in requests).items() for i in range(n)
    ]
    rewards, group, _, tokens = sample_columns(
        samples, dict.fromkeys(r.prompt_id for r in requests)
    )
    assert torch.equal(group, batch.group) and torch.equal(tokens, batch.response_mask.sum(1))


@pytest.mark.parametrize('harm', ['lose', 'repeat', 'swap', 'foreign'])
def test_nothing_may_be_lost_or_repeated(harm):
    _, requests, samples, _ = take(config())
    if harm == 'lose':
        samples.pop()
    if harm == 'repeat':
        samples.append(samples[0])
    if harm == 'swap':
        samples[-1] = samples[0]
    if harm == 'foreign':
        samples[-1].index = 77
    with pytest.raises(AssertionError, match='lost, repeated or not asked for'):
        in_order(requests, samples)


class Patient(Judge):
    "A judge that notes what it is asked"

    def __init__(self, prompts):
        self.judge, self.calls = SerialJudge(prompts, TOKENIZER, EOS_ID), []

    def start(self, sample):
        self.calls.append(('start', sample.prompt_id, sample.index))

    def settle(self, samples):
        self.calls.append(('settle', len(samples)))
        self.judge.settle(samples)


@pytest.mark.parametrize('sampling', ['uniform', 'adaptive', 'refill'])
def test_each_sample_is_started_once_and_settled_only_if_the_next_wave_needs_it(sampling):
    prompts, engine = questions(72), Coin()
    judge = Patient(prompts)
    requests, samples, m = collect(engine, prompts, 0, config(sampling), judge, EOS_ID)
    started = [c[1:] for c in judge.calls if c[0] == 'start']
    assert sorted(started) == sorted((r.prompt_id, r.index) for w in engine.waves for r in w)
    settled = [c[1] for c in judge.calls if c[0] == 'settle']
    if sampling == 'uniform':
        assert (
            not settled
            and m['time_reward_s'] == 0
            and all(s.verdict is None for s in samples)
            and 'zero_variance_first_frac' not in m
        )
    else:
        assert settled == list(itertools.accumulate(map(len, engine.waves))) and len(settled) > 1


# ---- waves that do not wait for each other


class Slots(RolloutEngine):
    "Draws in a few slots; a response takes as many passes as it has tokens"

    def __init__(self, slots, seed):
        self.slots, self.seed, self.asked = slots, seed, []

    def generate(self, requests, whole_groups=False):
        waiting, left = as_requests(requests), {}
        while True:
            for r in waiting.poll(self.slots - len(left)):
                self.asked.append((r.prompt_id, r.index))
                left[r] = self.answer(r)
            if not left:
                return
            for r, s in list(left.items()):
                s.timings['left'] = s.timings.get('left', len(s.response_ids)) - 1
                if not s.timings['left']:
                    yield left.pop(r)

    def answer(self, r):
        rng = random.Random(f'{self.seed}/{r.seed}')
        right = rng.random() < random.Random(f'{self.seed}/{r.prompt_id}').choice(
            [0, 0, 0.1, 0.9, 1]
        )
        ids = [ONE] if right else [ZERO] * rng.choice([1, 2, 5])
        zeros = torch.zeros(len(ids) + 1)
        return Sample(
            r.prompt_id, r.index, [2], [*ids, EOS_ID], zeros, None, None, 'stop', 0, timings={}
        )


class Halves(Slots):
    "Every second prompt is always answered wrong, the others half of the time"

    def answer(self, r):
        s = super().answer(r)
        right = int(r.prompt_id[1:]) % 2 == 0 and r.seed % 2
        return replace(s, response_ids=[ONE if right else ZERO, EOS_ID], rollout_log_probs=ZEROS)


ZEROS = torch.zeros(2)


class Beside(SerialJudge):
    "Has its verdicts when it is asked, as one that works beside the rollout"

    beside = True


class Stubborn(Slots):
    "Reads all requests before it draws"

    def generate(self, requests, whole_groups=False):
        yield from super().generate(list(requests))


def step_of(cfg, seed, judge=Beside, engine=Slots, slots=16, **kw):
    prompts, engine = questions(72), engine(slots, seed)
    judge = judge(prompts, TOKENIZER, EOS_ID)
    requests, samples, m = collect(engine, prompts, 0, cfg, judge, EOS_ID)
    judge.settle(samples)
    return engine, in_order(requests, samples), m


def seen_of(samples):
    return [(s.prompt_id, s.index, s.response_ids, s.verdict) for s in samples]


@pytest.mark.parametrize('engine', [Slots, Stubborn])
@pytest.mark.parametrize('sampling', ['adaptive', 'refill'])
def test_what_is_asked_early_is_what_would_be_asked(sampling, engine):
    early, later_waves = 0, 0
    for seed in range(50):
        rng = random.Random(seed)
        cfg = config(
            sampling,
            token_budget=rng.choice([0.3, 1.5, 2.0]),
            max_group_size=rng.choice([8, 32, 32]),
            max_refills=rng.choice([1, 3]),
        )
        cfg = replace(cfg, rollout=replace(cfg.rollout, max_tokens=6))
        slots = rng.choice([3, 16, 400])
        _, want, m = step_of(cfg, seed, SerialJudge, engine, slots)
        _, found, n = step_of(cfg, seed, Beside, engine, slots)
        assert seen_of(found) == seen_of(want)
        shared = 'tokens', 'waves', 'prompts', 'zero_variance_first_frac'
        assert {k: n[k] for k in shared} == {k: m[k] for k in shared}
        assert m['early_frac'] == 0
        early += n['early_frac'] > 0
        later_waves += n['waves'] > 2
    assert early > 10 and later_waves > 10


def test_what_still_runs_of_a_later_wave_may_use_up_the_budget():
    "Here the early decision would ask for too much if it took the rest of the wave for free"
    cfg = config('adaptive', token_budget=2.0, max_group_size=32)
    cfg = replace(cfg, rollout=replace(cfg.rollout, max_tokens=6))
    for seed in range(60):
        _, want, _ = step_of(cfg, seed, SerialJudge)
        assert seen_of(step_of(cfg, seed)[1]) == seen_of(want)


def test_an_early_wave_fills_the_slots_that_the_last_one_leaves():
    cfg = config('adaptive', token_budget=3.0)
    cfg = replace(cfg, rollout=replace(cfg.rollout, max_tokens=6))
    engine, samples, m = step_of(cfg, 3)
    first = cfg.prompts_per_step * cfg.group_size
    drawn = [(s.prompt_id, s.index) for s in samples]
    assert sorted(engine.asked) == sorted(drawn) and m['early_frac'] > 0
    again, _, _ = step_of(cfg, 3)
    assert again.asked == engine.asked, 'in an order that does not hang on the clock'
    patient, _, _ = step_of(cfg, 3, SerialJudge)
    assert patient.asked[:first] == engine.asked[:first]
    assert patient.asked != engine.asked


@pytest.mark.parametrize('judge', [Beside, SerialJudge])
def test_seconds_of_verdicts_are_not_seconds_of_the_rollout(monkeypatch, judge):
    "On a clock that stands still but for the work: a second per sample, 1000 per verdict"
    now, verdicts = [0.0], []
    monkeypatch.setattr('compassrl.experience.time.perf_counter', lambda: now[0])

    class Slow(judge):
        def settle(self, samples):
            new = [s for s in samples if s.verdict is None]
            now[0] += 1000 * len(new)
            verdicts.extend(new)
            super().settle(new)

    class Timed(Slots):
        def generate(self, requests, whole_groups=False):
            for s in super().generate(requests):
                now[0] += 1
                yield s

    cfg = config('adaptive', token_budget=3.0)
    prompts = questions(72)
    slow = Slow(prompts, TOKENIZER, EOS_ID)
    _, samples, m = collect(Timed(16, 3), prompts, 0, cfg, slow, EOS_ID)
    assert m['waves'] > 1 and m['early_frac'] * slow.beside == m['early_frac']
    assert m['time_rollout_s'] == len(samples) and m['time_reward_s'] == 1000 * len(verdicts) > 0


class Noting(Beside):
    "Notes who ended last whenever it is asked for verdicts"

    def start(self, sample):
        self.newest = sample.prompt_id

    def settle(self, samples):
        samples = list(samples)
        early = 48 > len(samples)  # before the first wave has come
        assert not (early and self.newest in {s.prompt_id for s in samples}), 'give it time'
        self.early = getattr(self, 'early', 0) + early
        super().settle(samples)


def test_nobody_waits_for_the_verdict_of_a_response_that_has_just_ended():
    cfg = config('refill')
    prompts = questions(72)
    judge = Noting(prompts, TOKENIZER, EOS_ID)
    collect(Slots(16, 3), prompts, 0, cfg, judge, EOS_ID)
    assert judge.early > 3


def test_a_pool_that_drops_the_longest_is_not_asked_early():
    cfg = config('adaptive', token_budget=3.0)
    cfg = replace(cfg, rollout=replace(cfg.rollout, max_tokens=6))
    schedule = replace(cfg.schedule, over_provision=0.5)
    dropping = replace(cfg, rollout_engine='pool', schedule=schedule)
    assert step_of(cfg, 3)[2]['early_frac'] > 0 == step_of(dropping, 3)[2]['early_frac']


class ByPrompt(Judge):
    "Verdicts that are known: the first prompt is solved, the second mixed, the others hopeless"

    def __init__(self, beside):
        self.beside = beside

    def settle(self, samples):
        for s in samples:
            right = s.prompt_id == 'p0' or (s.prompt_id == 'p1' and s.index % 2 == 1)
            s.verdict = Verdict(float(right), right)


@pytest.mark.parametrize('beside', [False, True])
def test_a_selection_learns_of_what_refill_throws_away(beside):
    "Half of the kinds are always wrong: they are asked less, though no silent group is kept"
    prompts = [replace(p, domain=f'kind {i % 2}') for i, p in enumerate(questions(400))]
    cfg = config('refill', max_refills=1)
    selection = PromptSelection(prompts, 'domain', cfg.prompts_per_step, 0)
    judge = (Beside if beside else SerialJudge)(prompts, TOKENIZER, EOS_ID)
    for step in range(6):
        engine = Halves(16, step)
        collect(engine, prompts, step, cfg, judge, EOS_ID, selection=selection)
    assert selection.awake['kind 0'] > 0.6 > 0.1 > selection.awake['kind 1']
    assert selection.skipped > 0


def test_the_real_engine_draws_an_early_wave_as_any_other():
    cfg = config('adaptive', prompts=8, token_budget=3.0)
    cfg = replace(cfg, rollout=replace(cfg.rollout, max_tokens=24))
    found = []
    for beside in (False, True):
        engine = make_engine(make_policy(), 16, dtype=torch.float64)
        found.append(collect(engine, questions(8), 0, cfg, ByPrompt(beside), 7))
    (q, s, m), (q2, s2, m2) = found
    assert m2['early_frac'] > 0 == m['early_frac'] and m2['waves'] == m['waves'] > 1
    for a, b in zip(in_order(q, s), in_order(q2, s2)):
        assert (a.prompt_id, a.index, a.response_ids) == (b.prompt_id, b.index, b.response_ids)
        assert torch.allclose(a.rollout_log_probs, b.rollout_log_probs, rtol=0, atol=1e-9)
        assert torch.equal(a.routed_experts, b.routed_experts)
