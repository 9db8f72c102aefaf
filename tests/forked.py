"Processes that are forked from one that has the imports: what takes ten seconds is paid once"
import multiprocessing
import os
import sys
import traceback
from pathlib import Path

IMPORTS = 'torch', 'matplotlib.pyplot', 'nbdev.test', 'transformers', 'compassrl.train', 'compassrl.engines.vllm'


def _child(log, env, fn, args): # as if it had been started by a shell
    with open(log, 'wb') as f: os.dup2(f.fileno(), 1); os.dup2(f.fileno(), 2)
    os.setsid()
    os.environ.clear(); os.environ.update(env)
    try: fn(*args)
    except SystemExit: raise
    except BaseException: traceback.print_exc(); os._exit(1)


def start(log, fn, *args, env=os.environ):
    "A process that calls `fn`; what it prints goes to the file `log`"
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload([m for m in IMPORTS if importable(m)])
