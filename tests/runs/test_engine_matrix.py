"Any rollout engine with any train engine: three steps on the same samples end in the same place"

import pickle
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from compassrl.algo.engine_gap import discrepancy
from compassrl.algo.losses import LossConfig, PolicyLoss
from compassrl.model.pretrained import from_pretrained, save_pretrained
from compassrl.model.pretrained import hf_weights as policy_weights
from compassrl.records import collate, select
from compassrl.train.megatron.engine import MegatronTrain
from compassrl.train.megatron.parallel import ParallelConfig
from compassrl.train.megatron.weights import gather_hf_weights
from compassrl.train.torch_train import OptimConfig, TorchTrain
from course.gradients import hf_gradients
from tests.support import vllm_fork_server as vllm_forks
from tests.support.engine_samples import POLICY, sample, write_samples
from tests.support.ranks import lively, name, run_ranks
from tests.train.megatron.test_engine import (
    TP_EP,
    equal,
    fresh,
    job,
    one_process,
    perturbed,
    used,
    whole_gradients,
    worst,
)

OPTIM, LOSS, STEPS = (
    OptimConfig(lr=2e-4, weight_decay=0.1, adam_eps=1e-4, micro_batch_tokens=150),
    PolicyLoss(LossConfig()),
    3,
)
LAYOUTS = [
    (1, {}),
    (2, {}),
    TP_EP,
    (2, dict(pp=2)),
    (2, dict(ep=2)),
    (4, dict(tp=2, pp=2, ep=2, etp=1)),
]
ROLLOUTS = ['torch', 'vllm', 'pool']


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('checkpoint')
    save_pretrained(lively(POLICY), folder)
    return folder


@pytest.fixture(scope='module')
def batches(folder):
    "By rollout engine; vLLM in a process of its own, since ranks are forked from this one"
    r = vllm_forks.run(
        folder / 'log', write_samples, ['pool', 'vllm'], folder, timeout=600
    )  # the engine changes its environment
    assert r.returncode == 0, r.stderr[-3000:]
    out = {}
    for kind in ROLLOUTS:
        b = collate(
            sample(kind, folder) if kind == 'torch' else pickle.loads((folder / kind).read_bytes())
        )
        out[kind] = replace(b, advantages=b.response_mask * torch.linspace(-1, 1, len(b))[:, None])
    return out


def three_steps(engine, batch, grads_of, leads=True):
    "Log-probs, then losses, log-probs seen, gradients of each step, and the weights in the end"
    out, steps = engine.score(batch if leads else None), []
    if leads:
        batch = replace(batch, **out)
    for _ in range(STEPS):
        out = engine.update(batch, LOSS) if leads else engine.update()
        if leads:
            steps.append((out[0], out[1]['log_probs']))
    return batch, steps, grads_of(), {k: v.clone() for k, v in engine.weights()}


def recorded(engine, policy):  # gradients of every step, taken before the optimiser clips them
    grads, step = [], engine.step

    def stepping(lr):
        grads.append(
            {
                k: v.clone()
                for k, v in gather_hf_weights(engine.chunks, policy, lambda p: p.main_grad)
            }
        )
        return step(lr)

    engine.step = stepping
    return lambda: grads


def megatron_steps(parallel, folder, batches):
    whole_gradients()
    leads, out = dist.get_rank() == 0, {}
    for kind, batch in batches.items():
        e = MegatronTrain(POLICY, folder, OPTIM, parallel, 0.8, 'R3')
        out[kind] = three_steps(e, batch, recorded(e, POLICY), leads)
    return out if leads else None


def torch_steps(folder, batch):
    import compassrl.train.torch_train as te

    e, grads, clip = TorchTrain(from_pretrained(folder), OPTIM, 0.8, 'R3'), [], te.clip_and_step

    def stepping(policy, *args):
        grads.append({k: v.clone() for k, v in hf_gradients(policy)})
        return clip(policy, *args)

    te.clip_and_step = stepping
    try:
        return three_steps(e, batch, lambda: grads)
    finally:
        te.clip_and_step = clip


@pytest.fixture(scope='module')
def embedded(folder, batches):
    return {k: torch_steps(folder, b) for k, b in batches.items()}


@pytest.mark.parametrize('kind', ROLLOUTS)
def test_rollout_and_training_agree_on_log_probs_and_routes(embedded, kind):
    batch = embedded[kind][0]
    found = discrepancy(batch)
    assert (
        found['rollout_train_gap'] < 1e-5
        and found['routes_valid_frac'] == 1
        and found['routes_agree_frac'] > 0.99
    )
    assert batch.response_mask.sum() > 100
    drawn = batch.response_mask.int()
    read = (batch.token_mask & ~batch.response_mask & (drawn.cumsum(1) > 0)).sum(1)
    assert (read >= 3).sum() >= 2, 'episodes with answers of a tool'


def claimed(batch, how):
    "Episodes whose answers are said to have any advantage, log-probs and entropy; or to be drawn"
    g = torch.Generator().manual_seed(0)
    answers = (batch.response_mask.int().cumsum(1) > 0) & batch.token_mask & ~batch.response_mask
    odd = answers * torch.randn(answers.shape, generator=g)
    if how == 'drawn':
        batch = replace(batch, response_mask=batch.response_mask | answers)
    if how != 'plain':
        batch = replace(
            batch,
            advantages=batch.advantages + odd,
            old_log_probs=batch.old_log_probs + odd,
            rollout_log_probs=batch.rollout_log_probs - odd,
            entropy=batch.entropy + odd.abs(),
        )
    return batch


