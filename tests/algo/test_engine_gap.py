"Routes are repeated exactly, gates stay live, wrong routes are refused; known bugs, one test each"

import itertools
from copy import deepcopy
from dataclasses import replace
from math import exp, log
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from compassrl.algo.engine_gap import discrepancy
from compassrl.algo.losses import LossConfig, PolicyLoss
from compassrl.config import TrainConfig
from compassrl.model.layers import route_dtype
from compassrl.model.policy import MoE, Policy, PolicyConfig
from compassrl.model.pretrained import hf_weights
from compassrl.records import (
    Batch,
    Request,
    SamplingParams,
    collate,
    derive_seed,
    micro_batches,
    select,
)
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.factory import train_setup, vllm_arguments
from compassrl.train.routes import routes_agreement, validate_routes
from compassrl.train.torch_train import (
    OptimConfig,
    TorchTrain,
    accumulate_grads,
    packed_states,
    response_log_probs,
)
from tests.support.gates import replay_gates

random = settings(
    deadline=None, max_examples=15, derandomize=True, phases=(Phase.explicit, Phase.generate)
)
KINDS = [
    ('softmax', True),
    ('softmax', False),
    ('topk_softmax', True),
    ('sigmoid', True),
    ('sigmoid', False),
]
CONFIG = PolicyConfig(
    vocab_size=20,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=16,
    moe_intermediate_size=8,
    num_experts=6,
    num_experts_per_tok=2,
    mlp_only_layers=(0,),
    max_position_embeddings=64,
)  # the first layer is dense
LOSS = PolicyLoss(LossConfig(tis='off'))


def close(a, b, tol=1e-12):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def lively(config=CONFIG, seed=0, dtype=torch.double, scale=8):
    p = Policy(config, seed).to(dtype)
    with torch.no_grad():
        for w in p.parameters():
            w.mul_(scale if w.dim() > 1 else 1)
    return p


