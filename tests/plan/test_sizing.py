"Estimates against what can be counted: real models, Megatron-Core's optimiser, kept tensors"

import weakref
from collections import Counter
from dataclasses import replace
from math import prod

import pytest
import torch

from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import hf_shapes, hf_weights
from compassrl.plan import sizing
from compassrl.plan.layout import Place, layout
from compassrl.plan.memory import check_fits, estimate, fitting
from compassrl.plan.sizing import (
    Workload,
    gpus,
    kept_elements,
    kv_bytes,
    num_params,
    place_params,
    rank_memory,
    server_memory,
    weight_bytes,
)
from compassrl.records import Batch
from compassrl.rollout.rollout_settings import VllmConfig
from compassrl.rollout.torch_rollout import RolloutConfig
from compassrl.train.megatron.engine import MegatronTrain
from compassrl.train.megatron.parallel import ParallelConfig
from compassrl.train.megatron.passes import inner_optimizers
from compassrl.train.torch_train import OptimConfig, accumulate_grads
from course import step_times
from course.ranks import run_ranks
from course.step_times import Guess, decode_s, times_table, token_flops
from tests.support.faults import noticed, planted

# Qwen3-30B-A3B and Qwen3-235B-A22B
Q30 = PolicyConfig(151936, 2048, 48, 32, 4, 128, 6144, 768, 128, 8, max_position_embeddings=40960)
Q235 = replace(
    Q30,
    hidden_size=4096,
    num_hidden_layers=94,
    num_attention_heads=64,
    intermediate_size=12288,
    moe_intermediate_size=1536,
)
SMALL = PolicyConfig(
    vocab_size=512,
    hidden_size=128,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    moe_intermediate_size=64,
    num_experts=16,
    num_experts_per_tok=4,
    num_hidden_layers=4,
    intermediate_size=256,
    max_position_embeddings=512,
)
MIXED = replace(SMALL, mlp_only_layers=(0, 1), tie_word_embeddings=True)
WORK = Workload(
    responses=2, prompt_tokens=128, response_tokens=128, max_tokens=128, micro_batch_tokens=512
)


# ---- parameters


def on_meta(policy):
    with torch.device('meta'):
        return sum(p.numel() for p in Policy(policy).parameters())


DENSE = dict(decoder_sparse_step=1, mlp_only_layers=tuple(range(80)))
LLAMA = dict(qk_norm='none', **DENSE)


def shape(V, D, layers, H, KV, head, dense, **more):
    return PolicyConfig(V, D, layers, H, KV, head, dense, **more)


# family -> shape of a public model, parameters on its card (or in its safetensors index)
PUBLIC = {
    'qwen3': (
        shape(151936, 1024, 28, 16, 8, 128, 3072, tie_word_embeddings=True, **DENSE),
        596049920,
    ),
    'qwen3_moe': (Q30, 30532122624),
    'qwen2': (
        shape(
            151936,
            896,
            24,
            14,
            2,
            64,
            4864,
            family='qwen2',
            qkv_bias=True,
            tie_word_embeddings=True,
            **LLAMA,
        ),
        494032768,
    ),
    'qwen2_moe': (
        shape(
            151936,
            2048,
            24,
            16,
            16,
            128,
            5632,
            family='qwen2',
            qk_norm='none',
            qkv_bias=True,
            moe_intermediate_size=1408,
            num_experts=60,
            num_experts_per_tok=4,
            shared_expert_intermediate_size=5632,
            shared_expert_gate=True,
        ),
        14315784192,
    ),
    'mixtral': (
        shape(
            32000,
            4096,
            32,
            32,
            8,
            128,
            14336,
            family='mixtral',
            qk_norm='none',
            moe_intermediate_size=14336,
        ),
        46702792704,
    ),
    'olmoe': (
        shape(
            50304,
            2048,
            16,
            16,
            16,
            128,
            1024,
            family='olmoe',
            qk_norm='width',
            moe_intermediate_size=1024,
            num_experts=64,
            num_experts_per_tok=8,
        ),
        6919161856,
    ),
    'llama': (shape(128256, 4096, 32, 32, 8, 128, 14336, family='llama', **LLAMA), 8030261248),
    'mistral': (shape(32000, 4096, 32, 32, 8, 128, 14336, family='mistral', **LLAMA), 7241732096),
    # a small GLM-4-MoE: its public sizes count a layer for guessing ahead, which is not trained
    'glm4_moe': (
        shape(
            512,
            64,
            4,
            4,
            2,
            16,
            96,
            family='glm4_moe',
            qk_norm='none',
            qkv_bias=True,
            mlp_only_layers=(0,),
            router_score='sigmoid',
            shared_expert_intermediate_size=64,
            partial_rotary_factor=0.5,
        ),
        None,
    ),
}


