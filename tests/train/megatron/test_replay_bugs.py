"""The known router-replay bugs of other systems, by number: each is tested on the real engines, or
refused"""

from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from compassrl.algo.engine_gap import discrepancy
from compassrl.model.pretrained import hf_weights as policy_weights
from compassrl.model.pretrained import save_pretrained
from compassrl.records import Batch, Request, SamplingParams, collate
from compassrl.rollout.rollout_settings import VllmConfig
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.rollout.vllm.messages import engine_args, read_routes, to_sample
from compassrl.train.megatron.batch import Packed, Tap, deal_rows, tap_routers
from compassrl.train.megatron.engine import MegatronTrain
from compassrl.train.megatron.model import build_model, init_parallel, transformer_config
from compassrl.train.megatron.parallel import ParallelConfig
from compassrl.train.routes import validate_routes
from compassrl.train.torch_train import TorchTrain
from tests.support import vllm_fork_server as vllm_forks
from tests.support.engine_samples import POLICY as ROLLED_OUT
from tests.support.engine_samples import shared_prefixes
from tests.support.ranks import RankError, lively, name, run_ranks
from tests.train.megatron.test_engine import (
    BATCH,
    DP,
    LOSS,
    MIX,
    ONE,
    OPTIM,
    POLICY,
    PP,
    TP_EP,
    agrees,
    fresh,
    holes,
    job,
    one_process,
    sampled,
    worst,
)

VPP = (2, dict(pp=2, vpp=2))
REQUEST = Request('p', (5, 6, 7), 0, 0, SamplingParams(9, stop_ids=(1,)))


def captured(b, i):  # [Tp+Tr-1, L, K] of a sample, as vLLM gives them
    return b.routed_experts[i][b.fed_mask[i]].numpy().astype(np.int32)


# ---- 1, 2: what the rollout recorded


def test_bug_1_all_zero_capture_of_a_fused_kernel():
    for zeros in (captured(BATCH, 12) * 0, captured(BATCH, 0) * 0):
        with pytest.raises(ValueError, match='moe_backend'):
            read_routes(zeros, POLICY)
    with pytest.raises(ValueError, match='recorded nothing'):
        validate_routes(replace(BATCH, routed_experts=BATCH.routed_experts * 0), POLICY)


def test_bug_2_prompt_rows_without_a_capture_are_marked_and_live():
    b = fresh(BATCH)
    routes, valid = captured(b, 12), None
    routes[:3] = 0
    ids, valid = read_routes(routes, POLICY)
    assert valid.tolist() == [False] * 3 + [True] * (len(routes) - 3) and ids.dtype == torch.uint8
    prompt = b.token_mask & ~b.response_mask & b.fed_mask
    b = replace(
        b,
        routed_experts=b.routed_experts.masked_fill(prompt[..., None, None], 0),
        routes_valid=b.routes_valid & ~prompt,
    )
    agrees(PP, b, steps=1)


# ---- 3, 4, 8: which layer a router belongs to


def taps_of(parallel, policy):
    init_parallel(parallel)
    return [[t.layer for t in tap_routers(m)] for m in build_model(policy, parallel)]


@pytest.mark.parametrize(
    'change',
    [
        dict(mlp_only_layers=(0,)),
        dict(mlp_only_layers=(1, 2)),
        dict(mlp_only_layers=(), decoder_sparse_step=2),
    ],
    ids=str,
)
@pytest.mark.parametrize('layout', [ONE, PP, VPP], ids=name)
def test_bugs_3_and_4_dense_layers_and_interleaved_pieces_shift_nothing(layout, change):
    c = replace(POLICY, **change)
    ranks = run_ranks(layout[0], taps_of, ParallelConfig(**layout[1]), c)
    pp, vpp = layout[1].get('pp', 1), layout[1].get('vpp', 1)
    n = 4 // (pp * vpp)
    for r, pieces in enumerate(ranks):
        for v, layers in enumerate(pieces):
            first = (v * pp + r) * n
            assert layers == [i for i in range(first, first + n) if c.is_sparse(i)]
    if layout[0] > 1:
        agrees(layout, sampled(c), config=c, steps=1)


