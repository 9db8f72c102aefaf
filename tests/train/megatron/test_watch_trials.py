"""A rank is killed, stopped or hangs at a random moment of random work: it is named, and all end.

`COMPASSRL_WATCH_S` sets the seconds for which a rank may be stopped. `-s` prints a table."""

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from compassrl.model.pretrained import hf_weights
from compassrl.records import Request, SamplingParams
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.train.megatron import watchdog
from compassrl.train.megatron.dist_checkpoint import (
    finish_save,
    latest_sharded,
    load_sharded,
    save_sharded,
)
from compassrl.train.megatron.engine import MegatronTrain
from compassrl.train.megatron.heartbeat import LIMIT_VARIABLE, Heartbeat
from compassrl.train.megatron.leader import Leader, RankMonitor, serve_leader
from compassrl.train.megatron.parallel import ParallelConfig
from compassrl.train.sft import SFTConfig
from tests.launch.test_machines import TWO
from tests.support import chaos
from tests.support.ranks import lively
from tests.train.megatron.test_engine import LOSS, OPTIM, POLICY
from tests.train.megatron.test_leader import scored, survivors

LIMIT_S = float(os.environ.get(LIMIT_VARIABLE, 4))


def hang(*args):
    "In the main thread, wherever it is"
    time.sleep(10_000)


def hang_in_c():
    "No thread of Python runs any more"
    ctypes.PyDLL(None).sleep(10_000)


WAYS = {
    'killed': (partial(os.kill, 0, signal.SIGKILL), 'was killed or crashed'),
    'stopped': (partial(os.kill, 0, signal.SIGSTOP), r'was stopped for \d+ s'),
    'hangs': (partial(os.kill, 0, signal.SIGUSR1), r'hangs: it did nothing for \d+ s'),
    'hangs in C': (hang_in_c, r'hangs: it did nothing for \d+ s'),
}


def strike(way, delay_s):
    "The rank tells when"
    act = WAYS[way][0]
    if isinstance(act, partial):
        act = partial(os.kill, os.getpid(), act.args[1])
    time.sleep(delay_s)
    text = f'struck at {time.monotonic()}\n'.encode()
    # a call that lets no other thread in: the next moment is the one that was noted
    ctypes.PyDLL(None).write(sys.stdout.fileno(), text, len(text))
    act()


def work(leader, folder):
    "The phases of a run, again and again"
    rollout = TorchRollout(POLICY, 4)
    requests = [Request('p', (5, 6), i, i, SamplingParams(8)) for i in range(4)]
    for step in range(10_000):
        rollout.load_weights(leader.weights(), step)
        list(rollout.generate(requests))
        b = scored(leader)
        leader.update(b, LOSS)
        leader.everywhere(save, folder, step)
        leader.everywhere(load, folder)


def save(engine, folder, step):
    save_sharded(engine, folder, step)


def load(engine, folder):
    finish_save(engine)
    load_sharded(engine, latest_sharded(folder))


def run(rank, way, delay_s, folder):
    signal.signal(signal.SIGUSR1, hang)
    own = dist.get_rank()
    Heartbeat(own, LIMIT_S)
    e = MegatronTrain(POLICY, hf_weights(lively(POLICY)), OPTIM, ParallelConfig())
    watch = RankMonitor(e.control, LIMIT_S)
    if own == rank:
        threading.Thread(target=strike, args=(way, delay_s), daemon=True).start()
    if own:
        return serve_leader(e, watch)
    with Leader(e, watch) as leader:
        work(leader, folder)


@chaos.kind('a rank at work is killed, stopped or hangs')
@pytest.mark.parametrize('number', range(chaos.trials(4, 30)))
def test_whatever_happens_to_a_rank(number, tmp_path, record_property):
    draw = chaos.draw('rank', number)
    way = list(WAYS)[number % len(WAYS)]
    rank, delay_s = draw.randrange(3), draw.uniform(0, 8)
    ends = survivors(3, lambda: run(rank, way, delay_s, tmp_path), 300)
    ended = time.monotonic()
    struck = float(re.search(r'struck at (\S+)', ends[rank][1])[1])
    record_property('slowest (s)', ended - struck)
    says = f'rank {rank} {WAYS[way][1]}'
    for r in range(3):
        assert ends[r][0] not in (None, 0), ends
        assert r == rank or re.search(says, ends[r][1]), (rank, way, ends[r])
    named = next(re.search(f'({says}.*)', said)[1] for r, (_, said) in ends.items() if r != rank)
    print(f'| {number} | {rank} | {way} | {delay_s:.1f} | {ended - struck:.1f} | {named[:90]} |')


def ranks_of(job, num=2):
    "The ranks that torchrun has started, in their order"
    found = {p.environ().get('RANK'): p for p in psutil.Process(job.pid).children()}
    found = [found.get(str(r)) for r in range(num)]
    return all(p and 'compassrl' in p.cmdline() for p in found) and found


def soon(what, seconds=300):
    until = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def sockets(process, kinds, status):
    return {c.laddr.ip for c in process.net_connections(kinds) if c.status == status}


