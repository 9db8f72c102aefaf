"Replayed gates: the sampler's values, the trainer's gradient; refused where they are missing"

import itertools
from dataclasses import fields, replace
from unittest.mock import patch

import pytest
import torch

from compassrl.algo.losses import LossConfig, PolicyLoss
from compassrl.config import TrainConfig
from compassrl.model.policy import MoE, PolicyConfig
from compassrl.model.pretrained import hf_weights
from compassrl.records import Request, SamplingParams, collate, derive_seed, select
from compassrl.rollout.fp8 import Fp8Rollout
from compassrl.rollout.own_process import ProcessRollout
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.factory import rollout_engines
from compassrl.train.torch_train import (
    OptimConfig,
    TorchTrain,
    accumulate_grads,
    response_log_probs,
)
from tests.algo.test_engine_gap import CONFIG, lively

SPARSE = [1, 2]
LOSS = PolicyLoss(LossConfig('grpo', tis='off'))


def close(a, b, tol=1e-10):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def sampled(policy=None, engine=None, num=12, tokens=10):
    "Two samples of each prompt"
    policy = policy or lively(dtype=torch.float)
    engine = engine or TorchRollout(policy.config, num, return_gates=True)
    engine.load_weights(hf_weights(policy), 0)
    params, g = SamplingParams(tokens, stop_ids=(1,)), torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(2, 20, (1 + i % 4,), generator=g).tolist()) for i in range(num)]
    asked = [
        Request(f'p{i // 2:02}', prompts[i // 2], i % 2, derive_seed(i), params) for i in range(num)
    ]
    return sorted(engine.generate(asked), key=lambda s: (s.prompt_id, s.index))


def foreign(b):
    "Gates that nobody computed, each token's own, and holes that are filled with junk"
    g = torch.Generator().manual_seed(2)
    gates = torch.rand(b.routed_gates.shape, generator=g).softmax(-1)
    gone = torch.arange(b.token_ids.shape[1]) % 3 == 1
    gates[:, gone] = 99
    return replace(b, routed_gates=gates, routes_valid=b.routes_valid & ~gone)


BATCH = collate(sampled())
PART = foreign(select(BATCH, [0, 1, 3, 7]))


# ---- an oracle: one row, one token, one expert at a time


def naive_log_probs(p, b, gates_of):
    """`gates_of` the row, the layer and the trainer's own gates of the ids: what experts are
    multiplied by"""
    out = torch.zeros(b.token_ids.shape).double()
    for row in range(len(b)):
        n, layers = int(b.lengths[row]), itertools.cycle(SPARSE)

        def forward(m, x, *_):
            layer, scores = next(layers), x @ m.router.T
            valid = b.routes_valid[row, :n, None]
            ids = torch.where(valid, b.routed_experts[row, :n, layer].long(), scores.topk(2)[1])
            own = scores.gather(1, ids).exp()
            own = own / own.sum(1, keepdim=True)
            gates = gates_of(row, layer, own)
            return torch.stack(
                [
                    sum(g * m.down[e] @ swiglu(m.gate_up[e] @ t) for g, e in zip(gs, es))
                    for t, gs, es in zip(x, gates, ids.tolist())
                ]
            ), ids

        with patch.object(MoE, 'forward', forward):
            hidden, _ = p(b.token_ids[row, :n][None])
        said = p.logits(hidden).log_softmax(-1)
        for t in b.response_mask[row].nonzero()[:, 0].tolist():
            out[row, t] = said[t - 1, b.token_ids[row, t]]
    return out


def swiglu(h):
    gate, up = h.chunk(2)
    return gate * gate.sigmoid() * up


def given_or(b, own_of):
    "The batch's gates where there is a route, else what `own_of` makes of the trainer's own"

    def gates_of(row, layer, own):
        n = len(own)
        given = b.routed_gates[row, :n, layer].double()
        return torch.where(b.routes_valid[row, :n, None], given + own_of(row, layer, own), own)

    return gates_of


def test_the_forward_pass_equals_the_loop():
    "With foreign gates, holes, and experts that the trainer would not have chosen"
    for b in (PART, replace(PART, routed_experts=(PART.routed_experts + 2) % 6)):
        b.routed_experts[:, :, 0] = 0
        want = naive_log_probs(lively(), b, given_or(b, lambda *_: 0))
        got, _ = response_log_probs(lively(), b)
        close(got, want)
        without = response_log_probs(lively(), replace(b, routed_gates=None))[0]
        assert (got - without).abs().max() > 0.02, 'or nothing is tested'


def test_what_is_not_valid_is_live():
    b = replace(PART, routes_valid=torch.zeros_like(PART.routes_valid))
    close(response_log_probs(lively(), b)[0], response_log_probs(lively(), b, replay=False)[0], 0)


def gradient(p, b, naive=None):
    p.zero_grad()
    w = torch.randn(b.token_ids.shape, generator=torch.Generator().manual_seed(3)).double()
    (w * (response_log_probs(p, b)[0] if naive is None else naive)).sum().backward()
    return {k: v.grad.clone() for k, v in p.named_parameters()}


def test_gradients_are_those_of_the_loop():
    "Of every weight: the loop adds the trainer's gates and takes away their value"
    p = lively()
    got = gradient(p, PART)
    own = given_or(PART, lambda row, layer, own: own - own.detach())
    want = gradient(p, PART, naive_log_probs(p, PART, own))
    for k, v in want.items():
        close(got[k], v)
    assert all(got[f'blocks.{i}.mlp.router'].abs().max() > 1e-2 for i in SPARSE)


def test_gradients_of_routers_are_finite_differences():
    "The function that this is the gradient of: gates move as the trainer's do, from the sampler's"
    p, start = lively(), {}
    got = gradient(p, PART)

    def moved(row, layer, own):
        start.setdefault((row, layer), own.detach())
        return own - start[row, layer]

    w = torch.randn(PART.token_ids.shape, generator=torch.Generator().manual_seed(3)).double()

    @torch.no_grad()
    def value():
        return float((w * naive_log_probs(p, PART, given_or(PART, moved))).sum())

    value()  # stores where gates start
    for i in SPARSE:
        router, g = p.blocks[i].mlp.router, got[f'blocks.{i}.mlp.router']
        at = divmod(int(g.abs().argmax()), g.shape[1])
        ends = []
        for step in (1e-6, -2e-6):
            with torch.no_grad():
                router[at] += step
            ends.append(value())
        with torch.no_grad():
            router[at] += 1e-6
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(g[at].item(), rel=1e-5)


def test_with_the_trainers_own_gates_it_is_R3():
    "Values and gradients: engines that agree train as if only experts were repeated"
    p = lively()
    samples = sampled(p, TorchRollout(CONFIG, 12, torch.double, return_gates=True))
    b = collate(samples)
    plain = replace(b, routed_gates=None)
    close(response_log_probs(p, b)[0], response_log_probs(p, plain)[0], 1e-6)
    got, want = gradient(p, b), gradient(p, plain)
    for k, v in want.items():
        close(got[k], v, 1e-5)


@pytest.mark.parametrize('how', [dict(recompute=True), dict(max_tokens=30)], ids=str)
def test_the_gradient_does_not_depend_on_how_it_is_computed(how):
    "Blocks that are computed again, micro-batches"
    p, b = lively(), replace(PART, advantages=torch.ones_like(PART.rollout_log_probs))
    b = replace(b, old_log_probs=b.rollout_log_probs)
    grads = []
    for recompute, tokens in ((False, 10**6), (how.get('recompute'), how.get('max_tokens', 10**6))):
        p.recompute = recompute
        accumulate_grads(p, b, LOSS, tokens)
        grads.append([w.grad.clone() for w in p.parameters()])
    for a, c in zip(*grads):
        close(a, c)


def test_equal_tokens_with_other_gates_are_not_shared():
    "Two rows of the same tokens and experts: each is computed with its own gates"
    one = select(BATCH, [0])
    two = select(BATCH, [0, 0])
    gates = two.routed_gates.clone()
    gates[1] = gates[1].flip(-1)
    got = response_log_probs(lively(), replace(two, routed_gates=gates))[0]
    close(got[:1], response_log_probs(lively(), one)[0])
    alone = replace(one, routed_gates=gates[1:])
    close(got[1:], response_log_probs(lively(), alone)[0])
    assert (got[0] - got[1]).abs().max() > 0.01


# ---- what the sampler records


@pytest.mark.parametrize('slots', [2, 12])
@pytest.mark.parametrize('kind', [TorchRollout, Fp8Rollout])
def test_the_sampler_records_what_it_multiplied_with(kind, slots):
    "In fp64, tokens of prompts and responses, also in slots that are used again and moved"
    policy = lively()
    bits = {} if kind is TorchRollout else dict(weights=False, activations=False)
    engine = kind(CONFIG, slots, torch.double, return_gates=True, **bits)
    samples = sampled(policy, engine)
    seen = {}

    def note(row, layer, own):
        seen[row, layer] = own
        return own

    b = collate(samples)
    with torch.no_grad():
        naive_log_probs(policy, b, note)
    for (row, layer), own in seen.items():
        close(b.routed_gates[row, : len(own) - 1, layer].double(), own[:-1], 1e-6)
    assert not b.routed_gates[:, :, 0].any() and b.routed_gates.dtype == torch.float


def test_a_bfloat16_sampler_records_its_rounded_gates():
    s = sampled(engine=TorchRollout(CONFIG, 12, torch.bfloat16, return_gates=True))[0]
    assert torch.equal(s.routed_gates, s.routed_gates.bfloat16().float())


def test_no_memory_unless_they_are_asked_for():
    for asked in (False, True):
        engine = TorchRollout(CONFIG, 4, return_gates=asked)
        samples = sampled(engine=engine)
        assert (engine.slots.gates.numel() > 0) == asked
        assert all((s.routed_gates is not None) == asked for s in samples)
        cfg = TrainConfig(router_replay='R3-gates' if asked else 'R3')
        built = rollout_engines['torch'].build(cfg, None, None)
        assert built.return_gates == asked and built.return_routes


def test_gates_come_out_of_another_process():
    engine = ProcessRollout(TorchRollout, CONFIG, 12, torch.float, 'cpu', True, True)
    try:
        got = sampled(engine=engine)
    finally:
        engine.close()
    for s, t in zip(got, sampled(), strict=True):
        assert torch.equal(s.routed_gates, t.routed_gates)


# ---- refused


def engine(mode='R3-gates'):
    return TorchTrain(lively(), OptimConfig(), replay=mode)


def test_a_batch_without_gates_is_refused_by_name():
    for b in (replace(BATCH, routed_gates=None), collate(sampled(engine=TorchRollout(CONFIG, 12)))):
        for use in (engine().score, lambda b: engine().update(b, LOSS)):
            with pytest.raises(
                ValueError, match="replay='R3-gates': the batch has no routed_gates"
            ):
                use(b)


@pytest.mark.parametrize('mode', ['off', 'R2', 'R3'])
def test_other_modes_leave_gates_alone(mode):
    "What own engines bring along changes nothing where it was not asked for"
    b = replace(foreign(BATCH), advantages=torch.ones_like(BATCH.rollout_log_probs))
    plain, seen = replace(b, routed_gates=None), []
    for x in (b, plain):
        e = engine(mode)
        x = replace(x, **e.score(x))
        seen.append((x.old_log_probs, e.update(x, LOSS)[1]['log_probs']))
    assert all(map(torch.equal, *seen))


def test_score_and_update_use_the_same_gates():
    "The first ratio is 1, whether the pass is used again or not"
    b = replace(foreign(BATCH), advantages=torch.ones_like(BATCH.rollout_log_probs))
    for again in (False, True):
        e = engine()
        scored = e.score(b)
        want = response_log_probs(lively(), b)[0].float()
        x = replace(b, **scored)
        e.last_pass = e.last_pass if again else None
        close(e.update(x, LOSS)[1]['log_probs'], want, 1e-5)
        close(scored['old_log_probs'], want, 1e-5)


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda g: g[..., :1], r'routed_gates \[12, \d+, 3, 1\]'),
        (lambda g: g.long(), 'torch.int64: use floats'),
        (lambda g: g * 0, 'at least 0 each, 1 in sum'),
        (lambda g: g * torch.nan, 'nan'),
        (lambda g: g * 1.5, '1 in sum'),
        (lambda g: torch.stack((1.5 + 0 * g[..., 0], -0.5 + 0 * g[..., 0]), -1), '-0.5'),
    ],
)
def test_gates_that_no_router_gives(change, message):
    with pytest.raises(ValueError, match=message):
        engine().score(replace(BATCH, routed_gates=change(BATCH.routed_gates)))


