"""What hashing costs a save, of a checkpoint in one process and of a sharded one.

    python benchmarks/checkpoint_hashes.py [--quick] [--megabytes 16 64 256] [--repeats 9]
        [--kinds whole sharded] [--folder /tmp]

Each size is saved with and without hashes, in turns. `whole` is `save_checkpoint`; `sharded` is
`save_sharded` of Megatron-Core on one rank, from the call until the folder has its name. Without
hashes means that sha256 is replaced by nothing. A checkpoint hashes while it writes, by a second
thread: where the disk is slower than the hash and a core is free, the hash is hidden.

Last line: one JSON object. `added` is (the fastest save with hashes / the fastest without), less 1:
other work on the machine only ever makes a save slower. `ratio` is the worst of sizes and kinds:
what the hash adds to a save (goal: 0.05 or less). `alone` is the processor time of the hash over
the time of the save: what it would add if no core were free for it.
"""

import argparse
import hashlib
import json
import shutil
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

import compassrl.train.checkpoint_files as manifest
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import hf_weights
from compassrl.runs.summary import machine_info
from compassrl.train.checkpoint import save_checkpoint
from compassrl.train.torch_train import OptimConfig

MB = 2**20


class NoHash:
    "In the place of hashlib"

    def __init__(self, data=b''):
        pass

    def update(self, data):
        pass

    def hexdigest(self):
        return ''

    sha256 = classmethod(lambda cls, data=b'': cls())
    file_digest = classmethod(lambda cls, file, name: cls())


def without(stack):
    stack.enter_context(patch.object(manifest, 'hashlib', NoHash))


def seconds(fn, clock=time.perf_counter):
    start = clock()
    fn()
    return clock() - start


def turns(save, a):
    "(with, without) of each repeat; the first pair is not counted"
    pairs = []
    for i in range(a.repeats + 1):
        pair = {}
        for hashes in (True, False) if i % 2 else (False, True):
            with ExitStack() as stack:
                if not hashes:
                    without(stack)
                pair[hashes] = seconds(lambda: save(2 * i + hashes))
        pairs.append((pair[True], pair[False]))
    return pairs[1:]


def whole(megabytes, a):
    state = dict(w=torch.randn(megabytes, MB // 4))
    root = Path(tempfile.mkdtemp(dir=a.folder))
    try:
        return megabytes * MB, turns(lambda step: save_fresh(root, state), a)
    finally:
        shutil.rmtree(root)


def save_fresh(root, state):
    shutil.rmtree(root)
    save_checkpoint(root, 1, state)


def policy_of(megabytes):  # weights and two moments in fp32 make 12 bytes per parameter
    width = 256
    per_expert = 3 * width * width
    experts = max(4, round(megabytes * MB / 12 / per_expert / 2))
    return PolicyConfig(
        hidden_size=width,
        head_dim=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        moe_intermediate_size=width,
        num_experts=experts,
    )


def sharded(megabytes, a):
    from course.ranks import run_ranks

    root = Path(tempfile.mkdtemp(dir=a.folder))
    try:
        return run_ranks(1, saves, policy_of(megabytes), root, a, timeout_s=1800)[0]
    finally:
        shutil.rmtree(root)


def saves(config, root, a):
    from compassrl.train.megatron.dist_checkpoint import save_sharded
    from compassrl.train.megatron.engine import MegatronTrain

    engine = MegatronTrain(config, hf_weights(Policy(config)), OptimConfig(), replay='off')
    pairs = turns(lambda step: save_sharded(engine, root / str(step), 1).wait(), a)
    folder = next(root.glob('*/step-*'))
    return sum(p.stat().st_size for p in folder.iterdir()), pairs


def measure(kind, megabytes, a):
    size, pairs = dict(whole=whole, sharded=sharded)[kind](megabytes, a)
    data = bytes(min(size, 64 * MB))
    alone = min(seconds(partial(hashlib.sha256, data), time.thread_time) for _ in range(5))
    hashed, save = (min(times) for times in zip(*pairs))
    out = dict(
        kind=kind,
        megabytes=round(size / MB, 1),
        save_s=round(save, 4),
        added=round(hashed / save - 1, 4),
        alone=round(alone * size / len(data) / save, 4),
    )
    print(*(f'{k} {v}' for k, v in out.items()), sep=', ', flush=True)
    return out


def main():
    p = argparse.ArgumentParser()
    p.add_argument('--megabytes', type=int, nargs='+', default=[16, 64, 256])
    p.add_argument('--repeats', type=int, default=9)
    p.add_argument('--kinds', nargs='+', default=['whole', 'sharded'])
    p.add_argument('--folder', default=None)
    p.add_argument('--quick', action='store_true')
    a = p.parse_args()
    if a.quick:
        a.megabytes, a.repeats = [2], 2
    torch.set_num_threads(1)
    found = [measure(k, m, a) for k in a.kinds for m in a.megabytes]
    result = dict(
        name='checkpoint_hashes',
        ratio=max(f['added'] for f in found),
        units='time of a save with hashes / without, less 1; the worst of all sizes and kinds',
        alone=max(f['alone'] for f in found),
        found=found,
        settings=dict(megabytes=a.megabytes, repeats=a.repeats, quick=a.quick),
        machine=machine_info(),
    )
    print(json.dumps(result))


if __name__ == '__main__':
    main()