def test_bugs_3_and_4_shifted_routes_are_refused():
    for shift in (1, -1):
        with pytest.raises(ValueError, match='layer'):
            validate_routes(
                replace(BATCH, routed_experts=BATCH.routed_experts.roll(shift, 2)), POLICY
            )


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.router_replay = 'its own'


def fake_layer(number, sparse=True):
    layer = nn.Module()
    layer.layer_number, layer.mlp = number, nn.Module()
    if sparse:
        layer.mlp.router = Router()
    return layer


def fake_chunk(fused=False):
    chunk, chunk.decoder, chunk.mtp = (c := nn.Module()), nn.Module(), nn.Module()
    chunk.config = SimpleNamespace(moe_router_fusion=fused, moe_router_pre_softmax=False)
    chunk.decoder.layers = nn.ModuleList([fake_layer(3), fake_layer(4, False), fake_layer(5)])
    chunk.mtp.layers = nn.ModuleList([fake_layer(1)])
    return c


def test_bug_8_layers_that_predict_several_tokens_are_not_the_decoder():
    chunk = fake_chunk()
    taps = tap_routers(chunk)
    assert [t.layer for t in taps] == [2, 4] and chunk.mtp.layers[
        0
    ].mlp.router.router_replay == 'its own'
    assert [layer.mlp.router.router_replay for layer in chunk.decoder.layers[::2]] == taps


# ---- 5: the trainer's own routes, through packing, padding and pieces


@pytest.mark.parametrize('layout', [VPP, (4, dict(tp=2, pp=2, vpp=2))], ids=name)
def test_bug_5_R2_through_packing_padding_and_interleaved_pieces(layout):
    "The rollout's routes are there, and are not those that are replayed"
    b = agrees(
        layout, forced(BATCH), replay='R2', optim=replace(OPTIM, micro_batch_tokens=25), steps=1
    )
    e = TorchTrain(lively(POLICY), OPTIM, 0.8, 'R2')
    own = replace(BATCH, routed_experts=None, routes_valid=None)
    own = replace(own, **e.score(own))
    same = (b.routed_experts.sort(-1)[0] == own.routed_experts.sort(-1)[0]).all(-1)[b.fed_mask]
    assert same.float().mean() > 0.999 and torch.equal(b.routes_valid, own.routes_valid)


# ---- 6, 7: what other passes and other models leave behind


def after_others(parallel, batch, others):
    from compassrl.train.megatron.weights import gather_hf_weights
    from tests.train.megatron.test_engine import whole_gradients

    whole_gradients()
    optim, leads = replace(OPTIM, num_mini_batches=1), dist.get_rank() == 0
    e = MegatronTrain(POLICY, policy_weights(lively(POLICY)), optim, parallel)
    batch = replace(batch, old_log_probs=batch.rollout_log_probs)
    for b in others:
        e.score(b if leads else None)
    left = [len(t.queue) for taps in e.taps for t in taps]
    grads, step = {}, e.step

    def stepping(lr):
        grads.update(
            {k: v.clone() for k, v in gather_hf_weights(e.chunks, POLICY, lambda p: p.main_grad)}
        )
        return step(lr)

    e.step = stepping
    e.update(batch, LOSS) if leads else e.update()
    return grads, left, [len(t.queue) for taps in e.taps for t in taps]


@pytest.mark.parametrize('layout', [PP, VPP], ids=name)
def test_bug_6_passes_that_only_go_forward_leave_nothing_behind(layout):
    how = ParallelConfig(recompute='full', **layout[1])
    alone = run_ranks(layout[0], after_others, how, holes(BATCH), [])
    others = [holes(sampled(num=5)), fresh(BATCH), holes(BATCH)]
    after = run_ranks(layout[0], after_others, how, holes(BATCH), others)
    assert all(torch.equal(v, after[0][0][k]) for k, v in alone[0][0].items())
    assert not any(sum(left) + sum(end) for _, left, end in after) and all(
        left for _, left, _ in after
    )


def stale(parallel, batch, others):  # a queue that was not emptied
    build = Tap.__init__

    def init(self, *args):
        build(self, *args)
        self.queue.append(torch.zeros(1, 2, dtype=torch.uint8))

    Tap.__init__ = init
    return after_others(parallel, batch, others)


