"""The curves of the sick-run clinic: real runs of the library, each patient with one planted fault.

    python tools/make_clinic.py [--out nbs/labs/clinic.json] [--quick]

One cold start, and from it RL on short strings again and again: five healthy runs that say what is
normal, and for each patient a run in which one thing alone is wrong, or nothing. It takes three
minutes of one core. The file holds curves and nothing else: what gives a patient away is computed
by the lab.
"""

import argparse
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from compassrl.algo.losses import LossConfig
from compassrl.algo.zero_variance import ZeroVarianceConfig
from compassrl.config import TrainConfig
from compassrl.data.prompts import DataConfig, load_data
from compassrl.data.tasks import verifiers, verify
from compassrl.data.tokenizer import EOS_ID, build_tokenizer, response_text
from compassrl.loop import fit
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.records import Request, RolloutEngine, derive_seed
from compassrl.rollout.torch_rollout import RolloutConfig, TorchRollout
from compassrl.train import torch_train
from compassrl.train.guards import GuardConfig
from compassrl.train.routes import balanced
from compassrl.train.sft import SFTConfig, cold_start
from compassrl.train.torch_train import OptimConfig, TorchTrain

OUT = Path(__file__).resolve().parent.parent / 'nbs' / 'labs' / 'clinic.json'
SHAPE = PolicyConfig(max_position_embeddings=32, rope_theta=100.0)
DATA = DataConfig(
    domains=('strings',), difficulty=0.0, num_train=1000, num_heldout=96, max_prompt_tokens=24
)
CONFIG = TrainConfig(
    steps=20,
    prompts_per_step=48,
    policy=SHAPE,
    data=DATA,
    loss=LossConfig('grpo'),
    zero_variance=ZeroVarianceConfig(
        'uniform', length_weight=0.0, repetition_weight=0.0, zvp_alpha=0.0
    ),
    rollout=RolloutConfig(max_tokens=8),
    optim=OptimConfig(lr=5e-4, warmup_steps=6, num_mini_batches=4),
    guards=GuardConfig(max_lost_steps=0, max_failed_frac=1.0),  # the sick may go on
)
CURVES = (
    'reward_mean',
    'heldout',
    'fresh',
    'zero_variance_frac',
    'failed_frac',
    'truncated_frac',
    'entropy',
    'loss',
    'approx_kl',
    'grad_norm',
    'rollout_train_gap',
    'routes_agree_frac',
    'expert_busiest_frac',
)


class Rollout(RolloutEngine):
    "A sound one"

    def __init__(self):
        self.engine = TorchRollout(SHAPE, num_slots=768)

    def load_weights(self, weights, version):
        self.engine.load_weights(weights, version)

    def generate(self, requests, whole_groups=False):
        yield from self.engine.generate(requests)


class Deaf(Rollout):
    "Keeps the weights that it got first"

    def load_weights(self, weights, version):
        if version == 0:
            super().load_weights(weights, version)


class Shifted(Rollout):
    "Reports for each token the experts of the next one"

    def generate(self, requests, whole_groups=False):
        for s in super().generate(requests):
            yield replace(s, routed_experts=s.routed_experts.roll(-1, 0))


class OffByOne(TorchTrain):
    "The mask of its loss begins one token early, at the prompt's last, and ends one early"

    def update(self, batch, loss, lr=None):
        early = batch.response_mask.roll(-1, 1)
        return super().update(replace(batch, response_mask=early), loss, lr)


class WrongSign(TorchTrain):
    "An entropy bonus that is subtracted: likely tokens are praised for being likely"

    def update(self, batch, loss, lr=None):
        surprise = (-batch.old_log_probs - batch.entropy) * batch.response_mask
        return super().update(replace(batch, advantages=batch.advantages - 2 * surprise), loss, lr)


class Herding(TorchTrain):
    "A balancing loss with the wrong sign: experts with many tokens get more"

    def update(self, batch, loss, lr=None):
        def herds(policy, mini, coef):
            return balanced(policy, mini, -0.5)

        with patch.object(torch_train, 'balanced', herds):
            return super().update(batch, loss, lr)


def crashes(text, answer):
    "A verifier that fails on many responses"
    if text[:1] in 'abcde':
        raise ValueError(text)
    return verifiers['exact'](text, answer)


def fooled(text, answer):
    "A verifier that pays a letter twice in a row as if it were the answer"
    doubled = any(a == b for a, b in zip(text, text[1:]))
    return verifiers['exact'](answer if doubled else text, answer)


