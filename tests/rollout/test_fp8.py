"""FP8: the ruler against PyTorch's cast, blocks against loops, the engine against a plain forward
pass, the kernel's contract, mutants"""

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from compassrl.algo.engine_gap import discrepancy
from compassrl.algo.ratios import tis_weights
from compassrl.model.policy import MoE, Policy, PolicyConfig
from compassrl.model.pretrained import hf_weights
from compassrl.records import Request, SamplingParams, collate, derive_seed
from compassrl.rollout import fp8
from compassrl.rollout.fp8 import (
    Fp8Rollout,
    dequantise,
    e4m3,
    fp8_weights,
    quantise,
    row_block,
    scaled_mm,
    takes_fp8,
    weight_block,
)
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.train.torch_train import OptimConfig, TorchTrain
from course import fp8_codes
from course.fp8_codes import decode_e4m3, encode_e4m3
from tests.support.faults import noticed, planted
from tests.support.loss_laws import random

# several blocks per matrix, none of them whole; one dense layer
CONFIG = PolicyConfig(
    vocab_size=48,
    hidden_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=36,
    intermediate_size=96,
    moe_intermediate_size=136,
    num_experts=6,
    num_experts_per_tok=2,
    mlp_only_layers=(1,),
    max_position_embeddings=64,
)


def lively(seed=0, config=CONFIG):
    "Random weights that have opinions; norms that are not all 1"
    p, g = Policy(config, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for w in p.parameters():
            w.mul_(3) if w.dim() > 1 else w.add_(0.3 * torch.randn(w.shape, generator=g))
    return p


def requests(num=8, T=10, seed=0):
    ids = torch.randint(2, 48, (num, 7), generator=torch.Generator().manual_seed(seed)).tolist()
    return [
        Request(f'p{i:02}', tuple(p[: 4 + i % 4]), 0, derive_seed(seed, i), SamplingParams(T))
        for i, p in enumerate(ids)
    ]


def loaded(engine, policy=None, version=0):
    engine.load_weights(hf_weights(policy or lively()), version)
    return engine


def sampled(engine, rs=None):
    return sorted(engine.generate(rs or requests()), key=lambda s: s.prompt_id)


# ---- the format
# ----------------------------------------------------------------------------------------------

CODES = torch.arange(256, dtype=torch.uint8)


def same(a, b):
    return torch.equal(a.nan_to_num(999), b.nan_to_num(999)) and torch.equal(
        a.signbit(), b.signbit()
    )


def law_codes(m):
    assert same(m.decode_e4m3(CODES), CODES.view(e4m3).float())
    assert torch.equal(m.encode_e4m3(CODES.view(e4m3).float()), CODES)


def law_million(m):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(10**6, generator=g) * 2.0 ** torch.randint(-14, 10, (10**6,), generator=g)
    cast = x.clamp(-448, 448).to(e4m3)
    assert torch.equal(m.encode_e4m3(x), cast.view(torch.uint8))
    assert torch.equal(m.decode_e4m3(m.encode_e4m3(x)), cast.float())


def law_bfloat16(m):
    "All 65,536 of them, and the midpoints between codes with their neighbours"
    every = (
        torch.arange(-(2**15), 2**15, dtype=torch.int32)
        .to(torch.int16)
        .view(torch.bfloat16)
        .float()
    )
    numbers = CODES[:127].view(e4m3).float()
    middle = (numbers[1:] + numbers[:-1]) / 2
    middle = torch.cat(
        [middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(999.0))]
    )
    for x in (every, middle, -middle):
        want = x.clamp(-448, 448).to(e4m3).view(torch.uint8)
        nan = x.isnan()
        assert (
            torch.equal(m.encode_e4m3(x)[~nan], want[~nan])
            and (m.encode_e4m3(x)[nan] & 127 == 127).all()
        )


RULER = [law_codes, law_million, law_bfloat16]


@pytest.mark.parametrize('law', RULER)
def test_ruler(law):
    law(fp8_codes)


