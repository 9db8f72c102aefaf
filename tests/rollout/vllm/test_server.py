"""Whatever a killed run leaves is removed, by its supervisor or by the next run; what belongs to a
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

from compassrl.rollout.vllm import server as vllm_server
from compassrl.rollout.vllm.messages import file_parts
from compassrl.rollout.vllm.server import ServerProcess, machine_prefix, server_folder, sweep

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
from compassrl.rollout.vllm.server import ServerProcess
server = ServerProcess([sys.executable, '-c', {code!r}], dict(os.environ), {log!r})
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
    if 'abort' in then:  # not before its supervisor has seen it
        then = f"while not os.path.exists(tempfile.gettempdir() + '/go'): time.sleep(0.05)\n{then}"
    server = ServerProcess(
        [sys.executable, '-c', SERVER.format(then=then)], dict(os.environ), tmp_path / 'log'
    )
    memory, folder = words(tmp_path / 'log')
    assert folder.stat().st_mode & 0o777 == 0o700 and list(folder.iterdir())
    assert (tmp_path / 'log').stat().st_mode & 0o777 == 0o600
    if 'abort' in then:
        assert soon((folder / vllm_server.memory_list).exists)
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


@pytest.mark.parametrize('how', ['killed', 'stopped', 'stopped, and the owner is killed'])
def test_a_server_whose_supervisor_is_struck_leaves_nothing(how, tmp_path):
    "Nor its own children, which hold memory and ports"
    log = tmp_path / 'log'
    child = "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    code = SERVER.format(then=child)
    if 'owner' in how:
        owner = subprocess.Popen([sys.executable, '-c', OWNER.format(code=code, log=str(log))])
        soon(lambda: psutil.Process(owner.pid).children())
        supervisor = psutil.Process(owner.pid).children()[0]
    else:
        server = ServerProcess([sys.executable, '-c', code], dict(os.environ), log)
        supervisor = psutil.Process(server.supervisor.pid)
    memory, folder = words(log)
    assert soon((folder / vllm_server.memory_list).exists)
    assert sweep(Path(tempfile.gettempdir())) == [] or folder.exists()  # the supervisor lives
    assert soon(lambda: len(supervisor.children(recursive=True)) == 2)
    below = supervisor.children(recursive=True)
    supervisor.kill() if how == 'killed' else supervisor.suspend()
    if 'owner' in how:
        owner.kill()
        owner.wait()
    else:
        assert how == 'stopped' or server.ended(60)
        server.kill()
    assert soon(lambda: not memory.exists() and not folder.exists())
    gone = psutil.STATUS_ZOMBIE
    assert soon(lambda: not any(p.is_running() and p.status() != gone for p in below))


def test_a_list_is_whole_or_not_there(tmp_path, monkeypatch):
    "Its supervisor can be killed while it writes"

    def killed(path, text):
        with open(path, 'w') as f:
            f.write(text[:5])
        raise KeyboardInterrupt

    def remember(*names, write=Path.write_text):
        monkeypatch.setattr(vllm_server, 'group_memory', lambda group: set(names))
        monkeypatch.setattr(Path, 'write_text', write)
        vllm_server.list_memory(tmp_path, 0)

    path = tmp_path / vllm_server.memory_list
    with pytest.raises(KeyboardInterrupt):
        remember('psm_a', write=killed)
    assert not path.exists()
    remember('psm_a')
    with pytest.raises(KeyboardInterrupt):
        remember('psm_b', write=killed)
    assert json.loads(path.read_text()) == ['psm_a']


def test_what_is_swept(tmp_path):
    "Of processes that are no more; of this machine; of this user; and no link is followed"
    mine, dead, outside = machine_prefix(), dead_pid(), tmp_path / 'outside'
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
    (here / f'{mine}{dead}-folder' / vllm_server.memory_list).write_text('["../x", "psm_/../x", 3]')
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
    names = {machine_prefix()}
    with patch.object(socket, 'gethostname', lambda: 'another'):
        names.add(machine_prefix())
    with patch.object(os, 'readlink', lambda path: 'pid:[7]'):
        names.add(machine_prefix())
    assert len(names) == 3


def test_weights_on_their_way_are_private(tmp_path):
    "Whatever the umask is"
    before = os.umask(0)
    try:
        for path in file_parts([('a', torch.zeros(3))], tmp_path):
            assert path.stat().st_mode & 0o777 == 0o600
        folder = server_folder()
        assert folder.stat().st_mode & 0o777 == 0o700
        vllm_server.remove(folder)
    finally:
        os.umask(before)


def test_names_of_sockets_fit(monkeypatch):
    "A socket of a server, in a folder with the longest name"
    for base in ('/tmp', '/tmp/' + 'x' * 200):
        monkeypatch.setattr(tempfile, 'tempdir', base)
        folder = server_folder()
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(str(folder / ('x' * 37)))
        vllm_server.remove(folder)
        assert not folder.exists() and len(str(folder)) < 107 - 38


@pytest.mark.parametrize(
    'cause',
    ['(EngineCore pid=7) ERROR [core.py:1] boom', 'Fatal Python error: Illegal instruction'],
)
def test_the_cause_of_an_engine_that_died_is_told(cause, tmp_path):
    "vLLM's server says afterwards, in many lines, that its engine is gone"
    code = f'print({cause!r}); print("(APIServer pid=1) ERROR its engine is gone\\n" * 99)'
    server = ServerProcess([sys.executable, '-c', code], dict(os.environ), tmp_path / 'log')
    assert server.ended(60)
    assert server.tail() == cause


TILES = """
import ctypes
from compassrl.rollout.vllm.transfer import register

def permitted():
    mask = ctypes.c_uint64()
    ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(mask))  # ARCH_GET_XCOMP_PERM
    return mask.value >> 18 & 1

before = permitted()
register()
print('tiles', before, permitted())
"""


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason='this CPU has no AMX')
def test_an_engine_may_use_the_tiles_of_its_cpu():
    "Linux gives them on request; vLLM's attention in bf16 uses them, and would be killed"
    pytest.importorskip('vllm')
    r = subprocess.run([sys.executable, '-c', TILES], capture_output=True, text=True, timeout=300)
    assert 'tiles 0 1' in r.stdout, r.stderr[-3000:]
