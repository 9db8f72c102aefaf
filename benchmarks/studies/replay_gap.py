"""How much of the gap between rollout and training does router replay take away, in a policy that
has been trained?

The policies are those that the studies begin with: the cold start of `tiny-cpu`, one per seed. They
answer 64 held-out prompts eight times each, in bfloat16, with weights in FP8, and both; the trainer
looks again in float32, with its own routes and with those of the rollout.
Last line: one JSON object; `ratio` is the mean gap with the trainer's own routes over that with the
rollout's, in bfloat16.
usage: make study NAME=replay_gap, python benchmarks/studies/replay_gap.py [--quick]
"""

import json
import math
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from _runner import RUNS, Study, cold_started, interval, prompts_of, rounded
from _tables import flags

from compassrl.algo.engine_gap import discrepancy
from compassrl.model.policy import Policy
from compassrl.records import collate
from compassrl.rollout.fp8 import Fp8Rollout
from compassrl.rollout.requests import requests_of
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.summary import machine_info
from compassrl.train.torch_train import TorchTrain

MIX = (('arithmetic', 1.25, 1.0),)
STUDY = Study('replay_gap', dict(default=MIX), dict(plain=lambda cfg: cfg), {}, range(6), 0)
KEYS = dict(gap='rollout_train_gap', k3='rollout_train_k3', agree='routes_agree_frac')


def rollouts(cfg, **more):
    "Precision -> engine"
    size, half = (cfg.policy, cfg.rollout.num_slots), torch.bfloat16
    return dict(
        bfloat16=TorchRollout(*size, half, **more),
        fp8=Fp8Rollout(*size, activations=False, **more),
        both=Fp8Rollout(*size, half, activations=False, **more),
    )


def measured(study, seed, num, modes=('off', 'R3'), also=lambda *_: {}, **more):
    "One policy: precision -> replay -> numbers, and what `also` finds there"
    cfg = study.config('plain', seed, 4e-4)
    policy = Policy(cfg.policy, seed)
    policy.load_state_dict(cold_started(study, seed))
    engines = {mode: TorchTrain(policy, cfg.optim, replay=mode) for mode in modes}
    prompts = prompts_of(MIX, num, seed, 'heldout')
    params = cfg.rollout.params(cfg.policy.eos_ids)
    asked = requests_of(prompts, [8] * num, Counter(), params, seed)
    out = {}
    for name, rollout in rollouts(cfg, **more).items():
        rollout.load_weights(engines['off'].weights(), 0)
        batch = collate(sorted(rollout.generate(asked), key=lambda s: (s.prompt_id, s.index)))
        out[name] = {}
        for mode, engine in engines.items():
            found = discrepancy(replace(batch, **engine.score(batch)))
            out[name][mode] = {k: found[v] for k, v in KEYS.items() if v in found}
        out[name] |= also(engines, batch, seed)
    return out


def policies(quick, *what, **more):
    "What is measured of the policy of each seed"
    with tempfile.TemporaryDirectory() as folder:
        small = replace(STUDY, seeds=(0, 1), cold_steps=9, pool=64, runs=Path(folder))
        study = small if quick else replace(STUDY, runs=RUNS)
        num = 4 if quick else 64
        return [rounded(measured(study, s, num, *what, **more)) for s in study.seeds]


def factor(runs, name, key, before='off', after='R3'):
    "Before over after: geometric mean over seeds and its 95 % interval"
    logs = [math.log(r[name][before][key] / r[name][after][key]) for r in runs]
    return [math.exp(x) for x in interval(logs)]


def main():
    quick = flags(__doc__).quick
    torch.set_num_threads(1)
    runs = policies(quick)
    table = {
        name: dict(factors={k: factor(runs, name, k) for k in ('gap', 'k3')})
        | {
            mode: {k: interval([r[name][mode][k] for r in runs])[0] for k in runs[0][name][mode]}
            for mode in ('off', 'R3')
        }
        for name in runs[0]
    }
    for name, row in table.items():
        parts = ', '.join(
            '{} / {:.2f} [{:.2f}, {:.2f}]'.format(k, *v) for k, v in row['factors'].items()
        )
        print(f'{name:9} {parts}')
    units = 'mean |gap| of log-probs in bfloat16 with own routes / with replayed ones'
    found = dict(name='replay_gap', ratio=round(table['bfloat16']['factors']['gap'][0], 3))
    found |= dict(units=units, table=rounded(table), runs=runs)
    settings = dict(prompts=64, samples=8, task=MIX, quick=quick)
    settings |= dict(seeds=list(STUDY.seeds[: len(runs)]))
    print(json.dumps(found | dict(settings=settings, machine=machine_info())))


if __name__ == '__main__':
    main()
