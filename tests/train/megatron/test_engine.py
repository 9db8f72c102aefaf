"""Megatron-Core trains as one process does, in every layout: log-probs, gradients, weights,
metrics; and says no in one line"""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import compassrl.train.megatron.passes as passes
from compassrl.algo.losses import LossConfig, PolicyLoss
from compassrl.config import TrainConfig
from compassrl.loop import loss_of
from compassrl.model.log_probs import dense_log_probs
from compassrl.model.policy import PolicyConfig
from compassrl.model.pretrained import hf_weights as policy_weights
from compassrl.records import Request, SamplingParams, collate, derive_seed, select
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.train.megatron.batch import Packed, Tap, deal_rows, share_rows, zigzag
from compassrl.train.megatron.engine import MegatronTrain, _report
from compassrl.train.megatron.parallel import ParallelConfig
from compassrl.train.megatron.passes import vocab_log_probs
from compassrl.train.megatron.weights import gather_hf_weights
from compassrl.train.routes import balanced
from compassrl.train.torch_train import OptimConfig, TorchTrain, accumulate_grads
from course.gradients import hf_gradients
from tests.support.ranks import RankError, lively, name, run_ranks

random = settings(
    deadline=None, max_examples=25, derandomize=True, phases=(Phase.explicit, Phase.generate)
)
POLICY = PolicyConfig(
    vocab_size=49,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_experts=8,
    mlp_only_layers=(1,),
    max_position_embeddings=64,
)
SHORT = replace(POLICY, num_hidden_layers=2)  # a mixture and a dense layer
OPTIM = OptimConfig(  # `adam_eps`: where a gradient is a rounding, the step is also small
    lr=1e-3,
    weight_decay=0.1,
    adam_eps=1e-4,
    num_mini_batches=2,
    micro_batch_tokens=60,
    grad_clip=0.5,
)
LOSS = PolicyLoss(LossConfig())
ONE, DP, TP_EP, PP = (1, {}), (2, {}), (2, dict(tp=2, ep=2, etp=1)), (2, dict(pp=2))
MIX = (4, dict(tp=2, pp=2, ep=2, etp=1))
LAYOUTS = [
    ONE,
    DP,
    TP_EP,
    PP,
    (2, dict(ep=2)),
    (2, dict(tp=2)),
    (2, dict(etp=2)),
    (2, dict(pp=2, vpp=2)),
    (2, dict(tp=2, etp=1)),
    MIX,
    (4, dict(tp=2, ep=4, etp=1)),
    (4, dict(tp=2, pp=2, vpp=2)),
    (4, dict(pp=2, ep=2)),
]


def sampled(config=POLICY, num=13, policy=None):
    "Responses of 5 to 17 tokens to prompts of 1 to 5"
    rollout = TorchRollout(config, num, torch.float)
    rollout.load_weights(policy_weights(policy or lively(config)), 0)
    g = torch.Generator().manual_seed(1)
    ids = [
        tuple(torch.randint(2, config.vocab_size, (1 + i % 5,), generator=g).tolist())
        for i in range(num)
    ]
    requests = [
        Request(f'p{i // 2:02}', ids[i], i, derive_seed(i), SamplingParams(5 + i, stop_ids=(1,)))
        for i in range(num)
    ]
    b = collate(sorted(rollout.generate(requests), key=lambda s: s.index))
    b = replace(b, advantages=b.response_mask * torch.linspace(-1, 1, len(b))[:, None])
    return b


BATCH, SHORT_BATCH = sampled(), sampled(SHORT)


def fresh(b):
    return replace(b)


def whole_gradients():  # every rank holds complete gradients, which `gather_hf_weights` needs
    schedule = passes.get_forward_backward_func
    passes.get_forward_backward_func = lambda: partial(schedule(), force_all_reduce=True)


