"""Whatever a killed run leaves is removed, by its guard or by the next run; what belongs to a
living one stays; and nobody else can read any of it"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch

from compassrl.rollout.vllm import cleanup
from compassrl.rollout.vllm.cleanup import made_here, server_folder, sweep
from compassrl.rollout.vllm.server import Server
from compassrl.rollout.vllm.weight_files import file_parts

SERVER = """
import os, sys, tempfile, time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *args: None
memory = shared_memory.SharedMemory(create=True, size=1000)
tempfile.mkstemp()
print(memory.name, tempfile.gettempdir(), flush=True)
{then}
"""
OWNER = """
import os, sys, time
from compassrl.rollout.vllm.server import Server
server = Server([sys.executable, '-c', {code!r}], dict(os.environ), {log!r})
time.sleep(600)
"""


def soon(what, seconds=60):
    until = time.monotonic() + seconds
    while not what() and time.monotonic() < until:
        time.sleep(0.05)
    return what()


def words(log):
    "Shared memory and temporary folder of a server, once it has said so"
    assert soon(lambda: log.exists() and log.read_text().endswith('\n'))
    name, folder = log.read_text().split()
    return Path('/dev/shm') / name, Path(folder)


def dead_pid():
    p = subprocess.Popen(['true'])
    p.wait()
    return p.pid


@pytest.mark.parametrize('then', ['os.abort()', 'time.sleep(600)'], ids=['crashes', 'is killed'])
def test_a_server_leaves_nothing(then, tmp_path):
    if 'abort' in then:  # not before its guard has seen it
        then = f"while not os.path.exists(tempfile.gettempdir() + '/go'): time.sleep(0.05)\n{then}"
    server = Server(
        [sys.executable, '-c', SERVER.format(then=then)], dict(os.environ), tmp_path / 'log'
    )
    memory, folder = words(tmp_path / 'log')
    assert folder.stat().st_mode & 0o777 == 0o700 and list(folder.iterdir())
    assert (tmp_path / 'log').stat().st_mode & 0o777 == 0o600
    if 'abort' in then:
        assert soon((folder / cleanup.listing).exists)
        (folder / 'go').touch()
    else:
        server.kill()
    assert server.ended(60) and soon(lambda: not memory.exists() and not folder.exists())
    server.kill()


def test_a_server_whose_owner_is_killed_leaves_nothing(tmp_path):
    log = tmp_path / 'log'
    code = OWNER.format(code=SERVER.format(then='time.sleep(600)'), log=str(log))
    owner = subprocess.Popen([sys.executable, '-c', code])
    memory, folder = words(log)
    owner.kill()
    owner.wait()
    assert soon(lambda: not memory.exists() and not folder.exists())


def test_a_server_whose_guard_is_killed_ends(tmp_path):
    "The kernel sees to it; the next run removes what it left"
    log = tmp_path / 'log'
    server = Server(
        [sys.executable, '-c', SERVER.format(then='time.sleep(600)')], dict(os.environ), log
    )
    memory, folder = words(log)
    process = psutil.Process(server.pid)
    assert soon((folder / cleanup.listing).exists)
    assert sweep(Path(tempfile.gettempdir())) == [] or folder.exists()  # the guard lives
    process.parent().kill()
    assert soon(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    assert server.ended(60) and memory.exists()
    server.kill()
    sweep(folder.parent)
    assert not memory.exists() and not folder.exists()


def test_a_list_is_whole_or_not_there(tmp_path, monkeypatch):
    "Its guard can be killed while it writes"

    def killed(path, text):
        with open(path, 'w') as f:
            f.write(text[:5])
        raise KeyboardInterrupt

    def remember(*names, write=Path.write_text):
        monkeypatch.setattr(cleanup, 'mapped_by_group', lambda group: set(names))
        monkeypatch.setattr(Path, 'write_text', write)
        cleanup.remember(tmp_path, 0)

    path = tmp_path / cleanup.listing
    with pytest.raises(KeyboardInterrupt):
        remember('psm_a', write=killed)
    assert not path.exists()
    remember('psm_a')
    with pytest.raises(KeyboardInterrupt):
        remember('psm_b', write=killed)
    assert json.loads(path.read_text()) == ['psm_a']


def test_what_is_swept(tmp_path):
    "Of processes that are no more; of this machine; of this user; and no link is followed"
    mine, dead, outside = made_here(), dead_pid(), tmp_path / 'outside'
    outside.mkdir()
    (outside / 'file').touch()
    here = tmp_path / 'here'
    here.mkdir()
    living = subprocess.Popen(['sleep', '60'])
    stay = [
        f'{mine}{os.getpid()}-0.safetensors',
        f'{mine}{living.pid}-0.safetensors',
        f'compassrl-elsewhere-{dead}-0.safetensors',
        f'other-{dead}',
    ]
    go = [f'{mine}{dead}-0.safetensors', f'{mine}{dead}-0.tmp']
    for name in stay + go:
        (here / name).touch()
    (here / f'{mine}{dead}-link').symlink_to(outside)
    (here / f'{mine}{dead}-folder').mkdir()
    (here / f'{mine}{dead}-folder' / 'x').touch()
    # a list that names what is no shared memory of a server
    (here / f'{mine}{dead}-folder' / cleanup.listing).write_text('["../x", "psm_/../x", 3]')
    sweep(here)
    assert sorted(p.name for p in here.iterdir()) == sorted(stay)
    assert (outside / 'file').exists()
    living.kill()
    living.wait()
    sweep(here)
    assert sorted(p.name for p in here.iterdir()) == sorted(stay[:1] + stay[2:])
    with patch.object(os, 'getuid', lambda: os.geteuid() + 1):  # files of somebody else
        (here / go[0]).touch()
        sweep(here)
    assert (here / go[0]).exists()


def test_machines_and_containers_do_not_sweep_for_each_other():
    names = {made_here()}
    with patch.object(socket, 'gethostname', lambda: 'another'):
        names.add(made_here())
    with patch.object(os, 'readlink', lambda path: 'pid:[7]'):
        names.add(made_here())
    assert len(names) == 3


def test_weights_on_their_way_are_private(tmp_path):
    "Whatever the umask is"
    before = os.umask(0)
    try:
        for path in file_parts([('a', torch.zeros(3))], tmp_path):
            assert path.stat().st_mode & 0o777 == 0o600
        folder = server_folder()
        assert folder.stat().st_mode & 0o777 == 0o700
        cleanup.remove(folder)
    finally:
        os.umask(before)


def test_names_of_sockets_fit(monkeypatch):
    "A socket of a server, in a folder with the longest name"
    for base in ('/tmp', '/tmp/' + 'x' * 200):
        monkeypatch.setattr(tempfile, 'tempdir', base)
        folder = server_folder()
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(str(folder / ('x' * 37)))
        cleanup.remove(folder)
        assert not folder.exists() and len(str(folder)) < 107 - 38
