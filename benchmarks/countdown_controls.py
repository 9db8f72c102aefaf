"""What made the policy of countdown-cpu search? The same run with one thing taken away.

    python benchmarks/countdown_controls.py [--seeds 0] [--quick]

- the loop alone: GRPO's loss, no penalties, no RL-ZVP, no selection of prompts, no router replay,
  which is the loop of step 6 with the learning rate of the preset;
- guesses alone: a cold start in which no solution searches.

Both run at once, a core each. The run itself is stored by train_seeds.py. Last line: one JSON
object; `ratio` is the share of right responses after RL of the run with guesses alone over that of
the loop alone, mean of the seeds.
"""

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parent))
from train_seeds import curve, train

from compassrl.runs.summary import machine_info

PLAIN = """--loss.name grpo --router-replay off --data.select-by turn
--zero-variance.zvp-alpha 0 --zero-variance.length-weight 0 --zero-variance.repetition-weight 0"""
ARMS = {'the loop alone': PLAIN, 'guesses alone': '--cold-start.hasty-frac 1'}
SMALL = """--steps 1 --eval-every 0 --eval-k 1 --cold-start.steps 10 --rollout.max-tokens 30
--prompts-per-step 4 --data.num-heldout 8 --data.num-train 100 --cold-start.num-solutions 100"""


def ended(seed, flags, folder):
    "What one run came to, and its curve"
    seconds, _, cpu_s = train('countdown-cpu', seed, folder, *flags.split())
    before, after = (
        json.loads((folder / f'eval_{when}.json').read_text()) for when in ('before', 'after')
    )
    return dict(
        seed=seed,
        before=before['avg'],
        after=after['avg'],
        stderr_after=after['avg_stderr'],
        tokens_before=before['response_tokens_mean'],
        tokens_after=after['response_tokens_mean'],
        curve=curve(folder, before, after),
        minutes=seconds / 60,
        cpu_minutes=cpu_s / 60,
    )


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--seeds', type=int, nargs='+', default=[0])
    p.add_argument('--quick', action='store_true', help='short runs of one seed')
    a = p.parse_args()
    arms, short = {name: [] for name in ARMS}, f' {SMALL}' if a.quick else ''
    for seed in a.seeds[: 1 if a.quick else None]:
        with tempfile.TemporaryDirectory() as tmp, ThreadPoolExecutor() as threads:
            going = {
                name: threads.submit(ended, seed, flags + short, Path(tmp) / str(i))
                for i, (name, flags) in enumerate(ARMS.items())
            }
            rows = {name: run.result() for name, run in going.items()}
        for name, row in rows.items():
            arms[name].append(row)
            rates = f'{100 * row["before"]:.1f} % -> {100 * row["after"]:.1f} %'
            tokens = f'{row["tokens_before"]:.0f} -> {row["tokens_after"]:.0f} tokens'
            print(f'{name}, seed {seed}: {rates}, {tokens}, {row["minutes"]:.1f} min', flush=True)
    last = {name: fmean(r['after'] for r in rows) for name, rows in arms.items()}
    print(
        json.dumps(
            dict(
                name='countdown_controls',
                ratio=last['guesses alone'] / max(last['the loop alone'], 1e-9),
                units='right after RL: a cold start of guesses alone over the loop alone',
                arms=arms,
                settings=dict(flags=ARMS, quick=a.quick),
                machine=machine_info(),
            )
        )
    )


if __name__ == '__main__':
    main()