def job(
    parallel,
    batch,
    make_loss=lambda b: LOSS,
    replay='R3',
    optim=OPTIM,
    steps=1,
    policy=None,
    temperature=0.8,
    config=POLICY,
):
    """On rank 0: the batch as the engine left it, gradients of the first mini-batch, metrics of
    each step, weights"""
    whole_gradients()
    e = MegatronTrain(
        config, policy_weights(policy or lively(config)), optim, parallel, temperature, replay
    )
    leads, grads, step = dist.get_rank() == 0, {}, e.step

    def stepping(lr):
        e.step = step
        walk = gather_hf_weights(e.chunks, config, lambda p: p.main_grad)
        grads.update((k, v.clone()) for k, v in walk)
        return step(lr)

    e.step = stepping
    out, metrics = e.score(batch if leads else None), []
    if leads:
        batch = replace(batch, **out)
    for _ in range(steps):
        out = e.update(batch, make_loss(batch)) if leads else e.update()
        if leads:
            metrics.append(out[0])
            batch = replace(batch, **out[1])
    weights = {k: v.clone() for k, v in e.weights()}
    return (batch, grads, metrics, weights) if leads else None


def one_process(
    batch,
    make_loss=lambda b: LOSS,
    replay='R3',
    optim=OPTIM,
    steps=1,
    policy=None,
    temperature=0.8,
    config=POLICY,
):
    "The same by the embedded engine"
    e = TorchTrain(policy or lively(config), optim, temperature, replay)
    batch = replace(batch, **e.score(batch))
    loss = make_loss(batch)
    first = select(batch, torch.arange(len(batch)).tensor_split(optim.num_mini_batches)[0])
    with balanced(e.policy, first, optim.aux_loss_coef):
        accumulate_grads(e.policy, first, loss, 10**6, temperature, replay != 'off')
    grads = {k: v.clone() for k, v in hf_gradients(e.policy)}
    metrics = []
    for _ in range(steps):
        m, seen = e.update(batch, loss)
        metrics.append(m)
        batch = replace(batch, **seen)
    return batch, grads, metrics, dict(policy_weights(e.policy))


def worst(a, b):
    assert list(a) == list(b)
    return max((a[k] - b[k]).abs().max().item() for k in b)


def equal(got, want, rtol=0):
    """Log-probs, entropies and gradients to 1e-5 (and `rtol` of the first two), metrics too,
    weights after Adam to 1e-4"""
    (b, grads, metrics, weights), (wb, wgrads, wmetrics, wweights) = got, want
    for k in ('old_log_probs', 'entropy', 'log_probs', 'routes_agree'):
        if getattr(wb, k) is None:
            assert getattr(b, k) is None
        else:
            torch.testing.assert_close(getattr(b, k), getattr(wb, k), rtol=rtol, atol=1e-5)
    if wb.routed_experts is not None:
        assert torch.equal(b.routes_valid, wb.routes_valid)
    scale = max(v.abs().max().item() for v in wgrads.values())
    assert worst(grads, wgrads) < 1e-5 * max(scale, 1), worst(grads, wgrads)
    for m, w in zip(metrics, wmetrics, strict=True):
        assert m.keys() == w.keys()
        for k in w:
            assert m[k] == pytest.approx(w[k], rel=1e-4, abs=1e-5), k
    assert list(weights) == list(wweights)
    assert worst(weights, wweights) < 1e-4, worst(weights, wweights)
    return b


def agrees(layout, batch, **kw):
    n, how = layout
    return equal(
        run_ranks(n, partial(job, **kw), ParallelConfig(**how), fresh(batch))[0],
        one_process(fresh(batch), **kw),
    )


# ---- parity with one process


@pytest.mark.parametrize('layout', LAYOUTS, ids=name)
def test_every_layout_computes_what_one_process_computes(layout):
    "Two steps of the optimiser in an update; some make a second update"
    agrees(layout, BATCH, steps=2 if layout in (ONE, DP, MIX) else 1)


@pytest.mark.parametrize('replay', ['off', 'R2'])
@pytest.mark.parametrize('layout', [DP, MIX], ids=name)
def test_other_modes_of_replay(layout, replay):
    b = agrees(
        layout,
        replace(BATCH, routed_experts=None, routes_valid=None) if replay == 'R2' else BATCH,
        replay=replay,
    )
    if replay == 'R2':
        assert b.routed_experts.dtype == torch.uint8 and torch.equal(b.routes_valid, b.fed_mask)