def sampled(policy=None, num=12, tokens=10, dtype=torch.float, slots=None, **kw):
    "Samples in the order of their requests, prompts of 1 to 4 tokens, two samples per prompt"
    policy = policy or lively(dtype=torch.float)
    c = policy.config
    rollout = TorchRollout(c, slots or num, dtype, **kw)
    rollout.load_weights(hf_weights(policy), 0)
    g = torch.Generator().manual_seed(1)
    ids = [
        tuple(torch.randint(2, c.vocab_size, (1 + i % 4,), generator=g).tolist())
        for i in range((num + 1) // 2)
    ]
    params = SamplingParams(tokens, stop_ids=(1,))
    requests = [
        Request(f'p{i // 2:02}', ids[i // 2], i % 2, derive_seed(i), params) for i in range(num)
    ]
    return sorted(rollout.generate(requests), key=lambda s: (s.prompt_id, s.index))


def forced(b, config=CONFIG):
    "Other experts than anybody chose, still distinct; dense layers stay 0"
    sparse = torch.tensor([config.is_sparse(i) for i in range(config.num_hidden_layers)])
    on = b.fed_mask[..., None, None] & sparse[:, None]
    return replace(
        b,
        routed_experts=torch.where(
            on, (b.routed_experts + 2) % config.num_experts, b.routed_experts
        ),
    )


BATCH = collate(sampled())


def holes(b):
    "A third of the routes is missing, and junk is stored there"
    gone = b.fed_mask & (torch.arange(b.token_ids.shape[1]) % 3 == 1)
    ids = torch.where(gone[..., None, None], 0, b.routed_experts)
    return replace(b, routed_experts=ids, routes_valid=b.routes_valid & ~gone)


# ---- gates


def naive_gates(logits, idx, score, norm, scale):
    out = []
    for z, ids in zip(logits.tolist(), idx.tolist()):
        p = (
            [1 / (1 + exp(-x)) for x in z]
            if score == 'sigmoid'
            else [exp(x) / sum(map(exp, z)) for x in z]
        )
        g = [p[i] for i in ids]
        total = sum(g) if norm or score == 'topk_softmax' else 1
        out.append([x / total * scale for x in g])
    return torch.tensor(out, dtype=torch.double)


@st.composite
def routers(draw):
    E = draw(st.integers(1, 12))
    K, N, seed = draw(st.integers(1, E)), draw(st.integers(1, 6)), draw(st.integers(0, 10**6))
    g = torch.Generator().manual_seed(seed)
    return torch.randn(N, E, generator=g).double() * draw(st.sampled_from([0.1, 1, 9])), torch.rand(
        N, E, generator=g
    ).topk(K).indices


@pytest.mark.parametrize('score, norm', KINDS)
@random
@given(routers(), st.sampled_from([1.0, 2.5]))
def test_gates_equal_the_loop(score, norm, data, scale):
    logits, idx = data
    got = replay_gates(logits, idx, score, norm, scale)
    assert got.dtype == torch.double
    close(got, naive_gates(logits, idx, score, norm, scale), 1e-10)
    order = torch.randperm(idx.shape[1], generator=torch.Generator().manual_seed(0))
    close(replay_gates(logits, idx[:, order], score, norm, scale), got[:, order])


def test_worked_numbers():
    "paper.md 4.6: logits 1, 2, .5, -1; replayed {0, 2}; its own choice would be {0, 1}"
    z = torch.tensor([[1.0, 2.0, 0.5, -1.0]])
    for score in ('softmax', 'topk_softmax'):
        close(
            replay_gates(z, torch.tensor([[0, 2]]), score),
            torch.tensor([[0.622459, 0.377541]]),
            1e-6,
        )
        close(
            replay_gates(z, torch.tensor([[0, 1]]), score),
            torch.tensor([[0.268941, 0.731059]]),
            1e-6,
        )


@pytest.mark.parametrize('norm', [True, False])
def test_gates_equal_the_policys_own_router(norm):
    c = replace(CONFIG, norm_topk_prob=norm)
    m, g = lively(c).blocks[1].mlp, torch.Generator().manual_seed(0)
    x, foreign = (
        torch.randn(30, 16, generator=g).double(),
        torch.rand(30, 6, generator=g).topk(2).indices,
    )
    valid = torch.rand(30, generator=g) < 0.6
    gates, ids, own = m.route(x, foreign, valid)
    logits = x @ m.router.T
    assert torch.equal(own, logits.topk(2).indices) and torch.equal(
        ids, torch.where(valid[:, None], foreign, own)
    )
    close(gates, replay_gates(logits, ids, 'softmax', norm))


def hf_router(kind):
    "A router of transformers: module, our name for it, normalised?, scale"
    torch.manual_seed(0)
    if kind.startswith('qwen3'):
        from transformers.models.qwen3_moe.modeling_qwen3_moe import (
            Qwen3MoeConfig,
            Qwen3MoeTopKRouter,
        )

        norm = kind == 'qwen3-norm'
        c = Qwen3MoeConfig(
            hidden_size=16, num_experts=8, num_experts_per_tok=3, norm_topk_prob=norm
        )
        router, rest = Qwen3MoeTopKRouter(c), ('softmax', norm, 1.0)
    elif kind == 'olmoe':
        from transformers.models.olmoe.modeling_olmoe import OlmoeConfig, OlmoeTopKRouter

        router, rest = (
            OlmoeTopKRouter(OlmoeConfig(hidden_size=16, num_experts=8, num_experts_per_tok=3)),
            ('softmax', False, 1.0),
        )
    elif kind == 'gpt-oss':
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssTopKRouter

        router = GptOssTopKRouter(
            GptOssConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=3)
        )
        rest = 'topk_softmax', True, 1.0
    else:
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
            DeepseekV3Config,
            DeepseekV3TopkRouter,
        )

        norm = kind == 'deepseek-norm'
        router = DeepseekV3TopkRouter(
            DeepseekV3Config(
                hidden_size=16,
                n_routed_experts=8,
                num_experts_per_tok=3,
                n_group=2,
                topk_group=1 if norm else 2,
                routed_scaling_factor=2.5,
                norm_topk_prob=norm,
            )
        )
        router.e_score_correction_bias.copy_(torch.randn(8) * 0.3)  # it chooses; it makes no gates
        rest = 'sigmoid', norm, 2.5
    with torch.no_grad():
        for p in router.parameters():
            p.normal_(std=0.5)
    return router, *rest


@pytest.mark.parametrize(
    'kind', ['qwen3-norm', 'qwen3', 'olmoe', 'gpt-oss', 'deepseek-norm', 'deepseek']
)
def test_gates_equal_transformers(kind):
    "Its router chooses, we are given its choice: the same gates, and gradient of the router"
    router, score, norm, scale = hf_router(kind)
    x = torch.randn(40, 16)
    logits, gates, ids = router(x)
    if gates.shape != ids.shape:
        gates = gates.gather(1, ids)
    weights = torch.randn(gates.shape)
    (want,) = torch.autograd.grad((gates * weights).sum(), [router.weight])
    bias = getattr(router, 'bias', None)
    logits = x @ router.weight.T + (0 if bias is None else bias)
    got = replay_gates(logits, ids, score, norm, scale)
    close(got, gates, 1e-5)
    close(torch.autograd.grad((got * weights).sum(), [router.weight])[0], want, 1e-4)
    if kind.startswith('deepseek'):
        assert not torch.equal(ids.sort(1)[0], logits.topk(3).indices.sort(1)[0]), 'the bias chose'


@pytest.mark.parametrize('score, norm', KINDS)
def test_gradients_of_gates(score, norm):
    "Finite differences; experts outside the live top-k learn too, others only through a softmax"
    g = torch.Generator().manual_seed(0)
    z = torch.randn(4, 6, generator=g).double().requires_grad_()
    worst = z.topk(2, largest=False).indices
    assert torch.autograd.gradcheck(lambda z: replay_gates(z, worst, score, norm, 2.0), z)
    replay_gates(z, worst, score, norm)[:, 0].sum().backward()
    hit = torch.zeros(4, 6, dtype=torch.bool).scatter(1, worst, True)
    assert (z.grad.gather(1, worst[:, :1]) != 0).all()
    if (score, norm) != ('softmax', False):
        assert (z.grad[~hit] == 0).all()


def test_gates_of_experts_that_are_next_to_impossible():
    z = torch.tensor([[300.0, 0.0, -1.0]], requires_grad=True)
    got = replay_gates(z, torch.tensor([[1, 2]]))
    close(got, torch.tensor([[0.731059, 0.268941]]), 1e-6)
    got[0, 0].backward()
    assert z.grad.isfinite().all() and z.grad[0, 1] > 0.1
    m = MoE(PolicyConfig(hidden_size=1, num_experts=3))
    with torch.no_grad():
        m.router.copy_(z.T)
    close(m.route(torch.ones(1, 1), torch.tensor([[1, 2]]), torch.tensor([True]))[0], got, 1e-6)
    assert replay_gates(z.bfloat16(), torch.tensor([[1, 2]])).dtype == torch.float


def test_unknown_score():
    with pytest.raises(ValueError, match="score='relu'.*softmax"):
        replay_gates(torch.zeros(1, 2), torch.zeros(1, 1).long(), 'relu')


# ---- against another implementation of the whole model


def test_a_replayed_forward_pass_equals_transformers():
    "transformers' Qwen3-MoE with its routers overruled by hooks: log-probs and router gradients"
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    c = CONFIG
    p = lively(dtype=torch.float, scale=4)
    keep = {
        k: v
        for k, v in vars(c).items()
        if (hasattr(Qwen3MoeConfig(), k) or k == 'head_dim')
        and k not in ('mlp_only_layers', 'eos_token_id', 'pad_token_id')
    }
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **keep,
            mlp_only_layers=[0],
            attn_implementation='eager',
            experts_implementation='eager',
            rope_parameters=dict(rope_type='default', rope_theta=c.rope_theta),
        )
    )
    state, seen = model.state_dict(), dict(hf_weights(p))
    for name, w in seen.items():
        if '.experts.' not in name:
            state[name].copy_(w)
    for i, b in enumerate(p.blocks):
        if not c.is_sparse(i):
            continue
        state[f'model.layers.{i}.mlp.experts.gate_up_proj'].copy_(b.mlp.gate_up.detach())
        state[f'model.layers.{i}.mlp.experts.down_proj'].copy_(b.mlp.down.detach())
    b = forced(select(BATCH, [3]))
    n = int(b.lengths[0])
    ids, valid = b.routed_experts[0, :n].long(), b.routes_valid[0, :n]
    for i in (1, 2):

        def overrule(module, args, out, i=i):
            logits, gates, own = out
            probs = logits.softmax(-1).gather(1, ids[:, i])
            return (
                logits,
                torch.where(valid[:, None], probs / probs.sum(1, keepdim=True), gates),
                torch.where(valid[:, None], ids[:, i], own),
            )

        model.model.layers[i].mlp.gate.register_forward_hook(overrule)
    want = model(b.token_ids[:, :n]).logits[0].log_softmax(-1)
    want = torch.stack([want[t - 1, b.token_ids[0, t]] for t in range(1, n)])[
        b.response_mask[0, 1:n]
    ]
    got, _ = response_log_probs(p, b)
    got = got[b.response_mask]
    close(got, want, 1e-4)
    assert (got - response_log_probs(p, b, replay=False)[0][b.response_mask]).abs().max() > 0.05
    want.sum().backward(), got.sum().backward()
    for i in (1, 2):
        g = p.blocks[i].mlp.router.grad
        assert g.abs().max() > 1e-3
        close(g, model.model.layers[i].mlp.gate.weight.grad, 1e-3 * g.abs().max().item())