def first_gradients(start, batch, leads=True):
    "Of one step from the same weights, whatever is claimed; and what the train engine scored"
    out = {}
    for how in ('plain', 'claimed', 'drawn'):
        engine, grads_of = start()
        scored = engine.score(batch if leads else None)
        if leads:
            engine.update(claimed(replace(batch, **scored), how), LOSS)
        else:
            engine.update()
        out[how] = grads_of()[0]
    return scored, out


def megatron_gradients(parallel, folder, batches):
    whole_gradients()

    def start():
        e = MegatronTrain(POLICY, folder, OPTIM, parallel, 0.8, 'R3')
        return e, recorded(e, POLICY)

    leads = dist.get_rank() == 0
    out = {k: first_gradients(start, b, leads) for k, b in batches.items()}
    return out if leads else None


def torch_gradients(folder, batch):
    import compassrl.train.torch_train as te

    grads, clip = [], te.clip_and_step

    def stepping(policy, *args):
        grads.insert(0, {k: v.clone() for k, v in hf_gradients(policy)})
        return clip(policy, *args)

    def start():
        return TorchTrain(from_pretrained(folder), OPTIM, 0.8, 'R3'), lambda: grads

    with mock.patch.object(te, 'clip_and_step', stepping):
        return first_gradients(start, batch)


def episodes(batch):
    "Rows with answers of a tool"
    begins = (batch.response_mask.int().diff(dim=1) == 1).sum(1)
    return fresh(select(batch, begins > 1))


@pytest.mark.parametrize(
    'train', ['torch', *LAYOUTS[:3]], ids=lambda x: x if isinstance(x, str) else name(x)
)
def test_answers_have_no_gradient(folder, batches, train):
    "Of every pair of engines: log-probs of episodes are equal, and nobody learns what was read"
    some = {k: episodes(b) for k, b in batches.items()}
    if train == 'torch':
        results = {k: torch_gradients(folder, b) for k, b in some.items()}
    else:
        n, how = train
        results = run_ranks(
            n, megatron_gradients, ParallelConfig(**how), folder, some, timeout_s=600
        )[0]
    assert set(results) == set(ROLLOUTS)
    for kind, (scored, grads) in results.items():
        batch = some[kind]
        gap = (scored['old_log_probs'] - batch.rollout_log_probs)[batch.response_mask]
        assert len(batch) >= 2 and gap.abs().max() < 1e-5, kind
        a, b, c = (grads[k] for k in ('plain', 'claimed', 'drawn'))
        assert all(a[k].equal(b[k]) for k in a) and any(v.any() for v in a.values()), kind
        assert not all(a[k].allclose(c[k]) for k in a), kind


@pytest.mark.parametrize('layout', LAYOUTS, ids=name)
def test_three_steps(folder, batches, embedded, layout):
    n, how = layout
    results = run_ranks(n, megatron_steps, ParallelConfig(**how), folder, batches, timeout_s=600)[0]
    for kind in ROLLOUTS:
        (batch, steps, grads, weights), (wbatch, wsteps, wgrads, wweights) = (
            results[kind],
            embedded[kind],
        )
        for k in ('old_log_probs', 'entropy', 'routes_agree'):
            torch.testing.assert_close(getattr(batch, k), getattr(wbatch, k), rtol=0, atol=1e-5)
        for i in range(STEPS):
            assert steps[i][0]['loss'] == pytest.approx(wsteps[i][0]['loss'], abs=1e-5)
            assert worst(grads[i], wgrads[i]) < 1e-5 * max(
                v.abs().max() for v in wgrads[i].values()
            ), (kind, i)
            torch.testing.assert_close(
                steps[i][1], wsteps[i][1], rtol=1e-5 if i else 0, atol=1e-5
            )  # later: of weights that differ
        assert worst(weights, wweights) < 1e-4
        moved = worst(wweights, dict(policy_weights(from_pretrained(folder))))
        assert moved > 4e-4 and len(grads) == STEPS


def plain(batch):
    "Without the episodes: a tool says tokens that a perturbed policy finds most unlikely"
    begins = (batch.response_mask.int().diff(dim=1) == 1).sum(1)
    return fresh(select(batch, begins <= 1))


@pytest.mark.parametrize('layout', LAYOUTS, ids=name)
def test_what_vllm_routed_is_what_every_layout_replays(batches, layout):
    "Routers would choose otherwise: the experts are vLLM's, routers learn as in one process"
    n, how = layout
    results = run_ranks(
        n, used, ParallelConfig(**how), fresh(batches['vllm']), POLICY, timeout_s=600
    )
    assert all(wrong == 0 and total > 100 for wrong, total, _ in results)
    assert results[0][2] < 0.9  # the live routers would have chosen others
    kw = dict(policy=perturbed(POLICY), config=POLICY, steps=1)
    got = run_ranks(
        n, partial(job, **kw), ParallelConfig(**how), plain(batches['vllm']), timeout_s=600
    )[0]
    # perturbed routers make logits large: seven digits
    equal(got, one_process(plain(batches['vllm']), **kw), rtol=1e-5)
    routers = [v for k, v in got[1].items() if k.endswith('mlp.gate.weight')]
    assert len(routers) == 3 and all(v.abs().max() > 1e-4 for v in routers)