def espo(b):
    return loss_of(TrainConfig(policy=replace(POLICY, max_position_embeddings=256)), b)


@pytest.mark.parametrize(
    'loss',
    [
        espo,
        lambda b: PolicyLoss(LossConfig('cispo')),
        lambda b: PolicyLoss(LossConfig('gspo', tis='off')),
    ],
    ids=['espo', 'cispo', 'gspo'],
)
def test_losses(loss):
    agrees(TP_EP, SHORT_BATCH, make_loss=loss, config=SHORT)


@pytest.mark.parametrize(
    'layout, recompute',
    [(DP, 'moe'), (TP_EP, 'full'), (PP, 'moe'), (PP, 'full'), ((2, dict(pp=2, vpp=2)), 'full')],
)
def test_recomputation_replays_what_was_used(layout, recompute):
    agrees((layout[0], layout[1] | dict(recompute=recompute)), holes(BATCH))


@pytest.mark.parametrize('recompute', ['none', 'moe'])
@pytest.mark.parametrize('layout', [TP_EP, PP], ids=name)
def test_the_auxiliary_loss_counts_each_token_once(layout, recompute):
    optim = replace(OPTIM, aux_loss_coef=0.3)
    agrees((layout[0], layout[1] | dict(recompute=recompute)), BATCH, optim=optim)


def test_the_auxiliary_loss_leaves_idle_ranks_out():
    optim = replace(OPTIM, aux_loss_coef=0.3)
    agrees(DP, select(SHORT_BATCH, [3, 5, 6]), optim=optim, config=SHORT)


@pytest.mark.parametrize('rows', [[3], [0, 1], list(range(11))])
def test_odd_numbers_of_rows(rows):
    "Ranks without a row keep in step"
    for layout in (DP, (4, dict(ep=2)))[: 2 if len(rows) == 1 else 1]:
        optim = replace(OPTIM, num_mini_batches=3)
        agrees(layout, select(SHORT_BATCH, rows), optim=optim, config=SHORT)


@pytest.mark.parametrize('tokens', [1, 10**6])
def test_the_size_of_micro_batches_changes_nothing(tokens):
    optim = replace(OPTIM, micro_batch_tokens=tokens)
    agrees(PP, select(SHORT_BATCH, range(6)), optim=optim, config=SHORT)


def holes(b):
    "Every third route is missing; junk is stored there"
    gone = b.fed_mask & (torch.arange(b.token_ids.shape[1]) % 3 == 1)
    return replace(
        b,
        routed_experts=torch.where(gone[..., None, None], 0, b.routed_experts),
        routes_valid=b.routes_valid & ~gone,
    )


@pytest.mark.parametrize('layout', [TP_EP, MIX], ids=name)
def test_tokens_without_a_route_take_the_live_one(layout):
    agrees(layout, holes(BATCH))


@pytest.mark.parametrize(
    'change',
    [
        dict(tie_word_embeddings=True),
        dict(norm_topk_prob=False),
        dict(mlp_only_layers=(0, 1, 2, 3)),
        dict(mlp_only_layers=(), decoder_sparse_step=2),
        dict(num_experts=264, num_experts_per_tok=3, num_hidden_layers=2),
    ],
    ids=str,
)
def test_other_policies(change):
    c = replace(POLICY, **change)
    layout = (2, dict(tp=2, etp=1)) if len(c.mlp_only_layers) == 4 else (2, dict(tp=2, ep=2, etp=1))
    b = sampled(c)
    if not any(c.is_sparse(i) for i in range(c.num_hidden_layers)):
        b = replace(b, routed_experts=None, routes_valid=None)
    for how in (layout, PP)[c.num_experts > 256 :]:
        agrees(how, b, config=c)


# ---- replay


def perturbed(config=POLICY):
    "Routers that would choose otherwise"
    p, g = lively(config), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for block in p.blocks:
            if hasattr(block.mlp, 'router'):
                block.mlp.router += 0.3 * torch.randn(block.mlp.router.shape, generator=g)
    return p