# ---- laws, each of a way to prepare a batch for the policy


def log_probs_of(b, prepare, p=None):
    return response_log_probs(p or lively(), prepare(b))[0]


def naive_moe(m, x, ids):
    "One token and one expert at a time; gates by the naive loop"
    gates = naive_softmax((x @ m.router.T).gather(1, ids))

    def expert(e, t):
        gate, up = (m.gate_up[e] @ t).chunk(2)
        return m.down[e] @ (gate * gate.sigmoid() * up)

    return torch.stack(
        [sum(g * expert(e, t) for g, e in zip(gs, es)) for t, gs, es in zip(x, gates, ids.tolist())]
    )


def naive_softmax(s):
    return s.exp() / s.exp().sum(1, keepdim=True)


def naive_log_probs(p, b):
    "One row at a time; naive mixtures: what the batch says, else the live choice"
    out = torch.zeros(b.token_ids.shape).double()
    for i in range(len(b)):
        n, layer = int(b.lengths[i]), itertools.count()
        ids, valid = b.routed_experts[i, :n].long(), b.routes_valid[i, :n]
        sparse = [j for j in range(CONFIG.num_hidden_layers) if CONFIG.is_sparse(j)]

        def forward(m, x, *_):
            own = (x @ m.router.T).topk(m.K).indices
            j = sparse[next(layer)]
            return naive_moe(m, x, torch.where(valid[:, None], ids[:, j], own)), own

        with patch.object(MoE, 'forward', forward):
            hidden, _ = p(b.token_ids[i, :n][None])
        said = p.logits(hidden).log_softmax(-1)
        for t in b.response_mask[i].nonzero()[:, 0].tolist():
            out[i, t] = said[t - 1, b.token_ids[i, t]]
    return out


PART = select(BATCH, [0, 3, 5, 7])


def law_naive(prepare):
    for b in (PART, forced(PART), holes(forced(PART))):
        close(log_probs_of(b, prepare), naive_log_probs(lively(), b), 1e-10)


def law_own(prepare):
    "Replaying what the routers choose anyway changes not one bit"
    _, own = packed_states(lively(), BATCH, False)
    b = replace(BATCH, routed_experts=torch.zeros_like(BATCH.routed_experts))
    b.routed_experts[b.token_mask] = own.to(torch.uint8)
    close(log_probs_of(b, prepare), response_log_probs(lively(), BATCH, replay=False)[0], 0)


def law_invalid(prepare):
    b = replace(forced(BATCH), routes_valid=torch.zeros_like(BATCH.routes_valid))
    close(log_probs_of(b, prepare), response_log_probs(lively(), BATCH, replay=False)[0], 0)


