"""Plays another processor: every policy's first weights are off by one part in a million.

Python imports this by itself in every process whose PYTHONPATH names this folder, ranks, servers
and notebooks too.
`SHAKE=2` chooses how the weights are off; equal policies stay equal. `SKEW=5` is a machine whose
clock is set every five seconds, ten hours forwards or back, as somebody or a time server may do.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time

SHAKEN = 'compassrl.model.policy'


def shake(module):
    import torch

    plain = module.Policy.__init__

    def init(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        generator = torch.Generator().manual_seed(int(os.environ['SHAKE']))
        with torch.no_grad():
            for p in self.parameters():
                noise = torch.randn(p.shape, generator=generator).to(p)
                p.mul_(1 + 1e-6 * noise)

    module.Policy.__init__ = init


class Finder(importlib.abc.MetaPathFinder):
    "Finds one module as everybody does, and shakes it when it has been loaded"

    def find_spec(self, name, path, target=None):
        if name != SHAKEN:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            shake(module)

        spec.loader.exec_module = exec_module
        return spec


def skew(every):
    plain, plain_ns = time.time, time.time_ns

    def hours():
        return (-10, 0, 10)[int(time.monotonic() / every) % 3]

    time.time = lambda: plain() + 3600 * hours()
    time.time_ns = lambda: plain_ns() + 3600 * 10**9 * hours()


if os.environ.get('SKEW'):
    skew(float(os.environ['SKEW']))
if os.environ.get('SHAKE'):
    sys.meta_path.insert(0, Finder())
