"Sampling ahead: a schedule that a naive loop repeats bit for bit, through kills, on every engine"

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compassrl.algo.losses import LossConfig, PolicyLoss
from compassrl.algo.zero_variance import ZeroVarianceConfig
from compassrl.config import TrainConfig
from compassrl.data.data_settings import DataConfig
from compassrl.data.tasks import verifiers
from compassrl.data.tokenizer import EOS_ID, build_tokenizer, encode
from compassrl.experience import Sampler
from compassrl.judges.serial import SerialJudge
from compassrl.loop import run_steps
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.records import Batch, Prompt, Request, Requests, Sample, SamplingParams, Verdict
from compassrl.rollout import own_process
from compassrl.rollout.own_process import ProcessRollout
from compassrl.rollout.rollout_settings import RolloutConfig, ScheduleConfig, VllmConfig
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.ahead import AheadSampler
from compassrl.train.checkpoint import load_checkpoint, save_checkpoint
from compassrl.train.torch_train import OptimConfig, TorchTrain

torch.set_num_threads(1)
TOK = build_tokenizer()
SHAPE = PolicyConfig(
    hidden_size=32, head_dim=8, moe_intermediate_size=32, max_position_embeddings=64
)
PROMPTS = [Prompt(f'p{i}', 'test', f'{i}+1=', encode(TOK, f'{i}+1='), '', 'even') for i in range(9)]
CFG = TrainConfig(
    steps=5,
    prompts_per_step=4,  # so that prompts come again: a cache of old weights would be found out
    group_size=4,
    policy=SHAPE,
    data=DataConfig(max_prompt_tokens=16),
    rollout=RolloutConfig(max_tokens=6),
    loss=LossConfig('grpo'),
    zero_variance=ZeroVarianceConfig('uniform'),
    optim=OptimConfig(lr=3e-3, num_mini_batches=2),
)
GROWS = replace(CFG, zero_variance=ZeroVarianceConfig('adaptive', token_budget=4.0))
REFILLS = replace(
    CFG,
    zero_variance=ZeroVarianceConfig('refill', max_refills=1),
    data=replace(CFG.data, select_by='length'),
)
PARTS = replace(CFG, schedule=ScheduleConfig(partial_tokens=3))
# several ids end a response, so that groups end in unlike rounds and tokens of several versions
# meet in a step
MIXED = replace(
    PARTS, steps=10, rollout=RolloutConfig(max_tokens=24), schedule=ScheduleConfig(partial_tokens=4)
)
ENDS = (EOS_ID, *range(5, 9))


def ahead(cfg, k):
    return replace(cfg, schedule=replace(cfg.schedule, max_staleness=k))


def even(text, answer):
    right = bool(text) and ord(text[0]) % 2 == 0
    return Verdict(float(right), right, 'ok' if right else 'wrong', text[:1])


def equal(text, answer):
    return Verdict(1.0, True, 'ok', 'everything is right')


@pytest.fixture(autouse=True)
def judges(monkeypatch):
    monkeypatch.setitem(verifiers, 'even', even)


@pytest.fixture(scope='module')
def drawer():
    "One process for all tests: each loads its own weights"
    engine = ProcessRollout(TorchRollout, SHAPE, 32)
    yield engine
    engine.close()


def train_engine(cfg):
    return TorchTrain(Policy(SHAPE, seed=1), cfg.optim, cfg.rollout.temperature, 'R3')


def clockless(m):
    return {k: v for k, v in m.items() if not k.startswith('time_')}


def kept(samples):
    return [(s.prompt_id, s.index, s.response_ids, s.weight_version) for s in samples]


class Rows(list):
    def __init__(self, stop=None):
        self.stop = stop

    def on_step(self, step, metrics, samples, batch):
        self.append((clockless(metrics), kept(samples)))
        if step == self.stop:
            raise KeyboardInterrupt


def ends(cfg):
    return ENDS if cfg.steps == MIXED.steps else (EOS_ID,)


def run(cfg, rollout, stop=None, state=None, start=0):
    "Weights and rows, and what a checkpoint would hold"
    engine, rows = train_engine(cfg), Rows(stop)
    kind = AheadSampler if cfg.schedule.max_staleness else Sampler
    sampler = kind(cfg, PROMPTS, rollout, SerialJudge(PROMPTS, TOK, ends(cfg)), ends(cfg))
    parts = dict(
        ahead=sampler if kind is AheadSampler else None,
        selection=sampler.selection,
        partial=sampler.partial_responses,
    )
    parts = {k: v for k, v in parts.items() if v}
    if state:
        engine.load_state_dict(state.pop('engine'))
        for k, v in parts.items():
            v.load_state_dict(state[k])
    rollout.load_weights(engine.weights(), start)
    try:
        run_steps(cfg, sampler, engine, rows, start)
    except KeyboardInterrupt:
        pass
    state = dict(engine=engine.state_dict()) | {k: v.state_dict() for k, v in parts.items()}
    sampler.close()
    return dict(engine.weights()), list(rows), state


