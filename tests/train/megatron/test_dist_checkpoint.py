"""A run that ends at any moment goes on from a checkpoint that is whole, to the last bit, or on
another number of ranks"""

import gc
import os
import signal
import time
from dataclasses import replace
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from compassrl.model.pretrained import hf_weights as policy_weights
from compassrl.records import Batch
from compassrl.train.checkpoint_files import CheckpointError
from compassrl.train.megatron.dist_checkpoint import finish_save, load_sharded, save_sharded
from compassrl.train.megatron.engine import MegatronTrain
from compassrl.train.megatron.leader import Leader, RankMonitor, serve_leader
from compassrl.train.megatron.parallel import ParallelConfig
from compassrl.train.megatron.passes import inner_optimizers
from compassrl.train.megatron.shards import keep_garbage_in_forks, sharded_manifest
from compassrl.train.torch_train import OptimConfig
from course.checkpoints import latest_sharded
from tests.support.ranks import MIXED, RankError, lively, name, run_ranks

SMALL = replace(
    MIXED,
    num_hidden_layers=4,
    hidden_size=32,
    moe_intermediate_size=32,
    intermediate_size=64,
    num_experts=4,
)
TINY = replace(SMALL, num_hidden_layers=2)  # a mixture and a dense layer
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, warmup_steps=3, adam_eps=1e-4)


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 13, (6, 1), generator=g)
    at = torch.arange(12)
    mask, response = at < lengths, (at < lengths) & (at >= 3)
    b = Batch(
        token_ids=torch.randint(2, 99, (6, 12), generator=g) * mask,
        token_mask=mask,
        response_mask=response,
        rollout_log_probs=torch.zeros(6, 12),
        group=torch.arange(6) // 2,
        rewards=torch.zeros(6),
    )
    return replace(b, advantages=torch.randn(6, 1, generator=g) * response)


def push(log_probs, batch, num_tokens, num_samples):
    return -(log_probs * batch.advantages * batch.response_mask).sum() / num_tokens, {}


def train(engine, *seeds):
    for seed in seeds:
        engine.update(*((batch(seed), push) if dist.get_rank() == 0 else ()))


def weights(engine):
    return {k: v.clone() for k, v in engine.weights()}


def begin(parallel, seed=5, config=TINY):
    return MegatronTrain(
        config, policy_weights(lively(config, seed)), OPTIM, parallel, replay='off'
    )


def save_and_go_on(parallel, root, config=TINY):
    engine = begin(parallel, config=config)
    train(engine, 0, 1)
    at_two = weights(engine)
    saving = save_sharded(engine, root, 2)
    train(engine, 2)  # while it is written
    path = saving.wait()
    assert saving.done() and finish_save(engine) == path
    at_three = weights(engine)
    train(engine, 3)
    return at_three, weights(engine), path, at_two


def resume(parallel, path, optimizer=True, config=TINY):
    engine = begin(parallel, seed=9, config=config)  # other weights
    assert load_sharded(engine, path, optimizer) == 2
    loaded = weights(engine)
    train(engine, 2)
    at_three = weights(engine)
    train(engine, 3)
    return at_three, weights(engine), engine.num_steps, loaded


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in b)


def worst(a, b):
    return max((a[k] - b[k]).abs().max().item() for k in b)


SAME = [
    (1, {}),
    (2, {}),
    (2, dict(ep=2)),
    (2, dict(tp=2)),
    (2, dict(pp=2, vpp=2)),
    (4, dict(tp=2, ep=2, etp=1)),
    (2, dict(ep=2, dtype='bfloat16')),
]


@pytest.mark.parametrize('layout', SAME, ids=name)
def test_resume_on_the_same_layout_is_exact(layout, tmp_path):
    n, parallel = layout[0], ParallelConfig(**layout[1])
    config = SMALL if parallel.vpp > 1 else TINY
    three, four, path, two = run_ranks(n, save_and_go_on, parallel, tmp_path, config)[0]
    assert path == tmp_path / 'step-000002' == latest_sharded(tmp_path)
    assert not list(tmp_path.glob('.tmp*')) and sharded_manifest(path)['num_steps'] == 2
    again = run_ranks(n, resume, parallel, path, True, config)[0]
    again_three, again_four, steps, loaded = again
    assert (
        equal(loaded, two) and equal(again_three, three) and equal(again_four, four) and steps == 4
    )


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    "Checkpoints of two layouts that differ in everything"
    out = {}
    for k, (n, kw) in dict(one=(1, {}), mix=(4, dict(tp=2, ep=2, etp=1))).items():
        root, parallel = tmp_path_factory.mktemp(k), ParallelConfig(**kw)
        out[k] = run_ranks(n, save_and_go_on, parallel, root, SMALL)[0]
    return out


OTHER = [
    ('one', 2, {}),
    ('one', 2, dict(tp=2)),
    ('one', 4, dict(pp=2, vpp=2, ep=2)),
    ('mix', 1, {}),
    ('mix', 2, dict(ep=2)),
    ('mix', 2, dict(pp=2)),
    ('mix', 2, dict(etp=2)),
]