def law_neighbours(prepare):
    "Order, company, padding and what is stored in it change nothing"

    @random
    @given(
        st.permutations(range(len(BATCH))),
        st.integers(1, 8),
        st.integers(0, 4),
        st.integers(0, 255),
    )
    def check(order, n, extra, junk):
        b = holes(forced(BATCH))
        want = log_probs_of(b, prepare)
        rows = order[:n]
        part = select(b, rows)
        part = part.map(
            lambda t: (
                t
                if t.dim() == 1
                else torch.cat(
                    [t, torch.zeros_like(t[:, :1]).repeat(1, extra, *[1] * (t.dim() - 2))], 1
                )
            )
        )
        part.routed_experts[~part.routes_valid] = junk
        T = min(want.shape[1], part.token_ids.shape[1])
        close(log_probs_of(part, prepare)[:, :T], want[rows][:, :T], 1e-10)

    check()


def law_gradient(prepare):
    "Router gradients are not zero and equal finite differences: largest element of each router"
    p, b = lively(), forced(PART)

    def loss():
        return log_probs_of(b, prepare, p).sum()

    p.zero_grad()
    loss().backward()
    for i in (1, 2):
        w = p.blocks[i].mlp.router
        assert w.grad is not None and w.grad.abs().max() > 1e-2
        at = divmod(int(w.grad.abs().argmax()), w.shape[1])
        with torch.no_grad():
            w[at] += 1e-6
            up = loss()
            w[at] -= 2e-6
            down = loss()
            w[at] += 1e-6
        assert float((up - down) / 2e-6) == pytest.approx(w.grad[at].item(), rel=1e-5)


LAWS = [law_naive, law_own, law_invalid, law_neighbours, law_gradient]


@pytest.mark.parametrize('law', LAWS, ids=lambda f: f.__name__)
def test_law(law):
    law(lambda b: b)


# ---- mutants


def moved(by, dim):
    return lambda b: replace(b, routed_experts=b.routed_experts.roll(by, dim))


def last_route(b):
    at = b.routes_valid.long().mul(torch.arange(b.token_ids.shape[1])).argmax(1)
    return replace(
        b,
        routed_experts=b.routed_experts[torch.arange(len(b)), at][:, None].expand_as(
            b.routed_experts
        ),
    )


def invalid_as_zero(b):
    ids = torch.where(
        b.routes_valid[..., None, None], b.routed_experts, torch.arange(2, dtype=torch.uint8)
    )
    return replace(b, routed_experts=ids, routes_valid=b.token_mask)


def no_valid(b):
    return replace(b, routes_valid=torch.zeros_like(b.routes_valid))


ROUTE = MoE.route


def gates_from_the_old_router(self, x, replay=None, valid=None):
    "Numbers of a router that is a small update behind"
    gates, ids, own = ROUTE(self, x, replay, valid)
    return (
        (
            gates
            if replay is None
            else replay_gates(x.detach() @ (0.999 * self.router.detach()).T, ids)
        ),
        ids,
        own,
    )


def gates_of_the_live_choice(self, x, replay=None, valid=None):
    gates, ids, own = ROUTE(self, x, replay, valid)
    return replay_gates(x @ self.router.T, own), ids, own


def gates_after_the_live_top_k(self, x, replay=None, valid=None):
    "Gathered from scores that are 0 outside the live choice: ISEEKYAN/Megatron-LM 79"
    _, ids, own = ROUTE(self, x, replay, valid)
    p = (x @ self.router.T).softmax(-1)
    p = (p * torch.zeros_like(p).scatter(1, own, 1.0)).gather(1, ids)
    return p / (p.sum(1, keepdim=True) + 1e-20), ids, own


MUTANTS = dict(
    one_row_late=moved(1, 1),
    one_row_early=moved(-1, 1),
    dense_layer_offset=moved(1, 2),
    rows_of_a_neighbour=moved(1, 0),
    last_route=last_route,
    invalid_as_zero=invalid_as_zero,
    never_replayed=no_valid,
    gates_from_the_old_router=gates_from_the_old_router,
    gates_of_the_live_choice=gates_of_the_live_choice,
    gates_after_the_live_top_k=gates_after_the_live_top_k,
)


@pytest.mark.parametrize('name', MUTANTS)
def test_some_law_kills_the_mutant(name):
    fault = MUTANTS[name]

    def broken(law):
        try:
            if not name.startswith('gates'):
                law(fault)
            else:
                with patch.object(MoE, 'route', fault):
                    law(lambda b: b)
        except (AssertionError, BaseExceptionGroup):
            return True
        return False

    assert any(broken(law) for law in LAWS)


# ---- the engine's three modes


def engine(mode, p=None, **kw):
    return TorchTrain(p or lively(), OptimConfig(**kw), replay=mode)


def test_unknown_mode():
    for bad in (True, 'r3', ''):
        with pytest.raises(ValueError, match="replay=.*'off', 'R2', 'R3'"):
            engine(bad)


@pytest.mark.parametrize('max_tokens', [1, 30, 10**6])
def test_old_log_probs_by_mode(max_tokens):
    b = holes(forced(BATCH))
    live, replayed = (
        response_log_probs(lively(), b, replay=r)[0].detach().float() for r in (False, True)
    )
    assert (live - replayed).abs().max() > 0.1
    for mode, want in (('off', live), ('R2', live), ('R3', replayed)):
        got = engine(mode, micro_batch_tokens=max_tokens).score(b)['old_log_probs']
        close(got, want, 1e-5)


