"""Peak memory of log-probs, entropies and their gradients: chunks of tokens against the whole table
of logits.

    python benchmarks/logprob_memory.py [--quick] [--tokens 1024] [--hidden 256] [--vocab 151936]
        [--chunk-tokens 64]

A process of its own for each version and size makes hidden states, a head and their gradients'
targets, notes the memory it holds, runs forward and backward once, and reads the high-water mark of
its resident memory (VmHWM, reset before the run). What both versions cannot avoid is in it: the
gradients of hidden states and head. Half the tokens are measured as well: the slope is what one
more token costs.

Last line: one JSON object. `ratio` is the dense version's peak over the chunked one's, and it grows
with the tokens; `seconds_ratio` the chunked version's time over the dense one's: the logits are
computed twice, but far fewer pages of fresh memory are touched. One run of each: on a busy machine
this number is noise.
"""

import argparse
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import torch

from compassrl.model.log_probs import dense_log_probs, token_log_probs
from compassrl.runs.summary import machine_info

MB = 2**20


def memory(key):
    "VmRSS (held now) or VmHWM (its peak), in bytes; Linux only"
    lines = open('/proc/self/status')
    return next(int(s.split()[1]) * 1024 for s in lines if s.startswith(key))


def measure(version, tokens, a):
    "Runs in a process of its own"
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, a.dtype)
    hidden = torch.randn(tokens, a.hidden).to(dtype).requires_grad_()
    head = (torch.randn(a.vocab, a.hidden) * a.hidden**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(a.vocab, (tokens,))
    fns = dict(
        dense=dense_log_probs,
        chunked=lambda *x: token_log_probs(*x, max_logits=a.chunk_tokens * a.vocab),
    )

    def step(n):
        log_probs, entropy = fns[version](hidden[:n], head, targets[:n])
        log_probs.sum().backward()
        return log_probs, entropy

    step(1)  # what is loaded on first use
    hidden.grad = head.grad = None
    with open('/proc/self/clear_refs', 'w') as f:
        f.write('5')  # VmHWM starts again
    before, start = memory('VmRSS'), time.perf_counter()
    step(tokens)
    seconds = time.perf_counter() - start
    return dict(mb=round((memory('VmHWM') - before) / MB, 1), seconds=round(seconds, 2))


def run(version, tokens, a):
    # forked: this process has the imports and has computed nothing yet
    with ProcessPoolExecutor(1, multiprocessing.get_context('fork')) as pool:
        got = pool.submit(measure, version, tokens, a).result()
    print(
        f'{version:8s} {tokens:6,d} tokens: {got["mb"]:8,.1f} MB {got["seconds"]:6.2f} s',
        flush=True,
    )
    return got


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for key, value in dict(
        tokens=1024, hidden=256, vocab=151_936, chunk_tokens=64, threads=1
    ).items():
        p.add_argument(f'--{key.replace("_", "-")}', type=int, default=value)
    p.add_argument('--dtype', default='float32', choices=['float32', 'bfloat16'])
    p.add_argument('--quick', action='store_true', help='fewer and narrower hidden states')
    a = p.parse_args()
    if a.quick:
        a.tokens, a.hidden, a.vocab = 256, 16, 20_000
    got = {v: {n: run(v, n, a) for n in (a.tokens // 2, a.tokens)} for v in ('dense', 'chunked')}
    dense, chunked = (got[v][a.tokens] for v in got)

    def slope(v):
        return round(
            (got[v][a.tokens]['mb'] - got[v][a.tokens // 2]['mb']) / (a.tokens - a.tokens // 2), 3
        )

    settings = {
        k: getattr(a, k) for k in ('tokens', 'hidden', 'vocab', 'chunk_tokens', 'dtype', 'quick')
    }
    torch.set_num_threads(a.threads)
    print(
        json.dumps(
            dict(
                name='logprob_memory',
                ratio=round(dense['mb'] / max(chunked['mb'], 0.1), 2),
                units='peak memory of dense / of chunked',
                dense_mb=dense['mb'],
                chunked_mb=chunked['mb'],
                dense_mb_per_token=slope('dense'),
                chunked_mb_per_token=slope('chunked'),
                seconds_ratio=round(chunked['seconds'] / dense['seconds'], 2),
                settings=settings,
                machine=machine_info(),
            )
        )
    )


if __name__ == '__main__':
    main()
