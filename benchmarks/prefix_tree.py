"""Forward and backward pass of a batch whose groups share their prompts, with a prefix tree and
without.

    python benchmarks/prefix_tree.py [--quick] [--repeats 9] [--threads 1] [--device cpu]

16 groups of 8 rows of 96 tokens. Of each row the first 0, 24, 48 or 72 tokens are its group's
prompt; the others are random, so nothing else is shared. Both passes take turns, medians are
compared. The tree is made again each time, and its gradient is compared with the other's. The bound
is the number of tokens over that of nodes: attention, which works on whole rows, keeps the pass
from it.

Last line: one JSON object. `ratio` is the time without a tree over the time with it where half of
each row is its prompt; `ratios` has all four, and `bounds` what no pass exceeds. What a tree costs
where nothing is shared is in `ratios['0']`.
"""

import argparse
import json
import statistics
import time

import torch

from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.prefix_tree import prefix_tree
from compassrl.procs import keep_freed_memory
from compassrl.runs.summary import machine_info

VOCAB, LENGTH, SAMPLES = 99, 96, 8


def make_policy(device):
    return Policy(PolicyConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH)).to(device)


def make_batch(groups, prompt_tokens, device):
    "[groups * 8, 96] tokens, all of them real"
    g = torch.Generator().manual_seed(prompt_tokens)
    ids = torch.randint(2, VOCAB, (groups, SAMPLES, LENGTH), generator=g)
    ids[:, :, :prompt_tokens] = ids[:, :1, :prompt_tokens]
    ids = ids.flatten(0, 1).to(device)
    return ids, torch.ones_like(ids, dtype=torch.bool)


def gradient(policy, ids, mask, shares):
    "Of a sum over all tokens"
    hidden, _ = policy(ids, mask, share=shares)
    up = torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view_as(hidden)
    grads = torch.autograd.grad((hidden * up).sum(), policy.blocks.parameters())
    return torch.cat([g.flatten() for g in grads])


def clocked(device, fn, *args):
    start = time.perf_counter()
    out = fn(*args)
    if device != 'cpu':
        torch.cuda.synchronize()
    return time.perf_counter() - start, out


def compared(policy, ids, mask, repeats, device):
    "Median seconds without a tree and with it; how far their gradients are apart"
    times, grads = {False: [], True: []}, {}
    for _ in range(repeats + 1):  # the first one warms up
        for shares, seconds in times.items():
            spent, grads[shares] = clocked(device, gradient, policy, ids, mask, shares)
            seconds.append(spent)
    off = (grads[True] - grads[False]).norm() / grads[False].norm()
    assert off < 1e-4, f'gradients differ by {off}'
    return tuple(statistics.median(t[1:]) for t in times.values())


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--quick', action='store_true')
    p.add_argument('--repeats', type=int, default=9)
    p.add_argument('--threads', type=int, default=1)
    p.add_argument('--device', default='cpu')
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    keep_freed_memory()
    groups, repeats = (2, 2) if a.quick else (16, a.repeats)
    policy, ratios, bounds = make_policy(a.device), {}, {}
    for prompt_tokens in (0, 24, 48, 72):
        ids, mask = make_batch(groups, prompt_tokens, a.device)
        bounds[prompt_tokens] = ids.numel() / len(prefix_tree(ids, mask).row)
        plain, shared = compared(policy, ids, mask, repeats, a.device)
        ratios[prompt_tokens] = plain / shared
        print(
            f'{prompt_tokens} of {LENGTH} tokens are the prompt: {plain:.3f} s without a tree, '
            f'{shared:.3f} s with it, {plain / shared:.2f} times as fast '
            f'(bound {bounds[prompt_tokens]:.2f})'
        )
    result = dict(
        name='prefix_tree',
        ratio=round(ratios[48], 3),
        units='seconds of a pass without a prefix tree / with it',
        ratios={k: round(v, 3) for k, v in ratios.items()},
        bounds={k: round(v, 3) for k, v in bounds.items()},
        settings=dict(
            groups=groups,
            samples=SAMPLES,
            tokens=LENGTH,
            repeats=repeats,
            device=a.device,
            dtype='float32',
            quick=a.quick,
        ),
        machine=machine_info(),
    )
    print(json.dumps(result))


if __name__ == '__main__':
    main()