def exact_counts(m):
    "The tensors of a checkpoint, name by name; the numbers of model cards"
    for c, public in PUBLIC.values():
        total = sum(map(prod, hf_shapes(c).values()))
        assert m.num_params(c)[0] == total == (public or total)
    for c in (PolicyConfig(), MIXED, replace(SMALL, decoder_sparse_step=2), Q235):
        assert m.num_params(c)[0] == on_meta(c)
    odd = [dict(mlp_only_layers=(0, 3, 9)), dict(decoder_sparse_step=3, mlp_only_layers=(1, 2, 2))]
    for kw in odd:
        c = replace(SMALL, num_hidden_layers=7, **kw)
        assert m.num_params(c)[0] == on_meta(c)
        halves = (Place(0, 0, *[0] * 7, (r,), *[range(0)] * 5) for r in (range(3), range(3, 7)))
        found = Counter()
        for place in halves:
            found.update(m._num_layers(c, place))
        assert found == Counter(map(c.is_sparse, range(7)))


def active_counts(m):
    "Without the experts that a token misses, from the same shapes"
    for c, _ in PUBLIC.values():
        shapes = hf_shapes(c).items()
        experts = sum(prod(s) for name, s in shapes if '.experts.' in name)
        idle = experts * (c.num_experts - c.num_experts_per_tok) // c.num_experts
        assert m.num_params(c)[1] == sum(prod(s) for _, s in shapes) - idle


def model_cards(m):
    "30.5 B of which 3.3 B are active; 235 B and 22 B"
    assert [int(n / 1e8) / 10 for n in m.num_params(Q30)] == [30.5, 3.3]
    assert [round(n / 1e9) for n in m.num_params(Q235)] == [235, 22]


def ranks_add_up(m):
    "Ranks that hold different things hold the model together; padding of the vocabulary is extra"
    for c in (SMALL, MIXED):
        p = ParallelConfig(tp=2, pp=2, ep=2, etp=1)
        parts = [m.place_params(c, q, p) for q in layout(p, c, 4).places]
        total = {k: sum(d.get(k, 0) for d in parts) for k in set().union(*parts)}
        both = total.pop('norms') + total.pop('router', 0)  # every tensor-parallel rank has its own
        # tied tables lie on both ends of a pipeline
        assert sum(total.values()) + both // 2 == on_meta(c) + (c.tie_word_embeddings and 512 * 128)


COUNTS = [exact_counts, active_counts, model_cards, ranks_add_up]


@pytest.mark.parametrize('law', COUNTS)
def test_parameters(law):
    law(sizing)


def test_transformers_counts_the_same():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    c = Q30
    keys = (
        'vocab_size',
        'hidden_size',
        'num_hidden_layers',
        'num_attention_heads',
        'num_key_value_heads',
        'head_dim',
        'intermediate_size',
        'moe_intermediate_size',
        'num_experts',
        'num_experts_per_tok',
        'tie_word_embeddings',
    )
    with torch.device('meta'):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{k: getattr(c, k) for k in keys}))
    assert sum(p.numel() for p in model.parameters()) == num_params(c)[0]


@pytest.mark.parametrize(
    'old, new',
    [
        ('found[_part(name, is_sparse)] += tensor.numel()', 'pass'),
        ('[*block.named_parameters(), *block.named_buffers()]', 'block.named_parameters()'),
        ("('shared', 'shared')", "('shared', 'experts')"),
        ('dict(attention=p.tp, dense=p.tp, experts=p.ep*p.expert_tp)', 'dict(dense=p.tp)'),
        ('1 if policy.tie_word_embeddings else', ''),
        ('last*policy.hidden_size', '0'),
        ('c.num_experts_per_tok)//', 'c.num_experts_per_tok-1)//'),
        ('r.stop//step', 'r.stop'),
        ('if i in r and', 'if'),
    ],
)
def test_wrong_counts_are_noticed(old, new):
    assert noticed(COUNTS, planted(sizing, old, new))