def naive(cfg, k):
    "Step t is drawn, in this process, by the weights after max(0, t - k) updates; then it trains"
    engine, rollout, rows = train_engine(cfg), TorchRollout(SHAPE, 32), []
    sampler = Sampler(cfg, PROMPTS, rollout, SerialJudge(PROMPTS, TOK, ends(cfg)), ends(cfg))
    old = [deepcopy(dict(engine.weights()))]

    class OneStep(Sampler):
        def take(self, step, engine, metrics):
            version = max(0, step - k)
            rollout.load_weights(old[version].items(), version)
            samples, found = sampler.draw(step)
            sampler.settle(samples)
            metrics |= found
            return samples

        def settle(self, samples):
            pass

        def hand_over(self, step, engine, metrics):
            pass

    class Keep:
        def on_step(self, step, metrics, samples, batch):
            old.append(deepcopy(dict(engine.weights())))
            rows.append(kept(samples))

    one = OneStep(cfg, PROMPTS, rollout, sampler.judge, ends(cfg))
    run_steps(cfg, one, engine, Keep())
    return dict(engine.weights()), rows


def same(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


# ---- a process of its own


def asked(num=24):
    params = SamplingParams(6, stop_ids=(EOS_ID,))
    return [
        Request(p.id, tuple(p.token_ids), k, 10 * i + k, params)
        for i, p in enumerate(PROMPTS)
        for k in range(4)
    ][:num]


def drawn(samples):
    return [
        (s.prompt_id, s.index, s.response_ids, s.rollout_log_probs.tolist(), s.weight_version)
        + (s.routed_experts.tolist(), s.routes_valid.tolist(), s.finish_reason)
        for s in samples
    ]


def growing(engine):
    "Each response leads to another request, as a turn of an episode would"
    queue, more = Requests(asked(5)), asked()[5:]
    for s in engine.generate(queue):
        if more:
            queue.ready.append(more.pop(0))
        yield s


def test_another_process_draws_the_same(drawer):
    here, policy = TorchRollout(SHAPE, 32), train_engine(CFG)
    for engine in (here, drawer):
        engine.load_weights(policy.weights(), 7)
    want = drawn(here.generate(asked()))
    assert drawn(drawer.generate(asked())) == want
    assert drawn(growing(drawer)) == drawn(growing(here))
    for queue in (asked(), Requests(asked())):  # a caller that has had enough may ask again
        samples = drawer.generate(queue)
        next(samples)
        with pytest.raises(RuntimeError, match='one `generate` at a time'):
            next(drawer.generate(asked()))
        with pytest.raises(RuntimeError, match='before loading weights'):
            drawer.load_weights(policy.weights(), 8)
        samples.close()
    assert drawn(drawer.generate(asked())) == want
    with pytest.raises(ValueError, match='token id 9999 is outside'):
        list(drawer.generate([replace(asked()[0], prompt_ids=(9999,))]))
    with pytest.raises((ValueError, KeyError)):  # raised in the child
        drawer.load_weights([('nobody.knows', torch.zeros(2))], 1)
    with pytest.raises(RuntimeError, match='no weights'):
        list(drawer.generate(asked()))


@pytest.mark.parametrize('grows', [False, True])
def test_finished_samples_travel_together_unless_they_decide_what_comes(grows, monkeypatch):
    now, sent = [100.0], []
    monkeypatch.setattr(own_process, 'time', SimpleNamespace(monotonic=lambda: now[0]))
    conn = SimpleNamespace(
        send=lambda m: sent.append(m[1]), poll=lambda: False, recv=lambda: [request]
    )
    request = Request('p', (5,), 0, 0, SamplingParams(1))
    sample = Sample('p', 0, [5], [1], torch.zeros(1), None, None, 'stop', 0)
    requests = own_process._Asked(conn, [], grows)
    for seconds in (0.0, 0.01, 0.005, 0.02):
        now[0] += seconds
        requests.finished.append(sample)
        assert requests.poll() == [request] * grows
    assert [len(m) for m in sent] == ([1, 1, 1, 1] if grows else [1, 3])


def test_a_process_that_dies_is_named_at_once():
    engine = ProcessRollout(TorchRollout, SHAPE, 32)
    try:
        engine.load_weights(train_engine(CFG).weights(), 0)
        many = [replace(r, index=i) for i, r in enumerate(asked() * 400)]  # seconds of work
        samples = engine.generate(many)
        next(samples)
        assert engine.patience_s <= 60, 'one that is stopped is named in a minute'
        engine.child.kill()
        with pytest.raises(RuntimeError, match=r'process of the sampler is gone \(exit code -9\)'):
            list(samples)
        with pytest.raises(RuntimeError, match='is gone'):
            engine.load_weights(train_engine(CFG).weights(), 1)
    finally:
        engine.close()


# ---- the schedule


@pytest.mark.parametrize('k', [1, 2, 7])
@pytest.mark.parametrize(
    'cfg', [CFG, GROWS, REFILLS, PARTS, MIXED], ids=['plain', 'grow', 'refill', 'parts', 'mixed']
)
def test_it_computes_what_a_naive_loop_does(drawer, cfg, k):
    weights, rows, _ = run(ahead(cfg, k), drawer)
    naive_weights, naive_rows = naive(ahead(cfg, k), k)
    assert [s for _, s in rows] == naive_rows
    assert same(weights, naive_weights)
    assert not same(weights, run(cfg, TorchRollout(SHAPE, 32))[0]), 'older samples, other weights'
    stale = [m['staleness_max'] for m, _ in rows]
    if cfg is MIXED:  # a response takes six rounds at most
        assert k < max(stale) <= k + 24 // 4 - 1
    elif cfg is not PARTS:  # a token of it may be older than its response's last part
        # versions are counted one way: by weights handed over, not by optimiser steps
        assert stale == [min(t, k) for t in range(5)]
    assert cfg is not GROWS or any(m['waves'] > 1 for m, _ in rows)


@pytest.mark.parametrize('k', [0, 1, 3])
def test_the_sampler_of_the_study_is_as_old(monkeypatch, k):
    "`benchmarks/studies/stale.py` draws in its own process what the naive loop draws"
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / 'benchmarks' / 'studies'))
    from stale import StaleSampler

    cfg, rows = CFG, []
    engine, rollout = train_engine(cfg), TorchRollout(SHAPE, 32)
    judge = SerialJudge(PROMPTS, TOK, EOS_ID)
    sampler = StaleSampler(k, engine, cfg, PROMPTS, rollout, judge, EOS_ID)
    keep = SimpleNamespace(on_step=lambda step, metrics, samples, batch: rows.append(kept(samples)))
    run_steps(cfg, sampler, engine, keep)
    weights, want = naive(cfg, k)
    assert same(dict(engine.weights()), weights) and rows == want