@pytest.mark.parametrize('score, norm', [('softmax', False), ('sigmoid', True), ('sigmoid', False)])
def test_real_gates_always_pass(score, norm):
    c = replace(CONFIG, router_score=score, norm_topk_prob=norm, routed_scaling_factor=2.5)
    p = lively(c)
    b = collate(sampled(p, TorchRollout(c, 12, torch.bfloat16, return_gates=True)))
    TorchTrain(p, OptimConfig(), replay='R3-gates').score(b)


def test_gates_without_experts_are_refused():
    b = BATCH
    with pytest.raises(ValueError, match='one for each of routed_experts'):
        lively()(b.token_ids, b.token_mask, routed_gates=b.routed_gates)


@pytest.mark.parametrize(
    'setting, why',
    [
        (dict(rollout_engine='vllm'), 'vLLM reports which experts'),
        (dict(rollout_engine='pool'), 'vLLM reports which experts'),
        (dict(train_engine='megatron'), 'Megatron-Core computes the gates'),
    ],
)
def test_engines_that_cannot(setting, why):
    with pytest.raises(ValueError, match=f"router_replay='R3-gates' with .*{why}"):
        TrainConfig(router_replay='R3-gates', **setting)
    TrainConfig(router_replay='R3', **setting)
    dense = PolicyConfig(mlp_only_layers=(0, 1))
    TrainConfig(router_replay='R3-gates', policy=dense, **setting)


def test_every_tensor_of_a_sample_is_checked_for_its_length():
    s = sampled()[0]
    assert any(f.name == 'routed_gates' for f in fields(s))
    with pytest.raises(ValueError, match='routed_gates has'):
        collate([replace(s, routed_gates=s.routed_gates[1:])])


def test_a_sample_without_gates_beside_one_that_has_them():
    "Its experts alone would be replayed with gates of 0: refused"
    one, two = sampled()[:2]
    with pytest.raises(ValueError, match='routed_gates'):
        engine().score(collate([one, replace(two, routed_gates=None)]))
    none = dict(routed_gates=None, routed_experts=None, routes_valid=None)
    engine().score(collate([one, replace(two, **none)]))  # it is live