# ---- bytes that Megatron-Core really takes


class Kept:
    "Bytes of tensors that the backward pass still needs, and the most there ever were"

    def __init__(self, own):
        self.own, self.holders, self.now, self.most = {s.data_ptr() for s in own}, {}, 0, 0

    def hook(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda box: box[0])

    def pack(self, t):
        class Box(list):
            pass

        box, s = Box([t.detach()]), t.untyped_storage()
        if s.data_ptr() not in self.own:
            at = s.data_ptr()
            n, _ = self.holders.get(at, (0, 0))
            if not n:
                self.now += s.nbytes()
                self.most = max(self.most, self.now)
            self.holders[at] = n + 1, s.nbytes()
            weakref.finalize(box, self.free, at)
        return box

    def free(self, at):
        n, size = self.holders.pop(at)
        if n > 1:
            self.holders[at] = n - 1, size
        else:
            self.now -= size


def rows(B, T=256):
    mask = torch.ones(B, T, dtype=torch.bool)
    response = mask.clone()
    response[:, 0] = False
    ids = torch.randint(0, 512, (B, T), generator=torch.Generator().manual_seed(0))
    return Batch(ids, mask, response, torch.zeros(B, T), torch.arange(B) // 2, torch.zeros(B))


def nll(log_probs, batch, num_tokens, num_samples):
    return -(log_probs * batch.response_mask).sum() / num_tokens, {}


def measure(policy, p, num_rows):
    "One rank: parameters and bytes after one step, and what its backward pass needed at most"
    e = MegatronTrain(
        policy, hf_weights(Policy(policy)), OptimConfig(micro_batch_tokens=512), p, replay='off'
    )
    kept = Kept([t.untyped_storage() for m in e.chunks for t in [*m.parameters(), *m.buffers()]])
    with kept.hook():
        e.update(rows(num_rows), nll)
    buffers = [b for m in e.models for b in m.buffers + m.expert_parallel_buffers]
    state = [
        v
        for o in inner_optimizers(e.optimizer)
        for s in o.state.values()
        for v in s.values()
        if v.numel() > 1
    ]
    masters = [
        q for o in inner_optimizers(e.optimizer) for g in o.param_groups for q in g['params']
    ]
    if p.on('cpu').dtype != 'float32':
        state += masters

    def size(ts):
        return sum(t.nbytes for t in ts)

    return dict(
        params=sum(q.numel() for m in e.chunks for q in m.parameters()),
        optimizer=size(state),
        gradients=size(b.grad_data for b in buffers),
        weights=size(b.param_data for b in buffers),
        kept=kept.most,
    )


P = ParallelConfig
LAYOUTS = [
    (P(), 1, SMALL),
    (P(), 2, MIXED),
    (P(tp=2, ep=2, etp=1), 2, SMALL),
    (P(pp=2), 2, MIXED),
    (P(tp=2, ep=2, etp=1, pp=2), 4, SMALL),
    (P(ep=2, etp=1), 2, MIXED),
    (P(dtype='bfloat16'), 2, SMALL),
    (P(recompute='full'), 1, SMALL),
    (P(recompute='moe'), 1, SMALL),
]


def named(value):  # what of a layout is not as usual
    if isinstance(value, P):
        return '-'.join(f'{k}{x}' for k, x in vars(value).items() if x != getattr(P(), k))
    return str(value) if isinstance(value, int) else ''


@pytest.mark.parametrize('p, n, policy', LAYOUTS, ids=named)
def test_megatron_takes_that_much(p, n, policy):
    """Parameters exactly; weights, gradients and optimiser to 1% (buckets are padded).

    Activations: on a CPU nothing is fused, so more is kept than the estimate says, which means
    fused kernels; at most twice as much
    """
    got = run_ranks(n, measure, policy, p, 4 * p.dp(n))  # two micro-batches per replica
    for g, q in zip(got, layout(p, policy, n).places):
        want = rank_memory(policy, p, n, q, WORK)
        assert g['params'] == sum(place_params(policy, q, p).values())
        for k in ('weights', 'gradients', 'optimizer'):
            assert want[k] == pytest.approx(g[k], rel=0.01), k
        activations = want['activations'] + want['logits']
        print(p, q.rank, g['kept'] / activations)
        assert 0.8 * activations < g['kept'] < 2.2 * activations


def test_the_embedded_engine_keeps_more():
    "Per token and layer, fp32: 1.1 to 1.4 times the estimate, which assumes fused kernels"

    def per_token(layers, dense):
        c = replace(
            SMALL, num_hidden_layers=layers, mlp_only_layers=tuple(range(layers)) if dense else ()
        )
        policy = Policy(c)
        kept = Kept([t.untyped_storage() for t in [*policy.parameters(), *policy.buffers()]])
        with kept.hook():
            accumulate_grads(policy, rows(2), nll, 512)
        return kept.most / 512

    for dense in (False, True):
        layer = per_token(3, dense) - per_token(2, dense)
        c = replace(SMALL, mlp_only_layers=(0, 1, 2, 3) if dense else ())
        assert 1.05 < layer / (4 * kept_elements(c, not dense)) < 1.5


# ---- servers


def test_server_memory():
    "Weights, cache and reserve fill what vLLM is given; a token takes as much as in our own cache"
    vllm, H100 = VllmConfig(tensor_parallel=2), gpus['H100']
    got = server_memory(Q30, vllm, H100)
    assert got['weights'] == sum(weight_bytes(Q30).values()) / 2 == num_params(Q30)[0]
    assert got['weights'] + got['reserve'] + got['kv_cache'] == pytest.approx(0.85 * 80e9)
    assert got['cached_tokens'] == pytest.approx(got['kv_cache'] / (2 * 48 * 2 * 128 * 2))
    assert kv_bytes(Q30, vllm, RolloutConfig(kv_cache_dtype='fp8')) * 2 == kv_bytes(Q30, vllm)
    assert kv_bytes(Q30, VllmConfig(tensor_parallel=8)) == kv_bytes(
        Q30, VllmConfig(tensor_parallel=4)
    ), '4 heads'
    fp8 = weight_bytes(Q30, 'fp8')
    assert (
        fp8['experts'] * 2 == weight_bytes(Q30)['experts']
        and fp8['router'] == weight_bytes(Q30)['router']
    )
    assert server_memory(Q30, vllm, H100, taken=20e9)['kv_cache'] == pytest.approx(
        got['kv_cache'] - 20e9
    )


# ---- time


def test_flops_of_the_real_policy():
    "torch counts as many forward; it counts whole attention matrices, causal ones need half"
    from torch.utils.flop_counter import FlopCounterMode

    T = 64
    for c in (SMALL, MIXED):
        policy, ids = Policy(c).double(), torch.randint(0, 512, (1, T))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            policy.logits(policy(ids)[0])
        attention = 4 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * T * T
        found = counter.get_total_flops()
        sdpa = sum(
            n for op, n in counter.get_flop_counts()['Global'].items() if 'attention' in str(op)
        )
        assert sdpa in (0, attention)
        norms = 2 * T * sum(p.numel() for p in policy.parameters() if p.dim() == 1)  # no matrices
        assert T * token_flops(c, T) - norms == found - sdpa + attention / 2


H100, VLLM = gpus['H100'], VllmConfig()


def experts_met(m):
    "The share of experts that some of 20 tokens need is what drawing them says"
    c, g = replace(SMALL, num_experts=64, num_experts_per_tok=4), torch.Generator().manual_seed(0)
    drawn = [len(torch.rand(20, 64, generator=g).topk(4).indices.unique()) for _ in range(2000)]
    share = sum(drawn) / len(drawn) / 64
    free = Guess(token_s=0, matrix_frac=1e9)
    size = weight_bytes(c)
    read = (
        m.decode_s(c, VLLM, H100, 20, 0, free) * H100.bandwidth_gbs * 1e9 * free.memory_frac
        - sum(size.values())
    ) / size['experts'] + 1
    assert abs(read - share) < 0.01


def decoding(m):
    "Every cache is read; more responses cost more per step and less per token; two GPUs take half"
    free, size = Guess(token_s=0, matrix_frac=1e9), weight_bytes(Q30)
    rate = H100.bandwidth_gbs * 1e9 * free.memory_frac
    longer = m.decode_s(Q30, VLLM, H100, 10, 1000, free) - m.decode_s(Q30, VLLM, H100, 10, 0, free)
    assert longer * rate == pytest.approx(10 * 1000 * kv_bytes(Q30, VLLM))
    assert m.decode_s(Q30, VLLM, H100, 1e5, 0, free) * rate == pytest.approx(sum(size.values()))
    a, b = m.decode_s(Q30, VLLM, H100, 16, 1000), m.decode_s(Q30, VLLM, H100, 64, 1000)
    assert a < b < 4 * a
    two = m.decode_s(Q30, VllmConfig(tensor_parallel=2), H100, 16, 1000, free)
    assert m.decode_s(Q30, VLLM, H100, 16, 1000, free) == pytest.approx(2 * two)
    slow = replace(free, matrix_frac=1e-6)
    assert m.decode_s(Q30, VLLM, H100, 16, 0, slow) == pytest.approx(
        16 * token_flops(Q30, 0) / (989e12 * 1e-6)
    )


def rollouts(m):
    "Twice the servers, half the time; the tail is drawn alone; a small cache makes waves"
    w = Workload(responses=512, response_tokens=2048, max_tokens=2048, num_slots=64)
    one, two = (m.rollout_s(Q30, VllmConfig(num_replicas=n), gpus['H200'], w) for n in (1, 2))
    assert one == pytest.approx(2 * two)
    assert m.rollout_s(Q30, VllmConfig(urls=('http://a:1', 'http://b:1')), gpus['H200'], w) == two
    tail = m.rollout_s(Q30, VLLM, gpus['H200'], replace(w, max_tokens=4096)) - one
    assert tail == pytest.approx(2048 * decode_s(Q30, VLLM, gpus['H200'], 1, 4096))
    room = server_memory(Q30, VLLM, gpus['H200'])['cached_tokens']
    tight = m.rollout_s(
        Q30,
        VLLM,
        gpus['H200'],
        replace(w, num_slots=512),
        taken=(room - 2560 * 8) * kv_bytes(Q30, VLLM),
    )
    assert tight == pytest.approx(512 / 8 * 2048 * decode_s(Q30, VLLM, gpus['H200'], 8, 512 + 1024))


def training(m):
    "Three passes with gradient, four with recomputation; tokens over GPUs; bubbles of a pipeline"
    w, p = Workload(), ParallelConfig(dtype='bfloat16')
    one = m.train_s(Q30, p, 8, H100, w)
    forward = 1024 * 2560 * token_flops(Q30, 2560) / (8 * 989e12 * 0.35)
    assert one['log_probs_s'] == pytest.approx(forward) and one['update_s'] == pytest.approx(
        3 * forward
    )
    assert m.train_s(Q30, p, 16, H100, w)['update_s'] == pytest.approx(one['update_s'] / 2)
    assert m.train_s(Q30, replace(p, recompute='full'), 8, H100, w)['update_s'] == pytest.approx(
        4 * forward
    )
    assert m.train_s(Q30, p, 8, H100, replace(w, num_forward=2))['log_probs_s'] == pytest.approx(
        2 * forward
    )
    micro = 1024 * 2560 / 16384 / 2  # tokens of each of two replicas
    piped = m.train_s(Q30, replace(p, pp=4), 8, H100, w)['update_s']
    assert piped == pytest.approx(one['update_s'] * (1 + 3 / micro))
    assert m.train_s(Q30, replace(p, pp=4, vpp=2), 8, H100, w)['update_s'] == pytest.approx(
        one['update_s'] * (1 + 3 / micro / 2)
    )


def syncing(m):
    "Two bytes per parameter over the slower link"
    near, far = m.sync_s(Q30, VLLM, H100), m.sync_s(Q30, VLLM, H100, 2)
    assert far == pytest.approx(9 * near) and near == pytest.approx(
        2 * num_params(Q30)[0] / (450e9 * 0.7)
    )
    assert m.sync_s(Q30, VllmConfig(urls=('http://a:1',)), H100) == far


TIMES = [experts_met, decoding, rollouts, training, syncing]


@pytest.mark.parametrize('law', TIMES)
def test_times(law):
    law(step_times)


@pytest.mark.parametrize(
    'old, new',
    [
        ('(1-K/E)**running', '(1-1/E)**running'),
        ('+running*length*kv_bytes', '+length*kv_bytes'),
        ('read/vllm.tensor_parallel', 'read'),
        ('ceil(w.responses/servers)', 'w.responses'),
        ('min(each, w.num_slots, fit)', 'min(each, w.num_slots)'),
        ('(p.pp-1)/(p.vpp*micro)', '(p.pp-1)/micro'),
        ("4 if p.recompute=='full' else 3", '3'),
        ('w.num_forward*forward', 'forward'),
        ('or vllm.urls else', 'else'),
    ],
)
def test_wrong_times_are_noticed(old, new):
    assert noticed(TIMES, planted(step_times, old, new))


# ---- all of it


def test_estimate_and_refusal():
    "A layout that does not fit is refused in one line with one that does"
    P = ParallelConfig
    vllm = VllmConfig(num_replicas=4, tensor_parallel=2)

    def of(p, n, gpu=H100, v=vllm):
        return estimate(layout(p, Q30, n, 8, v), Workload(), gpu, v)

    bad = of(P(ep=8, etp=1, dtype='bfloat16'), 16)
    said = (
        r'^a rank needs \d+ GB of the 80 GB of a H100, most for activations \(estimate\): '
        'use parallel.tp='
    )
    with pytest.raises(ValueError, match=said) as e:
        check_fits(bad)
    words = dict(word.split('=') for word in str(e.value).split('parallel.')[1].split())
    named = P(
        **{k: int(v) for k, v in words.items() if k != 'recompute'},
        recompute=words['recompute'],
        dtype='bfloat16',
    )
    check_fits(of(named, 16))
    assert named == fitting(Q30, 16, H100)[0]
    with pytest.raises(ValueError, match=r'use a smaller optim.micro_batch_tokens, or more GPUs'):
        check_fits(of(P(), 1))
    small = VllmConfig(num_replicas=4, tensor_parallel=1, gpu_memory_utilization=0.8)
    with pytest.raises(
        ValueError,
        match=r'a rollout server has room for [\d,]+ tokens, one response may need 4,608',
    ):
        check_fits(of(named, 16, H100, small))
    check_fits(estimate(layout(P(), Q30, 1)))  # a CPU has no data sheet


def test_the_embedded_engine_has_no_layout_to_change():
    "It is told to take smaller micro-batches; its logits come in chunks"
    work = replace(Workload(), micro_batch_tokens=65_536)
    e = estimate(layout(ParallelConfig(), Q30, 1), work, gpus['H200'])
    with pytest.raises(ValueError, match='use a smaller optim.micro_batch_tokens'):
        check_fits(e, can_cut=False)
    chunked = estimate(e.layout, replace(work, logit_tokens=256), gpus['H200'])
    assert e.stages[0]['logits'] == pytest.approx(256 * chunked.stages[0]['logits'])
    assert e.stages[0]['activations'] == chunked.stages[0]['activations']


def test_every_suggestion_fits():
    for p in fitting(Q235, 128, gpus['H200']):
        check_fits(estimate(layout(p, Q235, 128), Workload(), gpus['H200']))


def test_a_rollout_beside_training_has_less_room():
    "vLLM in a process that also trains: what training holds is not the cache's"
    p, vllm = ParallelConfig(), VllmConfig()
    alone = estimate(layout(p, SMALL, 1, 8, vllm), WORK, H100, vllm)
    both = estimate(layout(p, SMALL, 1), WORK, H100, vllm)
    assert alone.server['kv_cache'] - both.server['kv_cache'] == pytest.approx(both.peak)


def test_table_says_estimate():
    e = estimate(layout(ParallelConfig(pp=2), SMALL, 2, 8, VLLM), WORK, H100, VLLM)
    text = f'{e.table()}\n{times_table(step_times.step_times(e, VLLM))}'
    assert text.startswith('estimate for 2 x H100, not measured')
    for word in (
        'weights',
        'optimizer',
        'cached tokens',
        'rollout',
        'update',
        'sync',
        'one after the other',
    ):
        assert word in text
    cpu = estimate(layout(ParallelConfig(), SMALL, 1), WORK).table()
    assert 'CPU' in cpu and 'cached' not in cpu


@pytest.mark.parametrize(
    'kw, match',
    [
        (dict(responses=0), 'responses=0'),
        (dict(num_forward=-1), 'num_forward=-1'),
        (dict(response_tokens=5000), 'response_tokens=5000 exceeds max_tokens=4096'),
    ],
)
def test_workload(kw, match):
    with pytest.raises(ValueError, match=match):
        Workload(**kw)