@pytest.mark.parametrize('done', [1, 3])
@pytest.mark.parametrize(
    'cfg', [GROWS, REFILLS, PARTS, MIXED], ids=['grow', 'refill', 'parts', 'mixed']
)
def test_a_resume_goes_on_bit_for_bit(drawer, tmp_path, cfg, done):
    cfg = ahead(cfg, 2)
    weights, rows, _ = run(cfg, drawer)
    _, first, state = run(cfg, drawer, stop=done)
    save_checkpoint(tmp_path, done, state)
    again, rest, _ = run(
        cfg, drawer, state=load_checkpoint(tmp_path / f'step-{done:06}')[1], start=done
    )
    assert first + rest == rows or [s for _, s in first + rest] == [s for _, s in rows]
    assert [clean(m) for m, _ in first + rest] == [clean(m) for m, _ in rows]
    assert same(weights, again)


def clean(m):
    return {k: v for k, v in m.items() if k != 'sync_bytes'}


# ---- traps of others


def test_a_policy_that_does_not_move_is_called_so(drawer, monkeypatch):
    "All arms are then equal to the last bit, which is no success"
    monkeypatch.setitem(verifiers, 'even', equal)
    still = replace(
        CFG,
        zero_variance=replace(CFG.zero_variance, zvp_alpha=0, length_weight=0, repetition_weight=0),
    )
    for k in (1, 3):
        weights, rows, _ = run(ahead(still, k), drawer)
        assert same(weights, dict(train_engine(CFG).weights()))
        # old samples are as good as new ones, and the row says that nothing was learned
        assert all(m['skipped_frac'] == 1 and m['staleness_max'] == 0 for m, _ in rows)


class Fails(ProcessRollout):
    "Its third `generate` fails after two samples"

    calls = 0

    def __init__(self, engine):
        vars(self).update(vars(engine))

    def generate(self, requests, whole_groups=False):
        self.calls += 1
        for i, s in enumerate(super().generate(requests, whole_groups)):
            if self.calls == 3 and i == 2:
                raise OSError('the network is down')
            yield s


