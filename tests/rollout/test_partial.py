"""Partial rollouts: every response once and whole, every token with its owner, and a resume that
goes on with the same halves"""

import random
from collections import Counter
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compassrl.algo.losses import LossConfig
from compassrl.algo.zero_variance import ZeroVarianceConfig
from compassrl.config import TrainConfig
from compassrl.data.prompts import DataConfig, load_data
from compassrl.data.tokenizer import EOS_ID, build_tokenizer
from compassrl.experience import Sampler, collect
from compassrl.judges.serial import SerialJudge
from compassrl.loop import run_steps
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.records import Request, Sample, SamplingParams, collate, derive_seed
from compassrl.rollout.partial import PartialResponses
from compassrl.rollout.schedule import ScheduleConfig
from compassrl.rollout.torch_rollout import RolloutConfig, TorchRollout
from compassrl.train.checkpoint import load_checkpoint, save_checkpoint
from compassrl.train.sft import SFTConfig, cold_start
from compassrl.train.torch_train import OptimConfig, TorchTrain, response_log_probs

TOKENIZER = build_tokenizer()
SHAPE = PolicyConfig(
    hidden_size=32, head_dim=8, moe_intermediate_size=32, max_position_embeddings=48
)
DATA = DataConfig(
    domains=('strings',), difficulty=0.0, num_train=40, num_heldout=8, max_prompt_tokens=24
)
CFG = TrainConfig(
    steps=6,
    prompts_per_step=8,
    group_size=4,
    policy=SHAPE,
    data=DATA,
    rollout=RolloutConfig(max_tokens=12),
    schedule=ScheduleConfig(partial_tokens=4),
    loss=LossConfig('grpo', tis='truncate'),
    zero_variance=ZeroVarianceConfig('uniform'),
    optim=OptimConfig(lr=1e-3, num_mini_batches=2),
)
PROMPTS, _ = load_data(DATA, TOKENIZER, 0)


@pytest.fixture(scope='module')
def pupil():
    "A policy whose responses end at different places"
    policy = Policy(SHAPE, seed=1)
    for _ in cold_start(
        TorchTrain(policy, OptimConfig(lr=5e-3), replay='off'),
        PROMPTS,
        SFTConfig(steps=30),
        TOKENIZER,
    ):
        pass
    return policy


class Script:
    """An engine that says the next numbers of each response, which has a length of its own; in any
    order"""

    def __init__(self, lengths, rng):
        self.lengths, self.rng, self.version = lengths, rng, 0

    def generate(self, requests):
        requests = list(requests)
        self.rng.shuffle(requests)
        for r in requests:
            have, n = len(r.prompt_ids) - 1, self.lengths[r.prompt_id, r.index]
            ids = list(range(have, min(n, have + r.params.max_tokens)))
            yield Sample(
                r.prompt_id,
                r.index,
                list(r.prompt_ids),
                ids,
                torch.tensor(ids) / 10,
                None,
                None,
                'stop' if ids[-1] == n - 1 else 'length',
                self.version,
            )


