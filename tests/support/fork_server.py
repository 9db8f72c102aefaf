"A process that is forked from one that has the imports, which take up to twenty seconds"

import multiprocessing
import os
import subprocess
from multiprocessing import forkserver
from multiprocessing.forkserver import ForkServer
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
)


def preloaded(*more):
    "What a server imports; all of it stays, so it is not searched for garbage then or in a child"
    return ['tests.support.light_imports', *IMPORTS, *more, 'tests.support.gc_frozen']


_server = ForkServer()  # a server of our own: to fork it takes longer than the one that others use
_server.set_forkserver_preload(preloaded())


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
