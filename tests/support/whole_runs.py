"""Whole runs that can be struck at any moment: in one process, with workers that judge, on two
ranks, by torchrun, with two servers; and what a run says in the end, to compare it with another
one"""

import atexit
import json
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from unittest.mock import patch

import psutil

from compassrl.rollout.vllm.server import free_port
from compassrl.runs.cli import main
from tests.support import fork_server as forked
from tests.support.file_events import FileEvents

ENV = {**os.environ, 'OMP_NUM_THREADS': '1'}
TINY = ['smoke-cpu', '--steps', '2', '--save-every', '1', '--trace-every', '1', '--eval-k', '1']
TINY += ['--cold-start.steps', '60', '--prompts-per-step', '4', '--data.num-heldout', '4']
TINY += ['--zero-variance.screen-samples', '8']
MORE = {
    'one process': [],
    'judge workers': ['--rewards.workers', '2'],
    'two ranks': ['--train-engine', 'megatron', '--parallel.ep', '2'],
    'two servers': ['--rollout-engine', 'pool', '--vllm.num-replicas', '2'],
}
MORE['torchrun'] = MORE['two ranks']
AHEAD = ['--schedule.max-staleness', '1', '--optim.num-mini-batches', '2', '--steps', '3']
ROUNDS = ['--schedule.partial-tokens', '6', '--zero-variance.sampling', 'uniform']
MORE['two servers'] += [
    '--policy.head-dim',
    '32',
    '--vllm.timeout-s',
    '20',
]  # vLLM wants such heads
for kind in ('one process', 'two ranks', 'two servers'):
    MORE[f'{kind} ahead'] = MORE[kind] + AHEAD
    # a step trains on the groups that have ended, the others go on with newer weights
    MORE[f'{kind} in rounds'] = MORE[f'{kind} ahead'] + ROUNDS
BOUND_S = 60  # whatever was struck, all of it has ended after that

_ranks = ForkServer()
_ranks.set_forkserver_preload(
    forked.preloaded(
        *(f'compassrl.train.megatron.{m}' for m in ('engine', 'leader', 'dist_checkpoint'))
    )
)


def nothing():
    pass


def command(args, hook):
    hook()
    main(args)


def rank_command(args, hook):
    "What `python -m compassrl` does on a rank, and what an interpreter does at its end"
    try:
        command(args, hook)
    finally:
        atexit._run_exitfuncs()


def writing(logs):
    "Processes whose output goes to one of the files"
    files, found = {str(f) for log in logs for f in (log, log.with_suffix('.err'))}, set()
    # no pattern in the last part: a process that ends would raise while its folder is listed
    streams = (Path('/proc').glob(f'[0-9]*/fd/{n}') for n in (1, 2))
    for fd in chain(*streams):
        try:
            if os.readlink(fd) in files:
                found.add(psutil.Process(int(fd.parts[2])))
        except (OSError, psutil.Error):
            pass  # it has ended
    return found


class Command(subprocess.Popen):
    "Answers as a process of `multiprocessing` does"

    exitcode = property(subprocess.Popen.poll)

    def join(self, seconds):
        with suppress(subprocess.TimeoutExpired):
            self.wait(seconds)


@dataclass
class Job:
    "A run under way"

    processes: list  # processes that somebody has started: the trainer, each rank, or torchrun
    logs: list
    forks: int | None = None  # the process that forks servers

    def below(self, pid, recursive=True):
        try:
            return psutil.Process(pid).children(recursive)
        except psutil.Error:
            return []

    def own(self):
        found = []
        for p in self.processes:
            with suppress(psutil.Error):  # it has ended
                found.append(psutil.Process(p.pid))
        return found

    def helpers(self):
        "All that the run has started: judges, sentries, writers of checkpoints"
        return [c for p in self.processes for c in self.below(p.pid)]

    def ranks(self):
        "That torchrun has started"
        return [c for p in self.own() for c in self.below(p.pid, recursive=False)]

    def servers(self):
        return self.below(self.forks) if self.forks else []

    def family(self):
        "With those that nobody is the parent of any more"
        found = {*self.own(), *self.helpers(), *self.servers(), *writing(self.logs)}
        with suppress(psutil.Error):
            return found | ({psutil.Process(self.forks)} if self.forks else set())
        return found

    def cpu_s(self):
        "Seconds that all of it has computed: whatever else the machine does, they are the same"
        found = 0.0
        for p in [*self.own(), *self.helpers(), *self.servers()]:
            with suppress(psutil.Error):
                found += sum(p.cpu_times()[:2])
        return found

    def wait_cpu(self, seconds):
        "Until they have computed for so long, or all has ended"
        while not self.ended() and self.cpu_s() < seconds:
            time.sleep(0.05)

    def ended(self):
        return all(p.exitcode is not None for p in self.processes)

    def wait(self, seconds):
        "Exit codes; None where it still runs"
        until = time.monotonic() + seconds
        for p in self.processes:
            p.join(max(0, until - time.monotonic()))
        return [p.exitcode for p in self.processes]

    def said(self):
        files = [f for log in self.logs for f in (log, log.with_suffix('.err'))]
        return '\n'.join(f'{f.name}: {f.read_text()[-3000:]}' for f in files if f.exists())

    def kill(self):
        for p in self.family():
            try:
                p.kill()
            except psutil.Error:
                pass


def torchrun(log, words):
    "The command that a person types, with a port of its own"
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
    torchrun += ['--nproc-per-node', '2', '-m', 'compassrl', *words]
    env = ENV | dict(PYTHONWARNINGS='ignore')
    with open(log, 'wb') as out, open(log.with_suffix('.err'), 'wb') as err:
        return Command(torchrun, stdout=out, stderr=err, env=env, start_new_session=True)