def used(parallel, batch, config=POLICY):
    """On every rank: the experts that each router dispatched to, by layer, in the old-log-prob pass
    and the update"""
    from megatron.core.transformer.moe.router import TopKRouter

    optim, calls = replace(OPTIM, num_mini_batches=1), []
    e = MegatronTrain(config, policy_weights(perturbed(config)), optim, parallel)

    def note(router, args, out):
        calls.append((router.layer_number - 1, out[1].clone()))

    for m in e.chunks:
        for x in m.modules():
            if isinstance(x, TopKRouter):
                x.register_forward_hook(note)
    places = []
    put = Packed.put

    def spy(self, values, fill=0):
        out = put(self, values, fill)
        if values.dim() == 4:
            places.append(out.chunk(parallel.tp)[e.tp_rank])
        return out

    Packed.put = spy
    leads = dist.get_rank() == 0
    out = e.score(batch if leads else None)
    if leads:
        batch = replace(batch, **out)
    e.update(batch, LOSS) if leads else e.update()
    K, turn, wrong, total = config.num_experts_per_tok, Counter(), 0, 0
    for layer, chosen in calls:
        want = places[turn[layer]]
        turn[layer] += 1
        picked = torch.zeros_like(chosen).scatter(1, want[:, layer].long(), True)
        known = (want[:, layer].long().sort(-1)[0].diff(dim=-1) != 0).all(
            -1
        )  # rows of 0 are no route: the last token of a sample
        wrong += int((picked != chosen)[known].any(1).sum())
        total += int(known.sum())
        assert (chosen.sum(1) == K).all()
    return wrong, total, (batch.routes_agree[batch.routes_valid].mean().item() if leads else None)


@pytest.mark.parametrize('layout', [TP_EP, PP, MIX], ids=name)
def test_with_other_routers_the_experts_are_those_that_were_captured(layout):
    results = run_ranks(layout[0], used, ParallelConfig(**layout[1]), fresh(BATCH))
    assert all(wrong == 0 and total > 100 for wrong, total, _ in results)
    assert results[0][2] < 0.8  # the live routers would have chosen others


@pytest.mark.parametrize('layout', [TP_EP, PP, MIX], ids=name)
def test_routers_learn_under_replay_and_as_in_one_process(layout):
    n, how = layout
    got = run_ranks(n, partial(job, policy=perturbed()), ParallelConfig(**how), fresh(BATCH))[0]
    equal(got, one_process(fresh(BATCH), policy=perturbed()))
    routers = [v for k, v in got[1].items() if k.endswith('mlp.gate.weight')]
    assert len(routers) == 3 and all(v.abs().max() > 1e-4 for v in routers)


def test_a_tap_repeats_what_was_used_oldest_first():
    g = torch.Generator().manual_seed(0)
    tap, top = Tap(3, keep=True), lambda s, k, *a: torch.topk(s, k)
    scores = torch.randn(3, 5, 8, generator=g)
    ids = torch.rand(3, 5, 8, generator=g).topk(2, -1).indices
    valid = torch.tensor([True, False, True, True, False])
    first = []
    for s, i in zip(scores, ids):
        tap.forward(i.to(torch.uint8), valid)
        values, chosen = tap.get_replay_topk(s, 2, default_compute_topk=top)
        assert torch.equal(chosen[valid], i[valid]) and torch.equal(
            chosen[~valid], s.topk(2).indices[~valid]
        )
        assert (
            torch.equal(values, s.gather(1, chosen))
            and chosen.dtype == torch.int64
            and tap.own.dtype == torch.uint8
        )
        first.append(chosen)
        tap.backward()
    for s, chosen in zip(scores, first):
        assert torch.equal(
            tap.get_replay_topk(s + 9 * torch.randn(s.shape), 2, default_compute_topk=top)[1],
            chosen,
        )
    assert not tap.queue


# ---- dealing rows out and packing them

lengths = st.lists(st.integers(2, 30), min_size=1, max_size=12)


