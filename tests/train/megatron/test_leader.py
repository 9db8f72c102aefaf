"""The loop runs on rank 0 alone; whatever happens to another rank, all end within a bounded time
and say which one it was"""

import gc
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from compassrl.config import TrainConfig
from compassrl.data.prompts import load_data
from compassrl.data.tokenizer import build_tokenizer
from compassrl.loop import fit
from compassrl.model.pretrained import hf_weights
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs import factory
from compassrl.train.megatron import leader
from compassrl.train.megatron.engine import MegatronTrain
from compassrl.train.megatron.leader import Leader, RankMonitor, serve_leader
from compassrl.train.megatron.parallel import ParallelConfig
from compassrl.train.torch_train import TorchTrain
from tests.support.ranks import lively, name, run_ranks
from tests.train.megatron.test_engine import BATCH, DP, LOSS, MIX, OPTIM, POLICY, PP, TP_EP, fresh


def job(
    lead,
    parallel=ParallelConfig(),
    timeout_s=60.0,
    config=POLICY,
    optim=OPTIM,
    temperature=1.0,
    every_s=0.2,
    hang_s=1800.0,
):
    "`lead(leader)` on rank 0, `serve_leader` on the others"
    e = MegatronTrain(config, hf_weights(lively(config)), optim, parallel, temperature)
    watch = RankMonitor(e.control, timeout_s, every_s, hang_s)
    if dist.get_rank():
        return serve_leader(e, watch)
    with Leader(e, watch) as leader:
        return lead(leader)


def scored(leader):
    b = fresh(BATCH)
    b = replace(b, **leader.score(b))
    return b


# ---- what it does


def rank_plus(engine, x):
    return engine.control.rank + x, engine.num_steps


def everything(leader):
    b = scored(leader)
    first = leader.update(b, LOSS)[0]
    with pytest.raises(ValueError, match='recorded nothing'):
        leader.update(replace(b, routed_experts=b.routed_experts * 0), LOSS)
    second = leader.update(b, LOSS)[0], dict(leader.weights())
    assert first.keys() == second[0].keys() and first != second[0]
    walk = leader.weights()
    next(walk)
    with pytest.raises(RuntimeError, match='walk through all'):
        leader.update(b, LOSS)
    walk.close()
    return leader.everywhere(rank_plus, 5), leader.update(b, LOSS)[0]['lr'], second[1]


@pytest.mark.parametrize('layout', [(1, {}), DP, MIX], ids=name)
def test_one_rank_leads_and_the_others_follow(layout):
    told, lr, weights = run_ranks(layout[0], job, everything, ParallelConfig(**layout[1]))[0]
    e = TorchTrain(lively(POLICY), OPTIM)
    b = fresh(BATCH)
    b = replace(b, **e.score(b))
    for _ in range(2):
        e.update(b, LOSS)
    assert told == (5, e.num_steps) and lr == OPTIM.lr
    assert max((weights[k] - v).abs().max() for k, v in hf_weights(e.policy)) < 1e-4


SMALL = TrainConfig(
    steps=2,
    prompts_per_step=4,
    group_size=4,
    optim=replace(OPTIM, num_mini_batches=1, micro_batch_tokens=500),
)

TWO = replace(SMALL, train_engine='megatron', parallel=ParallelConfig(ep=2))


class Notes:
    def __init__(self):
        self.rows = []

    def on_step(self, step, metrics, samples, batch):
        self.rows.append({k: v for k, v in metrics.items() if not k.startswith('time')})


def loop(engine):
    tokenizer, notes = build_tokenizer(), Notes()
    train, _ = load_data(SMALL.data, tokenizer, 0)
    rollout = TorchRollout(SMALL.policy, 16, torch.float)
    rollout.load_weights(engine.weights(), 0)
    fit(SMALL, train, rollout, engine, tokenizer, notes, SMALL.policy.eos_token_id)
    return notes.rows


@pytest.fixture(scope='module')
def in_one_process():
    return loop(TorchTrain(lively(SMALL.policy), SMALL.optim))


@pytest.mark.parametrize('layout', [DP, TP_EP, PP], ids=name)
def test_the_loop_runs_unchanged(layout, in_one_process):
    got = run_ranks(
        layout[0], job, loop, ParallelConfig(**layout[1]), 60.0, SMALL.policy, SMALL.optim
    )[0]
    want = in_one_process
    assert [r.keys() for r in got] == [r.keys() for r in want]
    for g, w in zip(got, want):
        for k in w:
            assert g[k] == pytest.approx(w[k], rel=1e-3, abs=1e-4), k


# ---- how it ends


