"""A real disk that is full, and a clock that jumps by hours: whole runs come to the same end"""

import ctypes
import os
import shutil
import subprocess
import time
from functools import cache, partial

import pytest

from compassrl.runs.cli import main
from tests.chaos.test_kills import cases, noted
from tests.support import chaos
from tests.support import fork_server as forked
from tests.support.whole_runs import ENV, TINY, start, whole_run

REFUSED = 77  # this machine lets nobody mount a disk


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "The undisturbed run of a kind; each is made once"
    return cache(lambda kind: whole_run(kind, tmp_path_factory.mktemp('whole')))


# ---- a disk of its own


def own_mounts():
    "From now on this process may mount what nobody else sees"
    user, group = os.geteuid(), os.getegid()
    new_user = 0x10000000 if user else 0  # CLONE_NEWUSER
    if ctypes.CDLL(None).unshare(0x20000 | new_user):  # CLONE_NEWNS
        raise SystemExit(REFUSED)
    if new_user:
        for name, text in (
            ('setgroups', 'deny'),
            ('uid_map', f'0 {user} 1'),
            ('gid_map', f'0 {group} 1'),
        ):
            with open(f'/proc/self/{name}', 'w') as f:
                f.write(text)


def mount(*words):
    if subprocess.run(['mount', *words], stderr=subprocess.DEVNULL).returncode:
        raise SystemExit(REFUSED)


def in_a_fork(*words):
    "Its exit status: 0, or 1 after one line"
    pid = os.fork()
    if not pid:
        try:
            main(list(words))
            os._exit(0)
        except SystemExit as e:
            print(e, flush=True)
            os._exit(bool(e.code))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def on_a_small_disk(disk, size, out):
    "A run on a disk of so many bytes; then there is room, and it goes on"
    own_mounts()
    mount('--make-rprivate', '/')
    mount('-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', str(disk))
    words = ['train', *TINY, '--run-dir', str(disk / 'run')]
    first = in_a_fork(*words)
    mount('-o', 'remount,size=1g', str(disk))
    again = ['resume', str(disk / 'run')] if (disk / 'run/config.json').exists() else words
    assert first in (0, 1) and in_a_fork(*again) == 0, first
    shutil.copytree(disk / 'run', out)


@chaos.kind('full disks')
@pytest.mark.parametrize('number', range(chaos.trials(1, 20)))
def test_a_disk_that_is_too_small(number, whole, tmp_path, record_property):
    whole, rng = whole('one process'), chaos.draw('disk', number)
    need = sum(p.stat().st_size for p in whole.folder.rglob('*'))
    disk, out = tmp_path / 'disk', tmp_path / 'run'
    disk.mkdir()
    size = rng.randrange(1 << 14, need)
    r = forked.run(tmp_path / 'log', on_a_small_disk, disk, size, out, env=ENV, timeout=300)
    if r.returncode == REFUSED:
        pytest.skip('this machine lets nobody mount a disk')
    assert r.returncode == 0 and 'Traceback' not in r.stderr, (size, r.stdout, r.stderr)
    noted(record_property, out, whole, 1, None)
    assert 'No space left on device' in r.stdout, (size, need, r.stdout)


# ---- a clock that somebody sets


def jumping(*seed):
    "Every now and then it is hours earlier or later"
    rng, real, real_ns, off = chaos.draw(*seed), time.time, time.time_ns, 0

    def jumped():
        nonlocal off
        if rng.random() < 0.3:
            off = rng.randrange(-100_000, 100_000)
        return off

    time.time = lambda: real() + jumped()
    time.time_ns = lambda: real_ns() + jumped() * 10**9


CLOCKS = dict(one_process=(1, 6), two_ranks=(0, 4), two_servers=(0, 3))


@pytest.mark.parametrize('kind, number', list(cases('clock jumps', apart=False, **CLOCKS)))
def test_a_clock_that_jumps(kind, number, whole, tmp_path, record_property):
    "On one rank of two: they do not agree about the hour, either"
    folder = tmp_path / 'run'
    hook = partial(jumping, 'clock', kind, number)
    job = start(kind, folder, tmp_path / 'home', hook, rank=number % 2)
    try:
        assert not any(job.wait(300)), job.said()
    finally:
        job.kill()
    noted(record_property, folder, whole(kind), 1, None)
