"""Processes and vLLM servers that are forked from one that has imported vLLM: the workers of
a run import it once. A CPU server that is started by its command imports it twice, for 20 s"""

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing import forkserver
from unittest.mock import patch

from compassrl.procs import end_with_parent
from compassrl.rollout.vllm import server as vllm_server
from compassrl.rollout.vllm.server import private_env, server_env, supervise
from tests.support import fork_server as forked

MODULES = (  # what a server on a CPU imports
    'vllm.entrypoints.openai.api_server',
    'vllm.v1.engine.async_llm',
    'vllm.v1.engine.core',
    'vllm.v1.engine.utils',
    'vllm.v1.executor.uniproc_executor',
    'vllm.v1.executor.multiproc_executor',
    'vllm.v1.worker.cpu_worker',
    'vllm.model_executor.models.qwen3_moe',
    'compassrl.rollout.vllm.transfer',
)
_server, _env = forked.Shared('vllm'), {}
_by_command = vllm_server.start_supervisor  # the real one


def _ready():
    "The process with the imports runs, in the environment of a server"
    if not _env:
        _server.set_forkserver_preload(forked.preloaded(*MODULES))
        _env.update(server_env('cpu'))
        with patch.dict(os.environ, _env, clear=True):
            _server.ensure_running()


# ---- in the process that forks servers


def inspect_models_here():
    "vLLM starts an interpreter for each kind of model that it meets first, for the sake of GPUs"
    registry = importlib.import_module('vllm.model_executor.models.registry')
    registry._run_in_subprocess = lambda fn: fn()


def fork_the_engine_too():
    "vLLM spawns its engine and workers, which would import everything again"
    inspect_models_here()
    for name in 'vllm.v1.engine.utils', 'vllm.v1.executor.multiproc_executor':
        module = importlib.import_module(name)
        module.get_mp_context = lambda: multiprocessing.get_context('fork')
    gc.freeze()
    gc.unfreeze = lambda: None  # an engine that ends would search all of it for garbage
    # asyncio writes signals to a file, which children would share with us
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def next_request(owner):
    "Returns the files of a request in a new process for each; ends with the owner"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors that end leave nothing to collect
    while True:
        asked, files, *_ = socket.recv_fds(owner, 1, 3)
        if not asked:
            os._exit(0)
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return files
        for f in files:
            os.close(f)


def run_module(argv):
    "As `python -m`, in this process; never returns"
    sys.argv = argv
    sys.modules.pop(argv[0], None)  # it runs as __main__ now
    runpy.run_module(argv[0], run_name='__main__', alter_sys=True)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)  # to take a process with vLLM apart costs half as much as its start


def become_supervisor_and_server(link, log, request):
    "What `supervise_command` does, with a fork in place of a command"
    with open(request) as f:
        f.seek(0)
        folder, argv, env = json.load(f)
    os.setsid()
    for file, to in ((link, 0), (log, 1), (log, 2)):
        os.dup2(file, to)
    os.close(link)
    os.close(log)
    os.chdir(folder)
    os.environ.clear()
    env, own = private_env(env)
    os.environ.update(env)
    tempfile.tempdir = None  # it is read from the environment again
    multiprocessing.process._parent_process = None  # a server's own command has none
    supervisor = os.getpid()
    if server := os.fork():
        os.setpgid(server, server)
        supervise(server, own)
        os._exit(0)
    end_with_parent(parent=supervisor)
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    run_module(argv)


def _serve_forks(theirs, log, env):
    "Forks a server for each request of the owner"
    multiprocessing.current_process().daemon = False  # it has children
    os.setsid()
    with open(log, 'ab') as f:
        for fd, to in ((theirs.fileno(), 0), (f.fileno(), 1), (f.fileno(), 2)):
            os.dup2(fd, to)
    theirs.close()
    os.environ.clear()
    os.environ.update(env)
    fork_the_engine_too()
    owner = socket.socket(fileno=0)
    files = next_request(owner)
    owner.detach()  # its file number is the child's input now
    become_supervisor_and_server(*files)


# ---- in its owner


def read_at_import(env):
    "Variables that vLLM and torch read while they are imported"
    early = 'VLLM_', 'OMP_', 'MKL_', 'KMP_', 'TORCH', 'HF_', 'LD_'
    return {k: v for k, v in env.items() if k.startswith(early) and k != 'TORCHINDUCTOR_CACHE_DIR'}


class Supervisor:
    "In place of a `Popen`: the supervisor is no child of ours"

    def poll(self):
        return 0

    def wait(self, timeout=None):
        return 0

    def kill(self):
        pass


@dataclass
class ServerForks:
    "The process that forks servers, as its owner sees it"

    owner: socket.socket
    pid: int
    env: dict

    def __post_init__(self):
        self.fd = os.pidfd_open(self.pid)

    def ended(self):
        return bool(select.select([self.fd], [], [], 0)[0])

    def serves(self, command, env):
        vllm = command[1:2] == ['-m'] and command[2].startswith(('vllm.', 'http.'))
        return vllm and not self.ended() and read_at_import(self.env) == read_at_import(env)

    def start_supervisor(self, command, env, link, log):
        if not self.serves(command, env):
            return _by_command(command, env, link, log)
        with tempfile.TemporaryFile('w+') as request:
            json.dump([os.getcwd(), command[2:], env], request)
            request.flush()
            files = [link.fileno(), log.fileno(), request.fileno()]
            socket.send_fds(self.owner, [b'.'], files)
        return Supervisor()


current = None  # fork server of this process


def _fork_process(log):
    "The end of the owner, and the pid"
    _ready()
    ours, theirs = socket.socketpair()
    p = multiprocessing.get_context('forkserver').Process(
        target=_serve_forks, args=(theirs, log, _env), daemon=True
    )
    with theirs, patch.object(forkserver, 'connect_to_new_process', _server.connect_to_new_process):
        p.start()
    return ours, p.pid


def _adopt(owner, pid, env):
    global current
    os.set_inheritable(owner.fileno(), False)
    current = ServerForks(owner, pid, env)
    vllm_server.start_supervisor = current.start_supervisor


def adopt(log):
    "Servers of this process are forks from now on"
    if not current or current.ended():
        _adopt(*_fork_process(log), _env)


def _adopting(owner, pid, env, fn, *args):
    inspect_models_here()
    _adopt(owner, pid, env)
    fn(*args)


def start(log, fn, *args, env=os.environ):
    "As `forked.start`, and the pid of the process that forks its servers"
    owner, pid = _fork_process(log.with_suffix('.forks'))
    with owner, patch.object(forked, '_server', _server):
        return forked.start(log, _adopting, owner, pid, _env, fn, *args, env=env), pid


def run(log, fn, *args, env=os.environ, timeout):
    "As `forked.run`; vLLM is imported there, and its servers are forks"
    owner, pid = _fork_process(log.with_suffix('.forks'))
    with owner, patch.object(forked, '_server', _server):
        return forked.run(log, _adopting, owner, pid, _env, fn, *args, env=env, timeout=timeout)
