"""Every layout computes what one process computes, and gives back the checkpoint that it read, bit
for bit"""

import gc
import os
import pickle
import signal
import tempfile
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file

import compassrl.train.megatron.model as mm
import compassrl.train.megatron.weights as mw
import course.ranks as ranks
from compassrl.model.layers import causal_attention, rms_norm
from compassrl.model.policy import PolicyConfig
from compassrl.model.pretrained import hf_shapes, save_pretrained
from compassrl.model.pretrained import hf_weights as policy_weights
from compassrl.train.megatron.cpu import PackedAttention, RMSNorm, megatron_calls
from compassrl.train.megatron.model import build_model, init_parallel, transformer_config
from compassrl.train.megatron.parallel import ParallelConfig, padded_vocab
from compassrl.train.megatron.weights import cuts, gather_hf_weights, load_hf
from course.ranks import _first
from tests.support.ranks import (
    DENSE,
    LAYOUTS,
    MIXED,
    RankError,
    lively,
    model_pass,
    name,
    one_process,
    packed,
    run_ranks,
    run_schedule,
    sequences,
    wrapped,
)

PARTS = sequences()
SPARSE = replace(MIXED, num_hidden_layers=2, mlp_only_layers=())


def worst(a, b):
    return max((a[k] - b[k]).abs().max().item() for k in b)


def agrees(config, n, kw, parts=PARTS, tol=3e-6):
    "Logits and gradients of `n` ranks are those of one process"
    policy = lively(config)
    compare(run_ranks(n, model_pass, ParallelConfig(**kw), policy, parts), policy, parts, tol)


def compare(results, policy, parts=PARTS, tol=3e-6):
    logits, grads = one_process(policy, parts)
    seen = {i for r, _ in results for i in r}
    assert seen == set(range(len(parts)))
    assert max((r[i] - logits[i]).abs().max().item() for r, _ in results for i in r) < 1e-5
    assert list(results[0][1]) == list(grads) and not any(g for _, g in results[1:])
    assert worst(results[0][1], grads) < tol, worst(results[0][1], grads)


# ---- ranks


def test_ranks_return_in_order():
    assert run_ranks(3, lambda x: (dist.get_rank(), dist.get_world_size(), x), 'a') == [
        (0, 3, 'a'),
        (1, 3, 'a'),
        (2, 3, 'a'),
    ]


def fails(how):
    if dist.get_rank() == 1:
        if how == 'raises':
            raise ValueError('the reason')
        if how == 'killed':
            os.kill(os.getpid(), signal.SIGKILL)
        if how == 'exits':
            os._exit(3)
    dist.all_reduce(torch.ones(1))


def children():
    return {c.pid for c in psutil.Process().children()}  # zombies too


@pytest.mark.parametrize(
    'how,says',
    [
        ('raises', 'ValueError: the reason'),
        ('killed', 'killed by signal 9'),
        ('exits', 'left without'),
    ],
)
def test_the_rank_with_which_it_began_is_named(how, says):
    before = children()
    with pytest.raises(RankError, match=f'rank 1 of 3: .*{says}'):
        run_ranks(3, fails, how)
    assert children() <= before  # nobody is left


def test_of_several_failures_the_first_is_told(tmp_path):
    def answer(rank, *value, at):
        (tmp_path / f'{rank}.pkl').write_bytes(pickle.dumps(value))
        os.utime(tmp_path / f'{rank}.pkl', (at, at))

    answer(0, False, 'Connection closed by peer', at=30)
    answer(2, False, 'the reason', at=20)
    answer(3, True, 'a result', at=10)  # fine, but could not say goodbye
    assert _first(tmp_path, [0, 2, 3]) == 2
    assert _first(tmp_path, [0, 1, 2, 3]) == 1  # killed: no answer


def test_ranks_that_hang_are_ended(tmp_path, monkeypatch):
    "The parent's clock leaps when rank 0 has answered"
    start = iter([0.0])  # its first look, before it waits

    def clock():
        return next(start, 1e4 * any(tmp_path.glob('*/0.pkl')))

    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    monkeypatch.setattr(ranks, 'time', SimpleNamespace(sleep=time.sleep, monotonic=clock))
    before = children()
    with pytest.raises(RankError, match=r'ranks \[1\] of 2 did not'):
        run_ranks(2, lambda: time.sleep(600 * dist.get_rank()))
    assert children() <= before


