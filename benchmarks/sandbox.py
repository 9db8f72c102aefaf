"""Verdicts on trivial programs per second: the sandbox against a plain Python per program.

Each verdict runs one program by as many threads as there are cores: with one assert line, in two
sandboxes of a fork server, or with an input and an output, in one. A plain Python (`python -I -c`,
program and test in one source) keeps nothing in, and must be started for every program. All three
take turns, so that a busy machine is busy for all. Last line: one JSON object; `ratio` is the
sandbox's verdicts per second with assert lines over plain Python's.
usage: python benchmarks/sandbox.py [--verdicts 300] [--rounds 5] [--threads 2] [--quick]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from compassrl.judges.verifiers import code
from compassrl.runs.summary import machine_info
from compassrl.sandbox.fork_client import close_fork_servers
from compassrl.sandbox.isolated import best_isolation, verdict_budget

PROGRAM, TEST = 'def double(x): return 2 * x\n', 'assert double(2) == 4'
PAIR = dict(stdin='2\n', stdout='4\n')
PYTHON = os.path.realpath(sys.executable)


def sandboxed(_):
    with verdict_budget(60.0, unsafe=True):  # where nothing isolates, the result says so
        assert code(PROGRAM, json.dumps([TEST])).correct


def with_stdin(_):
    with verdict_budget(60.0, unsafe=True):
        assert code('print(2 * int(input()))', json.dumps([PAIR])).correct


def plain(_):
    assert subprocess.run([PYTHON, '-I', '-c', PROGRAM + TEST]).returncode == 0


def per_second(verdict, num, threads):
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(verdict, range(num)))
    return num / (time.perf_counter() - start)


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--verdicts', type=int, default=300)
    p.add_argument('--rounds', type=int, default=5)
    p.add_argument('--threads', type=int, default=min(2, os.cpu_count()))
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    a = p.parse_args()
    num = a.verdicts
    if a.quick:
        num, a.rounds = 6, 2
    kinds = sandboxed, with_stdin, plain
    rates = {kind.__name__: [] for kind in kinds}
    per_second(sandboxed, 4 * a.threads, a.threads)  # fork servers start once per run
    for i in range(a.rounds):
        for verdict in kinds:
            rates[verdict.__name__].append(per_second(verdict, num, a.threads))
        print(f'round {i + 1}: ' + ', '.join(f'{k} {v[-1]:.0f}/s' for k, v in rates.items()))
    close_fork_servers()
    median = {k: round(statistics.median(v), 1) for k, v in rates.items()}
    ratios = {k: [s / p for s, p in zip(rates[k], rates['plain'])] for k in rates}
    result = dict(
        name='sandbox',
        ratio=round(statistics.median(ratios['sandboxed']), 3),
        stdin_ratio=round(statistics.median(ratios['with_stdin']), 3),
        units='verdicts per second, sandboxed / one plain Python per program',
        verdicts_per_s=median['sandboxed'],
        stdin_verdicts_per_s=median['with_stdin'],
        plain_per_s=median['plain'],
        best_verdicts_per_s=round(max(rates['sandboxed']), 1),
        walls=best_isolation()[0] or 'none',
        settings=dict(verdicts=num, rounds=a.rounds, threads=a.threads),
        machine=machine_info() | dict(cores=os.cpu_count(), load=round(os.getloadavg()[0], 1)),
    )
    print(f'{median["sandboxed"]:.0f} verdicts per second (goal 100), {result["ratio"]:.1f} times')
    print(json.dumps(result))


if __name__ == '__main__':
    main()
