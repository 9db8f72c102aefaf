"""A rank is killed, stopped or hangs at a random moment of random work: it is named, and all end.

`COMPASSRL_WATCH_S` sets the seconds for which a rank may be stopped. `-s` prints a table."""

import ctypes
import json
import os
import re
import signal
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
from compassrl.train.megatron.dist_checkpoint import finish_save, load_sharded, save_sharded
from compassrl.train.megatron.engine import MegatronTrain
from compassrl.train.megatron.leader import LIMIT_VARIABLE, Leader, RankMonitor, serve_leader
from compassrl.train.megatron.parallel import ParallelConfig
from compassrl.train.sft import SFTConfig
from course.checkpoints import latest_sharded
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


SILENT = r'is lost: silent for \d+ s'
WAYS = {
    'killed': (partial(os.kill, 0, signal.SIGKILL), SILENT),
    'stopped': (partial(os.kill, 0, signal.SIGSTOP), SILENT),
    'hangs': (partial(os.kill, 0, signal.SIGUSR1), r'hangs: for \d+ s at'),
    'hangs in C': (hang_in_c, SILENT),
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
    e = MegatronTrain(POLICY, hf_weights(lively(POLICY)), OPTIM, ParallelConfig())
    watch = RankMonitor(e.control, LIMIT_S, hang_s=LIMIT_S)
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


def listening(process):
    found = process.net_connections('inet')
    return {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN}


def test_a_job_of_torchrun_whose_first_rank_is_stopped(tmp_path):
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
        assert soon((tmp_path / 'run/metrics.jsonl').exists)
        for p in (first, second):
            assert listening(p) <= {'127.0.0.1', '::1'}
        os.kill(first.pid, signal.SIGSTOP)
        told = re.compile(r'rank 0 is lost: silent for \d+ s, in: [a-z]{4}')  # whatever it did
        said = soon(lambda: told.search((tmp_path / 'log').read_text()), 60)
        assert said, (tmp_path / 'log').read_text()[-3000:]
        first.kill()  # torchrun would, after half a minute
        assert job.wait(300) != 0
        assert soon(lambda: not any(p.is_running() for p in (first, second)))
    finally:
        job.kill()
        job.wait()


def test_the_ranks_end_with_their_torchrun(tmp_path):
    "Nobody else would end one that has not met the others"
    code = 'import time, compassrl.runs.cli as c\n'
    code += 'c.main = lambda: print(1, flush=True) or time.sleep(600)\n'
    code += 'from compassrl.__main__ import main; main()'
    agent = f"""import subprocess, sys
p = subprocess.Popen([sys.executable, '-c', {code!r}])
print(p.pid, flush=True); p.wait()"""
    env = os.environ | {'TORCHELASTIC_RUN_ID': 'a run'}
    with subprocess.Popen([sys.executable, '-c', agent], env=env, stdout=subprocess.PIPE) as job:
        rank = psutil.Process(int(job.stdout.readline()))
        assert job.stdout.readline() == b'1\n'  # the rank is at work
        job.kill()
    assert soon(lambda: not rank.is_running(), 20)