def test_bug_6_stored_routes_that_nobody_used_are_an_error():
    with pytest.raises(RankError):
        run_ranks(1, stale, ParallelConfig(recompute='full'), holes(BATCH), [])


def among_others(batch):
    "The engine in the middle of three: built before and after it are models that nobody trains"

    def build(seed):
        return MegatronTrain(POLICY, policy_weights(lively(POLICY, seed)), OPTIM)

    before, e, after = build(9), build(5), build(11)
    batch = replace(batch, **e.score(batch))
    e.update(batch, LOSS)
    return (
        batch.old_log_probs,
        {k: v.clone() for k, v in e.weights()},
        [t.own is None for x in (before, after) for taps in x.taps for t in taps],
    )


def test_bug_7_only_the_routers_of_the_live_model_are_told():
    log_probs, weights, untouched = run_ranks(1, among_others, fresh(forced(BATCH)))[0]
    e, b = TorchTrain(lively(POLICY), OPTIM), fresh(forced(BATCH))
    b = replace(b, **e.score(b))
    e.update(b, LOSS)
    torch.testing.assert_close(log_probs, b.old_log_probs, rtol=0, atol=1e-5)
    assert worst(weights, dict(policy_weights(e.policy))) < 1e-4 and all(untouched)


def forced(b):
    "Experts that nobody chose, still distinct; dense layers stay 0"
    sparse = torch.tensor([POLICY.is_sparse(i) for i in range(4)])
    on = b.fed_mask[..., None, None] & sparse[:, None]
    return replace(b, routed_experts=torch.where(on, (b.routed_experts + 3) % 8, b.routed_experts))


# ---- 9, 10, 11: inside the router and the dispatcher


def test_bug_9_a_fused_router_is_never_built_and_refused():
    assert not transformer_config(POLICY, ParallelConfig()).moe_router_fusion
    with pytest.raises(ValueError, match='moe_router_fusion'):
        tap_routers(fake_chunk(fused=True))


@pytest.mark.parametrize('layout', [TP_EP, MIX], ids=name)
def test_bug_9_replay_is_never_ignored(layout):
    agrees(layout, forced(BATCH), steps=1)


def test_bug_10_pads_name_different_experts():
    """Packed for 2 x 8 tokens at a time; no pad names an expert twice, which some dispatchers
    cannot count"""
    p = Packed(replace(BATCH), tp=2, multiple=8)
    pads = torch.arange(2, dtype=torch.uint8)
    rows = p.put(BATCH.routed_experts, pads)
    real = torch.zeros(p.total, dtype=torch.bool).index_fill(0, p.place, True)
    assert (
        not real.all()
        and (rows[~real] == pads).all()
        and torch.equal(rows[p.place], BATCH.routed_experts[BATCH.token_mask])
    )
    odd = BATCH if int(BATCH.token_mask.sum()) % 2 else collate_less(BATCH)
    agrees(TP_EP, odd, optim=replace(OPTIM, num_mini_batches=1, micro_batch_tokens=10**6), steps=1)


def collate_less(b):  # one token less, so that the packed row needs a pad
    from compassrl.records import select

    i = next(i for i in range(len(b)) if int(b.lengths[i]) % 2)
    return select(b, [j for j in range(len(b)) if j != i])


def test_bug_10_duplicates_in_the_rollouts_routes_are_refused():
    b = replace(
        BATCH, routed_experts=torch.where(BATCH.routed_experts == 3, 4, BATCH.routed_experts)
    )
    with pytest.raises(ValueError, match='different experts'):
        validate_routes(b, POLICY)


@pytest.mark.parametrize('norm', [True, False])
def test_bug_11_experts_outside_the_live_choice_give_the_router_a_gradient(norm):
    c = replace(POLICY, norm_topk_prob=norm)
    b = sampled(c)
    n, how = TP_EP
    got = run_ranks(n, partial(job, config=c, steps=1), ParallelConfig(**how), forced(b))[0]
    want = one_process(forced(b), config=c, steps=1)
    assert worst(got[1], want[1]) < 1e-5
    for i in (0, 2, 3):
        assert got[1][f'model.layers.{i}.mlp.gate.weight'].abs().max() > 1e-5
    assert got[0].routes_agree[b.routes_valid].mean() < 0.5  # they were not the live choice


# ---- 12, 13: on the way


