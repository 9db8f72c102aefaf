"The embedded engines on a GPU that is pretended: devices, numbers, kernels and waits"

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import hf_weights
from compassrl.records import Request, SamplingParams, collate
from compassrl.rollout.episodes import Episodes
from compassrl.rollout.fp8 import Fp8Rollout
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.train.torch_train import OptimConfig, TorchTrain
from tests.support import pretend_gpu as gpu
from tests.support.engine_samples import Echo

MOE = PolicyConfig()
SHAPES = dict(
    moe=MOE,
    dense=replace(MOE, mlp_only_layers=(0, 1)),
    glm=PolicyConfig(
        family='glm4_moe',
        qk_norm='none',
        router_score='sigmoid',
        shared_expert_intermediate_size=64,
        mlp_only_layers=(0,),
    ),
    width=PolicyConfig(family='olmoe', qk_norm='width', norm_topk_prob=False),
)
LIMITS = SamplingParams(9, 1.0, stop_ids=tuple(range(8)))
REQUESTS = [Request(f'p{i}', tuple(range(3, 6 + i)), 0, i, LIMITS) for i in range(5)]

UNLIKE = [Request(f'p{i}', (5, 6, 7) * (1 + 7 * i), 0, i, LIMITS) for i in range(3)]


def lively(shape):
    policy = Policy(shape)
    with torch.no_grad():
        for p in policy.parameters():
            if p.dim() > 1:
                p.mul_(2.5)
    return policy


def drawn(policy, device, dtype=torch.float32, requests=REQUESTS, kind=TorchRollout, **how):
    engine = kind(policy.config, 3, dtype, device, **how)
    engine.load_weights(hf_weights(Policy(policy.config, 1)), 0)  # nothing of them stays
    engine.load_weights(hf_weights(policy), 1)
    return sorted(engine.generate(requests), key=lambda s: (s.prompt_id, s.index))


def tokens(samples):
    return [s.response_ids for s in samples]


@pytest.mark.parametrize('name', SHAPES)
def test_a_gpu_draws_what_a_cpu_draws_alone_and_among_others(name):
    policy = lively(SHAPES[name])
    on_cpu = drawn(policy, 'cpu', return_gates=True)
    with gpu.pretend():
        on_gpu = drawn(policy, gpu.DEVICE, return_gates=True)
        assert tokens(on_gpu) == tokens(on_cpu)
        for s, same in zip(on_gpu, on_cpu):
            assert len(s.routed_experts) == len(s.prompt_ids) + len(s.response_ids) - 1
            assert s.routed_experts.equal(same.routed_experts)
            torch.testing.assert_close(s.routed_gates, same.routed_gates, rtol=1e-4, atol=1e-5)
        if name == 'moe':
            for dtype in (torch.float32, torch.bfloat16):
                many = drawn(policy, gpu.DEVICE, dtype, UNLIKE)
                for i, r in enumerate(UNLIKE):
                    [one] = drawn(policy, gpu.DEVICE, dtype, [r])
                    assert one.response_ids == many[i].response_ids
                    assert one.rollout_log_probs.equal(many[i].rollout_log_probs)
                    assert one.routed_experts.equal(many[i].routed_experts)


def test_turns_and_full_slots_on_a_gpu_are_those_on_a_cpu():
    "Rows draw on after their end: into what the next turn reads, and beyond the last column"
    policy, call = lively(replace(MOE, vocab_size=10)), 2
    params = SamplingParams(64 - 3, stop_ids=(1,))
    asked = [Request(f'p{i}', (3 + i, 4, 5), 0, i, params) for i in range(5)]

    def found(device):
        engine = TorchRollout(policy.config, 3, torch.float32, device)
        engine.load_weights(hf_weights(policy), 0)
        turns = sorted(Episodes(engine, Echo(call)).generate(asked), key=lambda s: s.prompt_id)
        endless = [replace(r, params=replace(params, stop_ids=())) for r in asked[:3]]
        long = sorted(engine.generate(endless), key=lambda s: s.prompt_id)
        assert engine.slots.capacity % 64 == 0 or device == 'cpu'
        return turns + long

    on_cpu = found('cpu')
    assert sum(s.policy_mask is not None for s in on_cpu) >= 3  # some have read an answer
    with gpu.pretend():
        assert tokens(found(gpu.DEVICE)) == tokens(on_cpu)


