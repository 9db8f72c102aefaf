"A process that is forked from one that has the imports, which take up to twenty seconds"

import json
import multiprocessing
import os
import socket
import subprocess
import tempfile
from multiprocessing import forkserver
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from unittest.mock import patch

IMPORTS = (  # no engine: those have state
    'pytest',  # a function of a test file comes with it
    'matplotlib.pyplot',
    'matplotlib_inline.backend_inline',
    'tests.support.figure_drawn',
    'ipywidgets',
    'nbdev.test',
    'torch._dynamo',
    'transformers',
    'compassrl.runs.cli',
    'tests.support.no_pictures',
)


def preloaded(*more):
    "What a server imports; all of it stays, so it is not searched for garbage then or in a child"
    return ['tests.support.light_imports', *IMPORTS, *more, 'tests.support.gc_frozen']


class Shared(ForkServer):
    """A server of our own: to fork it takes longer than the one that others use. The workers of a
    run share it: the first who needs it starts it, and it ends when the last of them has ended"""

    folder = None  # set where a run has workers

    def __init__(self, name):
        super().__init__()
        self.name = name

    def ensure_running(self):
        if not self.folder or hasattr(self, '_forkserver_authkey'):  # Python 3.14 has a key
            return super().ensure_running()
        if self._forkserver_address:
            return
        from filelock import FileLock

        note = Path(self.folder, self.name)
        with FileLock(f'{note}.lock'):
            try:
                self._forkserver_address, owner, fd = json.loads(note.read_text())
                self._forkserver_alive_fd = os.open(f'/proc/{owner}/fd/{fd}', os.O_WRONLY)
            except OSError:  # nobody has one yet, or who had it has ended
                self.start()
            known = self._forkserver_address, os.getpid(), self._forkserver_alive_fd
            note.write_text(json.dumps(known))

    def start(self):
        "By a process that ends then, so that no worker has what others fork below itself"
        ours, theirs = socket.socketpair()
        if not (pid := os.fork()):
            try:  # the address is a file
                multiprocessing.current_process()._config['tempdir'] = self.folder
                super().ensure_running()
                said = self._forkserver_address.encode()
                socket.send_fds(theirs, [said], [self._forkserver_alive_fd])
            finally:
                os._exit(0)
        theirs.close()
        with ours:
            said, (self._forkserver_alive_fd,), *_ = socket.recv_fds(ours, 200, 1)
        self._forkserver_address = said.decode()
        os.waitpid(pid, 0)


def share(config):
    "Before there are workers: where they find each other's servers"
    if hasattr(config, 'workerinput'):
        Shared.folder = config.workerinput['fork_servers']
    else:
        config.fork_servers = tempfile.TemporaryDirectory(prefix='forks-')


_server = Shared('imports')
_server.set_forkserver_preload(preloaded('tests.support.studies'))


def _child(log, env, fn, args):
    "As if a shell had started it"
    for out, path in ((1, log), (2, log.with_suffix('.err'))):
        with open(path, 'wb') as f:
            os.dup2(f.fileno(), out)
    os.environ.clear()
    os.environ.update(env)
    fn(*args)


def start(log, fn, *args, env=os.environ):
    "Returns at once: the process; what it prints passes through files beside `log`"
    p = multiprocessing.get_context('forkserver').Process(
        target=_child, args=(log, dict(env), fn, args)
    )
    with patch.object(forkserver, 'connect_to_new_process', _server.connect_to_new_process):
        p.start()
    return p


def run(log, fn, *args, env=os.environ, timeout):
    "Its exit code, output and errors, or TimeoutExpired"
    p = start(log, fn, *args, env=env)
    p.join(timeout)
    out, err = log.read_text(), log.with_suffix('.err').read_text()
    if p.exitcode is None:
        p.kill()
        raise subprocess.TimeoutExpired(f'{fn.__name__}{args}', timeout, out, err)
    return subprocess.CompletedProcess((fn.__name__, *args), p.exitcode, out, err)