def test_off_says_nothing_of_routes():
    assert engine('off').score(forced(BATCH)).keys() == {'old_log_probs', 'entropy'}


@pytest.mark.parametrize('max_tokens', [1, 30, 10**6])
def test_R2_records_the_trainers_own_routes(max_tokens):
    "Aligned with tokens however the batch is cut (verl 7106); what the rollout said is gone"
    b = forced(BATCH)
    b = replace(b, **engine('R2', micro_batch_tokens=max_tokens).score(b))
    own = torch.zeros_like(b.routed_experts)
    own[b.token_mask] = packed_states(lively(), b, False)[1].to(torch.uint8)
    assert (
        torch.equal(b.routed_experts, own)
        and torch.equal(b.routes_valid, b.fed_mask)
        and b.routed_experts.dtype == torch.uint8
    )
    validate_routes(b, CONFIG)


@pytest.mark.parametrize('mode', ['off', 'R2', 'R3'])
def test_later_mini_batches_replay_or_not(mode):
    "The second mini-batch meets moved weights: new log-probs on the old routes, or on live ones"
    b = replace(BATCH)
    e = engine(mode, num_mini_batches=2, lr=0.003)
    b = replace(b, **e.score(b))
    b = replace(b, advantages=torch.randn(len(b), 1) * b.response_mask)
    _, seen = e.update(b, LOSS)
    half = torch.arange(len(b)).tensor_split(2)
    p, c = (TorchTrain(lively(), OptimConfig(lr=0.003), replay='R3' if mode != 'off' else 'off'), b)
    p.update(select(c, half[0]), LOSS)
    want = {
        r: response_log_probs(p.policy, select(b, half[1]), replay=r)[0].detach().float()
        for r in (True, False)
    }
    T = want[True].shape[1]
    close(seen['log_probs'][half[1]][:, :T], want[mode != 'off'], 1e-5)
    assert (want[True] - want[False]).abs().max() > 1e-3, 'some router changed its mind'


def test_R2_without_routes_says_what_to_do():
    with pytest.raises(ValueError, match=r"replay='R2'.*score\(batch\)"):
        engine('R2').update(replace(BATCH, routed_experts=None, routes_valid=None), LOSS)


def test_R2_needs_no_routes_of_the_rollout():
    b = collate(sampled(return_routes=False))
    assert b.routed_experts is None
    b = replace(b, **engine('R2').score(b))
    assert (
        b.routes_agree is None
        and discrepancy(replace(b, old_log_probs=b.rollout_log_probs))['routes_valid_frac'] == 1
    )


def test_a_dense_policy_agrees_with_nobody():
    "It has no routes, so none are recorded, replayed or said to agree"
    for dense, mode in (((), 'R3'), ((0, 1), 'off')):
        cfg = TrainConfig(policy=PolicyConfig(mlp_only_layers=dense), router_replay='R3')
        assert train_setup(cfg).router_replay == mode
        assert vllm_arguments(cfg)['return_routes'] == (mode == 'R3')


def test_R3_without_routes_is_off():
    "Cold-start data has none; nothing is replayed, and the metric says so"
    b = collate(sampled(return_routes=False))
    on, off = (engine(mode).score(b)['old_log_probs'] for mode in ('R3', 'off'))
    assert torch.equal(on, off)
    assert discrepancy(replace(b, old_log_probs=b.rollout_log_probs))['routes_valid_frac'] == 0


def test_the_engine_validates_before_use():
    bad = replace(forced(BATCH), routed_experts=torch.full_like(BATCH.routed_experts, 3))
    for mode in ('R2', 'R3'):
        with pytest.raises(ValueError, match='dense'):
            engine(mode).score(bad)
        with pytest.raises(ValueError, match='dense'):
            engine(mode).update(bad, LOSS)
    engine('off').score(bad)


# ---- metrics


@random
@given(st.integers(0, 10**6), st.sampled_from([1e-3, 0.3, 3.0]))
def test_discrepancy_equals_the_loop(seed, size):
    g = torch.Generator().manual_seed(seed)
    b = holes(
        replace(
            BATCH,
            old_log_probs=BATCH.rollout_log_probs
            + size * torch.randn(BATCH.token_ids.shape, generator=g),
        )
    )
    b = replace(b, routes_agree=torch.randint(0, 3, b.token_ids.shape, generator=g) / 2)
    d, valid, fed, agree = [], 0, 0, []
    for i in range(len(b)):
        n = int(b.lengths[i])
        for t in range(n):
            if b.response_mask[i, t]:
                d.append(float(b.old_log_probs[i, t] - b.rollout_log_probs[i, t]))
            if t < n - 1:
                fed += 1
                valid += bool(b.routes_valid[i, t])
            if b.routes_valid[i, t]:
                agree.append(float(b.routes_agree[i, t]))
    want = dict(
        rollout_train_gap=sum(map(abs, d)) / len(d),
        rollout_train_gap_max=max(map(abs, d)),
        rollout_train_k3=sum(exp(x) - 1 - x for x in d) / len(d),
        rollout_train_f2=sum(abs(x) > log(2) for x in d) / len(d),
        rollout_train_ess=sum(map(exp, d)) ** 2 / sum(exp(2 * x) for x in d) / len(d),
        routes_valid_frac=valid / fed,
        routes_agree_frac=sum(agree) / len(agree),
        tokens_agree_frac=agree.count(1.0) / len(agree),
    )
    got = discrepancy(b)
    assert got == pytest.approx(want, rel=1e-4, abs=1e-9) and all(
        type(v) is float for v in got.values()
    )


