"Layouts: Megatron-Core's own rank order, every weight held somewhere, refusals, a picture"

from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain, product
from pathlib import Path

import matplotlib
import pytest
import torch
from megatron.core.parallel_state import RankGenerator

from compassrl.config import TrainConfig
from compassrl.model.policy import PolicyConfig
from compassrl.plan import layout as parallel
from compassrl.plan.layout import layout
from compassrl.rollout.rollout_settings import VllmConfig
from compassrl.runs.factory import prepare
from compassrl.train.megatron import parallel as settings
from compassrl.train.megatron.model import build_model, init_parallel
from compassrl.train.megatron.parallel import ParallelConfig, check_parallel, padded_vocab
from compassrl.train.megatron.weights import cuts
from course.layouts import plot_layout, rank_groups, span
from course.ranks import run_ranks
from tests.support.faults import noticed, planted

matplotlib.use('Agg')
ORDER = 'tp-cp-ep-dp-pp'  # Megatron-Core's default
TINY = PolicyConfig(num_hidden_layers=4)  # 4 heads, 2 key-value heads, 8 experts, 99 tokens
WIDE = PolicyConfig(
    num_hidden_layers=16,
    num_attention_heads=8,
    num_key_value_heads=8,
    num_experts=16,
    moe_intermediate_size=8,
)


def shapes():
    "Layouts and their number of ranks"
    for tp, cp, pp, ep, etp, dp in product(
        (1, 2, 4), (1, 2), (1, 2, 4), (1, 2, 8), (1, 2, 4), (1, 2, 3)
    ):
        if tp * cp * pp * dp % (etp * ep * pp) == 0:
            yield ParallelConfig(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp), tp * cp * pp * dp


# ---- rank order


def same_groups(m):
    "Groups of every axis, and of axes together, are those of Megatron-Core's rank generator"
    for p, n in shapes():
        got = m.layout(p, WIDE, n)
        rest = RankGenerator(tp=p.tp, ep=1, dp=p.dp(n), pp=p.pp, cp=p.cp, order=ORDER)
        expert = RankGenerator(tp=p.expert_tp, ep=p.ep, dp=p.edp(n), pp=p.pp, cp=1, order=ORDER)
        for axes in ('tp', 'cp', 'dp', 'pp', 'tp-cp', 'dp-cp', 'tp-pp', 'tp-dp-cp', 'tp-cp-pp'):
            assert sorted(rank_groups(got, *axes.split('-'))) == sorted(rest.get_ranks(axes)), (
                p,
                axes,
            )
        for axes in ('tp', 'ep', 'dp', 'pp', 'tp-ep', 'tp-ep-pp', 'ep-dp'):
            names = [dict(tp='etp', dp='edp').get(a, a) for a in axes.split('-')]
            assert sorted(rank_groups(got, *names)) == sorted(expert.get_ranks(axes)), (p, axes)


def complete(m):
    "Every head, expert, row and layer is held by exactly as many ranks as the layout has replicas"
    for p, n in shapes():
        places = m.layout(p, WIDE, n).places

        def of(place, things):
            return product(chain(*place.layers), things)

        def holders(cells):
            return Counter(chain(*cells))

        for what in ('heads', 'kv_heads'):
            found = holders(of(q, getattr(q, what)) for q in places)
            assert len(found) == 16 * 8 and set(found.values()) == {p.dp(n) * p.cp}, (p, what)
        found = holders(of(q, list(product(q.experts, q.expert_rows))) for q in places)
        assert len(found) == 16 * 16 * 8 and set(found.values()) == {p.edp(n)}, p
        found = holders(product([q.pp], q.vocab) for q in places)
        want = set(product({0, p.pp - 1}, range(padded_vocab(99, p.tp))))
        assert found.keys() == want and set(found.values()) == {p.dp(n) * p.cp}, p


def interleaved(m):
    "Pieces of a pipeline rank alternate: Megatron-Core's own example, 16 layers, 4 ranks, 2 pieces"
    places = m.layout(ParallelConfig(pp=4, vpp=2), WIDE, 4).places
    assert [[list(piece) for piece in q.layers] for q in places] == [
        [[0, 1], [8, 9]],
        [[2, 3], [10, 11]],
        [[4, 5], [12, 13]],
        [[6, 7], [14, 15]],
    ]