@pytest.mark.parametrize(
    'source,n,kw',
    OTHER,
    ids=lambda x: '-'.join(f'{k}{v}' for k, v in x.items()) if isinstance(x, dict) else str(x),
)
def test_resume_on_another_layout(saved, source, n, kw):  # weights, moments and counters
    three, four, path, two = saved[source]
    again = run_ranks(n, resume, ParallelConfig(**kw), path, True, SMALL)[0]
    again_three, again_four, steps, loaded = again
    assert (
        equal(loaded, two)
        and worst(again_three, three) < 2e-6
        and worst(again_four, four) < 2e-6
        and steps == 4
    )


def test_weights_alone(saved):
    three, _, path, two = saved['mix']
    bare = run_ranks(1, resume, ParallelConfig(), path, False, SMALL)[0]
    assert (
        equal(bare[3], two) and bare[2] == 2 and worst(bare[0], three) > 1e-4
    )  # the optimiser begins again


def test_weights_alone_in_bfloat16(tmp_path):  # the master weights follow them
    parallel = ParallelConfig(dtype='bfloat16')
    path = run_ranks(1, save_and_go_on, parallel, tmp_path)[0][2]
    full, bare = (run_ranks(1, resume, parallel, path, o)[0] for o in (True, False))
    assert equal(full[3], bare[3]) and worst(bare[0], full[0]) < 0.05


def before_the_first_step(parallel, root):
    engine = begin(parallel)
    save_sharded(engine, root, 2).wait()
    train(engine, 2, 3)
    return weights(engine)


def test_a_save_before_the_first_step(tmp_path):
    want = run_ranks(2, before_the_first_step, ParallelConfig(ep=2), tmp_path)[0]
    assert equal(run_ranks(2, resume, ParallelConfig(ep=2), tmp_path / 'step-000002')[0][1], want)


def counters(parallel, path):
    engine = begin(parallel, config=SMALL)
    load_sharded(engine, path)
    steps = [s['step'] for o in inner_optimizers(engine.optimizer) for s in o.state.values()]
    return len({s.data_ptr() for s in steps}), len(steps), {float(s) for s in steps}


def test_every_parameter_has_its_own_counter(saved):
    own, number, values = run_ranks(1, counters, ParallelConfig(), saved['one'][2])[0]
    assert own == number > 10 and values == {2.0}


# ---- while training goes on


def hold_writer(gate):
    "The writer notes its number, and waits until `gate` exists"
    write = FileSystemWriterAsync.write_preloaded_data

    def held(*args, **kwargs):
        (gate.parent / f'writer-{os.getpid()}').touch()
        while not gate.exists():
            time.sleep(0.01)
        return write(*args, **kwargs)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(held)


def slow_disk(parallel, root):
    gate = root / 'gate'
    hold_writer(gate)
    engine = begin(parallel)
    train(engine, 0, 1)
    at_two = weights(engine)
    saving = save_sharded(engine, root, 2)
    train(engine, 2, 3, 4)
    seen = saving.done(), latest_sharded(root)
    if dist.get_rank() == 0:
        gate.touch()
    saving.wait()
    return at_two, seen


def test_training_goes_on_while_the_writer_works(tmp_path):
    at_two, seen = run_ranks(2, slow_disk, ParallelConfig(ep=2), tmp_path)[0]
    assert seen == (False, None)
    assert equal(run_ranks(2, resume, ParallelConfig(ep=2), tmp_path / 'step-000002')[0][3], at_two)


def killed_while_writing(parallel, root):
    engine = begin(parallel)
    train(engine, 0, 1)
    save_sharded(engine, root, 2).wait()
    hold_writer(root / 'gate')
    train(engine, 2)
    save_sharded(engine, root, 3)
    while len(list(root.glob('writer-*'))) < 2:
        time.sleep(0.01)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(engine, 3)