def test_k3_is_the_divergence_that_it_estimates():
    "By enumeration: the mean over q of r - 1 - log r, r = p/q, is KL(q || p); F(2) counts both"
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    counts = (q * 1000).round().long()
    ids = torch.repeat_interleave(torch.arange(3), counts)
    row = torch.ones(1, 1001, dtype=torch.bool)

    def pad(x):
        return torch.cat([torch.zeros(1), x])[None]

    b = Batch(
        torch.zeros(1, 1001).long(),
        row,
        torch.arange(1001)[None] > 0,
        pad(q.log()[ids]),
        torch.zeros(1).long(),
        torch.zeros(1),
        old_log_probs=pad(p.log()[ids]),
    )
    m = discrepancy(b)
    assert m['rollout_train_k3'] == pytest.approx(float((q * (q / p).log()).sum()), rel=1e-5) and m[
        'rollout_train_f2'
    ] == pytest.approx(0.7)


def test_discrepancy_of_extremes():
    far = replace(BATCH, old_log_probs=BATCH.rollout_log_probs - 1e4)
    assert all(map(torch.isfinite, map(torch.tensor, discrepancy(far).values())))
    far = replace(BATCH, old_log_probs=BATCH.rollout_log_probs - 5e3)
    assert discrepancy(far)['rollout_train_gap_max'] == pytest.approx(5e3), 'as far as it is'
    none = replace(
        BATCH,
        old_log_probs=BATCH.rollout_log_probs,
        response_mask=torch.zeros_like(BATCH.response_mask),
    )
    assert discrepancy(none)['rollout_train_gap_max'] == 0.0


@random
@given(st.integers(0, 10**6))
def test_agreement_equals_sets(seed):
    g = torch.Generator().manual_seed(seed)

    def draw():
        return (
            torch.stack([torch.rand(3, 6, generator=g).topk(2).indices for _ in range(9)])
            * torch.tensor([0, 1, 1])[:, None]
        )

    a, b = draw(), draw()
    want = [
        sum(set(x) == set(y) for x, y in zip(r[1:], s[1:])) / 2
        for r, s in zip(a.tolist(), b.tolist())
    ]
    assert routes_agreement(a, b.to(torch.uint8), CONFIG).tolist() == want


def test_agreement_of_a_real_batch():
    "The same weights agree; after a move some do not, and the engine's own pass has counted them"
    b = replace(BATCH)
    e = engine('R3', lively(dtype=torch.float), micro_batch_tokens=40)
    b = replace(b, **e.score(b))
    assert discrepancy(b)['routes_agree_frac'] > 0.99 and discrepancy(b)['rollout_train_gap'] < 1e-3
    with torch.no_grad():
        for w in e.policy.parameters():
            w.mul_(1 + 0.2 * torch.randn(w.shape, generator=torch.Generator().manual_seed(0)))
    b = replace(b, **e.score(b))
    _, own = packed_states(e.policy, b)
    same = (
        (own.sort(-1)[0] == b.routed_experts[b.token_mask].long().sort(-1)[0])
        .all(-1)[:, 1:]
        .float()
        .mean(1)
    )
    share = same[b.routes_valid[b.token_mask]].mean().item()
    assert discrepancy(b)['routes_agree_frac'] == pytest.approx(share) and 0.3 < share < 0.99


# ---- it is real


def fp8(w, size=128):
    rows, cols = w.shape[-2:]
    x = (
        torch.nn.functional.pad(w, (0, -cols % size, 0, -rows % size))
        .unflatten(-1, (-1, size))
        .unflatten(-3, (-1, size))
    )
    scale = x.abs().amax((-3, -1), keepdim=True).clamp(min=1e-12) / 448
    return (
        ((x / scale).to(torch.float8_e4m3fn).float() * scale)
        .flatten(-4, -3)
        .flatten(-2, -1)[..., :rows, :cols]
    )


@pytest.mark.parametrize('kind', ['bf16', 'fp8'])
def test_replay_brings_engines_together(kind):
    "A rollout that really rounds: mean gap and k3 fall, and R2 changes nothing before the update"
    c = PolicyConfig(
        vocab_size=64,
        num_hidden_layers=4,
        num_experts=16,
        moe_intermediate_size=32,
        max_position_embeddings=64,
    )
    p = lively(c, dtype=torch.float, scale=4)
    rollout = TorchRollout(c, 32, torch.bfloat16 if kind == 'bf16' else torch.float)
    rollout.load_weights(
        [(k, fp8(w) if kind == 'fp8' and '_proj' in k else w) for k, w in hf_weights(p)], 0
    )
    ids = torch.randint(2, 64, (32, 6), generator=torch.Generator().manual_seed(0)).tolist()
    b = collate(
        list(
            rollout.generate(
                Request(f'p{i}', tuple(x), 0, derive_seed(i), SamplingParams(32))
                for i, x in enumerate(ids)
            )
        )
    )
    found = {}
    for mode in ('off', 'R2', 'R3'):
        x = replace(b)
        x = replace(x, **engine(mode, p).score(x))
        found[mode] = discrepancy(x)

    def gain(k):
        return found['off'][k] / found['R3'][k]

    assert gain('rollout_train_gap') > (2 if kind == 'bf16' else 1.3) and gain(
        'rollout_train_k3'
    ) > (8 if kind == 'bf16' else 2)
    assert found['R2']['rollout_train_gap'] == found['off']['rollout_train_gap']
    assert 0.5 < found['R3']['tokens_agree_frac'] < found['R3']['routes_agree_frac'] < 1


