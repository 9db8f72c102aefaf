"Processes and servers forked from one that has vLLM: each pytest process imports it once"

import multiprocessing
import os
import select
import signal
import socket
from multiprocessing import forkserver
from multiprocessing.forkserver import ForkServer
from unittest.mock import patch

from tests.support import fork_server as forked

_server, _env = ForkServer(), {}


def _ready():
    "The process with the imports runs, in the environment of a server"
    if not _env:
        # imported late: they need packages that come with vLLM
        from compassrl.rollout.vllm.nursery import server_modules
        from compassrl.rollout.vllm.server import server_env

        # what lives after the imports is searched for garbage neither meanwhile nor later
        within = 'tests.support.gc_off', *forked.IMPORTS, *server_modules, 'tests.support.gc_frozen'
        _server.set_forkserver_preload([*within])
        _env.update(server_env('cpu'))
        with patch.dict(os.environ, _env, clear=True):
            _server.ensure_running()


class Process:
    "What an owner asks of its nursery's process, which is no child of it"

    def __init__(self, pid):
        self.pid, self.fd = pid, os.pidfd_open(pid)

    def wait(self, timeout=None):
        return 0 if select.select([self.fd], [], [], timeout)[0] else None

    def poll(self):
        return self.wait(0)

    def kill(self):
        signal.pidfd_send_signal(self.fd, signal.SIGKILL)


def _nurse(theirs, log, env):
    "Becomes a nursery, as if `start_nursery` had started it"
    from compassrl.rollout.vllm import nursery

    multiprocessing.current_process().daemon = False  # it has children
    os.setsid()
    with open(log, 'ab') as f:
        for fd, to in ((theirs.fileno(), 0), (f.fileno(), 1), (f.fileno(), 2)):
            os.dup2(fd, to)
    theirs.close()
    os.environ.clear()
    os.environ.update(env)
    nursery.main()


def _nursery_process(log):
    "The end of the owner, and the pid"
    _ready()
    ours, theirs = socket.socketpair()
    p = multiprocessing.get_context('forkserver').Process(
        target=_nurse, args=(theirs, log, _env), daemon=True
    )
    with theirs, patch.object(forkserver, 'connect_to_new_process', _server.connect_to_new_process):
        p.start()
    return ours, p.pid


def _adopt(owner, pid, env):
    from compassrl.rollout.vllm.nursery import Nursery

    os.set_inheritable(owner.fileno(), False)
    Nursery.one = Nursery(Process(pid), owner, env)


def adopt(log):
    "The servers of this process come from here, unless they have come from elsewhere already"
    from compassrl.rollout.vllm.nursery import Nursery

    if not Nursery.one or Nursery.one.process.poll() is not None:
        _adopt(*_nursery_process(log), _env)


def _adopting(owner, pid, env, fn, *args):
    _adopt(owner, pid, env)
    fn(*args)


def start(log, fn, *args, env=os.environ):
    "As `forked.start`, and the pid of the nursery that waits for whoever wants servers"
    owner, pid = _nursery_process(log.with_suffix('.nursery'))
    with owner, patch.object(forked, '_server', _server):
        return forked.start(log, _adopting, owner, pid, _env, fn, *args, env=env), pid


def run(log, fn, *args, env=os.environ, timeout):
    "As `forked.run`; vLLM is imported there, and a nursery waits for whoever wants servers"
    owner, pid = _nursery_process(log.with_suffix('.nursery'))
    with owner, patch.object(forked, '_server', _server):
        return forked.run(log, _adopting, owner, pid, _env, fn, *args, env=env, timeout=timeout)
