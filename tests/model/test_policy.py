"""The policy against transformers' Qwen3-MoE: logits, router choices, gradients, greedy text,
checkpoints"""

import json
import random
import re
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from compassrl.data.tokenizer import build_tokenizer, save_tokenizer
from compassrl.model.hf_config import read_config, write_config
from compassrl.model.layers import (
    combine_experts,
    dispatch,
    gated_swiglu,
    grouped_linear,
    rms_norm,
    rope_table,
    rotate,
    route_dtype,
)
from compassrl.model.policy import MoE, Policy, PolicyConfig
from compassrl.model.pretrained import (
    from_pretrained,
    hf_slices,
    hf_weights,
    load_hf_weights,
    save_pretrained,
)
from compassrl.records import Request, SamplingParams
from compassrl.rollout.cached_layers import add_experts
from compassrl.rollout.torch_rollout import TorchRollout
from course.gradients import hf_gradients

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()


def random_config(seed):
    "A different mix of everything that a config can say"
    r, turn = random.Random(seed), lambda *options, every=1: options[seed // every % len(options)]
    kv = r.choice([1, 2])
    return PolicyConfig(
        vocab_size=r.choice([50, 99]),
        hidden_size=r.choice([32, 48]),
        num_hidden_layers=r.choice([2, 3]),
        num_attention_heads=kv * r.choice([1, 2, 3]),
        num_key_value_heads=kv,
        head_dim=r.choice([8, 16]),
        intermediate_size=r.choice([24, 40]),
        moe_intermediate_size=r.choice([16, 20]),
        num_experts=r.choice([3, 4, 8]),
        num_experts_per_tok=turn(1, 2, 3),
        norm_topk_prob=turn(True, False),
        decoder_sparse_step=turn(1, 1, 2),
        mlp_only_layers=turn((), (0,), (), (1,)),
        rms_norm_eps=r.choice([1e-6, 1e-5]),
        rope_theta=turn(1e4, 500.0, 1e6, every=2),
        tie_word_embeddings=turn(False, True, every=2),
    )


def lively(config, seed=0):
    "Weights large enough for a fault in any part to show"
    policy, gen = Policy(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            p.normal_(std=0.15, generator=gen).add_(p.dim() == 1)
    return policy


def opened(folder, dtype=torch.float32):
    "The checkpoint as transformers sees it; every name must be found and none left over"
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation='eager', output_loading_info=True
    )
    assert not info['missing_keys'] and not info['unexpected_keys'] and not info['mismatched_keys']
    return model


def their_gradients(model):
    "By the names of the files, one expert at a time"
    out = {}
    for name, p in model.named_parameters():
        g = torch.zeros_like(p) if p.grad is None else p.grad
        for e in range(len(g) if '.experts.' in name else 0):
            if 'gate_up' in name:
                for half, part in zip(('gate', 'up'), g[e].chunk(2)):
                    out[name.replace('gate_up_proj', f'{e}.{half}_proj.weight')] = part
            else:
                out[name.replace('down_proj', f'{e}.down_proj.weight')] = g[e]
        if '.experts.' not in name:
            out[name] = g
    return out


def chosen(scores, config):
    return scores.float().softmax(-1).topk(config.num_experts_per_tok).indices


def sparse_layers(config):
    return [i for i in range(config.num_hidden_layers) if config.is_sparse(i)]


def relative(a, b):
    return ((a - b).norm() / b.norm()).item() if b.norm() > 0 else a.norm().item()


def same(p, q):
    "Equal to the bit"
    pairs = zip(p.state_dict().items(), q.state_dict().items(), strict=True)
    return all(n == m and a.dtype == b.dtype and torch.equal(a, b) for (n, a), (m, b) in pairs)


# ---- parity --------------------------------------------------------------------------------------
# --------------------


@pytest.mark.parametrize('seed', range(12))
def test_parity(seed, tmp_path):
    config = random_config(seed)
    policy = lively(config, seed)
    save_pretrained(policy, tmp_path)
    model = opened(tmp_path)
    gen = torch.Generator().manual_seed(seed)
    # its padding id 0 gets no gradient there
    ids = torch.randint(1, config.vocab_size, (3, 17), generator=gen)
    mask = torch.ones(3, 17, dtype=torch.bool)
    mask[1, 12:] = False

    hidden, routes = policy(ids, mask)
    logits = policy.logits(hidden)
    sparse = sparse_layers(config)
    # transformers cannot say "none"
    out = model(ids, attention_mask=mask.long(), output_router_logits=bool(sparse))
    theirs = out.logits[mask]
    assert relative(logits, theirs) < 1e-5

    scores = out.router_logits if sparse else ()
    assert len(sparse) == len(scores)
    for i, their_scores in zip(sparse, scores):
        their_choice = chosen(their_scores[mask.flatten()], config)
        own = routes[:, i].sort(-1).values
        assert torch.equal(their_choice.sort(-1).values, own), f'layer {i}'
    assert not routes[:, [i for i in range(config.num_hidden_layers) if i not in sparse]].any()

    w = torch.randn(logits.shape, generator=gen)
    (logits * w).sum().backward()
    (theirs * w).sum().backward()
    ours, want = dict(hf_gradients(policy)), their_gradients(model)
    assert ours.keys() == want.keys()
    worst = {
        n: relative(ours[n], want[n])
        for n in want
        if want[n].norm() > 1e-4 or ours[n].norm() > 1e-4
    }
    assert max(worst.values()) < 1e-5, max(worst.items(), key=lambda kv: kv[1])
    assert len(worst) > len(want) / 2


def test_the_configs_cover_everything():
    configs = [random_config(s) for s in range(12)]

    def values(field):
        return {getattr(c, field) for c in configs}

    assert values('tie_word_embeddings') == values('norm_topk_prob') == {True, False}
    assert values('num_experts_per_tok') == {1, 2, 3} and values('decoder_sparse_step') == {1, 2}
    assert (
        len(values('rope_theta'))
        == len({c.num_attention_heads // c.num_key_value_heads for c in configs})
        == 3
    )
    mixtures = [len(sparse_layers(c)) / c.num_hidden_layers for c in configs]
    assert 0 in mixtures and 1 in mixtures and len(set(mixtures)) > 2


@pytest.mark.parametrize('dim, theta', [(16, 10_000.0), (128, 1_000_000.0), (64, 5000.0)])
def test_rotary_table_is_the_reference_to_the_bit(dim, theta):
    config = Qwen3MoeConfig(
        head_dim=dim, rope_parameters=dict(rope_type='default', rope_theta=theta)
    )
    cos, sin = Qwen3MoeRotaryEmbedding(config)(torch.zeros(1), torch.arange(40_960)[None])
    ours_cos, ours_sin = rope_table(dim, 40_960, theta)
    assert torch.equal(ours_cos, cos[0])
    assert torch.equal(torch.cat([-ours_sin[:, : dim // 2], ours_sin[:, dim // 2 :]], 1), sin[0])


def test_bf16_parity(tmp_path):
    "Within the noise of bfloat16: as close to the fp32 result as transformers is"
    policy = lively(replace(random_config(0), hidden_size=32, moe_intermediate_size=16))
    save_pretrained(policy, tmp_path)
    ids = torch.randint(1, 50, (2, 15), generator=torch.Generator().manual_seed(0))
    exact = policy.logits(policy(ids)[0])
    half, model = from_pretrained(tmp_path, torch.bfloat16), opened(tmp_path, torch.bfloat16)
    ours, theirs = half.logits(half(ids)[0]).float(), model(ids).logits.flatten(0, 1).float()

    def median(t):
        return (t - exact).norm(dim=1).median()  # some tokens change experts

    assert median(ours) < 2 * median(theirs) + 1e-3


def test_a_router_with_a_bias_chooses_in_bf16_as_in_fp64():
    "transformers, vLLM and Megatron-Core keep the bias and these logits in fp32"
    c = PolicyConfig(
        num_experts=32, num_experts_per_tok=4, router_score='sigmoid', num_hidden_layers=1
    )
    gen, exact = torch.Generator().manual_seed(0), Policy(c, seed=0)
    bias = 8 + 0.02 * torch.randn(32, generator=gen)
    with torch.no_grad():
        exact.blocks[0].mlp.correction.copy_(bias)
    weights = [(n, w.detach().clone()) for n, w in hf_weights(exact)]
    half, engine = exact.to(torch.bfloat16), TorchRollout(c, 4, torch.bfloat16)
    engine.load_weights(weights, 0)
    mlp, (layer,) = half.blocks[0].mlp, engine.layers
    assert mlp.correction.equal(bias) and engine.policy.blocks[0].mlp.correction.equal(bias)
    assert half.double().blocks[0].mlp.correction.dtype == torch.float64
    mlp.bfloat16()
    x = torch.randn(2000, c.hidden_size, generator=gen).bfloat16()
    scores = (x.double() @ mlp.router.double().T).sigmoid() + bias.double()
    want = scores.topk(4).indices.sort(-1).values
    owner = torch.arange(8000) // 4
    with torch.no_grad():
        trained, drawn = mlp.route(x)[2], add_experts(x.clone(), x, layer, owner)[0]
    for chosen_, most in ((trained, 0.002), (drawn, 0.002)):
        assert (chosen_.sort(-1).values != want).any(-1).double().mean() <= most


@pytest.mark.parametrize('seed', [0, 3, 4])
def test_greedy_text(seed, tmp_path):
    "transformers.generate, a plain loop and the rollout engine write the same tokens"
    config = random_config(seed)
    policy = lively(config, seed)
    save_pretrained(policy, tmp_path)
    model = opened(tmp_path)
    gen = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(2, config.vocab_size, (n,), generator=gen) for n in (1, 4, 9)]
    engine = TorchRollout(config, num_slots=2)
    engine.load_weights(hf_weights(policy), version=0)
    greedy = SamplingParams(max_tokens=20, temperature=0)
    requests = [Request(str(i), tuple(p.tolist()), params=greedy) for i, p in enumerate(prompts)]
    samples = {int(s.prompt_id): s for s in engine.generate(requests)}
    for i, prompt in enumerate(prompts):
        seen = torch.ones(1, len(prompt), dtype=torch.long)
        want = model.generate(
            prompt[None], attention_mask=seen, max_new_tokens=20, do_sample=False, eos_token_id=[]
        )[0]
        text = prompt
        for _ in range(20):
            text = torch.cat([text, policy.logits(policy(text[None])[0])[-1:].argmax(-1)])
        assert torch.equal(text, want)
        assert samples[i].prompt_ids + samples[i].response_ids == want.tolist()
        scores = model(want[None], output_router_logits=True).router_logits
        for layer, s in zip(sparse_layers(config), scores, strict=True):
            assert torch.equal(chosen(s[:-1], config), samples[i].routed_experts[:, layer].long())


# ---- laws ----------------------------------------------------------------------------------------
# --------------------


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize('D, out', [(16, 8), (5, 7), (16, 3), (2, 8)])
def test_grouped_linear_takes_any_width_and_empty_experts(dtype, D, out):
    gen = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(shape, generator=gen).to(dtype).requires_grad_()
        for shape in ((9, D), (4, out, D))
    )
    y = grouped_linear(x, w, torch.tensor([0, 5, 5, 9], dtype=torch.int32))
    want = torch.cat([x[:5] @ w[1].T, x[5:] @ w[3].T])
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), (x, w)) for o in (y, want)))


@pytest.mark.parametrize('seed', range(4))
def test_rows_do_not_know_each_other(seed):
    "Alone, in a padded batch, in any order, with other tokens behind: the same hidden states"
    policy, r = lively(random_config(seed), seed).double(), random.Random(seed)
    rows = [torch.randint(0, 50, (r.randint(1, 12),)) for _ in range(5)]
    alone = [policy(row[None])[0] for row in rows]
    order = r.sample(range(5), 5)
    ids, mask = torch.zeros(5, 14, dtype=torch.long), torch.zeros(5, 14, dtype=torch.bool)
    for at, i in enumerate(order):
        ids[at, : len(rows[i])], mask[at, : len(rows[i])] = rows[i], True
    torch.testing.assert_close(
        policy(ids, mask)[0], torch.cat([alone[i] for i in order]), rtol=1e-10, atol=1e-10
    )
    longer = torch.cat([rows[0], torch.randint(0, 50, (3,))])
    torch.testing.assert_close(
        policy(longer[None])[0][: len(rows[0])], alone[0], rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize('seed', range(4))
def test_replaying_own_routes_changes_nothing(seed):
    config = random_config(seed)
    policy, gen = lively(config, seed), torch.Generator().manual_seed(seed)
    ids, mask = (
        torch.randint(0, 50, (2, 9), generator=gen),
        torch.arange(9) < torch.tensor([[9], [6]]),
    )
    hidden, routes = policy(ids, mask)
    stored = torch.randint(0, config.num_experts, (2, 9, *routes.shape[1:]), generator=gen)
    stored = stored.to(route_dtype(config.num_experts))
    valid = mask & (torch.rand(2, 9, generator=gen) < 0.7)
    stored[valid] = routes[valid[mask]].to(stored.dtype)
    again, chosen = policy(ids, mask, stored, valid)
    assert torch.equal(hidden, again) and torch.equal(routes, chosen)
    grads = [
        torch.autograd.grad(h.square().sum(), list(policy.blocks.parameters()))
        for h in (hidden, again)
    ]
    assert all(map(torch.equal, *grads))


def test_foreign_routes_are_obeyed_and_the_router_learns():
    config = replace(
        random_config(0),
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=(),
        decoder_sparse_step=1,
    )
    policy = lively(config)
    ids = torch.randint(0, 50, (1, 6))
    routes = torch.tensor([3, 0]).expand(1, 6, config.num_hidden_layers, 2)
    hidden, own = policy(ids, None, routes.to(torch.uint8), torch.ones(1, 6, dtype=torch.bool))
    assert torch.equal(own[:, 0], policy(ids)[1][:, 0]), (
        'what the first router would have chosen is still reported'
    )
    hidden.square().sum().backward()
    for b in policy.blocks:
        assert (b.mlp.down.grad.abs().sum((1, 2)) > 0).tolist() == [True, False, False, True]
        scores = b.mlp.router.grad.norm(dim=1)  # gates sum to 1 over the replayed two
        assert (scores > 1e-3 * scores.max()).tolist() == [True, False, False, True]


def test_gates_of_the_paper():
    """R3: scores 1, 2, .5, -1; the replayed experts 0 and 2 get .622459 and .377541, the own choice
    .731059 and .268941"""
    moe = MoE(PolicyConfig(hidden_size=1, num_experts=4))
    with torch.no_grad():
        moe.router.copy_(torch.tensor([[1.0], [2.0], [0.5], [-1.0]]))
    gates, *_ = moe.route(torch.ones(1, 1), torch.tensor([[0, 2]]), torch.tensor([True]))
    torch.testing.assert_close(gates[0], torch.tensor([0.622459, 0.377541]), atol=1e-6, rtol=0)
    gates, ids, own = moe.route(torch.ones(1, 1), torch.tensor([[0, 2]]), torch.tensor([False]))
    assert ids.tolist() == own.tolist() == [[1, 0]]
    torch.testing.assert_close(gates[0], torch.tensor([0.731059, 0.268941]), atol=1e-6, rtol=0)


def test_hand_written_gradients_against_finite_differences():
    g = torch.Generator().manual_seed(0)

    def leaf(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True)

    cos, sin = (t[:5, None].double() for t in rope_table(8, 5, 100.0))
    order = torch.randperm(10, generator=g)
    check, inverse = torch.autograd.gradcheck, order.argsort()
    assert check(lambda x: rotate(x, cos, sin), leaf(5, 3, 8))
    assert check(gated_swiglu, (leaf(6, 8), leaf(6)))
    assert check(lambda x: dispatch(x, order, inverse, 2), leaf(5, 4))
    assert check(lambda y: combine_experts(y, order, inverse, 2), leaf(10, 4))
    assert check(lambda x, w: rms_norm(x, w, 1e-6), (leaf(5, 3, 8), leaf(3, 8)))
    # adding up and spreading are each other's transpose
    x, y = leaf(5, 4), leaf(10, 4)
    spread, summed = dispatch(x, order, inverse, 2), combine_experts(y, order, inverse, 2)
    torch.testing.assert_close((spread * y).sum(), (x * summed).sum())


@pytest.mark.parametrize('eps', [1e-6, 1e-9, 1e-12])
def test_the_epsilon_of_a_norm_is_the_one_that_was_asked_for(eps):
    "It decides for activations whose mean square is about as small"
    x = 1e-5 * torch.randn(7, 8, generator=torch.Generator().manual_seed(0)).double()
    want = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    torch.testing.assert_close(rms_norm(x, torch.ones(8).double(), eps), want)


def test_gradients_against_finite_differences():
    config = PolicyConfig(
        vocab_size=5,
        hidden_size=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=2,
        num_experts=3,
        intermediate_size=3,
        moe_intermediate_size=3,
        mlp_only_layers=(0,),
    )
    policy = lively(config, 1).double()
    names, params = zip(*policy.named_parameters())
    ids = torch.tensor([[1, 2, 3], [4, 0, 0]])
    mask = torch.tensor([[True] * 3, [True, False, False]])

    def run(*p):
        return torch.func.functional_call(policy, dict(zip(names, p)), (ids, mask))[0]

    assert torch.autograd.gradcheck(
        run, tuple(p.detach().requires_grad_() for p in params), check_undefined_grad=False
    )


# ---- checkpoints ---------------------------------------------------------------------------------
# --------------------


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('limit', [1, 30_000, 1 << 30])
def test_round_trip_is_exact(dtype, limit, tmp_path):
    for seed in range(4):
        policy = lively(random_config(seed), seed).to(dtype)
        save_pretrained(policy, tmp_path, limit)
        back = from_pretrained(tmp_path, dtype)
        assert same(policy, back) and back.config == policy.config


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('shards', [False, True])
@pytest.mark.parametrize('seed', [1, 2])
def test_transformers_writes_and_we_read(seed, shards, dtype, tmp_path):
    c = random_config(seed)
    torch.manual_seed(seed)
    apart = 'mlp_only_layers', 'eos_token_id', 'pad_token_id'
    kept = Qwen3MoeConfig()
    known = {k: v for k, v in vars(c).items() if hasattr(kept, k) or k == 'head_dim'}
    known = {k: v for k, v in known.items() if k not in apart}
    hf = Qwen3MoeConfig(
        **known,
        mlp_only_layers=list(c.mlp_only_layers),
        eos_token_id=[7, 8],
        rope_parameters=dict(rope_type='default', rope_theta=c.rope_theta),
    )
    model = Qwen3MoeForCausalLM(hf).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size='20KB' if shards else '1GB')
    assert (len(list(tmp_path.glob('*.safetensors'))) > 1) == shards
    policy = from_pretrained(tmp_path, dtype)
    assert policy.config == replace(c, eos_token_id=(7, 8), pad_token_id=0)
    state = model.state_dict()
    for name, w in hf_weights(policy):
        if '.experts.' not in name:
            assert torch.equal(w, state[name]), name
    for i, b in enumerate(policy.blocks):
        if c.is_sparse(i):
            assert torch.equal(b.mlp.gate_up, state[f'model.layers.{i}.mlp.experts.gate_up_proj'])
        if c.is_sparse(i):
            assert torch.equal(b.mlp.down, state[f'model.layers.{i}.mlp.experts.down_proj'])
    ids = torch.randint(1, c.vocab_size, (2, 9))
    if dtype == torch.float32:
        assert relative(policy.logits(policy(ids)[0]), model(ids).logits.flatten(0, 1)) < 1e-5


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('limit', [20_000, 1 << 30])
def test_we_write_and_transformers_reads(limit, dtype, tmp_path):
    policy = lively(random_config(4)).to(dtype)
    save_tokenizer(build_tokenizer(), tmp_path)  # into the same folder, before
    save_pretrained(policy, tmp_path, limit)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = '12+30= #42'
    assert tokenizer(text).input_ids == build_tokenizer().encode(text).ids
    model = opened(tmp_path, dtype)
    # config.json names the type
    assert model.dtype == AutoModelForCausalLM.from_pretrained(tmp_path).dtype == dtype
    state = model.state_dict()
    for name, w in hf_weights(policy):
        if '.experts.' not in name:
            assert torch.equal(w, state[name]), name
    model.save_pretrained(tmp_path / 'back', max_shard_size='20KB')
    assert same(from_pretrained(tmp_path / 'back', dtype), policy)


def test_saving_over_an_older_checkpoint(tmp_path):
    "Neither reader may find a file of the old one"
    save_tokenizer(build_tokenizer(), tmp_path)
    old, new = lively(random_config(0), 1), lively(random_config(0), 2)
    for limits in ((20_000, 1 << 30), (1 << 30, 20_000), (5_000, 20_000)):
        for policy, limit in zip((old, new), limits):
            save_pretrained(policy, tmp_path, limit)
        assert same(from_pretrained(tmp_path), new)
        assert torch.equal(opened(tmp_path).model.norm.weight, new.norm)
    assert (tmp_path / 'tokenizer.json').exists()


def test_every_number_has_one_name():
    for seed in range(6):
        policy = Policy(random_config(seed))
        owners = {id(p): torch.zeros_like(p) for p in policy.parameters()}
        for _, p, at in hf_slices(policy):
            owners[id(p)][at] += 1
        assert all((n == 1).all() for n in owners.values())


def test_weights_are_views():
    policy = Policy(random_config(0))
    dict(hf_weights(policy))['model.layers.0.self_attn.q_proj.weight'].fill_(7)
    assert (policy.blocks[0].qkv == 7).any()
    with pytest.raises(ValueError, match='has no gradient: call backward first'):
        list(hf_gradients(policy))


def test_load_refuses_what_does_not_fit():
    policy = Policy(PolicyConfig())
    good = list(hf_weights(Policy(PolicyConfig(), seed=1)))
    for weights, message in (
        (good[:-1], '1 weights are missing, first lm_head'),
        ([*good, ('model.norm.weight', policy.norm)], 'model.norm.weight came twice'),
        ([*good, ('visual.weight', policy.norm)], 'visual.weight is not a weight of this policy'),
        ([('model.norm.weight', torch.ones(63))], r'has shape \[63\].* needs \[64\]'),
    ):
        with pytest.raises(ValueError, match=message):
            load_hf_weights(policy, weights)
    load_hf_weights(policy, good[:-1], strict=False)


def test_what_a_config_may_leave_out(tmp_path):
    "Missing keys mean what they mean to transformers, not our own defaults"
    write_config(PolicyConfig(hidden_size=48, num_attention_heads=4, head_dim=12), tmp_path)
    d = json.loads((tmp_path / 'config.json').read_text())
    plain = 'norm_topk_prob', 'decoder_sparse_step', 'rms_norm_eps', 'tie_word_embeddings'
    for key in (*plain, 'head_dim', 'mlp_only_layers', 'rope_parameters', 'rope_theta'):
        del d[key]
    d['num_local_experts'] = d.pop('num_experts')
    (tmp_path / 'config.json').write_text(json.dumps(d))
    ours, theirs = read_config(tmp_path), Qwen3MoeConfig.from_pretrained(tmp_path)
    for key in (*plain, 'num_experts'):
        assert getattr(ours, key) == getattr(theirs, key), key
    assert ours.mlp_only_layers == tuple(theirs.mlp_only_layers) and ours.head_dim == 12
    assert ours.rope_theta == theirs.rope_parameters['rope_theta']
    d['rope_theta'] = 777.0  # where older files have it
    (tmp_path / 'config.json').write_text(json.dumps(d))
    theirs = Qwen3MoeConfig.from_pretrained(tmp_path)
    assert read_config(tmp_path).rope_theta == 777 == theirs.rope_parameters['rope_theta']


@pytest.mark.parametrize(
    'dense', [dict(mlp_only_layers=(0, 1)), dict(decoder_sparse_step=5)], ids=str
)
def test_a_dense_config_comes_back_as_it_was(dense, tmp_path):
    config = PolicyConfig(num_hidden_layers=2, **dense)
    write_config(config, tmp_path)
    assert (
        read_config(tmp_path) == config
        and json.loads((tmp_path / 'config.json').read_text())['model_type'] == 'qwen3'
    )


# ---- bad input -----------------------------------------------------------------------------------
# --------------------


def edit(**changes):
    def fn(folder):
        d = json.loads((folder / 'config.json').read_text()) | changes
        (folder / 'config.json').write_text(
            json.dumps({k: v for k, v in d.items() if v is not None})
        )

    return fn


def cut(name, n):
    def fn(folder):
        path = next(folder.glob(name))
        path.write_bytes(path.read_bytes()[:n])

    return fn


def without(name):
    return lambda folder: next(folder.glob(name)).unlink()


@pytest.mark.parametrize(
    'fault, message',
    [
        (without('config.json'), 'config.json does not exist'),
        (without('*00002-of*'), '00002-of-.* does not exist: the checkpoint is incomplete'),
        (without('*.index.json'), 'model.safetensors does not exist'),
        (cut('*00001-of*', -1), '00001-of-.* cannot be read .*torn'),
        (cut('*00001-of*', 0), 'torn'),
        (cut('*00001-of*', 20), 'torn'),
        (cut('config.json', 40), 'config.json is not JSON'),
        (cut('*.index.json', 40), 'index.json is not JSON'),
        (lambda f: (f / 'config.json').write_text('[]'), 'holds list, not an object'),
        (
            lambda f: (f / 'config.json').write_bytes(b'\xff\xfe{'),
            'config.json: byte 0 is no UTF-8',
        ),
        (
            lambda f: next(f.glob('*.index.json')).write_text('{"weight_map": {}}'),
            'missing, first model.embed_tokens',
        ),
        (edit(model_type='gemma3'), "model_type='gemma3', only 'qwen3', 'qwen3_moe', 'qwen2'"),
        (edit(model_type='deepseek_v3'), "'deepseek_v3': the policy has no multi-head latent att"),
        (edit(model_type=None), 'model_type=None'),
        (
            edit(hidden_size=16),
            r'model.embed_tokens.weight has shape \[99, 64\], this policy needs \[99, 16\]',
        ),
        (edit(num_hidden_layers=3), 'weights are missing, first model.layers.2'),
        (edit(num_hidden_layers=1), 'model.layers.1.* is not a weight of this policy'),
        (edit(num_experts=None), "has no 'num_experts'"),
        (edit(vocab_size=None), "has no 'vocab_size'"),
        (edit(hidden_size='64'), "hidden_size='64': use a whole number"),
        (edit(num_experts_per_tok=9), 'config.json: num_experts_per_tok=9 exceeds'),
        (
            edit(rope_parameters=dict(rope_type='longrope', factor=4.0, rope_theta=1e4)),
            "rope_type='longrope', only 'default', 'yarn' and 'llama3'",
        ),
        (
            edit(rope_parameters=None, rope_scaling=dict(type='linear', factor=2.0)),
            "rope_type='linear'",
        ),
        (edit(attention_bias=True), 'attention_bias=True, only False is supported'),
        (edit(hidden_act='gelu'), "hidden_act='gelu', only 'silu'"),
        (edit(use_sliding_window=True), 'use_sliding_window=True'),
        (edit(quantization_config=dict(quant_method='fp8')), 'quantization_config='),
    ],
)
def test_bad_checkpoint(fault, message, tmp_path):
    save_pretrained(Policy(PolicyConfig()), tmp_path, 100_000)
    fault(tmp_path)
    with pytest.raises(ValueError) as e:
        from_pretrained(tmp_path)
    assert re.search(message, str(e.value)) and '\n' not in str(e.value)


@pytest.mark.parametrize(
    'kw, message',
    [
        (dict(hidden_size=0), 'hidden_size=0: use at least 1'),
        (dict(moe_intermediate_size=-4), 'moe_intermediate_size=-4'),
        (dict(intermediate_size=0), 'intermediate_size=0'),
        (dict(num_hidden_layers=2.5), 'num_hidden_layers=2.5'),
        (dict(num_experts=True), 'num_experts=True'),
        (dict(num_attention_heads=3), 'not a multiple of num_key_value_heads=2'),
        (dict(num_experts_per_tok=9), 'exceeds num_experts=8'),
        (dict(head_dim=7), 'head_dim=7 is odd'),
        (dict(rope_theta=0.0), 'rope_theta=0'),
        (dict(rms_norm_eps=float('nan')), 'rms_norm_eps=nan'),
    ],
)
def test_bad_config(kw, message):
    with pytest.raises(ValueError, match=message):
        PolicyConfig(**kw)


def test_what_a_killed_process_was_writing_goes(tmp_path):
    "A file that is not whole has a name of ours, or of safetensors; a user's own file stays"
    policy = Policy(PolicyConfig(), seed=0)
    for name in ('.new-0', '.new-7', '.tmpX7kHsj', '.tmp', 'notes.txt'):
        (tmp_path / name).write_text('half')
    (tmp_path / '.tmpabcdef').mkdir()
    save_pretrained(policy, tmp_path)
    found = {p.name for p in tmp_path.iterdir()}
    assert found == {'config.json', 'model.safetensors', '.tmp', '.tmpabcdef', 'notes.txt'}


def test_bad_rows():
    policy = Policy(PolicyConfig(max_position_embeddings=8))
    ids, mask = torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.bool)
    routes = torch.zeros(2, 4, 2, 2, dtype=torch.uint8)
    for args, message in (
        (
            (torch.zeros(1, 9, dtype=torch.long),),
            'rows of 9 tokens exceed max_position_embeddings=8',
        ),
        ((ids, mask, routes), 'without routes_valid'),
        ((ids, mask, routes[..., :1], mask), r'this policy needs \[2, 4, 2, 2\]'),
        ((ids, mask, routes, mask[:, 1:]), r'routes_valid \[2, 3\]'),
        ((ids, mask.triu()), 'pad rows on the right'),
    ):
        with pytest.raises(ValueError, match=message):
            policy(*args)
    with pytest.raises(ValueError, match='max_shard_bytes=0'):
        save_pretrained(policy, 'nowhere', 0)