def survivors(n, fn, timeout_s=300):
    "How each rank of `n` ended, and what it printed, however the others did"
    with tempfile.TemporaryDirectory() as folder:
        folder, pids = Path(folder), []
        for r in range(n):
            pids.append(os.fork())
            if not pids[-1]:
                gc.freeze()  # a checkpoint collects garbage: not among what was imported
                code, sys.stdout = 1, open(folder / f'{r}', 'w', buffering=1)
                sys.stderr = sys.stdout
                os.dup2(sys.stdout.fileno(), 2)  # what a library writes
                try:
                    torch.set_num_threads(1)
                    dist.init_process_group(
                        'gloo',
                        store=dist.FileStore(str(folder / 'store'), n),
                        rank=r,
                        world_size=n,
                        timeout=timedelta(seconds=300),
                    )
                    fn()
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(code)
        ends, alone, until = {}, time.monotonic(), time.monotonic() + timeout_s
        while set(range(n)) - ends.keys() and time.monotonic() < until:
            for r in set(range(n)) - ends.keys():
                pid, status = os.waitpid(pids[r], os.WNOHANG)
                if pid:
                    ends[r] = status
            last = set(range(n)) - ends.keys()
            if len(last) > 1 or not any(ends.values()):
                alone = time.monotonic()
            elif last and time.monotonic() > alone + 15:
                os.kill(pids[last.pop()], signal.SIGKILL)  # torchrun does so in the end
            time.sleep(0.02)
        for r in set(range(n)) - ends.keys():
            os.kill(pids[r], signal.SIGKILL)
            os.waitpid(pids[r], 0)
        return {r: (ends.get(r), (folder / f'{r}').read_text()) for r in range(n)}


def hang():
    time.sleep(1000)


def some_work():
    "A part of the time, and a watchdog sees it; the rest is left to other tests"
    sum(range(100_000))
    time.sleep(0.005)


def strike(engine, rank, how):
    "One rank is killed, stopped, hangs or raises, while the others wait for it"
    if dist.get_rank() == rank:
        os.kill(os.getpid(), how) if isinstance(how, int) else how()
    dist.barrier()


def explode():
    raise KeyError('the reason')


def stricken(rank, how):
    def lead(leader):
        leader.update(scored(leader), LOSS)
        leader.everywhere(strike, rank, how)

    return lambda: job(lead, timeout_s=3.0, hang_s=3.0)


SAID = {
    explode: "rank {}: KeyError: 'the reason'",
    hang: r'rank {} hangs: for \d+ s at .*test_leader.py:\d+ hang',
    signal.SIGKILL: r'rank {} is lost: silent for \d+ s, ',
    signal.SIGSTOP: r'rank {} is lost: silent for \d+ s, ',
}


@pytest.mark.parametrize('rank', [0, 1])
@pytest.mark.parametrize('how', SAID, ids=['raises', 'hangs', 'killed', 'stopped'])
def test_a_rank_that_fails_is_named_and_all_end(rank, how):
    "Rank 0 too; nobody is left, not even one that was stopped, and nobody calls it a success"
    ends = survivors(3, stricken(rank, how))
    for r in range(3):
        assert ends[r][0] not in (None, 0), ends
        if r != rank:
            assert re.search(SAID[how].format(rank), ends[r][1]), ends[r]
    assert how != explode or 'the reason' in ''.join(said for _, said in ends.values()), ends


def test_whoever_waits_for_a_rank_that_works_is_left_in_peace():
    "Six seconds of work, where a rank may be silent or stand still for two"

    def lead(leader):
        until = time.monotonic() + 6
        while time.monotonic() < until:
            some_work()
        leader.everywhere(rank_plus, 1)

    ends = survivors(2, lambda: job(lead, timeout_s=2.0, hang_s=2.0))
    assert [status for status, _ in ends.values()] == [0, 0], ends


def pause(engine):
    "All ranks are stopped at once for longer than one may be silent, as when a machine sleeps"
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 0 and not os.fork():
        for how, pause_s in ((signal.SIGSTOP, 6.0), (signal.SIGCONT, 0.0)):
            for pid in pids[::-1] if how == signal.SIGSTOP else pids:
                os.kill(pid, how)  # rank 0 has heard the other's last word, and wakes before it
                time.sleep(0.6)
            time.sleep(pause_s)
        os._exit(0)
    until = time.monotonic() + 9
    while time.monotonic() < until:
        some_work()
    dist.barrier()


def test_ranks_that_were_all_stopped_go_on():
    ends = survivors(
        2, lambda: job(lambda leader: leader.everywhere(pause), timeout_s=3.0, hang_s=3.0)
    )
    assert [status for status, _ in ends.values()] == [0, 0], ends


