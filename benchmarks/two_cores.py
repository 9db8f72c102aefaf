"""How long by the clock, if each side may use two cores? Our recipe one step ahead against TRL.

    python benchmarks/two_cores.py [--seeds 0 1 2] [--tasks silent] [--time 2.5] [--quick]

The race of time_to_accuracy.py by the clock, alone on two cores: the same checkpoints, prompts,
verifier, evaluations, targets and settings of TRL. Four contenders:

- ahead: the default recipe with `schedule.max_staleness` 1. Its sampler draws the next step in a
  process of its own while the trainer computes this one. Nothing else differs from `tiny-cpu`;
- default: the same without that, on one core;
- TRL: GRPOTrainer, one thread;
- TRL, two threads.

The last three take turns. A turn would give `ahead` time to sample that nobody counts, so it goes
from the start to the end at once. Each 512 responses it keeps its weights, which are evaluated
afterwards. Its CPU seconds are those of both processes. A contender has as many seconds as it has
CPU seconds in the other race.

Last line: one JSON object. `ratio`: seconds of the faster TRL over those of `ahead` on the default
task, summed over seeds (goal: 5); `tasks` has both. `factors` has geometric means over seeds with
95 % intervals: `both` and `threads` are the two TRLs over `ahead`, `one_core` is the default over
`ahead`.
"""

import json
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from time_to_accuracy import (
    EVERY,
    TASKS,
    Ours,
    Peer,
    Start,
    arguments,
    by_level,
    factors,
    line,
    presets,
    race,
    small,
    total_rows,
)

from compassrl.loop import Stop, run_steps
from compassrl.procs import process_stat
from compassrl.runs.run_process import set_up
from compassrl.runs.summary import machine_info

PROMISED = 5  # times as fast as TRL
BY = 'seconds'
AHEAD, THREADS = 'ahead', 'TRL, two threads'
PAIRS = dict(both=('TRL', AHEAD), threads=(THREADS, AHEAD), one_core=('default', AHEAD))


class Ahead(Ours):
    "All steps of a run at once, with the sampler one step ahead; weights are kept on the way"

    def __init__(self, start, stack):
        schedule = replace(start.cfg.schedule, max_staleness=1)
        super().__init__(start, replace(start.cfg, schedule=schedule), stack)
        stack.callback(self.sampler.close)
        self.kept, self.tokens = [], 0

    def now(self):
        "CPU seconds of both processes, seconds"
        sampler = process_stat(self.engines.rollout.child.pid).cpu_s
        return time.process_time() + sampler, time.perf_counter()

    def on_step(self, step, metrics, samples, batch):
        self.tokens += int(metrics['tokens'])
        if step % self.every == 0:
            cpu, clock = (round(b - a, 4) for a, b in zip(self.began, self.now()))
            row = dict(steps=step, cpu_seconds=cpu, seconds=clock, tokens=self.tokens)
            weights = self.engines.train.weights()
            self.kept.append((row, [(name, t.detach().clone()) for name, t in weights]))
            if clock > self.cap:
                raise Stop

    def run(self, cap, every):
        "Rows without evaluations, and weights, for so many seconds and each so many responses"
        self.cap, self.every, self.began = cap, max(1, every // self.rows), self.now()
        with suppress(Stop):
            run_steps(self.cfg, self.sampler, self.engines.train, self)
        return self.kept


def evaluated(start, kept, enough):
    "Its curve up to the first evaluation that is enough"
    curve = []
    for row, weights in kept:
        curve.append(row | dict(avg=start.accuracy(weights)))
        print(f'  {AHEAD:17} {line(curve[-1])}', flush=True)
        if curve[-1]['avg'] > enough - 1e-9:
            break
    return curve


def raced(start, task, peer, every, quick):
    "Curves by name"
    with ExitStack() as stack:
        others = {'default': Ours(start, start.cfg, stack)}
        for n, name in enumerate(('TRL',) if quick else ('TRL', THREADS), 1):
            others[name] = stack.enter_context(Peer(start, peer, f'trl-{n}', threads=n))
        curves = race(start, others, task, every, BY)
    with ExitStack() as stack:
        kept = Ahead(start, stack).run(task.cap, every)
    seed = dict(before=start.before, curves=curves)
    return curves | {AHEAD: evaluated(start, kept, task.goal(seed, task.levels[-1]))}


def summary(seeds, task):
    "Factors, and what the faster TRL needs over what `ahead` does"
    levels = by_level(seeds, task, BY)
    needs = levels[to := task.said(task.levels[-1])]['needs']
    for name, n in needs.items():
        some = '>' if n['missed'] else ' '
        print(f'all {name:17} {some}{n[BY]:.1f} s, {some}{n["cpu_seconds"]:.1f} CPU seconds')
    fastest = min(n[BY] for name, n in needs.items() if name in ('TRL', THREADS))
    found = factors(seeds, lambda s: task.goal(s, task.levels[-1]), PAIRS, BY)
    for name, row in found.items():
        print(f'to {to}, {name:8} {"{:.2f} [{:.2f}, {:.2f}]".format(*row)}')
    ratio = fastest / needs[AHEAD][BY]
    print(f'one step ahead: {ratio:.2f} times as fast by the clock (goal {PROMISED})')
    return dict(to=to, ratio=ratio, factors=found, levels=levels, seeds=seeds)


def main():
    a, cfg, every, changed = arguments(__doc__), presets['tiny-cpu'](), EVERY, {}
    cfg = replace(cfg, data=replace(cfg.data, num_heldout=256))
    tasks = {k: replace(TASKS[k], cap=a.time * TASKS[k].cap) for k in a.tasks}
    if a.quick:
        cfg, a.seeds = small(cfg), [0]
        tasks = dict(silent=replace(TASKS['silent'], cap=1e-3))  # one evaluation of each
        changed, every = dict(prompts=4, micro_batch=16), 1
    set_up(cfg.device, cfg.num_threads)
    found = {}
    with ExitStack() as stack:
        home = Path(a.starts or stack.enter_context(tempfile.TemporaryDirectory()))
        for name, task in tasks.items():
            print(f'== {name}')
            peer, seeds = task.peers(**changed)['TRL'], []
            for seed in a.seeds:
                start = Start(replace(cfg, seed=seed), home / f'{name}{seed}', task.mix)
                print(f'seed {seed}: {100 * start.before:.1f} % after the cold start', flush=True)
                curves = raced(start, task, peer, every, a.quick)
                seeds.append(dict(seed=seed, before=start.before, curves=curves))
            found[name] = summary(seeds, task)
    settings = dict(every=every, eval_k=cfg.eval_k, heldout=cfg.data.num_heldout, quick=a.quick)
    settings |= dict(caps={k: t.cap for k, t in tasks.items()}, responses=total_rows(cfg))
    units = 'seconds by the clock to the target: of the faster TRL over those one step ahead'
    main_ratio = next(iter(found.values()))['ratio']
    result = dict(name='two_cores', ratio=main_ratio, units=units, tasks=found, settings=settings)
    print(json.dumps(result | dict(machine=machine_info())))


if __name__ == '__main__':
    main()