@settings(max_examples=120, deadline=None)
@given(data=st.data(), most=st.integers(1, 9), limit=st.integers(1, 20), seed=st.integers(0, 99))
def test_every_response_once_and_whole(data, most, limit, seed):
    "Whatever the lengths, the parts and the order of answers; saved and loaded at any time"
    rng, partial_responses = random.Random(seed), PartialResponses(most)
    sizes = data.draw(
        st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=1, max_size=6)
    )
    lengths = {
        (f'p{p}', k): min(n, limit) for p, group in enumerate(sizes) for k, n in enumerate(group)
    }
    engine, seen, began = (
        Script({key: n if n < limit else 99 for key, n in lengths.items()}, rng),
        [],
        {},
    )
    step = 0
    while step < len(sizes) or partial_responses.groups:
        engine.version = step
        if step < len(sizes):
            partial_responses.begin(
                Request(f'p{step}', (0,), k, k, SamplingParams(limit))
                for k in range(len(sizes[step]))
            )
            began[f'p{step}'] = step
        if rng.random() < 0.5:
            other = PartialResponses(most)
            other.load_state_dict(partial_responses.state_dict())
            partial_responses = other
        for s in engine.generate(partial_responses.parts()):
            assert len(s.response_ids) <= most
            whole = partial_responses.take(s)
            assert (whole is not None) == (
                s.prompt_ids[1:] + s.response_ids == list(range(lengths[s.prompt_id, s.index]))
            )
        requests, samples = partial_responses.whole_groups()
        assert [(r.prompt_id, r.index) for r in requests] == [
            (s.prompt_id, s.index) for s in samples
        ]
        for s in samples:
            assert (
                step
                == began[s.prompt_id]
                + (
                    max(lengths[s.prompt_id, k] for k in range(len(sizes[int(s.prompt_id[1:])])))
                    - 1
                )
                // most
            )
        seen += samples
        step += 1
    assert Counter((s.prompt_id, s.index) for s in seen) == Counter(lengths.keys())
    for s in seen:
        n = lengths[s.prompt_id, s.index]
        assert (
            s.prompt_ids == [0]
            and s.response_ids == list(range(n))
            and torch.equal(s.rollout_log_probs, torch.arange(n) / 10)
        )
        assert s.token_versions.tolist() == [began[s.prompt_id] + t // most for t in range(n)]
    assert (
        not partial_responses.drawn
        and not partial_responses.ended
        and not partial_responses.running
    )


def test_each_part_has_random_numbers_of_its_own():
    partial_responses, seeds = PartialResponses(1), []
    partial_responses.begin(
        Request('p', (0,), k, derive_seed(k), SamplingParams(5)) for k in range(3)
    )
    engine = Script({('p', k): 9 for k in range(3)}, random.Random(0))
    while parts := partial_responses.parts():
        seeds += [p.seed for p in parts]
        assert [p.begun for p in parts] == [
            (True,) * (len(p.prompt_ids) - 1) or None for p in parts
        ]
        for s in engine.generate(parts):
            partial_responses.take(s)
    assert len(set(seeds)) == len(seeds) == 15 and seeds[:3] == [derive_seed(k) for k in range(3)]


def test_loading_replaces_what_is_under_way():
    def begun(prompt):
        p = PartialResponses(2)
        p.begin(Request(prompt, (0,), k, k, SamplingParams(5)) for k in range(3))
        for s in Script({(prompt, k): 9 for k in range(3)}, random.Random(0)).generate(p.parts()):
            p.take(s)
        return p

    saved, other = begun('saved'), begun('other')
    state = saved.state_dict()
    other.load_state_dict(state)
    assert list(other.groups) == ['saved'] and other.state_dict() == state
    assert other.parts() == saved.parts() and len(other.running) == 3


def test_log_probs_and_routes_of_a_joined_response(pupil):
    "In fp64, with weights that stay: what one forward pass over the whole gives"
    policy = deepcopy(pupil).double()
    engine = TorchRollout(SHAPE, 16, torch.float64)
    engine.load_weights(TorchTrain(policy, OptimConfig()).weights(), 0)
    partial_responses = PartialResponses(3)
    partial_responses.begin(
        Request(
            p.id,
            tuple(p.token_ids),
            k,
            derive_seed(p.id, k),
            SamplingParams(11, stop_ids=(EOS_ID,)),
        )
        for p in PROMPTS[:10]
        for k in range(3)
    )
    while partial_responses.running:
        for s in engine.generate(partial_responses.parts()):
            partial_responses.take(s)
    batch = collate(partial_responses.whole_groups()[1])
    with torch.no_grad():
        live, _ = response_log_probs(policy, batch, replay=False)
        replayed, _ = response_log_probs(policy, batch, replay=True)
    assert (live - batch.rollout_log_probs)[batch.response_mask].abs().max() < 1e-6
    assert torch.equal(live, replayed), 'the routes are those of one pass'
    assert bool(batch.routes_valid[batch.fed_mask].all()) and batch.response_mask.sum(1).max() == 11


def test_each_token_keeps_the_routes_of_the_pass_that_drew_it(pupil):
    "Other weights read a part again and may send it elsewhere; the log-probs are those of before"
    engines = []
    for seed in (1, 2):
        engines.append(TorchRollout(SHAPE, 4, return_gates=True))
        weights = TorchTrain(Policy(SHAPE, seed=seed), OptimConfig()).weights()
        engines[-1].load_weights(weights, seed)
    partial_responses = PartialResponses(3)
    partial_responses.begin([Request('p', tuple(PROMPTS[0].token_ids), 0, 7, SamplingParams(9))])
    passes, gates = [], []
    for engine in (engines[0], engines[1], engines[0]):
        (s,) = engine.generate(partial_responses.parts())
        passes.append(s.routed_experts)
        gates.append(s.routed_gates)
        partial_responses.take(s)
        partial_responses.load_state_dict(partial_responses.state_dict())
    got, (n, m) = partial_responses.whole_groups()[1][0], map(len, passes[:2])
    assert not passes[1][:n].equal(passes[0]), 'or nothing is tested'
    assert got.routed_experts.equal(torch.cat((passes[0], passes[1][n:], passes[2][m:])))
    assert got.routed_gates.equal(torch.cat((gates[0], gates[1][n:], gates[2][m:])))
    assert not gates[1][:n].equal(gates[0]), 'or nothing is tested'
    assert got.routes_valid.all() and len(got.routes_valid) == len(passes[2])


# ---- in the loop


class Log(list):
    def on_step(self, step, metrics, samples, batch):
        self.append((metrics, samples, batch))


def run(policy, steps, cfg=CFG, start=0, state=None, partial_responses=None):
    engine = TorchTrain(deepcopy(policy), cfg.optim)
    if state:
        engine.load_state_dict(state)
    cfg, rollout, log = replace(cfg, steps=steps), TorchRollout(SHAPE, 32), Log()
    rollout.load_weights(engine.weights(), start)
    sampler = Sampler(cfg, PROMPTS, rollout, SerialJudge(PROMPTS, TOKENIZER, EOS_ID), EOS_ID)
    sampler.partial_responses = partial_responses or sampler.partial_responses
    run_steps(cfg, sampler, engine, log, start)
    return engine, log


def same(a, b):
    return all(torch.equal(x, y) for (_, x), (_, y) in zip(a.weights(), b.weights(), strict=True))


@pytest.fixture(scope='module')
def whole(pupil):
    return run(pupil, 6)


def test_what_a_step_trains_on(whole):
    engine, log = whole
    going = 0  # responses under way
    for step, (m, samples, _) in enumerate(log):
        groups = Counter(s.prompt_id for s in samples)
        assert groups and set(groups.values()) == {4} and m['prompts'] == len(groups)
        for s in samples:
            v = s.token_versions
            assert (
                len(v) == len(s.response_ids)
                and (v.diff() >= 0).all()
                and v[-1] == s.weight_version <= step
            )
            assert s.verdict is not None and (s.finish_reason == 'stop') == (
                s.response_ids[-1] == EOS_ID
            )
            assert s.finish_reason == 'stop' or len(s.response_ids) == 12
        stale = torch.cat([s.token_versions for s in samples]) < step
        assert m['stale_frac'] == pytest.approx(float(stale.float().mean()), abs=1e-6)
        # ended, but not their groups
        assert m['partial_responses'] <= going + 32 - len(samples) + 24
        going = m['partial_responses']
    assert (
        max(m['stale_frac'] for m, _, _ in log) > 0.1
        and max(m['partial_responses'] for m, _, _ in log) > 0
    )
    assert all(m['rollout_train_gap'] < 1e-5 or m['stale_frac'] > 0 for m, _, _ in log), (
        'only old tokens differ'
    )


@pytest.mark.parametrize('done', [1, 4])
def test_a_resume_goes_on_with_the_same_halves(pupil, whole, tmp_path, done):
    partial_responses = PartialResponses(4)
    first, _ = run(pupil, done, partial_responses=partial_responses)
    save_checkpoint(tmp_path / 'e', done, first.state_dict())
    save_checkpoint(tmp_path / 'u', done, partial_responses.state_dict())
    again, state = PartialResponses(4), load_checkpoint(tmp_path / 'e' / f'step-{done:06}')[1]
    again.load_state_dict(load_checkpoint(tmp_path / 'u' / f'step-{done:06}')[1])
    rest, _ = run(pupil, 6, start=done, state=state, partial_responses=again)
    assert same(whole[0], rest)
    forgot, _ = run(pupil, 6, start=done, state=state)
    assert not same(whole[0], forgot), 'what is under way matters'


def test_a_prompt_that_is_under_way_is_not_begun_again():
    "Fewer prompts than a few steps ask for; the first takes three steps"
    prompts = [replace(p, token_ids=[0]) for p in PROMPTS[:4]]
    slow, judge, partial_responses = (
        prompts[0].id,
        SerialJudge(prompts, TOKENIZER, EOS_ID),
        PartialResponses(4),
    )
    engine = Script(
        {(p.id, k): 99 if p.id == slow else 2 for p in prompts for k in range(4)}, random.Random(0)
    )
    for step in range(6):
        engine.version, last = step, step % 3 == 2
        requests, samples, m = collect(
            engine,
            prompts,
            step,
            replace(CFG, prompts_per_step=4),
            judge,
            EOS_ID,
            partial_responses,
        )
        assert Counter(r.prompt_id for r in requests) == {
            p.id: 4 for p in prompts if p.id != slow or last
        }
        assert m['partial_responses'] == (0 if last else 4) and m['tokens'] == 3 * 4 * 2 + 4 * 4
        assert m['stale_frac'] == (pytest.approx(32 / 72) if last else 0)


def test_a_step_without_a_whole_group_draws_on():
    prompts = [replace(p, token_ids=[0]) for p in PROMPTS]
    engine = Script({(p.id, k): 99 for p in prompts for k in range(4)}, random.Random(0))
    _, samples, m = collect(
        engine,
        prompts,
        0,
        CFG,
        SerialJudge(prompts, TOKENIZER, EOS_ID),
        EOS_ID,
        PartialResponses(4),
    )
    assert (
        m['waves'] == 3
        and len(samples) == 32
        and {len(s.response_ids) for s in samples} == {12}
        and m['tokens'] == 32 * 12
    )


@pytest.mark.parametrize(
    'kw, words',
    [
        (
            dict(schedule=ScheduleConfig(partial_tokens=4), zero_variance=ZeroVarianceConfig()),
            'partial_tokens=4.*adaptive.*uniform',
        ),
        (
            dict(schedule=ScheduleConfig(partial_tokens=12)),
            'partial_tokens=12: .* no response is cut',
        ),
    ],
)
def test_what_does_not_fit_together(kw, words):
    with pytest.raises(ValueError, match=words):
        replace(CFG, **kw)


def test_bad_values():
    with pytest.raises(ValueError, match='partial_tokens=-1: use at least 0'):
        ScheduleConfig(partial_tokens=-1)
    with pytest.raises(ValueError, match='use one of them'):
        ScheduleConfig(partial_tokens=5, over_provision=0.5)
    with pytest.raises(ValueError, match='tokens=0: draw at least 1'):
        PartialResponses(0)
