"""Does bfloat16 learn as float32 does? `compassrl train tiny-cpu` with both passes, seed by seed.

The embedded trainer computes in bfloat16 over float32 masters, or in float32; all else is equal.
Prints held-out avg@8 after each run. The last line is one JSON object: the mean difference in
points, its standard error over the seeds, the spread of the float32 seeds (their standard
deviation), the largest mean difference at an evaluation, and, as ratio, |difference| over spread.
usage: python benchmarks/bf16_curve.py [--seeds 0 1 2] [--quick]
"""

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path

from train_seeds import curve, train

from compassrl.runs.summary import machine_info

QUICK = '--steps 1 --eval-every 0 --cold-start.steps 10 --rollout.max-tokens 16'


def run(preset, dtype, seed, *flags):
    "Held-out avg@k in points, as [step, points] from the start of RL to its end; the settings"
    with tempfile.TemporaryDirectory() as tmp:
        train(preset, seed, Path(tmp), '--parallel.dtype', dtype, *flags)
        before, after = (
            json.loads(Path(tmp, f'eval_{w}.json').read_text()) for w in ('before', 'after')
        )
        config = json.loads(Path(tmp, 'config.json').read_text())
        assert config['parallel']['dtype'] == dtype
        return [[step, 100 * avg] for step, avg in curve(Path(tmp), before, after)], config


def deviation(values):
    "Standard deviation; 0 of one value"
    return statistics.stdev(values) if len(values) > 1 else 0.0


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    p.add_argument('--quick', action='store_true', help='two short runs of one seed of smoke-cpu')
    a = p.parse_args()
    preset, seeds, flags = 'tiny-cpu', a.seeds, ()
    if a.quick:
        preset, seeds, flags = 'smoke-cpu', [0], QUICK.split()
    rows = []
    for seed in seeds:
        row = dict(seed=seed)
        for dtype in ('float32', 'bfloat16'):
            row[dtype], config = run(preset, dtype, seed, *flags)
            print(f'seed {seed} {dtype}: {row[dtype][-1][1]:.1f} %', flush=True)
        rows.append(row)
    gaps = [[b[1] - a[1] for a, b in zip(r['float32'], r['bfloat16'])] for r in rows]
    ends = [g[-1] for g in gaps]
    difference = statistics.fmean(ends)
    spread = deviation([r['float32'][-1][1] for r in rows])
    settings = {k: config[k] for k in ('steps', 'prompts_per_step', 'group_size', 'eval_k')}
    print(
        json.dumps(
            dict(
                name='bf16_curve',
                ratio=abs(difference) / max(spread, 1e-9),
                units='|held-out accuracy, bfloat16 minus float32| over the spread of the seeds',
                difference_points=difference,
                stderr_points=deviation(ends) / math.sqrt(len(ends)),
                spread_points=spread,
                on_the_way_points=max(map(abs, map(statistics.fmean, zip(*gaps)))),
                seeds=rows,
                settings=settings | dict(preset=preset),
                machine=machine_info(),
            )
        )
    )


if __name__ == '__main__':
    main()
