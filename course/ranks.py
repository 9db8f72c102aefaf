"""Several ranks from one process: fork it, and the imports are paid once."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_T = TypeVar('_T')


class RankError(RuntimeError):
    "A rank that failed, died or did not come to an end; the message names it"


def _child(rank, n, folder, timeout_s, fn, args):  # never returns
    # The parent's garbage stays: a dead process group that is collected here waits for threads that
    # no fork has.
    gc.freeze()
    try:
        fd = os.open(folder / f'{rank}.log', os.O_WRONLY | os.O_CREAT)
        for out in (1, 2):
            os.dup2(fd, out)
        # a kernel's own streams stay with it
        sys.stdout = sys.stderr = open(fd, 'w', buffering=1, closefd=False)
        with suppress(AttributeError, OSError):  # `model.wait_for_a_core` without Megatron-Core
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        torch.set_num_threads(1)  # the parent's OpenMP threads do not exist here
        store = dist.FileStore(str(folder / 'store'), n)
        dist.init_process_group(
            'gloo', store=store, rank=rank, world_size=n, timeout=timedelta(seconds=timeout_s)
        )
        answer = True, fn(*args)
    except BaseException as e:
        answer = False, f'{type(e).__name__}: {e}\n{traceback.format_exc()}'
    try:
        (folder / f'{rank}.tmp').write_bytes(pickle.dumps(answer))
        os.replace(folder / f'{rank}.tmp', folder / f'{rank}.pkl')
        if answer[0]:
            dist.barrier()  # a rank that leaves takes its connections with it
    finally:
        os._exit(not answer[0])


def _answer(folder, rank):  # what a rank left behind: fine?, its result or its traceback
    try:
        return pickle.loads((folder / f'{rank}.pkl').read_bytes())
    except FileNotFoundError:
        return None


def _why(folder, rank, status):
    left = _answer(folder, rank)
    if left:
        return left[1]
    said = (folder / f'{rank}.log').read_text(errors='replace')[-2000:]
    how = (
        f'was killed by signal {os.WTERMSIG(status)}'
        if os.WIFSIGNALED(status)
        else 'left without an answer'
    )
    return f'{how}\n{said}'


# the rank that the others followed: one without an answer, or with the earliest bad one
def _first(folder, failed):
    def when(r):
        answer = _answer(folder, r)
        if answer is None:
            return False, False, None
        return True, answer[0], (folder / f'{r}.pkl').stat().st_mtime_ns

    return min(failed, key=when)


def _wait(pids, folder, until):  # all well, or RankError that names the rank with which it began
    left = dict(enumerate(pids))
    while left:
        ended = {r: os.waitpid(pid, os.WNOHANG) for r, pid in left.items()}
        ended = {r: status for r, (done, status) in ended.items() if done}
        for r in ended:
            del left[r]
        failed = {r: status for r, status in ended.items() if status}
        if failed:
            time.sleep(0.05)  # a killed one lets go of its connections before it has ended
            failed |= {
                r: s
                for r, pid in left.items()
                for done, s in [os.waitpid(pid, os.WNOHANG)]
                if done and s
            }
            r = _first(folder, failed)
            raise RankError(f'rank {r} of {len(pids)}: {_why(folder, r, failed[r])}')
        if left and time.monotonic() > until:
            late = [r for r in left if _answer(folder, r) is None]
            raise RankError(f'ranks {late} of {len(pids)} did not come to an end')
        time.sleep(0.005)


def run_ranks(
    n: int,  # ranks
    fn: Callable[..., _T],  # called by every rank, in a copy of this process
    *args: Any,
    timeout_s: float = 120,  # for all of it, and for each collective
) -> list[_T]:  # what each rank returned (pickled; tensors on the CPU)
    """Forks `n` ranks of a gloo group, which share this process's imports. Raises RankError, and
    leaves no rank behind"""
    pids = []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for rank in range(n):
            pid = os.fork()
            if not pid:
                _child(rank, n, folder, timeout_s, fn, args)
            pids.append(pid)
        try:
            _wait(pids, folder, time.monotonic() + timeout_s)
        finally:
            _end(pids)
        return [_answer(folder, r)[1] for r in range(n)]


def _end(pids):  # kill and reap those that still run
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
