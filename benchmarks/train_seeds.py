"""Does the default run learn? `compassrl train tiny-cpu` for seeds 0, 1 and 2, as a user runs it.

Prints held-out avg@8 before and after, minutes and peak memory of each seed, and ends with one
JSON line whose ratio is the smallest gain over the 30 points that we promise. usage: python
benchmarks/train_seeds.py [--seeds 0 1 2] [--preset tiny-cpu] [--quick]
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from compassrl.runs.summary import machine_info

PROMISED_POINTS = 30


def train(preset, seed, folder, *flags):
    "One run in a process of its own: seconds, peak memory in MB, seconds of computing"
    t = time.perf_counter()
    pid = os.posix_spawn(
        sys.executable,
        [
            sys.executable,
            '-m',
            'compassrl',
            'train',
            preset,
            '--seed',
            str(seed),
            '--run-dir',
            str(folder),
            *flags,
        ],
        os.environ,
    )
    _, status, usage = os.wait4(pid, 0)
    if status:
        sys.exit(f'seed {seed} failed: see the messages above')
    peak = usage.ru_maxrss / (1024 if sys.platform == 'linux' else 1024**2)
    return time.perf_counter() - t, peak, usage.ru_utime + usage.ru_stime


def curve(folder, before, after):
    "(step, held-out avg@k) before RL, at each evaluation of the run, and after"
    rows = map(json.loads, (folder / 'metrics.jsonl').read_text().splitlines())
    at = {m['step']: m.get('eval_avg') for m in rows}
    between = [(step, avg) for step, avg in at.items() if avg is not None]
    return [(0, before['avg']), *between, (max(at), after['avg'])]


def samples(before, after):
    "The first response to a prompt before and after: the first two prompts that RL has mended"
    first = [{s['prompt_id']: s for s in e['samples'] if s['index'] == 0} for e in (before, after)]
    mended = [i for i, s in first[0].items() if not s['correct'] and first[1][i]['correct']]
    return [
        dict(
            prompt=first[0][i]['prompt'],
            before=first[0][i]['response'],
            after=first[1][i]['response'],
        )
        for i in mended[:2]
    ]


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    p.add_argument('--preset', default='tiny-cpu')
    p.add_argument(
        '--quick',
        action='store_true',
        help='one short run, to see that it works: --preset smoke-cpu --seeds 0, cut short',
    )
    a = p.parse_args()
    flags = []
    if a.quick:
        a.preset, a.seeds, flags = (
            'smoke-cpu',
            [0],
            [
                '--steps',
                '1',
                '--eval-every',
                '0',
                '--cold-start.steps',
                '10',
                '--rollout.max-tokens',
                '16',
            ],
        )
    rows = []
    with tempfile.TemporaryDirectory() as tmp:
        for seed in a.seeds:
            folder = Path(tmp) / f'seed{seed}'
            seconds, peak, cpu_s = train(a.preset, seed, folder, *flags)
            before, after = (
                json.loads((folder / f'eval_{w}.json').read_text()) for w in ('before', 'after')
            )
            config = json.loads((folder / 'config.json').read_text())
            row = dict(
                seed=seed,
                before=before['avg'],
                after=after['avg'],
                stderr_before=before['avg_stderr'],
                stderr_after=after['avg_stderr'],
                gain_points=100 * (after['avg'] - before['avg']),
                minutes=seconds / 60,
                cpu_minutes=cpu_s / 60,
                peak_mb=peak,
                curve=curve(folder, before, after),
                tokens_before=before['response_tokens_mean'],
                tokens_after=after['response_tokens_mean'],
                samples=samples(before, after),
            )
            rows.append(row)
            gain = f'{100 * row["before"]:.1f} % -> {100 * row["after"]:.1f} %'
            gain += f' ({row["gain_points"]:+.1f} points)'
            cost = f'{row["minutes"]:.1f} minutes, peak {peak:,.0f} MB'
            print(f'seed {seed}: {gain}, {cost}', flush=True)
    worst = min(r['gain_points'] for r in rows)
    settings = {
        k: config[k] for k in ('steps', 'prompts_per_step', 'group_size', 'eval_k', 'num_threads')
    } | dict(preset=a.preset, domains=config['data']['domains'])
    print(
        json.dumps(
            dict(
                name='countdown_cpu' if a.preset == 'countdown-cpu' else 'train_seeds',
                ratio=worst / PROMISED_POINTS,
                units=f'smallest gain of held-out avg@8 over {PROMISED_POINTS} points',
                seeds=rows,
                settings=settings,
                machine=machine_info(),
            )
        )
    )


if __name__ == '__main__':
    main()