@random
@given(lengths, st.integers(1, 5), st.sampled_from([1, 50, 10**6]), st.sampled_from([1, 2, 3]))
def test_every_row_goes_to_one_rank_with_all_its_tensors(sizes, ranks, tokens, multiple):
    b = numbered(sizes)
    rows = torch.arange(len(b))[::2]
    works = deal_rows(b, rows, ranks, tokens, multiple)
    assert (
        len(works) == ranks
        and len({len(w.parts) for w in works}) == 1
        and len(works[0].parts) % multiple == 0
    )
    seen = torch.cat([p.rows for w in works for p in w.parts])
    assert sorted(seen.tolist()) == rows.tolist()
    for w in works:
        assert (w.num_tokens, w.num_samples) == (int(b.response_mask[rows].sum()), len(rows))
        for p in w.parts:
            for k in ('token_ids', 'routed_experts', 'routes_valid', 'old_log_probs'):
                v = getattr(p.batch, k)
                if len(p.rows):
                    assert torch.equal(v, getattr(b, k)[p.rows, : v.shape[1]])
            assert (
                not p.batch.response_mask.any()
                if not len(p.rows)
                else p.batch.token_mask.any(0).all()
            )


def numbered(sizes):
    "A batch in which every tensor tells its row and column"
    B, T = len(sizes), max(sizes)
    mask = torch.arange(T) < torch.tensor(sizes)[:, None]
    code = (torch.arange(B)[:, None] * 100 + torch.arange(T) + 1) * mask
    from compassrl.records import Batch

    zero = torch.zeros(B)
    return Batch(
        code,
        mask,
        mask & (torch.arange(T) > 0),
        code.float(),
        zero.long(),
        zero,
        old_log_probs=code.float(),
        routed_experts=code[..., None, None].expand(B, T, 2, 2).clone(),
        routes_valid=mask.clone(),
    )


def test_tokens_are_balanced():
    "Whoever has most would have least without its last row"
    sizes = torch.randint(2, 100, (40,), generator=torch.Generator().manual_seed(0))
    shares = share_rows(sizes, 4)
    loads = [int(sizes[s].sum()) for s in shares]
    assert all(load - int(sizes[s[-1]]) <= min(loads) for load, s in zip(loads, shares)) and sorted(
        sum(shares, [])
    ) == list(range(40))


@random
@given(
    lengths,
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 16]),
    st.sampled_from([0, 200]),
)
def test_packing_is_undone_and_pads_are_a_sequence_of_their_own(sizes, tp, cp, multiple, at_least):
    b = numbered(sizes)
    parts = [Packed(b, tp, cp, r, multiple, at_least) for r in range(cp)]
    p = parts[0]
    assert p.total % (tp * cp * multiple) == 0 and p.total >= max(sum(sizes), at_least)
    whole = torch.zeros(p.total, dtype=torch.long)
    for x in parts:
        whole[x.local] = x.put(b.token_ids, -1)  # together the ranks hold every place once
    assert sorted(torch.cat([x.local for x in parts]).tolist()) == list(range(p.total))
    assert torch.equal(p.take(whole, b.token_ids), b.token_ids) and int(
        (whole == -1).sum()
    ) == p.total - sum(sizes)
    ends = p.params.cu_seqlens_q.tolist()
    assert ends[-1] == p.total and all(
        (y - x) % (2 * cp if cp > 1 else 1) == 0 for x, y in zip(ends, ends[1:])
    )
    for i, (start, n) in enumerate(zip(ends, sizes)):
        assert torch.equal(whole[start : start + n], b.token_ids[i, :n]) and torch.equal(
            p.positions[start : start + n], torch.arange(n)
        )