def servers(m):
    "Servers take the GPUs that do not train, and stay on one node where they fit on one"

    def gpus(world, **kw):
        return [
            (list(s.gpus), s.node)
            for s in m.layout(ParallelConfig(), TINY, world, 8, VllmConfig(**kw)).servers
        ]

    assert gpus(4, num_replicas=2, tensor_parallel=2) == [([4, 5], 0), ([6, 7], 0)]
    assert gpus(6, num_replicas=2, tensor_parallel=4) == [
        ([8, 9, 10, 11], 1),
        ([12, 13, 14, 15], 1),
    ]
    assert gpus(8, num_replicas=1, tensor_parallel=16) == [(list(range(8, 24)), 1)]
    assert gpus(4, urls=('http://a:1',)) == []
    assert m.layout(ParallelConfig(), TINY, 8, 8, VllmConfig(tensor_parallel=16)).num_nodes == 3


LAWS = [same_groups, complete, interleaved, servers]


@pytest.mark.parametrize('law', LAWS)
def test_layout(law):
    law(parallel)


@pytest.mark.parametrize(
    'old, new',
    [
        (
            'tp=p.tp, cp=p.cp, dp=p.dp(world_size), pp=p.pp)',
            'dp=p.dp(world_size), cp=p.cp, tp=p.tp, pp=p.pp)',
        ),
        (
            'etp=p.expert_tp, ep=p.ep, edp=p.edp(world_size))',
            'etp=p.expert_tp, edp=p.edp(world_size), ep=p.ep)',
        ),
        ("piece*p.pp+at['pp']", "at['pp']*p.vpp+piece"),
        ("_share(c.num_experts, p.ep, at['ep'])", "_share(c.num_experts, p.ep, at['ep']*0)"),
        ("if at['pp'] in (0, p.pp-1):", "if at['pp']==0:"),
        ('rows = range(0)', 'rows = range(1)'),
        ('ceil(vocab_size/tp)*tp', 'vocab_size//tp*tp'),
        ('if left<n and left: start += left', 'pass'),
        ('start//ranks_per_node)); start += n', 'start//ranks_per_node)); start += 1'),
    ],
)
def test_faults_are_noticed(old, new):
    assert noticed(LAWS, planted((settings, parallel), old, new), IndexError)


# ---- what Megatron-Core really holds


def held(policy, p):
    "On one rank: the rows or columns of every Hugging Face tensor that it holds, once each"
    init_parallel(p)
    return {
        (c.name, c.start, c.stop) if c.dim is not None else (c.name, 0, c.shape[0])
        for c in cuts(build_model(policy, p, router_replay=False), policy)
    }


def told(policy, p, q):
    "The same from its place"
    d, tp = policy.head_dim, p.tp

    def ends(r, size=1):
        return r.start * size, r.stop * size

    def dense(r):
        return r * policy.intermediate_size // tp, (r + 1) * policy.intermediate_size // tp

    for i in chain(*q.layers):
        at = f'model.layers.{i}.'
        heads = dict(q=q.heads, k=q.kv_heads, v=q.kv_heads, o=q.heads)
        for k, r in heads.items():
            yield at + f'self_attn.{k}_proj.weight', *ends(r, d)
        for k in ('q', 'k'):
            yield at + f'self_attn.{k}_norm.weight', 0, d
        for k in ('input', 'post_attention'):
            yield at + f'{k}_layernorm.weight', 0, policy.hidden_size
        sparse = policy.is_sparse(i)
        if sparse:
            yield at + 'mlp.gate.weight', 0, policy.num_experts
        for e in q.experts if sparse else [None]:
            name = at + (f'mlp.experts.{e}.' if sparse else 'mlp.')
            rows = ends(q.expert_rows) if sparse else dense(q.tp)
            for k in ('gate', 'up', 'down'):
                yield f'{name}{k}_proj.weight', *rows
    V = policy.vocab_size
    rows = min(q.vocab.start, V), min(q.vocab.stop, V)
    if q.pp == 0:
        yield 'model.embed_tokens.weight', *rows
    if q.pp == p.pp - 1:
        yield from [('lm_head.weight', *rows), ('model.norm.weight', 0, policy.hidden_size)]