# ---- the stand-ins for CUDA


def test_cuda_means_cpu_only_inside():
    before = {
        k: getattr(torch.cuda, k)
        for k in ('current_device', 'Stream', 'synchronize', 'get_rng_state')
    }
    with megatron_calls(), megatron_calls():
        assert torch.zeros(2, device='cuda').cuda().device.type == 'cpu'
        assert torch.zeros(1).to('cuda').to(device='cuda').type() == 'torch.cuda.FloatTensor'
        assert torch.cuda.current_device() == torch.device('cpu')
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            assert stream == torch.cuda.current_stream()
    assert {k: getattr(torch.cuda, k) for k in before} == before
    assert torch.zeros(1).type() == 'torch.FloatTensor'
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device='cuda')


def test_packed_attention_keeps_sequences_apart():
    config = transformer_config(MIXED, ParallelConfig())
    attend, g = PackedAttention(config), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(16, heads, 16, generator=g) for heads in (4, 2, 2))
    params = packed([(torch.zeros(n), torch.zeros(n)) for n in (5, 9, 2)])[-1]
    got, start = attend(q, k, v, packed_seq_params=params), 0
    for n in (5, 9, 2):
        at = slice(start, start := start + n)
        want = causal_attention(torch.ones(1, n, dtype=torch.bool))(0, q[at], k[at], v[at])
        torch.testing.assert_close(got[at], want.flatten(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            attend(q[at, None], k[at, None], v[at, None])[:, 0],
            want.flatten(1),
            rtol=1e-5,
            atol=1e-5,
        )


def test_rms_norm_is_the_policys():
    norm = RMSNorm(transformer_config(MIXED, ParallelConfig(tp=2)), 64, eps=1e-6)
    x = torch.randn(7, 64)
    assert norm.weight.sequence_parallel
    torch.testing.assert_close(norm(x), rms_norm(x, norm.weight, 1e-6))


# ---- logits and gradients


@pytest.mark.parametrize(
    'layout', [(1, {}), (2, dict(tp=2)), (2, dict(pp=2)), (4, dict(tp=2, pp=2))], ids=name
)
def test_gradients_of_a_dense_policy(layout):
    agrees(DENSE, *layout)


@pytest.mark.parametrize(
    'layout', [(2, {}), (2, dict(tp=2)), (2, dict(pp=2)), (4, dict(tp=2, pp=2, vpp=2))], ids=name
)
def test_gradients_of_tied_embeddings(layout):
    agrees(replace(MIXED, tie_word_embeddings=True), *layout)


@pytest.mark.parametrize('layout', [(2, dict(ep=2)), (4, dict(tp=2, ep=2, etp=1))], ids=name)
def test_gradients_when_gates_do_not_sum_to_one(layout):
    agrees(replace(SPARSE, norm_topk_prob=False), *layout)
    agrees(replace(SPARSE, norm_topk_prob=False, num_experts_per_tok=1), *layout)


@pytest.mark.parametrize(
    'layout',
    [
        (1, dict(recompute='moe')),
        (2, dict(tp=2, ep=2, etp=1, recompute='full')),
        (2, dict(pp=2, recompute='full')),
    ],
    ids=name,
)
def test_gradients_with_recompute(layout):
    agrees(SPARSE, *layout)


@pytest.mark.parametrize(
    'layout', [(2, {}), (2, dict(pp=2, vpp=2)), (4, dict(pp=2, vpp=2))], ids=name
)
def test_as_few_micro_batches_as_stages(layout):  # the pipeline is all warm-up then
    agrees(MIXED, *layout, parts=PARTS[: 2 * layout[0] // layout[1].get('pp', 1)])


def test_several_sequences_in_one_micro_batch():
    def both(parallel, policy):
        init_parallel(parallel)
        pieces = build_model(MIXED, parallel, router_replay=False)
        load_hf(pieces, MIXED, policy_weights(policy))
        with megatron_calls():
            return run_schedule(wrapped(pieces), MIXED, parallel.tp, [(0, PARTS)], 24)[0]

    policy = lively(MIXED)
    want = torch.cat(one_process(policy, PARTS)[0])
    for r in run_ranks(2, both, ParallelConfig(tp=2), policy):
        torch.testing.assert_close(r, want, rtol=1e-5, atol=1e-5)


def test_transformers_computes_the_same(tmp_path):
    from transformers import AutoModelForCausalLM

    policy = lively(MIXED)
    save_pretrained(policy, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    logits, _ = run_ranks(2, model_pass, ParallelConfig(tp=2, ep=2, etp=1), policy, PARTS)[0]
    for i, (x, _) in enumerate(PARTS):
        torch.testing.assert_close(
            logits[i], reference(x[None]).logits[0].detach(), rtol=1e-4, atol=1e-5
        )


def test_bfloat16():
    logits, _ = run_ranks(
        2, model_pass, ParallelConfig(ep=2, dtype='bfloat16'), lively(SPARSE), PARTS
    )[0]
    want, _ = one_process(lively(SPARSE), PARTS)
    assert logits[0].dtype == torch.bfloat16
    assert 1e-4 < max((logits[i] - want[i]).abs().mean() for i in logits) < 0.1


def grad_norm(parallel, policy):
    init_parallel(parallel)
    pieces = build_model(MIXED, parallel, router_replay=False)
    load_hf(pieces, MIXED, policy_weights(policy))
    with megatron_calls():
        mine = [(i, [p]) for i, p in enumerate(PARTS)][
            mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()
        ]
        models = wrapped(pieces, distributed=True)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer='adam', lr=1e-3, use_distributed_optimizer=True), models
        )
        run_schedule(models, MIXED, parallel.tp, mine, 24)
        return optimizer.step()[1]


@pytest.mark.parametrize(
    'layout',
    [
        (1, {}),
        (2, {}),
        (2, dict(tp=2)),
        (2, dict(tp=2, etp=1)),
        (2, dict(etp=2)),
        (4, dict(tp=2, ep=2, etp=1)),
        (4, dict(tp=2, pp=2)),
    ],
    ids=name,
)
def test_gradient_norm_counts_every_parameter_once(layout):  # replicas once, parts all
    _, grads = one_process(lively(MIXED), PARTS)
    want = sum(g.double().square().sum() for g in grads.values()).sqrt().item()
    for got in run_ranks(layout[0], grad_norm, ParallelConfig(**layout[1]), lively(MIXED)):
        assert got == pytest.approx(want, rel=1e-5)


# ---- weights in and out


def there_and_back(parallel, *policies):
    "Of each policy, a config and where its weights are: the weights, and how many this rank has"
    init_parallel(parallel)
    return [one_there_and_back(parallel, *policy) for policy in policies]


def one_there_and_back(parallel, config, source):
    pieces = build_model(config, parallel, router_replay=False)
    with torch.no_grad():
        for m in pieces:
            for p in m.parameters():
                p.fill_(torch.nan)
    load_hf(pieces, config, source)
    assert not any(p.isnan().any() for m in pieces for p in m.parameters())  # padding too
    return {k: v.clone() for k, v in gather_hf_weights(pieces, config)}, sum(
        p.numel() for m in pieces for p in m.parameters()
    )


def pass_and_back(parallel, policy, *policies):
    "A pass, and then `there_and_back` by the same ranks"
    found = model_pass(parallel, policy, PARTS)
    return found, [one_there_and_back(parallel, *p) for p in policies]


@pytest.mark.parametrize('layout', LAYOUTS, ids=name)
def test_of_every_layout_gradients_are_right_and_a_round_trip_is_bit_exact(layout, tmp_path):
    n, kw = layout
    configs = [MIXED, replace(MIXED, tie_word_embeddings=True)]
    paths = [tmp_path / str(i) for i, _ in enumerate(configs)]
    for config, path in zip(configs, paths):
        save_pretrained(lively(config), path, max_shard_bytes=100_000)
    policy, parallel = lively(MIXED), ParallelConfig(**kw)
    ranks = run_ranks(n, pass_and_back, parallel, policy, *zip(configs, paths))
    compare([found for found, _ in ranks], policy)
    for config, (out, *others) in zip(configs, zip(*(back for _, back in ranks))):
        want = dict(policy_weights(lively(config)))
        assert list(out[0]) == list(want) == list(hf_shapes(config)) and all(
            torch.equal(out[0][k], want[k]) for k in want
        )
        assert not any(o for o, _ in others)


def test_round_trip_of_a_dense_policy_from_tensors_in_any_order():
    policy = lively(DENSE)
    weights = list(policy_weights(policy))[::-1]
    out = run_ranks(2, there_and_back, ParallelConfig(tp=2), (DENSE, weights))[0][0][0]
    assert all(torch.equal(out[k], v) for k, v in weights)


class Counted:  # a slice of safetensors that notes how much is read
    read = 0

    def __init__(self, s):
        self.s = s

    def get_shape(self):
        return self.s.get_shape()

    def __getitem__(self, at):
        t = self.s[at]
        Counted.read += t.numel()
        return t


def elements_read(parallel, config, folder):
    init_parallel(parallel)
    real = mw.read_shards
    mw.read_shards = lambda folder, whole: ((k, Counted(s)) for k, s in real(folder, whole))
    pieces = build_model(config, parallel, router_replay=False)
    load_hf(pieces, config, folder)
    held = {id(c.param): c.param.numel() for c in cuts(pieces, config)}
    return (
        Counted.read,
        sum(held.values()),
        sum(v.numel() for v in (c.view(c.param) for c in cuts(pieces, config))),
    )


@pytest.mark.parametrize(
    'layout', [(2, dict(ep=2)), (4, dict(tp=2, pp=2)), (4, dict(tp=2, ep=4, etp=1))], ids=name
)
def test_a_rank_reads_its_part_alone(layout, tmp_path):
    save_pretrained(lively(MIXED), tmp_path)
    total = sum(p.numel() for p in lively(MIXED).parameters())
    for read, held, real in run_ranks(
        layout[0], elements_read, ParallelConfig(**layout[1]), MIXED, tmp_path
    ):
        assert read == real <= held < 0.7 * total  # held: with rows of padding


def alive_at_once(parallel, policy):
    init_parallel(parallel)
    pieces = build_model(MIXED, parallel, router_replay=False)
    refs, most = [], [0, 0]

    def note(which, t):
        refs.append(weakref.ref(t))
        most[which] = max(most[which], sum(r() is not None for r in refs))

    def stream():
        for k, v in policy_weights(policy):
            t = v.clone()
            note(0, t)
            yield k, t
            del t

    load_hf(pieces, MIXED, stream())
    gc.collect()
    refs.clear()
    for _, v in gather_hf_weights(pieces, MIXED):
        note(1, v)
    return most


def test_one_tensor_at_a_time():  # in and out; a second one while the next is made
    into, out = run_ranks(2, alive_at_once, ParallelConfig(tp=2), lively(MIXED))[0]
    assert 1 <= into <= 2 and 1 <= out <= 2


def test_shapes_are_those_of_the_policy():
    for config in (MIXED, DENSE, replace(MIXED, tie_word_embeddings=True)):
        want = {k: tuple(v.shape) for k, v in policy_weights(lively(config))}
        assert hf_shapes(config) == want and list(hf_shapes(config)) == list(want)
    big = PolicyConfig(
        vocab_size=151_936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        head_dim=128,
        num_key_value_heads=4,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    )
    assert (
        sum(torch.Size(s).numel() for s in hf_shapes(big).values()) == 30_532_122_624
    )  # and no memory


# ---- refusals

BAD = dict(
    unknown=(
        lambda w: {**w, 'model.layers.9.mlp.gate.weight': w['model.norm.weight']},
        'is not a weight of this policy',
    ),
    shape=(
        lambda w: {**w, 'model.norm.weight': w['model.norm.weight'][:5]},
        'has shape .5., this policy needs .64.',
    ),
    missing=(
        lambda w: {k: v for k, v in w.items() if k != 'model.norm.weight'},
        '1 weights are missing, first model.norm.weight',
    ),
)


def refuses(weights, says):
    init_parallel(ParallelConfig())
    pieces = build_model(MIXED, ParallelConfig(), router_replay=False)
    with pytest.raises(ValueError, match=says):
        load_hf(pieces, MIXED, weights)


@pytest.mark.parametrize('bad', BAD)
def test_weights_that_do_not_fit_are_refused(bad, tmp_path):
    change, says = BAD[bad]
    weights = change({k: v.clone() for k, v in policy_weights(lively(MIXED))})
    run_ranks(1, refuses, list(weights.items()), says)
    save_file({k: v.clone() for k, v in weights.items()}, tmp_path / 'model.safetensors')
    run_ranks(1, refuses, tmp_path, says)


def test_a_weight_that_comes_twice_is_refused():
    weights = list(policy_weights(lively(MIXED)))
    run_ranks(1, refuses, [*weights, weights[3]], 'came twice')


def test_a_torn_file_is_named(tmp_path):
    save_pretrained(lively(MIXED), tmp_path)
    whole = (tmp_path / 'model.safetensors').read_bytes()
    (tmp_path / 'model.safetensors').write_bytes(whole[: len(whole) // 2])
    run_ranks(1, refuses, tmp_path, 'model.safetensors cannot be read')
    run_ranks(1, refuses, tmp_path / 'nowhere', 'model.safetensors does not exist')


def test_a_gate_that_cannot_learn_is_refused():
    with pytest.raises(ValueError, match='num_experts_per_tok=1 with norm_topk_prob=True'):
        transformer_config(replace(SPARSE, num_experts_per_tok=1), ParallelConfig())


@pytest.mark.parametrize(
    'n,kw,says',
    [
        (3, dict(tp=2), '3 ranks are not a multiple'),
        (1, dict(ep=3), 'ranks are not a multiple'),
        (4, dict(tp=4), 'tp=4 does not divide num_key_value_heads=2'),
        (3, dict(pp=3), 'does not divide num_hidden_layers=4'),
    ],
)
def test_layouts_that_do_not_fit_are_refused(n, kw, says):
    def build(parallel):
        with pytest.raises(ValueError, match=says):
            build_model(MIXED, parallel)

    run_ranks(n, build, ParallelConfig(**kw))


def test_fused_routers_and_dropped_tokens_are_off():
    config = transformer_config(MIXED, ParallelConfig())
    assert (
        config.moe_enable_routing_replay
        and not config.moe_router_fusion
        and config.moe_expert_capacity_factor is None
    )
    assert padded_vocab(99, 2) == 100 and padded_vocab(99, 1) == 99


# ---- what Transformer Engine is asked for, where it is installed


@pytest.mark.parametrize(
    'recipe, fp8',
    [('', None), ('blockwise', 'e4m3'), ('tensorwise', 'hybrid'), ('delayed', 'hybrid')],
)
def test_settings_for_transformer_engine(monkeypatch, recipe, fp8):
    """Grouped products, fused rotation and norms, FP8 by recipe; routers stay apart, so that they
    can be told what to choose"""
    monkeypatch.setattr(mm, 'TransformerConfig', SimpleNamespace)
    monkeypatch.setattr(mm, 'has_te', lambda: True)
    c = transformer_config(MIXED, ParallelConfig(cp=2, fp8_recipe=recipe, dtype='bfloat16'))
    assert (
        c.moe_grouped_gemm and c.moe_permute_fusion and c.apply_rope_fusion and c.persist_layer_norm
    )
    assert not c.moe_router_fusion and c.moe_enable_routing_replay and c.moe_router_dtype == 'fp32'
    assert (
        c.context_parallel_size == 2
        and c.bf16
        and getattr(c, 'fp8', None) == fp8
        and getattr(c, 'fp8_recipe', '') == recipe
    )
    known = vars(TransformerConfig)['__dataclass_fields__']
    assert set(vars(c)) <= set(known)
    monkeypatch.setattr(mm, 'has_te', lambda: False)
    if recipe:
        with pytest.raises(
            ValueError, match=f"fp8_recipe='{recipe}' needs a GPU and Transformer Engine"
        ):
            transformer_config(MIXED, ParallelConfig(fp8_recipe=recipe))


@pytest.mark.parametrize(
    'theirs, ours',
    [
        ('self_attention.linear_qkv.layer_norm_weight', ['input_layernorm']),
        ('mlp.linear_fc1.layer_norm_weight', ['post_attention_layernorm']),
        ('mlp.experts.linear_fc1.weight3', ['mlp.experts.7.gate_proj', 'mlp.experts.7.up_proj']),
        ('mlp.experts.linear_fc2.weight0', ['mlp.experts.4.down_proj']),
    ],
)
def test_names_of_transformer_engine(theirs, ours):
    "Norms inside the layers that follow them, experts side by side in one module"
    layers = [SimpleNamespace(layer_number=n) for n in (3, 4)]
    model = SimpleNamespace(
        decoder=SimpleNamespace(layers=layers), share_embeddings_and_output_weights=False
    )
    assert mw._names(model, f'decoder.layers.1.{theirs}', 4)[0] == [
        f'model.layers.3.{n}.weight' for n in ours
    ]