def test_zigzag_gives_each_rank_an_early_and_a_late_piece():
    assert zigzag(torch.tensor([8, 4]), 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag(torch.tensor([8, 4]), 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


# ---- the vocabulary in pieces


def scored(hidden, head, targets, temperature, V):
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = -(-V // n)
    mine = torch.zeros(rows, hidden.shape[1]).index_put(
        (torch.arange(max(min(V - rank * rows, rows), 0)),), head[rank * rows : (rank + 1) * rows]
    )
    mine[max(V - rank * rows, 0) :] = 50.0  # padding of the vocabulary must not count
    logits = (hidden @ mine.T).requires_grad_()
    lp, h = vocab_log_probs(logits, targets, temperature, V, rank, dist.group.WORLD)
    assert not h.requires_grad
    (lp * torch.arange(1.0, len(lp) + 1)).sum().backward()
    return lp.detach(), h, logits.grad


@pytest.mark.parametrize('n, V', [(1, 13), (2, 13), (3, 13), (3, 7), (4, 5)])
@pytest.mark.parametrize('scale', [1.0, 60.0])
def test_log_probs_of_a_vocabulary_in_pieces(n, V, scale):
    g = torch.Generator().manual_seed(V)
    hidden, head = scale * torch.randn(9, 6, generator=g), torch.randn(V, 6, generator=g)
    targets = torch.randint(0, V, (9,), generator=g)
    full = (hidden @ head.T).requires_grad_()
    lp, h = dense_log_probs(full, torch.eye(V), targets, 0.7)
    (lp * torch.arange(1.0, 10)).sum().backward()
    parts = run_ranks(n, scored, hidden, head, targets, 0.7, V)
    for got_lp, got_h, _ in parts:
        torch.testing.assert_close(got_lp, lp.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got_h, h, rtol=1e-5, atol=1e-5)
    grad = torch.cat([p[2] for p in parts], 1)
    torch.testing.assert_close(grad[:, :V], full.grad, rtol=1e-5, atol=1e-5)
    assert (grad[:, V:] == 0).all()


# ---- steps that are not taken, things that are refused


def nan_loss(log_probs, batch, num_tokens, num_samples):
    return log_probs.sum() * float('nan'), {}


def constant_loss(log_probs, batch, num_tokens, num_samples):
    "Infinite in one row; its gradient is finite everywhere"
    one = (batch.token_ids[:, 0] == 7).all()
    return log_probs.sum() / num_tokens + (float('inf') if one else 0.0), {}


def mean_loss(log_probs, batch, num_tokens, num_samples):
    return -log_probs.sum() / num_tokens, {}


def skipped(parallel, batch):
    "Of each update: its metrics, and does this rank hold the weights that it began with?"
    optim = replace(OPTIM, num_mini_batches=1, micro_batch_tokens=1)  # each row is a part
    e = MegatronTrain(SHORT, policy_weights(lively(SHORT)), optim, parallel, replay='off')
    leads, found = dist.get_rank() == 0, []
    before = [p.detach().clone() for m in e.chunks for p in m.parameters()]
    for loss, lr in ((nan_loss, None), (constant_loss, None), (LOSS, None), (mean_loss, 1e30)):
        out = e.update(batch, loss, lr) if leads else e.update()
        now = [p for m in e.chunks for p in m.parameters()]
        found.append((out and out[0], all(map(torch.equal, now, before))))
    return found


@pytest.mark.parametrize('layout', [DP, MIX], ids=name)
def test_all_ranks_skip_what_is_not_finite_and_say_what_it_did_to_the_weights(layout):
    """A gradient that is not finite; a loss that is not, in one row of one rank; a good step; one
    that blows up the weights of all"""
    batch = select(SHORT_BATCH, range(5))
    ids = batch.token_ids.clone()
    ids[:, 0], ids[4, 0] = 3, 7
    batch = replace(batch, token_ids=ids, old_log_probs=batch.rollout_log_probs)
    results = run_ranks(layout[0], skipped, ParallelConfig(**layout[1]), batch)
    same = [[same for _, same in found] for found in results]
    assert same == [[True, True, False, False]] * layout[0], 'no rank took a bad step'
    nan, bad, good, blown = (metrics for metrics, _ in results[0])
    assert nan['skipped_frac'] == 1 and nan['grad_norm'] == 0
    assert bad['skipped_frac'] == 1 and bad['loss'] == float('inf') and bad['weights_finite'] == 1
    assert good['skipped_frac'] == 0 and good['grad_norm'] > 0 and good['weights_finite'] == 1
    assert blown['skipped_frac'] == 0 == blown['weights_finite']


@pytest.mark.parametrize('fine', [(True, True), (True, False), (False, True)])
def test_the_weights_of_every_rank_count(fine):
    metrics = dict(grad_norm=1.0, skipped_frac=0.0, lr=0.1)
    total, _ = _report(fresh(BATCH), [([({}, [], metrics)], f) for f in fine])
    assert total == metrics | dict(weights_finite=float(all(fine)))


def broken_start(parallel):
    policy = lively(POLICY)
    with torch.no_grad():
        policy.blocks[3].mlp.down[7, 0, 0] = float('nan')  # an expert of one rank
    try:
        MegatronTrain(POLICY, policy_weights(policy), OPTIM, parallel)
    except ValueError as e:
        return str(e)


@pytest.mark.parametrize('layout', [DP, TP_EP, PP], ids=name)
def test_weights_that_are_not_finite_are_refused_by_all_ranks(layout):
    said = run_ranks(layout[0], broken_start, ParallelConfig(**layout[1]))
    assert len(set(said)) == 1 and said[0].startswith('a weight is not finite')


def refused(parallel, batch, replay, what):
    e = MegatronTrain(POLICY, policy_weights(lively(POLICY)), OPTIM, parallel, 1.0, replay)
    leads = dist.get_rank() == 0
    try:
        (e.score if what == 'score' else e.update)(
            *((batch,) if what == 'score' else (batch, LOSS)) if leads else ()
        )
    except ValueError as x:
        error = str(x)
    batch = replace(batch, old_log_probs=batch.rollout_log_probs)
    after = (
        e.update(replace(batch, routed_experts=None), LOSS)
        if leads and replay != 'R2'
        else e.update()
        if replay != 'R2'
        else None
    )
    return error, after


@pytest.mark.parametrize(
    'change, replay, what, message',
    [
        (
            lambda b: replace(b, routed_experts=b.routed_experts * 0),
            'R3',
            'score',
            'recorded nothing',
        ),
        (
            lambda b: replace(b, routed_experts=b.routed_experts * 0),
            'R3',
            'update',
            'recorded nothing',
        ),
        (lambda b: replace(b, routed_experts=None), 'R2', 'update', "replay='R2' repeats"),
    ],
    ids=['zeros', 'zeros_update', 'R2'],
)
def test_bad_input_is_refused_on_all_ranks_and_they_can_go_on(change, replay, what, message):
    results = run_ranks(2, refused, ParallelConfig(), change(fresh(BATCH)), replay, what)
    assert all(message in error for error, _ in results)
    if replay == 'R3':
        assert results[0][1][0]['grad_norm'] > 0


@pytest.mark.parametrize(
    'kw, message', [(dict(temperature=0.0), 'temperature=0'), (dict(replay='R4'), 'R4')]
)
def test_settings_are_checked_first(kw, message):
    with pytest.raises(ValueError, match=message):
        MegatronTrain(POLICY, [], OPTIM, **kw)


def test_rows_longer_than_the_context_are_refused():
    with pytest.raises(RankError, match='exceed max_position_embeddings'):
        run_ranks(
            1,
            job,
            ParallelConfig(),
            fresh(BATCH),
            lambda b: LOSS,
            'R3',
            OPTIM,
            1,
            lively(replace(POLICY, max_position_embeddings=16)),
            0.8,
            replace(POLICY, max_position_embeddings=16),
        )


# ---- in half precision


def test_bf16_passes_with_fp32_masters():
    """Rounding moves log-probs by less than it can, the step is of the same size, and small updates
    are not lost"""
    b, grads, metrics, weights = run_ranks(
        2,
        partial(job, optim=replace(OPTIM, lr=1e-5)),
        ParallelConfig(dtype='bfloat16'),
        fresh(BATCH),
    )[0]
    wb, _, wmetrics, _ = one_process(fresh(BATCH), optim=replace(OPTIM, lr=1e-5))
    gap = (b.old_log_probs - wb.old_log_probs)[b.response_mask].abs()
    assert 1e-4 < gap.mean() < 0.1 and metrics[0]['grad_norm'] == pytest.approx(
        wmetrics[0]['grad_norm'], rel=0.2
    )
    assert {v.dtype for v in weights.values()} == {torch.bfloat16}