def test_new_weights_drop_captured_graphs():
    "They read tensors that `load_weights` makes anew"
    policy = lively(SHAPES['moe'])
    engine = TorchRollout(policy.config, 1)
    engine.graphs[64, 64] = None
    engine.load_weights(hf_weights(policy), 0)
    assert not engine.graphs


def test_fp8_finds_its_tensors_on_a_gpu():
    policy = lively(SHAPES['moe'])
    with gpu.pretend():
        assert len(drawn(policy, gpu.DEVICE, requests=REQUESTS[:1], kind=Fp8Rollout)) == 1


def steps(shape, num_layers, dtype):
    "Counts of eight steps of decoding"
    policy = lively(replace(shape, num_hidden_layers=num_layers))
    engine = TorchRollout(policy.config, 4, dtype, gpu.DEVICE)
    engine.load_weights(hf_weights(policy), 0)
    engine.admit([replace(r, params=SamplingParams(50)) for r in REQUESTS[:1]])
    gpu.counts.clear()
    for _ in range(8):
        engine.step()
    return gpu.counts.copy()


# Of the mixture's kernels three choose (top k, their scores among all, softmax) and three make
# silu(gate) * up * gates; torch has no operation that does either at once. Weights of the norms of
# queries and keys differ, so they are a kernel of their own before the rotation. Fewer than 17 need
# kernels that are written for it.
@pytest.mark.parametrize('name, most', [('moe', 17), ('dense', 13)])
def test_kernels_and_waits_of_decoding(name, most):
    "Ceilings for one layer, and one wait in eight steps"
    with gpu.pretend():
        one, two = (steps(SHAPES[name], n, torch.bfloat16) for n in (1, 2))
        assert (two['kernel'] - one['kernel']) / 8 <= most
        assert one['wait'] == two['wait'] == 1


def step_of(policy, batch, device='cpu', replay='R3', **how):
    train = TorchTrain(
        deepcopy(policy).to(device), OptimConfig(micro_batch_tokens=99), 1.0, replay, **how
    )
    scored = replace(batch, **train.score(batch))

    def loss(log_probs, part, num_tokens, num_samples):
        return -(log_probs * part.advantages).sum() / num_tokens, {}

    train.update(scored, loss, lr=1e-3)
    params = list(train.policy.parameters())
    flat = [
        torch.cat([t.detach().cpu().flatten() for t in ts])
        for ts in (params, [p.grad for p in params])
    ]
    return *flat, train


@pytest.mark.parametrize('name', ['moe', 'dense', 'glm'])
@pytest.mark.parametrize('replay', ['R3', 'R2', 'off'])
def test_a_gpu_trains_as_a_cpu_does(name, replay):
    policy = lively(SHAPES[name])
    batch = collate(drawn(policy, 'cpu'))
    batch = replace(
        batch, advantages=batch.response_mask * torch.linspace(-1, 1, len(batch))[:, None]
    )
    if replay != 'R3':
        batch = replace(batch, routed_experts=None, routes_valid=None)
    weights, grad, _ = step_of(policy, batch, replay=replay)
    again, same, _ = step_of(policy, batch, replay=replay, recompute=True)
    assert again.equal(weights) and same.equal(grad)
    with gpu.pretend():
        for how in (dict(), dict(dtype=torch.bfloat16, recompute=True)):
            found, its_grad, train = step_of(policy, batch, gpu.DEVICE, replay, **how)
            off = (its_grad - grad).norm() / grad.norm()
            # a router that is free may choose another expert in bfloat16
            most = (0.02 if replay == 'R3' else 0.1) if how else 1e-5
            assert off < most, how
            assert not how or off > 1e-4  # it did compute in bfloat16
            assert all(p.dtype == torch.float32 for p in train.policy.parameters())
    # no kernel is asked for scores of all pairs of tokens: in fp32 no GPU has one for grouped heads
    assert gpu.attention
    assert not any(a['enable_gqa'] and a['dtype'] == torch.float32 for a in gpu.attention)


def test_a_wrong_device_is_noticed():
    "The oracle itself: what CUDA refuses, and what it allows"
    with gpu.pretend():
        x = torch.ones(3, device=gpu.DEVICE)
        assert (x + torch.tensor(2.0)).tolist() == [3.0] * 3 and gpu.counts['wait'] == 1
        with pytest.raises(RuntimeError, match='two devices'):
            x + torch.ones(3)
        with pytest.raises(RuntimeError, match='two devices'):
            torch.ones(3)[torch.zeros(1, dtype=torch.long, device=gpu.DEVICE)]