def test_bug_12_no_path_drops_a_tensor():
    b = replace(
        BATCH,
        **{
            f.name: torch.rand(BATCH.token_ids.shape)
            for f in fields(Batch)
            if getattr(BATCH, f.name) is None
        },
    )
    for work in deal_rows(b, torch.arange(len(b)), 3, 60):
        for part in work.parts:
            assert all(getattr(part.batch, f.name) is not None for f in fields(Batch))


def test_bug_13_a_rollout_that_sends_no_routes_is_seen():
    s = to_sample(REQUEST, [8, 9], [-0.1, -0.2], None, POLICY, 0, 0.0)
    b = collate([s])
    b = replace(b, old_log_probs=b.rollout_log_probs)
    assert b.routed_experts is None and discrepancy(b)['routes_valid_frac'] == 0
    with pytest.raises(ValueError, match='no routes'):
        TorchTrain(lively(POLICY), OPTIM, 1.0, 'R2').update(b, LOSS)


# ---- 14, 15: prefix cache and streams, with vLLM itself


def test_bugs_14_and_15_every_row_of_a_shared_prefix_and_of_a_stream_has_its_route(tmp_path):
    save_pretrained(lively(ROLLED_OUT), tmp_path)
    out = vllm_forks.run(tmp_path / 'log', shared_prefixes, tmp_path, timeout=500)
    assert out.returncode == 0 and 'all routes are there' in out.stdout, out.stderr[-3000:]


def test_bugs_14_and_15_settings():
    args = engine_args('m', POLICY, VllmConfig(), torch.float32, 64, 8, True, 'cpu')
    assert args['enable_chunked_prefill'] is False and args['max_num_batched_tokens'] >= 64
    from compassrl.rollout.vllm.in_process import sampling_params  # imported here: it takes seconds

    assert (
        sampling_params(REQUEST).output_kind.name == 'FINAL_ONLY'
    )  # pieces of a stream lose their routes


# ---- 16, 17, 18


def test_bug_16_more_than_256_experts_travel_as_int16():
    c = replace(
        POLICY, num_experts=264, num_experts_per_tok=3, num_hidden_layers=2, moe_intermediate_size=8
    )
    b = sampled(c, num=6)
    assert b.routed_experts.dtype == torch.int16 and b.routed_experts.max() > 255
    got = agrees(
        PP, replace(b, routed_experts=None, routes_valid=None), config=c, replay='R2', steps=1
    )
    assert got.routed_experts.dtype == torch.int16 and got.routed_experts.max() > 255
    tap = Tap(0, keep=True)
    tap.get_replay_topk(
        torch.randn(4, 264), 3, default_compute_topk=lambda s, k, *a: torch.topk(s, k)
    )
    assert tap.own.dtype == tap.queue[0][0].dtype == torch.int16


def test_bug_17_tokens_without_a_route_are_counted_and_logged():
    from tests.train.megatron.test_leader import SMALL, loop

    b = agrees(DP, holes(BATCH), steps=1)
    found = discrepancy(b)
    assert (
        found['routes_valid_frac']
        == pytest.approx((b.routes_valid.sum() / b.fed_mask.sum()).item())
        and found['routes_valid_frac'] < 0.8
    )
    rows = loop(TorchTrain(lively(SMALL.policy), SMALL.optim))
    assert all(r['routes_valid_frac'] == 1 and 0 < r['routes_agree_frac'] <= 1 for r in rows)


@pytest.mark.parametrize('layout', [TP_EP, VPP], ids=name)
def test_bug_18_a_part_from_old_weights_can_be_left_to_the_live_router(layout):
    later = torch.arange(BATCH.token_ids.shape[1]) >= 6
    agrees(layout, replace(forced(BATCH), routes_valid=BATCH.routes_valid & later), steps=1)


def test_bug_18_no_engine_loads_weights_under_a_running_response():
    e = TorchRollout(POLICY, 2, torch.float)
    e.load_weights(policy_weights(lively(POLICY)), 0)
    running = e.generate(
        [replace(REQUEST, params=SamplingParams(3 + 4 * i), seed=i) for i in range(2)]
    )
    next(running)
    with pytest.raises(RuntimeError, match='running'):
        e.load_weights(policy_weights(lively(POLICY)), 1)