@pytest.mark.parametrize(
    'p, n',
    [
        (ParallelConfig(tp=2, ep=2, etp=1), 4),
        (ParallelConfig(tp=2, pp=2), 4),
        (ParallelConfig(pp=2, vpp=2, ep=2, etp=1), 4),
        (ParallelConfig(etp=2, ep=2), 4),
    ],
)
def test_the_real_model_is_cut_so(p, n):
    "Names and rows that Megatron-Core's own parameters hold on every rank, with a dense layer"
    policy = replace(TINY, mlp_only_layers=(1,))
    got = run_ranks(n, held, policy, p)
    assert got == [set(told(policy, p, q)) for q in layout(p, policy, n).places]


# ---- refusals


def refuse(match, **kw):
    kw = dict(policy=TINY, world_size=2, device='cuda') | kw
    p = kw.pop('parallel')
    with pytest.raises(ValueError, match=match) as e:
        check_parallel(p, **kw)
    assert '\n' not in str(e.value)


def test_refusals():
    "One line each: the value, the reason, what to use instead"
    P = ParallelConfig
    refuse(
        r'2 ranks are not a multiple of tp x cp x pp = 4: use 4 ranks',
        parallel=P(tp=2, pp=2, etp=1),
    )
    refuse(
        r'3 ranks are not a multiple of tp x cp x pp = 2: use 2 ranks',
        parallel=P(tp=2),
        world_size=3,
    )
    refuse(r'2 ranks are not a multiple of expert tp x ep x pp = 4', parallel=P(tp=2, ep=2))
    refuse(
        r'tp=4 does not divide num_key_value_heads=2: use one of \[1, 2\]',
        parallel=P(tp=4),
        world_size=4,
    )
    refuse(r'tp=3 does not divide num_attention_heads=4', parallel=P(tp=3), world_size=3)
    refuse(
        r'ep=3 does not divide num_experts=8: use one of \[1, 2, 4, 8\]',
        parallel=P(ep=3),
        world_size=3,
    )
    refuse(r'pp x vpp=3 does not divide num_hidden_layers=4', parallel=P(pp=3), world_size=3)
    refuse(r'pp x vpp=8', parallel=P(pp=2, vpp=4))
    refuse(
        r'expert tp=2 does not divide moe_intermediate_size=33',
        parallel=P(etp=2),
        policy=replace(TINY, moe_intermediate_size=33),
    )
    refuse(
        r'tp=2 does not divide intermediate_size=33',
        parallel=P(tp=2),
        policy=replace(TINY, mlp_only_layers=(1,), intermediate_size=33),
    )
    refuse(
        r'ep=2: this policy has no experts',
        parallel=P(ep=2),
        policy=replace(TINY, mlp_only_layers=(0, 1, 2, 3)),
    )
    refuse(r'cp=2: it needs a GPU and Transformer Engine, use 1', parallel=P(cp=2), device='cpu')
    refuse(
        r"fp8_recipe='blockwise': it needs a GPU and Transformer Engine, use ''",
        parallel=P(fp8_recipe='blockwise'),
        device='cpu',
    )


def test_what_transformer_engine_cannot_do():
    P = ParallelConfig
    refuse(
        "parallel.dtype='float32' with Transformer Engine",
        parallel=P(dtype='float32'),
        device='cuda',
    )
    refuse('vpp=2 of a mixture on GPUs', parallel=P(pp=2, vpp=2), world_size=2, device='cuda')
    assert P().on('cuda').dtype == 'bfloat16' and P().on('cpu').dtype == 'float32'


def test_a_run_on_a_cpu_touches_no_gpu(monkeypatch):
    "Whatever the machine has: its config decides, and one function is asked"
    from compassrl import procs
    from compassrl.runs.run_process import set_up

    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(procs, 'may_use_gpu', True)
    assert procs.has_gpu()
    set_up('cpu', torch.get_num_threads())
    assert not procs.has_gpu()
    asked = 'cuda.is_available(', 'cuda.device_count() else'
    for folder in ('rollout', 'train'):
        for file in (Path(procs.__file__).parent / folder).rglob('*.py'):
            assert not any(x in file.read_text() for x in asked), file


