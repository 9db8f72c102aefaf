"""Three ways to treat silent groups: held-out accuracy and what became of the tokens.

All start from the same cold start and generate the same number of tokens.

grpo    nothing is done: a group whose rewards are equal adds nothing to the update
refill  DAPO's dynamic sampling: silent groups are thrown away, and other prompts are asked until
        the batch is full
stages  the paper's three: silent groups grow, penalties tell equals apart, RL-ZVP gives the rest
        an advantage per token

All use the GRPO loss and R3. Prompts are a mix of easy, medium and hard ones for which about half
of plain GRPO's groups are silent. A run ends when its budget of response tokens is spent. Last
line: one JSON object; `ratio` is the mean gain of `stages` over that of `grpo`.
usage: python benchmarks/zero_variance.py [--seeds 0 1 2] [--budget 900000] [--quick]
"""

import argparse
import json
import statistics
import time
from dataclasses import replace

from compassrl.algo.losses import LossConfig
from compassrl.algo.zero_variance import ZeroVarianceConfig
from compassrl.config import TrainConfig
from compassrl.data.prompts import make_prompts
from compassrl.loop import fit
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.records import derive_seed
from compassrl.rollout.torch_rollout import RolloutConfig, TorchRollout
from compassrl.runs.evaluate import evaluate
from compassrl.runs.run_data import load
from compassrl.runs.summary import machine_info
from compassrl.train.sft import SFTConfig, cold_start
from compassrl.train.torch_train import OptimConfig, TorchTrain

OFF = dict(length_weight=0.0, repetition_weight=0.0, zvp_alpha=0.0)
METHODS = dict(
    grpo=ZeroVarianceConfig('uniform', **OFF),
    refill=ZeroVarianceConfig('refill', **OFF),
    stages=ZeroVarianceConfig(),
)
# domain, difficulty, share: easy, medium, hard
MIX = (('strings', 0.0, 0.35), ('arithmetic', 1.0, 0.4), ('arithmetic', 4.0, 0.25))


class Spent(Exception):
    "The token budget of a run is used up"


def prompts_of(num, seed, split, tokenizer):
    "The mix, in random order"
    parts = [
        make_prompts(domain, round(num * share), difficulty, seed, split, tokenizer)
        for domain, difficulty, share in MIX
    ]
    return sorted((p for part in parts for p in part), key=lambda p: derive_seed(seed, p.id))


def base(a, seed):
    return TrainConfig(
        seed=seed,
        steps=10_000,
        prompts_per_step=a.prompts,
        group_size=8,
        eval_k=8,
        policy=PolicyConfig(max_position_embeddings=128),
        rollout=RolloutConfig(max_tokens=64, num_slots=256),
        loss=LossConfig('grpo'),
        cold_start=SFTConfig(steps=a.cold_steps, lr=5e-3, num_solutions=4096, hasty_frac=0.5),
        optim=OptimConfig(lr=2e-4, warmup_steps=10, num_mini_batches=2),
    )


def prepare(a, seed):
    "Parts of a run whose policy has been cold-started on the mix"
    cfg = base(a, seed)
    parts = load(cfg)
    parts.policy = Policy(cfg.policy, cfg.seed)
    parts.rollout = TorchRollout(cfg.policy, cfg.rollout.num_slots)
    parts.train, parts.heldout = (
        prompts_of(n, seed, split, parts.tokenizer)
        for n, split in ((a.train, 'train'), (a.heldout, 'heldout'))
    )
    engine = TorchTrain(
        parts.policy, replace(cfg.optim, lr=cfg.cold_start.lr, num_mini_batches=1), replay='off'
    )
    for _ in cold_start(engine, parts.train, cfg.cold_start, parts.tokenizer, seed):
        pass
    return cfg, parts


class Hooks:
    "Counts tokens, evaluates at marks, stops at the budget"

    def __init__(self, a, cfg, parts):
        self.a, self.cfg, self.parts, self.rows, self.evals, self.tokens = a, cfg, parts, [], [], 0

    def evaluate(self):
        p, c = self.parts, self.cfg
        r = evaluate(
            p.rollout, p.heldout, c.eval_k, c.rollout.params(p.eos_id), p.tokenizer, c.seed
        )
        self.evals.append((self.tokens, r.avg))

    def on_step(self, step, metrics, samples, batch):
        self.rows.append(metrics)
        self.tokens += int(metrics['tokens'])
        mark = self.a.budget / self.a.marks * len(self.evals)
        if self.tokens >= mark or self.tokens >= self.a.budget:
            self.evaluate()
        if self.tokens >= self.a.budget:
            raise Spent