@pytest.mark.parametrize('when', ['imports', 'work'])
def test_a_job_of_torchrun_whose_first_rank_is_stopped(when, tmp_path):
    "It ends, says which rank it was and where; its connections are for this machine alone"
    cfg = replace(TWO, steps=10_000, cold_start=SFTConfig(steps=5, num_solutions=60))
    (tmp_path / 'config.json').write_text(json.dumps(asdict(cfg)))
    env = os.environ | {'OMP_NUM_THREADS': '1', LIMIT_VARIABLE: '4', 'PYTHONWARNINGS': 'ignore'}
    torchrun = [str(Path(sys.executable).parent / 'torchrun'), '--standalone']
    words = ['--nproc-per-node=2', '-m', 'compassrl', 'train', 'config.json', '--run-dir', 'run']
    with open(tmp_path / 'log', 'wb') as log:
        job = subprocess.Popen([*torchrun, *words], cwd=tmp_path, env=env, stdout=log, stderr=log)
    try:
        first, second = soon(partial(ranks_of, job))
        watchdog_process = soon(first.children)[0]
        if when == 'work':
            assert soon((tmp_path / 'run/metrics.jsonl').exists)
            for p in (first, second):
                assert sockets(p, 'inet', psutil.CONN_LISTEN) <= {'127.0.0.1', '::1'}
            hears = sockets(watchdog_process, 'udp', psutil.CONN_NONE)
            assert hears == {'127.0.0.1'}
        os.kill(first.pid, signal.SIGSTOP)
        assert job.wait(300) != 0
        told = re.compile(r'rank 0 was stopped for \d+ s, in: [a-z]{4}')  # whatever it was doing
        # a watchdog ends its rank first, and says why then
        assert soon(lambda: told.search((tmp_path / 'log').read_text()), 20), (
            tmp_path / 'log'
        ).read_text()[-3000:]
        assert soon(lambda: not any(p.is_running() for p in (first, second, watchdog_process)))
    finally:
        job.kill()
        job.wait()


def test_words_that_came_early_or_are_read_late_count():
    "Before the ranks have met they wait; a watchdog that was held up reads before it judges"
    link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dog, key = watchdog.Watchdog(os.getpid(), 0, 1.0, 0.1, theirs), '00' * 32
    link.send(json.dumps(dict(bind='127.0.0.1')).encode())
    dog.receive(time.monotonic())
    port = json.loads(link.recv(1000))['port']
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(('127.0.0.1', 0))

        def says(number, **words):
            words |= dict(rank=1, number=number)
            peer.sendto(f'{key} {json.dumps(words)}'.encode(), ('127.0.0.1', port))

        says(1)
        dog.receive(time.monotonic() + 0.05)
        assert not dog.reports
        met = dict(meet=[['127.0.0.1', port], list(peer.getsockname())], key=key)
        link.send(json.dumps(met).encode())
        dog.receive(time.monotonic() - 1)
        assert dog.reports[1]['number'] == 1
        says(2, failed='the reason')
        dog.receive(time.monotonic() - 1)
        assert dog.cause == 'the reason'
    link.close()


def test_a_stop_of_the_sentry_itself_is_no_credit_for_later():
    _, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dog, now = watchdog.Watchdog(os.getpid(), 0, 1.0, 0.1, theirs), time.monotonic()
    dog.reported_at = {1: now - 50.0, 2: now}  # the second was heard after the stop
    dog.skip(30.0)
    assert dog.reported_at[1] == now - 20.0
    assert now <= dog.reported_at[2] <= time.monotonic() and dog.beat_at <= time.monotonic()


def test_names_of_other_processes_are_any_bytes():
    "Whoever looks at all processes of a machine reads the names that others gave to theirs"
    code = """import ctypes, time
ctypes.CDLL(None).prctl(15, b') R \\xff\\n(')
while time.process_time() < 0.05:  # more than the kernel's clock rounds away
    pass
print(flush=True)
time.sleep(600)"""
    with subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE) as p:
        try:
            p.stdout.readline()
            assert b'\xff' in Path(f'/proc/{p.pid}/stat').read_bytes()
            assert watchdog.process_stat(p.pid).parent == os.getpid()
            assert watchdog.helper_stats(os.getpid())[p.pid].cpu_s > 0
        finally:
            p.kill()


def test_what_a_rank_does_after_a_long_wait_is_not_late_from_its_start():
    "It waited for others longer than it may do nothing; then it goes on, and is between two tasks"
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, theirs:
        dog = watchdog.Watchdog(os.getpid(), 0, 10.0, 0.1, theirs)
        dog.peers = {1: ('127.0.0.1', 1)}
        beat = dict(dog.beat, where='x.py:1 f', bound_s=1e9)
        for waits in ('ranks', ''):
            mine.send(json.dumps(dict(beat=beat | dict(waits=waits))).encode())
            dog._receive_message(theirs)
            if waits:
                dog.process.worked_at -= 90
            now = time.monotonic()
            assert dog.diagnosis(now) == ''
        dog.process.ran_at = now + 17
        assert 'did nothing' in dog.diagnosis(now + 17)
        dog.beat_at -= 9  # no beat since, on a busy machine
        dog.process.worked_at -= 90
        dog.beat['waits'] = 'ranks'
        assert dog.diagnosis(now) == ''
        dog.process.ran_at = now + 17
        assert 'did nothing' in dog.diagnosis(now + 17)