def test_a_kill_while_writing_leaves_the_checkpoint_before(tmp_path):
    with pytest.raises(RankError, match='rank 1 of 2: was killed by signal 9'):
        run_ranks(2, killed_while_writing, ParallelConfig(ep=2), tmp_path)
    assert latest_sharded(tmp_path).name == 'step-000002' and list(tmp_path.glob('.tmp-000003-*'))
    writers = [f'/proc/{p.name.removeprefix("writer-")}' for p in tmp_path.glob('writer-*')]
    until = time.monotonic() + 60
    while any(map(os.path.exists, writers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(writers) == 2 and not any(map(os.path.exists, writers)), 'a writer outlives its rank'
    run_ranks(2, resume, ParallelConfig(ep=2), tmp_path / 'step-000002')
    run_ranks(1, lambda: save_sharded(begin(ParallelConfig()), tmp_path, 4).wait())
    assert sorted(p.name for p in tmp_path.glob('[.s]*')) == ['step-000002', 'step-000004']


def writer_killed(parallel, root):
    hold_writer(root / 'gate')
    saving = save_sharded(begin(parallel), root, 1)
    while len(noted := list(root.glob('writer-*'))) < 2:
        time.sleep(0.01)
    dist.barrier()
    if dist.get_rank() == 1:
        own = {p.pid for p in psutil.Process().children(recursive=True)}
        numbers = [int(p.name.removeprefix('writer-')) for p in noted]
        os.kill(next(n for n in numbers if n in own), signal.SIGKILL)
        (root / 'gate').touch()
    why = '.*was killed.*memory' * (dist.get_rank() == 0)  # rank 0 says it
    with pytest.raises(CheckpointError, match='step-000001 was not written' + why):
        saving.wait()


def test_a_writer_that_is_killed_is_told_on_every_rank(tmp_path):
    run_ranks(2, writer_killed, ParallelConfig(tp=2), tmp_path, timeout_s=60)
    assert latest_sharded(tmp_path) is None


def crash_before_the_rename(root):
    saving = save_sharded(begin(ParallelConfig()), root, 1)
    with (
        patch('os.replace', side_effect=OSError('the machine goes down')),
        pytest.raises(CheckpointError),
    ):
        saving.wait()


def test_there_is_no_moment_with_half_a_checkpoint(tmp_path):
    run_ranks(1, crash_before_the_rename, tmp_path)
    assert (
        latest_sharded(tmp_path) is None
        and not list(tmp_path.glob('step-*'))
        and list(tmp_path.glob('.tmp-*'))
    )


def no_space(parallel, root):
    def full(transforms, local_proc_idx, write_bucket, results_queue, count_queue, use_fsync, **kw):
        results_queue.put((local_proc_idx, OSError(28, 'No space left on device')))
        count_queue.get()
        count_queue.task_done()

    if dist.get_rank() == 1:
        FileSystemWriterAsync.write_preloaded_data = staticmethod(full)
    saving = save_sharded(begin(parallel), root, 1)
    with pytest.raises(CheckpointError, match='step-000001 was not written: rank .*free space'):
        saving.wait()


def test_a_full_disk_is_told_on_every_rank(tmp_path):
    run_ranks(2, no_space, ParallelConfig(tp=2), tmp_path)
    assert latest_sharded(tmp_path) is None


def test_a_folder_that_cannot_be_is_told_on_every_rank(tmp_path):
    (tmp_path / 'file').touch()

    def save(parallel):
        engine = begin(parallel)
        with pytest.raises(CheckpointError, match='use another folder'):
            save_sharded(engine, tmp_path / 'file' / 'x', 1)

    run_ranks(2, save, ParallelConfig(tp=2))


def test_only_the_newest_are_kept(tmp_path):
    def many():
        engine = begin(ParallelConfig())
        for step in (1, 2, 3, 3):
            save_sharded(engine, tmp_path, step)  # the last one again
        return finish_save(engine)

    assert run_ranks(1, many)[0].name == 'step-000003'
    assert sorted(p.name for p in tmp_path.iterdir()) == ['step-000002', 'step-000003']
    with pytest.raises(ValueError, match='keep=0'):
        save_sharded(None, tmp_path, 1, keep=0)


# ---- foreign ones; tests/train/megatron/test_damage.py has the torn ones


def dead_group():
    """A process group that is garbage, to be found by the next collection: its end joins threads
    that no fork has"""
    from torch.distributed import HashStore, ProcessGroupGloo

    gc.collect()
    cycle = [ProcessGroupGloo(HashStore(), 0, 1)]
    cycle.append(cycle)


def collect_in_a_rank_and_in_its_writer():
    keep_garbage_in_forks()
    gc.collect()
    pid = os.fork()
    if not pid:
        gc.collect()
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_a_fork_leaves_the_garbage_of_its_parent_alone():
    gc.disable()
    try:
        dead_group()
        assert run_ranks(1, collect_in_a_rank_and_in_its_writer, timeout_s=30) == [0]
    finally:
        gc.enable()


def test_no_checkpoint_at_all(tmp_path):
    assert latest_sharded(tmp_path / 'nowhere') is None


def test_another_policy_is_refused_and_nothing_changes(saved):
    def load():
        engine = begin(ParallelConfig(), config=replace(SMALL, num_experts=8))
        before = weights(engine)
        with pytest.raises(CheckpointError, match='num_experts=4 there and 8 here'):
            load_sharded(engine, saved['one'][2])
        assert equal(weights(engine), before)

    run_ranks(1, load)


# ---- through the leader


def led(root):
    engine = begin(ParallelConfig(ep=2))
    watch = RankMonitor(engine.control)
    if dist.get_rank():
        return serve_leader(engine, watch)
    with Leader(engine, watch) as leader:
        leader.update(batch(0), push)
        leader.everywhere(save_sharded, root, 2)
        leader.update(batch(1), push)
        path = leader.everywhere(finish_save)
        leader.everywhere(load_sharded, path)
        return weights_of(leader)


def weights_of(leader):
    return {k: v.clone() for k, v in leader.weights()}


def test_the_leader_saves_and_loads(tmp_path):
    got = run_ranks(2, led, tmp_path)[0]

    def one_step():
        engine = begin(ParallelConfig())
        train(engine, 0)
        return weights(engine)

    assert worst(got, run_ranks(1, one_step)[0]) < 2e-6