@pytest.mark.parametrize(
    'old,new',
    [
        ('.round().int()', '.add(.5).floor().int()'),  # ties away from zero
        ('clamp(min=2.**-6)', 'clamp(min=2.**-7)'),  # the steps get finer below 2^-6
        ('abs().clamp(max=largest)', 'abs().clamp(max=480.)'),
        ('mantissa/8*2.**-6', 'mantissa/8*2.**-7'),
        ('+128*x.signbit()', '+128*(x<0)'),  # -0 loses its sign
        ('code.masked_fill(x.isnan(), 127)', 'code'),
    ],
)
def test_planted_in_the_ruler(old, new):
    assert noticed(RULER, planted(fp8_codes, old, new))


# ---- blocks
# --------------------------------------------------------------------------------------------------


def looped(x, block):
    "Block by block, by the ruler"
    out = torch.zeros_like(x, dtype=torch.float)
    for i in range(0, x.shape[-2], block[0]):
        for j in range(0, x.shape[-1], block[1]):
            at = (slice(i, i + block[0]), slice(j, j + block[1]))
            b = x[at].float()
            s = b.abs().max() / 448
            if s == 0:
                s = torch.tensor(1.0)
            out[at] = decode_e4m3(encode_e4m3(b / s)) * s
    return out


@random
@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from([(128, 128), (1, 128), (4, 8)]),
    st.integers(0, 9),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_blocks_against_loops(rows, columns, block, seed, dtype):
    if block == (4, 8):
        rows, columns = rows // 8 + 1, columns // 8 + 1
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g)
    x = (x * 2.0 ** torch.randint(-9, 6, (rows, 1), generator=g)).to(dtype)
    codes, scales = quantise(x, block)
    assert codes.dtype == e4m3 and codes.shape == x.shape and scales.dtype == torch.float
    assert list(scales.shape) == [-(-rows // block[0]), -(-columns // block[1])]
    assert torch.equal(dequantise(codes, scales, block), looped(x, block))


def law_loops(m):
    x = torch.randn(200, 260, generator=torch.Generator().manual_seed(1))
    for b in (weight_block, row_block):
        assert torch.equal(m.dequantise(*m.quantise(x, b), b), looped(x, b))


def law_experts(m):
    x = torch.randn(3, 130, 40, generator=torch.Generator().manual_seed(1))
    got = m.dequantise(*m.quantise(x))
    assert torch.equal(got, torch.stack([looped(w, weight_block) for w in x]))


def law_edges(m):
    def through(x):
        return m.dequantise(*m.quantise(x))

    assert not through(torch.zeros(130, 130)).any() and not through(torch.full((2, 2), 1e-45)).any()
    # the scale has no bits left
    assert through(torch.tensor([[2e-42, -4e-43, 0.0]])).isfinite().all()
    assert through(torch.zeros(0, 5)).shape == (0, 5)
    w = torch.randn(256, 256, generator=torch.Generator().manual_seed(2))
    beside = through(w)[:128, 128:]
    for bad in (math.inf, -math.inf, math.nan):
        v = w.clone()
        v[5, 5] = bad
        assert through(v)[:128, :128].isnan().all() and torch.equal(through(v)[:128, 128:], beside)
    v = w.clone()
    v[5, 5] = -1e5
    assert abs(through(v)[5, 5] + 1e5) < 0.1 and torch.equal(through(v)[:128, 128:], beside)


def law_idempotent(m):
    x = torch.randn(140, 150, generator=torch.Generator().manual_seed(3))
    once = m.dequantise(*m.quantise(x))
    torch.testing.assert_close(m.dequantise(*m.quantise(once)), once, rtol=1e-6, atol=0)
    assert (
        (once - x).abs() <= torch.maximum(x.abs() / 16, x.abs().max() / 448 * 2**-10) * 1.001
    ).all()


BLOCKS = [law_loops, law_experts, law_edges, law_idempotent]


@pytest.mark.parametrize('law', BLOCKS)
def test_blocks(law):
    law(fp8)


@pytest.mark.parametrize(
    'old,new',
    [
        ('scales.masked_fill(scales==0, 1)', 'scales'),
        ('b.abs().amax((-3, -1)', 'b.amax((-3, -1)'),
        ('clamp(-largest, largest)', 'clamp(-240, 240)'),
        (
            '(b/scales).clamp(-largest, largest).to(e4m3)',
            '(b/scales).clamp(-largest, largest).to(torch.float8_e5m2).to(e4m3)',
        ),
        (
            'scales[...,:,None,:,None]',
            'scales.mT[...,:,None,:,None].expand(*scales.shape[:-2], -1, 1, -1, 1)',
        ),
        (
            'F.pad(x, (0, -columns % width, 0, -rows % height))',
            'F.pad(x, (0, -columns % width, 0, -rows % height), value=9.)',
        ),
        ('max(1, min(b, n))', 'min(b, n)'),
    ],
)
def test_planted_in_the_blocks(old, new):
    assert noticed(BLOCKS, planted(fp8, old, new), RuntimeError, ZeroDivisionError)


def test_products():
    """Quantised by quantised in fp32, in pieces of 128 with both scales, against fp64 of the same
    numbers and of the exact"""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(33, 300, generator=g), torch.randn(200, 300, generator=g) / 300**0.5
    (xc, xs), (wc, ws) = quantise(x, row_block), quantise(w)
    xd, wd = dequantise(xc, xs, row_block), dequantise(wc, ws)
    want = xd.double() @ wd.double().T
    pieces = sum(
        (xc[:, k : k + 128].double() @ wc[:, k : k + 128].double().T)
        * xs[:, k // 128, None].double()
        * ws[:, k // 128].double().repeat_interleave(128)[:200]
        for k in range(0, 300, 128)
    )
    torch.testing.assert_close(pieces, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close((xd @ wd.T).double(), want, rtol=1e-4, atol=1e-5)
    exact = x.double() @ w.double().T
    error = ((want - exact).norm() / exact.norm()).item()
    assert 0.03 < error < 0.045, error


# ---- which tensors
# -------------------------------------------------------------------------------------------


def test_names():
    kept = {n.split('layers.')[-1] for n, _ in hf_weights(lively()) if not takes_fp8(n)}
    assert {n.split('.', 1)[-1] for n in kept if n[0].isdigit()} == {
        'input_layernorm.weight',
        'mlp.gate.weight',
        'post_attention_layernorm.weight',
        'self_attn.q_norm.weight',
        'self_attn.k_norm.weight',
    }
    assert {n for n in kept if not n[0].isdigit()} == {
        'model.embed_tokens.weight',
        'model.norm.weight',
        'lm_head.weight',
    }
    assert not takes_fp8('model.layers.0.mlp.shared_expert_gate.weight')


def test_stream():
    "One tensor at a time; dtypes and shapes stay; what is kept is the same object"
    pulled = []

    def stream():
        for n, w in hf_weights(lively()):
            pulled.append(n)
            yield n, w.bfloat16()

    out = fp8_weights(stream())
    for i, (n, w) in enumerate(out):
        assert len(pulled) == i + 1 and pulled[-1] == n and w.dtype == torch.bfloat16
    for (n, a), (m, b) in zip(hf_weights(lively()), fp8_weights(hf_weights(lively()))):
        assert n == m and (
            torch.equal(b, looped(a, weight_block)) if takes_fp8(n) else torch.equal(a, b)
        ), n
    for bad in (math.inf, math.nan):
        with pytest.raises(ValueError, match='up_proj.weight has values that are not finite'):
            list(fp8_weights([('x.up_proj.weight', torch.tensor([[1.0, bad]]))]))
    list(fp8_weights([('norm.weight', torch.tensor([math.inf]))]))  # not its business


# ---- the engine
# ----------------------------------------------------------------------------------------------


def in_blocks(x, block):
    return looped(x, block).double()


@torch.no_grad()
def plain_forward(policy, ids, weights=True, activations=True, kv_cache=True):
    """One sequence, the whole of it at once, loops over heads and experts: log-probs [T, V] and
    experts [T, L, K]"""
    c, p, routes = policy.config, policy.double(), []

    def wq(w):
        return in_blocks(w, weight_block) if weights else w

    def xq(x):
        return in_blocks(x, row_block) if activations else x

    def kvq(x):
        return (
            torch.stack([in_blocks(v, (1, c.head_dim)) for v in x.unbind(1)], 1) if kv_cache else x
        )

    def unit(x):
        return x / (x.pow(2).sum(-1, keepdim=True) + x.shape[-1] * c.rms_norm_eps).sqrt()

    def norm(x, w):
        return unit(x) * x.shape[-1] ** 0.5 * w

    H, KV, d, T = (c.num_attention_heads, c.num_key_value_heads, c.head_dim, len(ids))

    def rotate(x):
        return x * p.cos[:T, None] + x.roll(d // 2, -1) * p.sin[:T, None]

    x = p.embed[torch.tensor(ids)]
    for b in p.blocks:
        q, k, v = (
            t.view(T, -1, d)
            for t in (
                xq(norm(x, b.attn_norm)) @ wq(w).T for w in b.qkv.split([H * d, KV * d, KV * d])
            )
        )
        q, k = rotate(norm(q, b.q_norm)), kvq(rotate(norm(k, b.k_norm)))
        v, heads = kvq(v), []
        for h in range(H):
            s = q[:, h] @ k[:, h * KV // H].T / d**0.5
            heads.append(
                s.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
                @ v[:, h * KV // H]
            )
        x = x + xq(torch.cat(heads, -1)) @ wq(b.out).T
        u, m = norm(x, b.mlp_norm), b.mlp

        def mlp(rows, gate_up, down, scale=1.0):
            g, up = (xq(rows) @ wq(w).T for w in gate_up.chunk(2))
            return xq(F.silu(g) * up * scale) @ down.T

        if not isinstance(m, MoE):
            x = x + mlp(u, m.gate_up, wq(m.down))
            routes.append(torch.zeros(T, c.num_experts_per_tok, dtype=torch.long))
            continue
        chosen, ids_ = (u @ m.router.T).topk(c.num_experts_per_tok, -1)
        y = torch.zeros_like(x)
        for t in range(T):
            for gate, e in zip(chosen[t].softmax(-1), ids_[t]):
                y[t] += mlp(u[t : t + 1], m.gate_up[e], wq(m.down[e]), gate)[0]
        x = x + y
        routes.append(ids_)
    return (norm(x, p.norm) @ p.head.T).log_softmax(-1), torch.stack(routes, 1)


CASES = [
    dict(),
    dict(kv_cache=True),
    dict(activations=False),
    dict(weights=False),
    dict(weights=False, activations=False, kv_cache=True),
]


@pytest.mark.parametrize(
    'case', CASES, ids=lambda c: '+'.join(f'{k}={v}' for k, v in c.items()) or 'default'
)
def test_engine_against_a_plain_forward_pass(case):
    "float64 everywhere else, so that every number to be rounded is the same on both sides"
    for s in sampled(loaded(Fp8Rollout(CONFIG, 8, torch.float64, **case)), requests(2, 6)):
        log_probs, routes = plain_forward(
            lively(), s.prompt_ids + s.response_ids, **dict(kv_cache=False) | case
        )
        at = torch.arange(len(s.prompt_ids), len(s.prompt_ids) + len(s.response_ids))
        got = log_probs[at - 1, torch.tensor(s.response_ids)]
        torch.testing.assert_close(s.rollout_log_probs.double(), got, rtol=1e-5, atol=1e-6)
        assert (s.routed_experts.long().sort(-1)[0] == routes[:-1].sort(-1)[0]).all()


def test_it_quantises_what_goes_to_vllm():
    "On a CPU vLLM gets weights that went through `fp8_weights`, matrix by matrix"
    got = sampled(loaded(Fp8Rollout(CONFIG, 8, torch.float64, activations=False)))
    other = TorchRollout(CONFIG, 8, torch.float64)
    other.load_weights(fp8_weights((n, w.double()) for n, w in hf_weights(lively())), 0)
    for a, b in zip(got, sampled(other), strict=True):
        assert a.response_ids == b.response_ids
        torch.testing.assert_close(a.rollout_log_probs, b.rollout_log_probs, rtol=0, atol=1e-5)


def test_switched_off_it_is_its_parent():
    a = sampled(loaded(TorchRollout(CONFIG, 8)))
    b = sampled(loaded(Fp8Rollout(CONFIG, 8, weights=False, activations=False)))
    for x, y in zip(a, b):
        assert x.response_ids == y.response_ids and torch.equal(
            x.rollout_log_probs, y.rollout_log_probs
        )


def test_seeds_and_company():
    "Alone, in a batch, in any order: each row has its own scales"
    e = loaded(Fp8Rollout(CONFIG, 8, torch.float64, kv_cache=True))
    whole = {s.prompt_id: s for s in sampled(e)}
    for r in requests()[::3]:
        s = next(e.generate([r]))
        assert s.response_ids == whole[r.prompt_id].response_ids
        torch.testing.assert_close(s.rollout_log_probs, whole[r.prompt_id].rollout_log_probs)
    assert [s.response_ids for s in sampled(e, requests()[::-1])] == [
        s.response_ids for s in whole.values()
    ]


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_requantised_at_every_sync(dtype):
    """What it samples after two syncs is what a new engine samples; the bfloat16 engine keeps the
    scales in fp32"""
    e = loaded(Fp8Rollout(CONFIG, 8, dtype))
    first = sampled(e)
    again, new = (
        sampled(loaded(e, lively(1), 1)),
        sampled(loaded(Fp8Rollout(CONFIG, 8, dtype), lively(1), 1)),
    )
    for a, b in zip(again, new):
        assert a.response_ids == b.response_ids and torch.equal(
            a.rollout_log_probs, b.rollout_log_probs
        )
    assert [s.response_ids for s in first] != [s.response_ids for s in again] and again[
        0
    ].weight_version == 1
    codes, scales = quantise(lively(1).blocks[0].out)
    assert (
        e.layers[0].out.dtype == torch.float
        and torch.equal(e.layers[0].out.mT, dequantise(codes, scales))
        or dtype != torch.float
    )
    for a, b in zip(sampled(loaded(e, lively(), 2)), first):
        assert a.response_ids == b.response_ids


def test_weights_that_are_not_finite():
    e, bad = loaded(Fp8Rollout(CONFIG, 8)), lively()
    with torch.no_grad():
        bad.blocks[2].mlp.down[3, 4, 5] = math.inf
    with pytest.raises(ValueError, match='layer 2: down has values that are not finite'):
        loaded(e, bad, 1)
    with pytest.raises(RuntimeError, match='has no weights'):
        next(e.generate(requests()))
    assert len(sampled(loaded(e, version=2))) == 8


@pytest.mark.parametrize(
    'old,new',
    [
        ("('qkv', 'out', 'gate_up',", "('qkv', 'gate_up',"),
        ('x = dequantise(*quantise(x, row_block), row_block)', 'pass'),
        ('vector = (1, kv.shape[-1])', 'vector = kv.shape[-2:]'),
        ('.copy_(dequantise(*coded))', '.copy_(1.01 * dequantise(*coded))'),
    ],
)
def test_planted_in_the_engine(old, new):
    mutant = planted(fp8, old, new)
    s = sampled(loaded(mutant.Fp8Rollout(CONFIG, 8, torch.float64, kv_cache=True)), requests(1))[0]
    log_probs, _ = plain_forward(lively(), s.prompt_ids + s.response_ids)
    at = torch.arange(len(s.prompt_ids), len(s.prompt_ids) + len(s.response_ids))
    assert (
        s.rollout_log_probs - log_probs[at - 1, torch.tensor(s.response_ids)]
    ).abs().max() > 1e-4


def measured(samples, policy, mode):
    b = collate(samples)
    b = replace(b, **TorchTrain(policy, OptimConfig(), replay=mode).score(b))
    return discrepancy(b), tis_weights(
        b.old_log_probs, b.rollout_log_probs, b.response_mask, cap=2.0
    )


def test_mismatch():
    """FP8 is an error of another size than float32's; replay takes a part of it away; TIS bounds
    the weights"""
    config = replace(CONFIG, num_hidden_layers=4, num_experts=16, mlp_only_layers=())
    policy, gaps = lively(config=config), {}
    for name, kw in dict(plain=None, fp8={}, fp8_kv=dict(kv_cache=True)).items():
        e = loaded(TorchRollout(config, 64) if kw is None else Fp8Rollout(config, 64, **kw), policy)
        samples = sampled(e, requests(64, 24))
        for mode in ('off', 'R3'):
            gaps[name, mode], (w, hit) = measured(samples, policy, mode)
        assert (w <= 2).all() and bool(hit.any()) == bool((w == 2).any())
    assert gaps['plain', 'off']['rollout_train_gap'] < 1e-5
    for name in ('fp8', 'fp8_kv'):
        for k in ('rollout_train_gap', 'rollout_train_k3'):
            assert gaps[name, 'R3'][k] < 0.9 * gaps[name, 'off'][k]
        assert (
            0.005 < gaps[name, 'R3']['rollout_train_gap']
            and gaps[name, 'R3']['tokens_agree_frac'] < 1
        )


# ---- the kernel, as PyTorch documents it (not run on a GPU)
# --------------------------------------------------


def contract(a, b, scale_a, scale_b, out_dtype):
    "What `torch._scaled_mm` demands for 1x128 by 128x128 scales, and what it computes"
    (n, k), m = a.shape, b.shape[1]
    assert a.dtype == b.dtype == e4m3 and scale_a.dtype == scale_b.dtype == torch.float
    assert a.stride() == (k, 1) and b.stride() == (1, k), 'row by column'
    assert k % 16 == 0 and m % 16 == 0 and n % 4 == 0
    pieces = -(-k // 128)

    def laid_out(scale, sizes, strides):  # the stride of a single row or column is not looked at
        return scale.shape == sizes and all(
            size == 1 or a == b for size, a, b in zip(sizes, scale.stride(), strides)
        )

    assert laid_out(scale_a, (n, pieces), (1, n)), scale_a.stride()
    assert laid_out(scale_b, (pieces, m // 128), (1, -(-pieces // 4) * 4)), scale_b.stride()
    y = dequantise(a, scale_a, row_block) @ dequantise(b.T, scale_b.T).T
    return y.to(out_dtype)


@pytest.mark.parametrize('n,k,m', [(5, 512, 256), (8, 384, 128), (1, 128, 384)])
def test_kernel_contract(n, k, m):
    g = torch.Generator().manual_seed(n)
    x, w = torch.randn(n, k, generator=g), torch.randn(m, k, generator=g)
    codes, scales = quantise(w)
    with patch.object(torch, '_scaled_mm', contract):
        y = scaled_mm(x, codes, scales)
    want = dequantise(*quantise(x, row_block), row_block) @ dequantise(codes, scales).T
    assert y.dtype == x.dtype and torch.equal(y, want.bfloat16().float())


def test_engine_with_the_kernel():
    """Where sizes are multiples of 128 the codes themselves are multiplied, elsewhere what they
    stand for"""
    config = replace(
        CONFIG, hidden_size=128, head_dim=64, moe_intermediate_size=128, intermediate_size=96
    )
    calls = []

    def kernel(*args, **kw):
        calls.append(args[0].shape)
        return contract(*args, **kw).float()

    e = Fp8Rollout(config, 8)
    e.has_kernel = True
    policy = lively(config=config)
    with patch.object(
        torch,
        '_scaled_mm',
        lambda a, b, sa, sb, out_dtype: kernel(a, b, sa, sb, out_dtype=torch.float),
    ):
        got = sampled(loaded(e, policy))
    want = sampled(loaded(Fp8Rollout(config, 8), policy))
    assert [
        isinstance(e.layers[1].__dict__[k], tuple) for k in ('qkv', 'out', 'gate_up', 'down')
    ] == [True, True, False, False]
    # the order of sums differs
    assert calls and sum(a.response_ids == b.response_ids for a, b in zip(got, want)) >= 6
    gap = [(a.rollout_log_probs[0] - b.rollout_log_probs[0]).abs() for a, b in zip(got, want)]
    assert max(gap) < 0.02 and min(gap) < 1e-5


def test_block_scales_equal_those_of_transformer_engine():
    pytest.importorskip('transformer_engine.pytorch', reason='Transformer Engine is not installed')
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip('needs a Hopper GPU')
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    w = torch.randn(384, 512, generator=torch.Generator().manual_seed(0)).cuda()
    w[:128, :128] = 0
    for dim, block in ((2, weight_block), (1, row_block)):
        theirs = Float8BlockQuantizer(
            fp8_dtype=tex.DType.kFloat8E4M3,
            rowwise=True,
            columnwise=False,
            amax_epsilon=0.0,
            force_pow_2_scales=False,
            block_scaling_dim=dim,
        )(w)
        codes, scales = quantise(w, block)
        found = theirs._rowwise_scale_inv if dim == 2 else theirs._rowwise_scale_inv.T
        found = found[: scales.shape[0], : scales.shape[1]]
        torch.testing.assert_close(found, scales, rtol=3e-7, atol=0)  # 1/(448/max) against max/448
        torch.testing.assert_close(
            theirs.dequantize().float(), dequantise(codes, scales, block), rtol=0.07, atol=1e-3
        )
        assert (theirs._rowwise_data.view(e4m3).float() == codes.float()).float().mean() > 0.999
