"""Steps per second with the sampler one step ahead over the same loop without (embedded engines).

`tiny-cpu` from an untrained policy that hardly moves, and the same with ten times the parameters:
pairs of short stretches, k = 0 and k = 1, take turns, so that a busy machine disturbs both alike.
Reported: the seconds of a step in the fastest stretch with k = 0 over those in the fastest with
k = 1 (other programs only make a stretch slower; `median` is that of the pairs), and the bound,
(s + t) / max(s, t) for s seconds of sampling and t of all else at k = 0.
Last line: one JSON object.
usage: python benchmarks/staleness.py [--pairs 9] [--steps 10] [--quick]
"""

import argparse
import json
import os
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from compassrl.experience import Sampler
from compassrl.judges.genrm_judge import make_judge
from compassrl.loop import Stop, run_steps
from compassrl.model.policy import Policy
from compassrl.model.pretrained import save_pretrained
from compassrl.runs.ahead import AheadSampler
from compassrl.runs.factory import open_engines
from compassrl.runs.presets import tiny_cpu
from compassrl.runs.run_data import load
from compassrl.runs.run_process import set_up
from compassrl.runs.summary import machine_info

PROMISED = 1.6


def larger(cfg):
    "Ten times the parameters"
    wide = replace(cfg.policy, hidden_size=192, moe_intermediate_size=192, num_hidden_layers=3)
    return replace(cfg, policy=wide)


class Stretch:
    "One loop that goes on where it stopped"

    def __init__(self, cfg, k, model, data, folder, stack):
        self.cfg = replace(cfg, schedule=replace(cfg.schedule, max_staleness=k))
        self.engines = stack.enter_context(open_engines(self.cfg, model, folder))
        judge = make_judge(data.prompts, data.tokenizer, data.eos_id, cfg.rewards, cfg.seed)
        stack.callback(judge.close)
        kind = AheadSampler if k else Sampler
        self.sampler = kind(self.cfg, data.train, self.engines.rollout, judge, data.eos_id)
        stack.callback(self.sampler.close)
        self.engines.rollout.load_weights(self.engines.train.weights(), 0)
        self.done = 0

    def on_step(self, step, metrics, samples, batch):
        self.rows.append(metrics)
        self.done = step
        if len(self.rows) == self.num:
            raise Stop

    def run(self, num):
        """Seconds of each of so many steps; those that sample, those that do not. One step more
        comes first, whose samples were drawn in another stretch; nothing is drawn after the end"""
        self.rows, self.num = [], num + 1
        try:
            run_steps(self.cfg, self.sampler, self.engines.train, self, self.done)
        except Stop:
            pass
        if isinstance(self.sampler, AheadSampler):
            self.sampler.catch_up(self.engines.train)
        whole = sum(m['time_step_s'] for m in self.rows[1:]) / num
        sampled = sum(m['time_rollout_s'] for m in self.rows[1:]) / num
        return whole, sampled


def compared(cfg, pairs, steps):
    with tempfile.TemporaryDirectory() as tmp, ExitStack() as stack:
        model = Path(tmp, 'model')
        save_pretrained(Policy(cfg.policy, seed=0), model)
        data = load(cfg)
        both = [Stretch(cfg, k, model, data, Path(tmp), stack) for k in (0, 1)]
        for b in both:
            b.run(2)  # warm
        found = [[b.run(steps) for b in both] for _ in range(pairs)]
    ratios = sorted(zero[0] / one[0] for zero, one in found)
    (step, sampled), (ahead, _) = (min(stretches) for stretches in zip(*found))
    return dict(
        parameters=sum(p.numel() for p in Policy(cfg.policy).parameters()),
        ratio=step / ahead,
        median=median(ratios),
        ratios=ratios,
        bound=step / max(sampled, step - sampled),
        step_s=step,
        sampling_s=sampled,
        load=os.getloadavg()[0],
    )


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--pairs', type=int, default=9)
    p.add_argument('--steps', type=int, default=10)
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    a = p.parse_args()
    set_up('cpu', 1)
    base = tiny_cpu()
    optim = replace(base.optim, lr=1e-12)  # so that all stretches have answers of like length
    cfg = replace(base, trackers=(), steps=10_000, optim=optim)
    cases = dict(tiny=cfg, ten_times=larger(cfg))
    if a.quick:
        cases = dict(tiny=replace(cfg, prompts_per_step=4))
        a.pairs = a.steps = 1
    found = {name: compared(c, a.pairs, a.steps) for name, c in cases.items()}
    for name, r in found.items():
        print(
            f'{name}: {r["parameters"]:,} parameters, {r["ratio"]:.2f} times as fast one step '
            f'ahead (bound {r["bound"]:.2f}; load {r["load"]:.0f})'
        )
    ratio = min(r['ratio'] for r in found.values())
    what = dict(name='staleness', ratio=ratio, units='seconds at k=0 over seconds at k=1')
    more = dict(promised=PROMISED, settings=vars(a), cases=found, machine=machine_info())
    print(json.dumps(what | more))


if __name__ == '__main__':
    main()