# ---- validators


def changed(b, at, value, key='routed_experts'):
    t = getattr(b, key).clone()
    t[at] = torch.as_tensor(value, dtype=t.dtype)
    return replace(b, **{key: t})


ALL = slice(None)
BAD = {
    'layer 1 is \\[3, 3\\]: name 2 different': lambda b: changed(b, (0, 2, 1), 3),
    'row 4, token 1, layer 2 is \\[0, 6\\]: use 0 to 5': lambda b: changed(b, (4, 1, 2), [0, 6]),
    'is \\[-1, -1\\]: use 0 to 5, and routes_valid=False': lambda b: changed(
        replace(b, routed_experts=b.routed_experts.short()), (0, 2, 1), -1
    ),
    'layer 0 is \\[0, 1\\]: a dense layer': lambda b: changed(b, (0, 2, 0), [0, 1]),
    'layer 2 is \\[0, 0\\]: as in all rows of this layer': lambda b: changed(b, (ALL, ALL, 2), 0),
    'last token of a sample': lambda b: replace(b, routes_valid=b.routes_valid.roll(1, 1)),
    'routes_valid: set a bool tensor': lambda b: replace(b, routes_valid=None),
    'whole numbers \\[12, .*, 3, 2\\]': lambda b: replace(
        b, routed_experts=b.routed_experts[:, :, 1:]
    ),
    'torch.float32: this policy needs whole': lambda b: replace(
        b, routed_experts=b.routed_experts.float()
    ),
    'routed_experts \\[12, .*, 3, 1\\]': lambda b: replace(
        b, routed_experts=b.routed_experts[..., :1]
    ),
}


@pytest.mark.parametrize('message', BAD)
def test_wrong_routes_are_refused(message):
    validate_routes(BATCH, CONFIG)
    with pytest.raises(ValueError, match=message):
        validate_routes(BAD[message](BATCH), CONFIG)


def test_what_is_not_replayed_is_not_judged():
    b = changed(BATCH, ~BATCH.routes_valid, 99)
    validate_routes(b, CONFIG)
    validate_routes(replace(b, routes_valid=torch.zeros_like(b.routes_valid)), CONFIG)
    validate_routes(replace(b, routed_experts=None, routes_valid=None), CONFIG)


def test_a_sample_is_judged_too():
    s = sampled()[3]
    validate_routes(s, CONFIG)
    with pytest.raises(ValueError, match='name 2 different'):
        validate_routes(
            replace(
                s,
                routed_experts=s.routed_experts * 0
                + torch.tensor([[0], [1], [1]], dtype=torch.uint8),
            ),
            CONFIG,
        )
    with pytest.raises(ValueError, match='routed_experts has'):
        validate_routes(replace(s, routed_experts=s.routed_experts[1:]), CONFIG)


def test_all_tokens_may_take_one_way():
    "A collapsed router is a bad policy, no fault of the record"
    validate_routes(changed(BATCH, (ALL, ALL, slice(1, 3)), [0, 1]), CONFIG)
    single = replace(CONFIG, num_experts_per_tok=1)
    one = replace(BATCH, routed_experts=BATCH.routed_experts[..., :1])
    validate_routes(changed(one, (ALL, ALL, 1), 0), single)


@random
@given(st.integers(0, 5), st.booleans(), st.integers(1, 3))
def test_real_routes_always_pass(seed, dense_first, K):
    c = replace(
        CONFIG,
        mlp_only_layers=(0,) if dense_first else (),
        num_experts_per_tok=K,
        decoder_sparse_step=1 + seed % 2,
    )
    validate_routes(collate(sampled(lively(c, seed, torch.float), 6)), c)


# ---- known bugs of other systems (systems.md 2.5), by number


def test_bug_1_all_zero_capture():
    with pytest.raises(ValueError, match='recorded nothing'):
        validate_routes(replace(BATCH, routed_experts=BATCH.routed_experts * 0), CONFIG)


def test_bug_2_prompt_rows_are_zero():
    prompt = BATCH.token_mask & ~BATCH.response_mask
    b = changed(BATCH, prompt, 0)
    with pytest.raises(ValueError, match='name 2 different'):
        validate_routes(b, CONFIG)


@pytest.mark.parametrize(
    'kw',
    [
        dict(mlp_only_layers=(0,)),
        dict(mlp_only_layers=(1,)),
        dict(mlp_only_layers=(), decoder_sparse_step=2),
    ],
)
def test_bugs_3_and_4_dense_layers_shift_nothing(kw):
    "Routes of layer i reach layer i, wherever the dense layers are; a shifted copy is refused"
    c = replace(CONFIG, num_hidden_layers=4, **kw)
    p = lively(c, dtype=torch.float)
    b = collate(sampled(p))
    got, own = response_log_probs(p, b)[0], packed_states(p, b)[1]
    assert (own.sort(-1)[0] == b.routed_experts[b.token_mask].long().sort(-1)[0])[
        b.fed_mask[b.token_mask]
    ].float().mean() > 0.999
    close(got[b.response_mask], b.rollout_log_probs[b.response_mask], 1e-3)
    with pytest.raises(ValueError):
        validate_routes(replace(b, routed_experts=b.routed_experts.roll(1, 2)), c)