def start(kind, folder, home, hook=nothing, rank=None):
    """Begins the run in `folder`, or goes on with it, as a script does that is started again and
    again; `hook` comes first, on that rank alone, but torchrun knows no hook"""
    words = ['resume', str(folder)]
    if not (folder / 'config.json').exists():
        words = ['train', *TINY, *MORE[kind], '--run-dir', str(folder)]
    home.mkdir(exist_ok=True)
    log = home / f'log-{time.monotonic_ns()}'
    if kind.startswith('two servers'):
        from tests.support import vllm_fork_server as vllm_forks

        p, forks = vllm_forks.start(log, command, words, hook, env=ENV)
        return Job([p], [log], forks)
    if kind == 'torchrun':
        return Job([torchrun(log, words)], [log])
    if not kind.startswith('two ranks'):
        return Job([forked.start(log, command, words, hook, env=ENV)], [log])
    env = ENV | dict(WORLD_SIZE='2', LOCAL_WORLD_SIZE='2', MASTER_ADDR='127.0.0.1')
    env |= dict(MASTER_PORT=str(free_port()), PYTHONWARNINGS='ignore')
    job = Job([], [])
    with patch.object(forked, '_server', _ranks):
        for r in range(2):
            job.logs.append(log.with_name(f'{log.name}-{r}'))
            of_rank = env | dict(RANK=str(r), LOCAL_RANK=str(r))
            args = rank_command, words, hook if rank in (r, None) else nothing
            job.processes.append(forked.start(job.logs[-1], *args, env=of_rank))
    return job


# ---- the run that nobody disturbed


MARKS = 'config.json', 'start', 'eval_before.json', 'screen.json', 'checkpoints/step-000001'
MARKS += 'checkpoints/step-000002', 'model', 'report.md'  # in the order of a run
AGAIN = 'config.json', 'eval_before.json'  # after these, all that has to be started is there


def note_operations(home, folder):
    "Notes the number of each operation on the disk before it is done"
    events, log = FileEvents(folder), home / f'operations{os.environ.get("RANK", 0)}'

    def hit():
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 'a') as f:
            f.write(f'{events.seen}\n')

    events.hit = hit


@dataclass
class Whole:
    folder: object
    operations: list  # on the disk, of each rank
    took: dict  # a mark -> CPU seconds until it was there, from the mark before

    def left(self, folder):
        "CPU seconds of another run there that starts now, without what it has behind it"
        return sum(s for m, s in self.took.items() if m in AGAIN or not (folder / m).exists())


def whole_run(kind, home):
    folder = home / 'run'
    job = start(kind, folder, home, partial(note_operations, home, folder))
    took, now = {}, 0.0
    for mark in MARKS:
        before = now
        while not (folder / mark).exists() and not job.ended():
            now = max(now, job.cpu_s())
            time.sleep(0.05)
        took[mark] = now - before
    codes = job.wait(600)
    assert codes == [0] * len(codes), job.said()
    found = [max(map(int, p.read_text().split())) for p in sorted(home.glob('operations*'))]
    return Whole(folder, found, took)


# ---- what a run says


def clean(d):
    "Without what depends on the clock, on this machine, and on servers that were lost"
    if isinstance(d, dict):
        left_out = 'timings', 'run_dir', 'folder', 'replicas_lost'
        return {k: clean(v) for k, v in d.items() if k[:4] != 'time' and k not in left_out}
    return [clean(v) for v in d] if isinstance(d, list) else d


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def content(folder):
    "All that a run says"
    out = {
        p: (folder / p).read_bytes() for p in ('model/model.safetensors', 'start/model.safetensors')
    }
    for name in ('eval_before', 'eval_after', 'screen', 'config', 'origin'):
        out[name] = clean(json.loads((folder / f'{name}.json').read_text()))
    for name in ('metrics', 'trace', 'cold_start'):
        out[name] = clean(rows(folder / f'{name}.jsonl'))
    return out


def samples(folder):
    "How often each response to each prompt of each step was used"
    found = (r for r in rows(folder / 'trace.jsonl') if r['kind'] == 'sample')
    return Counter((r['step'], r['prompt_id'], r['index']) for r in found)


def names(folder):
    "What lies there in the end: nothing half-done; an older checkpoint may have been left"
    found = {p.relative_to(folder).parts[:2] for p in folder.rglob('*')}
    return {p for p in found if p[0] != 'tensorboard' and p[1:] != ('step-000000',)}


def apart(a, b, at):
    "Where two of them differ, and how"
    if isinstance(a, dict) and isinstance(b, dict):
        for k in a.keys() | b.keys():
            yield from apart(a.get(k), b.get(k), f'{at}.{k}')
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b)):
            yield from apart(x, y, f'{at}[{i}]')
    elif a != b:
        yield f'{at}: {str(a)[:60]} here, {str(b)[:60]} there'


def differences(folder, whole):
    "(prompts lost or doubled, what else differs)"
    a, b = content(folder), content(whole)
    differ = [line for k in b for line in apart(a[k], b[k], k)]
    if names(folder) != names(whole):
        differ.append(f'files: {sorted(names(folder) ^ names(whole))}')
    one, other = samples(folder), samples(whole)
    return (one - other).total() + (other - one).total(), differ


def expect_the_same(folder, whole):
    lost, differ = differences(folder, whole)
    assert lost == 0 and not differ, (lost, differ)