@pytest.mark.skipif(bool(find_spec('transformer_engine')), reason='Transformer Engine is installed')
def test_a_gpu_without_transformer_engine(monkeypatch):
    "Refused when a run is prepared, not after its cold start"
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    cfg = TrainConfig(
        device='cuda', train_engine='megatron', parallel=ParallelConfig(fp8_recipe='blockwise')
    )
    with pytest.raises(
        ValueError, match="fp8_recipe='blockwise': it needs a GPU and Transformer Engine"
    ):
        prepare(cfg)


def test_what_is_allowed():
    "Layouts that train are let through"
    P = ParallelConfig
    for p, n in [
        (P(), 1),
        (P(), 5),
        (P(tp=2, ep=2, etp=1), 2),
        (P(tp=2), 2),
        (P(tp=2, etp=1), 2),
        (P(tp=2, etp=2), 2),
        (P(pp=2), 2),
        (P(ep=2), 2),
        (P(etp=2), 2),
        (P(tp=2, pp=2, ep=2, etp=1), 4),
    ]:
        check_parallel(p, TINY, n, 'cpu')
    check_parallel(P(pp=2, vpp=2), TINY, 2, 'cpu')
    check_parallel(P(cp=2, fp8_recipe='blockwise'), TINY, 2, 'cuda')


@pytest.mark.parametrize(
    'kw, match',
    [
        (dict(tp=0), 'tp=0'),
        (dict(etp=-1), 'etp=-1'),
        (dict(vpp=2), 'vpp=2 with pp=1'),
        (dict(recompute='all'), "recompute='all'"),
        (dict(dtype='float16'), "dtype='float16'"),
        (dict(fp8_recipe='mx'), "fp8_recipe='mx'"),
    ],
)
def test_parallel_config(kw, match):
    with pytest.raises(ValueError, match=match):
        ParallelConfig(**kw)


@pytest.mark.parametrize(
    'kw, match',
    [
        (dict(num_replicas=0), 'num_replicas=0'),
        (dict(tensor_parallel=0), 'tensor_par'),
        (dict(max_restarts=-1), 'max_restarts=-1'),
        (dict(timeout_s=0.0), 'timeout_s=0'),
        (dict(urls=('host:80',)), 'an address such as'),
        (dict(gpu_memory_utilization=1.1), 'gpu_memory_utilization=1.1'),
        (dict(sync='pigeon'), 'sync'),
    ],
)
def test_vllm_config(kw, match):
    with pytest.raises(ValueError, match=match):
        VllmConfig(**kw)


# ---- picture


@pytest.mark.parametrize(
    'p, n, vllm',
    [
        (ParallelConfig(), 1, None),
        (ParallelConfig(), 2, VllmConfig()),
        (
            ParallelConfig(tp=2, ep=4, etp=1, pp=4),
            64,
            VllmConfig(num_replicas=2, tensor_parallel=8),
        ),
        (ParallelConfig(tp=2, ep=4, etp=1, pp=2), 256, VllmConfig(tensor_parallel=16)),
    ],
)
def test_picture(p, n, vllm):
    "Every rank, server and node is in it once, and the figure stays on a page"
    import matplotlib.pyplot as plt

    drawn = layout(p, TINY, n, 8, vllm)
    ax = plot_layout(drawn)
    texts = [t.get_text() for t in ax.texts]
    first = [t.splitlines()[0].removeprefix('rank ').split(':')[0] for t in texts]
    assert all(first.count(str(r)) == 1 for r in range(n))
    nodes = [t for t in texts if t.startswith('node')]
    assert nodes == [f'node {i}' for i in range(drawn.num_nodes)]
    for s in drawn.servers:
        assert texts.count(f'vLLM {s.index}') == -(-len(s.gpus) // 8)
    assert max(ax.figure.get_size_inches()) <= 13.1
    plt.close(ax.figure)


def test_span():
    assert [span(r) for r in (range(0), range(3, 4), range(2, 6))] == ['-', '3', '2-5']


def test_groups_of_both_kinds():
    with pytest.raises(ValueError, match=r"axes=\('tp', 'ep'\): use some of"):
        rank_groups(layout(ParallelConfig(), TINY, 2), 'tp', 'ep')