def test_bug_5_R2_with_padding_and_micro_batches():
    test_R2_records_the_trainers_own_routes(25)


def test_bug_6_a_forward_pass_leaves_nothing_behind():
    "Log-probs of other batches between the old-log-prob pass and the update change no gradient"

    def grads(between):
        e, b = engine('R3'), replace(forced(BATCH))
        b = replace(b, **e.score(b))
        for other in between:
            e.score(other)
        b = replace(b, advantages=b.response_mask * torch.linspace(-1, 1, len(b))[:, None])
        accumulate_grads(e.policy, b, LOSS, 40)
        return torch.cat([w.grad.flatten() for w in e.policy.parameters()])

    assert torch.equal(grads([]), grads([BATCH, select(BATCH, [1, 2])]))


def test_bug_7_only_the_live_policy_is_replayed():
    "Policies built before and after, also copies, are nobody's routers"
    before, p = lively(seed=3), lively()
    after = [lively(seed=4), deepcopy(p)]
    b = forced(BATCH)
    got = response_log_probs(p, b)[0]
    assert torch.equal(response_log_probs(after[1], b)[0], got)
    for other in (before, after[0]):
        assert not torch.equal(response_log_probs(other, b)[0], got)


def test_bug_8_more_layers_than_the_model_has():
    more = torch.cat([BATCH.routed_experts, BATCH.routed_experts[:, :, -1:]], 2)
    with pytest.raises(ValueError, match='one row for each layer'):
        validate_routes(replace(BATCH, routed_experts=more), CONFIG)


def test_bug_9_replay_is_never_ignored():
    "Experts that no route names get no gradient"
    p = lively()
    on = BATCH.fed_mask[..., None, None] & torch.tensor([False, True, True])[:, None]
    b = replace(BATCH, routed_experts=torch.where(on, torch.tensor([4, 1], dtype=torch.uint8), 0))
    response_log_probs(p, b)[0].sum().backward()
    for i in (1, 2):
        assert (p.blocks[i].mlp.down.grad.abs().sum((1, 2)) > 0).tolist() == [
            False,
            True,
            False,
            False,
            True,
            False,
        ]


def test_bug_10_duplicates_in_padding_are_never_dispatched():
    b = changed(forced(BATCH), ~BATCH.token_mask, 5)
    assert torch.equal(
        response_log_probs(lively(), b)[0], response_log_probs(lively(), forced(BATCH))[0]
    )


def test_bug_11_replayed_experts_outside_the_live_choice_learn():
    p = lively()

    def logits(m, x):
        return x @ m.router.T

    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(0)).double()
    m = p.blocks[1].mlp
    worst = logits(m, x).topk(2, largest=False).indices
    y, own = m(x, worst, torch.ones(20, dtype=torch.bool))
    assert (
        not (own[..., None] == worst[:, None]).any()
        and torch.autograd.grad(y.square().sum(), [m.router])[0].abs().max() > 1e-3
    )


def test_bug_12_routes_are_on_every_path():
    b = replace(forced(BATCH), routes_agree=torch.rand(BATCH.token_ids.shape))
    paths = [
        select(b, [2, 0]),
        b.to('cpu'),
        b.map(lambda t: t.flip(0)),
        *(select(b, r) for r in micro_batches(b, 30)),
        replace(b),
    ]
    for x in paths:
        assert all(
            getattr(x, k) is not None for k in ('routed_experts', 'routes_valid', 'routes_agree')
        )


@pytest.mark.parametrize('slots', [1, 3, 12])
def test_bugs_14_and_15_no_row_is_missing(slots):
    "Shared prefixes, refilled slots, early samples: each fed token has its plain forward's route"
    p = lively(dtype=torch.float)
    for s in sampled(p, slots=slots):
        assert (
            s.routes_valid.all()
            and len(s.routed_experts) == len(s.prompt_ids) + len(s.response_ids) - 1
        )
        _, own = p(torch.tensor([s.prompt_ids + s.response_ids]))
        assert (own[:-1].sort(-1)[0] == s.routed_experts.long().sort(-1)[0]).float().mean() > 0.98


def test_bug_16_more_than_256_experts():
    c = replace(CONFIG, num_experts=300)
    p = lively(c, dtype=torch.float)
    b = collate(sampled(p, 4))
    assert (
        b.routed_experts.dtype == torch.int16 == route_dtype(300) and b.routed_experts.max() > 255
    )
    close(response_log_probs(p, b)[0][b.response_mask], b.rollout_log_probs[b.response_mask], 1e-3)
    b = replace(b, **engine('R2', p).score(b))
    assert b.routed_experts.dtype == torch.int16


def test_bug_17_rows_without_a_route_are_counted():
    b = holes(replace(BATCH, old_log_probs=BATCH.rollout_log_probs))
    assert (
        discrepancy(b)['routes_valid_frac']
        == pytest.approx((b.routes_valid.sum() / b.fed_mask.sum()).item())
        and 0.4 < discrepancy(b)['routes_valid_frac'] < 0.9
    )


def test_bug_18_a_part_from_old_weights_can_be_left_to_the_live_router():
    "Rows marked invalid are those of the live router, the others are replayed: naive loop"
    b = forced(PART)
    b = replace(b, routes_valid=b.routes_valid & (torch.arange(b.token_ids.shape[1]) >= 4))
    close(response_log_probs(lively(), b)[0], naive_log_probs(lively(), b), 1e-10)