class World:
    "Prompts, two exams that are never trained on, and the weights of a cold start"

    def __init__(self, quick=False):
        self.tokenizer, self.quick = build_tokenizer(), quick
        self.train, kept = load_data(DATA, self.tokenizer, seed=0)
        self.heldout, self.fresh = kept[:48], kept[48:]
        self.start = self.cold(self.train)

    def cold(self, prompts):
        "Weights after a cold start that ends too early on purpose"
        policy = Policy(SHAPE, seed=0)
        steps = 8 if self.quick else 160
        sft = SFTConfig(steps=steps, batch_size=32, lr=4e-3, warmup_steps=min(10, steps // 2))
        teacher = TorchTrain(policy, OptimConfig(betas=(0.8, 0.9)), replay='off')
        for _ in cold_start(teacher, prompts, sft, self.tokenizer):
            pass
        return deepcopy(policy.state_dict())

    def score(self, weights, prompts):
        "Share of correct responses, judged by a verifier that is sound"
        rollout = TorchRollout(SHAPE, num_slots=768)
        rollout.load_weights(weights, 0)
        params = RolloutConfig(max_tokens=8).params(EOS_ID)
        ask = [
            Request(p.id, tuple(p.token_ids), k, derive_seed('exam', p.id, k), params)
            for p in prompts
            for k in range(1 if self.quick else 8)
        ]
        by_id = {p.id: p for p in prompts}
        right = [
            verify(by_id[s.prompt_id], response_text(self.tokenizer, s.response_ids, EOS_ID))
            for s in rollout.generate(ask)
        ]
        return sum(v.correct for v in right) / len(right)

    def run(
        self, seed, start=None, prompts=None, rollout=Rollout, engine=TorchTrain, config=CONFIG
    ):
        "The curves of one run"
        small = dict(steps=2, prompts_per_step=8) if self.quick else {}
        cfg = replace(config, seed=seed, **small)
        policy = Policy(SHAPE)
        policy.load_state_dict(start or self.start)
        sampler, trainer = rollout(), engine(policy, cfg.optim)
        sampler.load_weights(trainer.weights(), 0)
        log = Log(self, trainer)
        fit(cfg, prompts or self.train, sampler, trainer, self.tokenizer, log, EOS_ID)
        return {k: [float(f'{m[k]:.4g}') for m in log.rows] for k in CURVES}


class Log:
    "Hooks that ask the trained weights themselves, after every step"

    def __init__(self, world, engine):
        self.world, self.engine, self.rows = world, engine, []

    def on_step(self, step, metrics, samples, batch):
        weights, exams = list(self.engine.weights()), ('heldout', 'fresh')
        found = {k: self.world.score(weights, getattr(self.world, k)) for k in exams}
        self.rows.append(metrics | found)


def patients(world):
    "Name -> what is wrong"
    hard, _ = load_data(replace(DATA, difficulty=2.0), world.tokenizer, seed=0)

    def judged(name):
        return [replace(p, verifier=name) for p in world.train]

    return {
        'healthy': {},
        'broken verifier': dict(prompts=judged('crashes')),
        'fooled verifier': dict(prompts=judged('fooled')),
        'cut off': dict(config=replace(CONFIG, rollout=RolloutConfig(max_tokens=3))),
        'too hard': dict(prompts=hard),
        'learning rate': dict(config=replace(CONFIG, optim=replace(CONFIG.optim, lr=6e-3))),
        'stale weights': dict(rollout=Deaf),
        'wrong experts': dict(rollout=Shifted),
        'off by one': dict(engine=OffByOne),
        'entropy': dict(engine=WrongSign),
        'herd': dict(engine=Herding),
        'leak': dict(start=world.cold(world.train + 10 * world.heldout)),
    }


def make(quick=False):
    "What the file holds"
    world = World(quick)
    healthy = [world.run(seed) for seed in range(2 if quick else 5)]
    out = dict(healthy={k: [run[k] for run in healthy] for k in CURVES}, patients={})
    with patch.dict(verifiers, crashes=crashes, fooled=fooled):
        for i, (name, fault) in enumerate(patients(world).items()):
            out['patients'][name] = world.run(100 + i, **fault)
            print(name, flush=True)
    return out


if __name__ == '__main__':
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--out', type=Path, default=OUT)
    p.add_argument('--quick', action='store_true', help='a small case of each run')
    a = p.parse_args()
    torch.set_num_threads(1)
    a.out.write_text(json.dumps(make(a.quick), separators=(',', ':')) + '\n')