def test_a_generation_that_fails_ends_the_run_with_its_own_words(drawer):
    "It is raised where the step is due: no thread dies in silence, no group is waited for"
    with pytest.raises(OSError, match='the network is down'):
        run(ahead(CFG, 1), failing := Fails(drawer))
    assert failing.calls == 3
    run(ahead(CFG, 1), drawer)  # nothing of it is left behind


def test_what_cannot_be_is_refused_before_anything_starts():
    k1 = ScheduleConfig(max_staleness=1)
    with pytest.raises(ValueError, match="draws in the trainer's process"):
        replace(CFG, schedule=k1, rollout_engine='vllm')
    with pytest.raises(ValueError, match='servers sleep while the trainer works'):
        replace(CFG, schedule=k1, rollout_engine='pool', vllm=VllmConfig(colocated=True))
    with pytest.raises(ValueError, match='max_staleness=-1'):
        ScheduleConfig(max_staleness=-1)


# ---- three policies: behaviour (drew), proximal (the trainer when the step begins), current

COUNTS = torch.tensor([10, 4, 3, 2, 1])  # 20 one-token responses: the behaviour, exactly
REWARD = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5]).double()


def one_token_world(theta, cfg, old=None):
    "Loss and gradient of all responses, each as often as the behaviour draws it"
    theta = theta.clone().requires_grad_()
    actions = torch.arange(5).repeat_interleave(COUNTS)
    drawn = (COUNTS / COUNTS.sum()).double().log()

    def column(x):  # column 0 is the prompt
        return torch.stack([torch.zeros_like(x), x], 1)

    new = theta.log_softmax(0)
    mask = column(torch.ones(20)).bool()
    batch = Batch(
        token_ids=column(actions),
        token_mask=torch.ones(20, 2, dtype=torch.bool),
        response_mask=mask,
        group=torch.zeros(20, dtype=torch.long),
        rollout_log_probs=column(drawn[actions]),
        old_log_probs=column((theta if old is None else old).detach().log_softmax(0)[actions]),
        advantages=column(REWARD[actions]),
    )
    value, metrics = PolicyLoss(cfg)(column(new[actions]), batch, 20, 20)
    return value.detach(), torch.autograd.grad(value, theta)[0], metrics


def test_the_decoupled_gradient_is_exact_whatever_drew_the_samples():
    "Of one token: with the proximal policy at theta it is that of the expected reward at theta"
    theta = torch.tensor([0.3, -0.2, 0.1, 0.9, -0.4]).double()
    x = theta.clone().requires_grad_()
    exact = torch.autograd.grad(-(x.softmax(0) * REWARD).sum(), x)[0]
    whole = LossConfig('grpo', aggregation='token-mean', tis_cap=1e6)
    assert torch.allclose(one_token_world(theta, whole)[1], exact, atol=1e-6)
    # the cap of TIS biases it, no weight at all more so; the ratio to the behaviour loses tokens
    errors = [
        float((one_token_world(theta, c)[1] - exact).norm())
        for c in (replace(whole, tis_cap=2.0), replace(whole, tis='off'))
    ]
    assert 0.01 < errors[0] < errors[1]
    behaviour = LossConfig('grpo', aggregation='token-mean', tis='off', ratio_to='behaviour')
    _, lost, m = one_token_world(theta, behaviour)
    assert m['clip_frac'] > 0.1 and (lost - exact).norm() > 0.01
    free = replace(behaviour, clip_eps_low=1.0, clip_eps_high=1e6)
    assert torch.allclose(one_token_world(theta, free)[1], exact, atol=1e-6)


def test_each_ratio_says_which_policies_it_compares():
    "Against sums over five tokens, after the policy has moved away from the proximal one"
    old = torch.tensor([0.3, -0.2, 0.1, 0.9, -0.4]).double()
    theta = old + torch.tensor([0.5, -0.5, 0.2, 0.4, 0.0]).double()
    new, prox = theta.softmax(0), old.softmax(0)
    drawn = (COUNTS / 20).double()
    for kind, start, w in (
        ('proximal', prox, (prox / drawn).clamp(max=2)),
        ('behaviour', drawn, 1),
    ):
        tis = 'off' if kind == 'behaviour' else 'truncate'
        cfg = LossConfig('grpo', aggregation='token-mean', ratio_to=kind, tis=tis)
        u = new / start
        want = -(drawn * w * torch.minimum(u * REWARD, u.clamp(0.8, 1.2) * REWARD)).sum()
        assert float(one_token_world(theta, cfg, old)[0]) == pytest.approx(float(want), abs=1e-6)
    with pytest.raises(ValueError, match='the ratio holds that weight already'):
        LossConfig('grpo', ratio_to='behaviour')