def run(a, cfg, parts, start, method):
    "One run from `start`; what became of its tokens, and the curve of held-out accuracy"
    cfg = replace(cfg, zero_variance=METHODS[method])
    parts.policy.load_state_dict(start)
    engine = TorchTrain(parts.policy, cfg.optim, cfg.rollout.temperature, cfg.router_replay)
    parts.rollout.load_weights(engine.weights(), 0)
    hooks, t = Hooks(a, cfg, parts), time.perf_counter()
    hooks.evaluate()
    try:
        fit(cfg, parts.train, parts.rollout, engine, parts.tokenizer, hooks, parts.eos_id)
    except Spent:
        pass
    rows = hooks.rows
    groups = [m['samples'] / m['group_size_mean'] for m in rows]
    awake = sum(g * (1 - m['zero_variance_residual_frac']) for g, m in zip(groups, rows))
    useful = sum(m['gradient_token_frac'] * m['response_tokens_mean'] * m['samples'] for m in rows)

    def mean(key):
        return statistics.fmean(m[key] for m in rows)

    return dict(
        method=method,
        seed=cfg.seed,
        steps=len(rows),
        tokens=hooks.tokens,
        seconds=time.perf_counter() - t,
        evals=hooks.evals,
        silent_first=mean('zero_variance_first_frac'),
        silent_raw=mean('zero_variance_raw_frac'),
        silent_shaped=mean('zero_variance_frac'),
        residual=mean('zero_variance_residual_frac'),
        prompts_without_gradient=1 - awake / sum(m['prompts'] for m in rows),
        gradient_tokens=useful / hooks.tokens,
        silent_first_start=rows[0]['zero_variance_first_frac'],
    )


def spread(values):
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def table(rows):
    "Mean and spread over seeds of each method"
    out = {}
    for method in METHODS:
        mine = [r for r in rows if r['method'] == method]
        values = {
            k: [r[k] for r in mine]
            for k in (
                'steps',
                'tokens',
                'silent_first',
                'residual',
                'prompts_without_gradient',
                'gradient_tokens',
            )
        }
        values |= dict(
            before=[r['evals'][0][1] for r in mine], after=[r['evals'][-1][1] for r in mine]
        )
        values['gain'] = [y - x for x, y in zip(values['before'], values['after'])]
        out[method] = {k: spread(v) for k, v in values.items()}
    return out


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    p.add_argument('--budget', type=int, default=900_000, help='response tokens of a run')
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    a = p.parse_args()
    a.prompts, a.cold_steps, a.train, a.heldout, a.marks = (
        (8, 20, 80, 8, 2) if a.quick else (48, 700, 4096, 160, 6)
    )
    if a.quick:
        a.seeds, a.budget = [0], 4_000
    rows = []
    for seed in a.seeds:
        cfg, parts = prepare(a, seed)
        start = {k: v.clone() for k, v in parts.policy.state_dict().items()}
        for method in METHODS:
            rows.append(r := run(a, cfg, parts, start, method))
            print(
                f'seed {seed} {method:7} {r["steps"]:4} steps, {r["seconds"]:4.0f} s: silent at '
                f'first {r["silent_first"]:.0%} (step 1: {r["silent_first_start"]:.0%}), '
                f'tokens with gradient {r["gradient_tokens"]:.0%}, prompts without '
                f'{r["prompts_without_gradient"]:.1%}; '
                f'held out {100 * r["evals"][0][1]:.1f} -> {100 * r["evals"][-1][1]:.1f} %',
                flush=True,
            )
    t = table(rows)
    print(
        f'\n{"":8}{"steps":>12}{"silent first":>16}{"residual":>14}{"asked in vain":>16}'
        f'{"gradient tokens":>18}{"held out, points":>20}'
    )
    for m, v in t.items():

        def cell(k, scale=100):
            return f'{scale * v[k][0]:.1f} ± {scale * v[k][1]:.1f}'

        print(
            f'{m:8}{cell("steps", 1):>12}{cell("silent_first"):>16}{cell("residual"):>14}'
            f'{cell("prompts_without_gradient"):>16}{cell("gradient_tokens"):>18}'
            f'{"+" + cell("gain"):>20}'
        )
    settings = dict(
        budget=a.budget,
        seeds=a.seeds,
        mix=MIX,
        prompts_per_step=a.prompts,
        group_size=8,
        heldout=a.heldout,
        eval_k=8,
        quick=a.quick,
    )
    print(
        json.dumps(
            dict(
                name='zero_variance',
                ratio=round(t['stages']['gain'][0] / (t['grpo']['gain'][0] or 1e-9), 3),
                units='mean gain of held-out avg@8 with three stages / with plain GRPO, same '
                'tokens',
                table=t,
                runs=rows,
                settings=settings,
                machine=machine_info(),
            )
        )
    )


if __name__ == '__main__':
    main()