def bad_loss(log_probs, batch, num_tokens, num_samples):
    raise ZeroDivisionError('of this loss')


def test_an_error_in_the_loss_names_a_rank():
    def lead(leader):
        leader.update(scored(leader), bad_loss)

    ends = survivors(2, lambda: job(lead, ParallelConfig(pp=2), 6.0))
    assert all(status not in (None, 0) for status, _ in ends.values())
    assert 'rank 1: ZeroDivisionError: of this loss' in ends[0][1]


# ---- before there is an engine


def cold_start(how):
    "Ranks as `python -m compassrl` prepares them; rank 0 works alone while rank 1 goes"

    def run():
        rank = dist.get_rank()
        alone = dict(RANK=str(rank), WORLD_SIZE='2', LOCAL_WORLD_SIZE='2')  # torchrun sets the same
        with (
            patch.dict(os.environ, alone),
            patch.object(leader, 'RankMonitor', partial(RankMonitor, timeout_s=3.0, every_s=0.2)),
        ):
            watch = factory.prepare(TWO)
        assert watch.is_alive()
        assert gc.get_freeze_count(), 'checkpoints collect garbage among all imports'
        if rank:
            os.kill(os.getpid(), how)
        while True:
            some_work()

    return run


@pytest.mark.parametrize('how', [signal.SIGKILL, signal.SIGSTOP], ids=['killed', 'stopped'])
def test_a_rank_that_is_gone_during_the_cold_start_is_named(how):
    status, said = survivors(2, cold_start(how))[0]
    assert status not in (None, 0), said
    assert re.search('rank 0 ends: ' + SAID[how].format(1), said), said


def test_what_was_told_first_stays():
    monitor = RankMonitor.__new__(RankMonitor)
    monitor.store, monitor.key = dist.HashStore(), 'key'
    assert [monitor.tell(cause) for cause in ('first', 'second')] == ['first'] * 2


def test_a_rank_that_waits_half_an_hour_for_its_stopped_writer_does_not_hang():
    "With the usual limits: the main thread waits for a process that gets no core"
    monitor = RankMonitor(SimpleNamespace(rank=0, size=1))
    monitor.store, monitor.key, monitor.heard = dist.HashStore(), 'key', {}
    writer = multiprocessing.get_context('fork').Process(target=signal.pause)
    writer.start()
    os.kill(writer.pid, signal.SIGSTOP)
    said = {}

    def look():
        while 'popen_fork' not in str(leader.stack()[:1]):
            time.sleep(0.05)
        monitor.calls, monitor.cpu_s, monitor.since = leader.stack(), time.process_time(), 0.0
        for minutes in 1, 10, 29, 31:
            said[minutes] = monitor._diagnosis(60.0 * minutes)
        writer.kill()

    thread = threading.Thread(target=look)
    thread.start()
    writer.join()
    thread.join()
    assert [said[m] for m in (1, 10, 29)] == [''] * 3
    assert re.match(r'rank 0 hangs: for 1860 s at .*popen_fork', said[31])


def test_one_process_is_not_watched():
    def alone():
        watch = factory.prepare(replace(TWO, parallel=ParallelConfig()))
        assert not watch.is_alive() and watch.cause == ''
        with pytest.raises(KeyError), watch.share_errors():
            explode()
        watch.stop()

    run_ranks(1, alone)


@pytest.mark.parametrize(
    'env',
    [
        {},
        dict(LOCAL_WORLD_SIZE='1'),
        dict(WORLD_SIZE='2'),
        dict(WORLD_SIZE='2', LOCAL_WORLD_SIZE='2'),
    ],
    ids=['alone', 'alone after vLLM', 'two', 'two by torchrun'],
)
def test_ranks_of_one_machine_meet_on_loopback(env):
    "vLLM in the same process leaves a LOCAL_WORLD_SIZE behind"
    own = {k: v for k, v in os.environ.items() if k not in ('WORLD_SIZE', 'LOCAL_WORLD_SIZE')}
    with patch.dict(os.environ, own | env, clear=True):
        assert leader.cluster_address() == '127.0.0.1'


def test_ranks_on_other_machines_without_an_address_are_refused_in_one_line():
    ranks = dict(WORLD_SIZE='4', LOCAL_WORLD_SIZE='2')
    own = {k: v for k, v in os.environ.items() if k != 'MASTER_ADDR'}
    with patch.dict(os.environ, own | ranks, clear=True):
        with pytest.raises(ValueError, match='WORLD_SIZE=4 without MASTER_ADDR: .*torchrun'):
            leader.cluster_address()
