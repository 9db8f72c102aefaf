"""Pools of real responses, to ask where further samples of a prompt buy most.

Three policies answer 256 prompts 64 times each, and nothing is trained on the answers:

tiny, cold start    the policy of `make train` before any RL
tiny, 35 steps      the same after 35 steps of plain GRPO: most groups are solved
mix, cold start     a policy on easy, medium and hard prompts, some of them hopeless

Kept are reward and length of every response, and how often right responses repeat an n-gram. The
study nbs/studies/growth.ipynb draws groups from these pools. Last line: one JSON object; `ratio`
is what a token earns in groups of 32 over what it earns in groups of 8, on the mix: the sum of
|z-scores| per token, expected from the pools.
usage: python benchmarks/growth.py [--seed 0] [--quick]
"""

import argparse
import json
import math
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from zero_variance import prepare as prepare_mix

sys.path.insert(0, str(Path(__file__).parent / 'studies'))
from _runner import common  # noqa: E402

from compassrl.algo.zero_variance import ZeroVarianceConfig, repetition_penalty
from compassrl.judges.serial import SerialJudge
from compassrl.loop import fit
from compassrl.model.policy import Policy
from compassrl.rollout.requests import requests_of
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.run_data import load
from compassrl.runs.summary import machine_info
from compassrl.train.sft import cold_start
from compassrl.train.torch_train import TorchTrain

GRPO = ZeroVarianceConfig('uniform', length_weight=0.0, repetition_weight=0.0, zvp_alpha=0.0)
NGRAMS = 3, 4, 5, 6, 8, 10, 12


def prepare_tiny(a):
    "Parts of `make train`, cold-started"
    cfg = replace(common(), seed=a.seed, zero_variance=GRPO)
    cfg = replace(cfg, optim=replace(cfg.optim, final_lr_frac=1.0))
    cfg = replace(cfg, data=replace(cfg.data, select_by='turn'))
    cfg = replace(cfg, cold_start=replace(cfg.cold_start, steps=a.cold_steps))
    parts = load(cfg)
    parts.policy = Policy(cfg.policy, cfg.seed)
    parts.rollout = TorchRollout(cfg.policy, cfg.rollout.num_slots)
    optim = replace(cfg.optim, lr=cfg.cold_start.lr, num_mini_batches=1)
    engine = TorchTrain(parts.policy, optim, replay='off')
    for _ in cold_start(engine, parts.train, cfg.cold_start, parts.tokenizer, cfg.seed):
        pass
    return cfg, parts


class Quiet:
    "Plain GRPO needs no hooks"

    def on_step(self, step, metrics, samples, batch):
        pass


def train(a, cfg, parts):
    engine = TorchTrain(parts.policy, cfg.optim, cfg.rollout.temperature, cfg.router_replay)
    parts.rollout.load_weights(engine.weights(), 0)
    cfg = replace(cfg, steps=a.steps)
    fit(cfg, parts.train, parts.rollout, engine, parts.tokenizer, Quiet(), parts.eos_id)


def pool(a, cfg, parts):
    "Reward and length of `a.samples` responses to each of `a.num` prompts; what n-grams hit"
    engine = TorchTrain(parts.policy, cfg.optim)
    parts.rollout.load_weights(engine.weights(), 0)
    prompts = parts.train[: a.num]
    judge = SerialJudge(prompts, parts.tokenizer, parts.eos_id, cfg.rewards)
    params = cfg.rollout.params(parts.eos_id)
    requests = requests_of(prompts, [a.samples] * len(prompts), Counter(), params, a.seed, 'pool')
    samples = []
    for s in parts.rollout.generate(requests):
        judge.start(s)
        samples.append(s)
    judge.settle(samples)
    samples.sort(key=lambda s: (s.prompt_id, s.index))
    right = [s.response_ids for s in samples if s.verdict.correct]
    by_prompt = {}
    for s in samples:
        by_prompt.setdefault(s.prompt_id, []).append((int(s.verdict.correct), len(s.response_ids)))
    return dict(
        prompts=[
            dict(right=''.join(str(r) for r, _ in v), lengths=' '.join(str(n) for _, n in v))
            for v in by_prompt.values()
        ],
        ngram={n: hits(right, n) for n in NGRAMS},
    )


def hits(responses, n):
    "Share of these responses that a penalty of n-grams would touch, and its mean"
    found = [repetition_penalty(ids, n) for ids in responses]
    num = max(len(found), 1)
    return dict(right_hit=sum(x < 0 for x in found) / num, right_mean=sum(found) / num)


def earned(prompts, N):
    "Expected sum of |z-scores| per token in groups of N, drawn without replacement"
    total = tokens = 0.0
    for p in prompts:
        right, num = p['right'].count('1'), len(p['right'])
        for k in range(1, N):
            ways = math.comb(right, k) * math.comb(num - right, N - k) / math.comb(num, N)
            total += ways * 2 * math.sqrt(k * (N - k) * (N - 1) / N)
        tokens += N * sum(map(int, p['lengths'].split())) / num
    return total / tokens


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--seed', type=int, default=0)
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    a = p.parse_args()
    a.prompts, a.train, a.heldout = 64, 2000, 8
    a.num, a.samples, a.cold_steps, a.steps = (8, 32, 20, 1) if a.quick else (256, 64, 1200, 35)
    states, t = {}, time.perf_counter()
    cfg, parts = prepare_tiny(a)
    states['tiny, cold start'] = pool(a, cfg, parts)
    train(a, cfg, parts)
    states[f'tiny, {a.steps} steps'] = pool(a, cfg, parts)
    states['mix, cold start'] = pool(a, *prepare_mix(a, a.seed))
    for name, state in states.items():
        rates = [p['right'].count('1') / len(p['right']) for p in state['prompts']]
        print(
            f'{name:18s} right {sum(rates) / len(rates):.2f}, never {rates.count(0.0)}, always '
            f'{rates.count(1.0)} of {len(rates)} prompts; right answers that repeat: '
            + ', '.join(f'n={n} {x["right_hit"]:.1%}' for n, x in state['ngram'].items())
        )
    mix = states['mix, cold start']['prompts']
    few = earned(mix, 8)
    print(f'{time.perf_counter() - t:.0f} s')
    result = dict(
        name='growth',
        ratio=earned(mix, 32) / few if few else 1.0,
        units='sum of |z-scores| per token, groups of 32 / groups of 8',
        settings=dict(seed=a.seed, prompts=a.num, samples=a.samples, steps=a.steps),
        machine=machine_info(),
        states=states,
    )
    print(json.dumps(result))


if __name__ == '__main__':
    main()
