"""A tiny policy that is right now and then, its answers to sums as a batch, and one update of it:
for the lesson on ESPO and the study that goes on from it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from compassrl.algo.advantages import group_advantages, per_token
from compassrl.algo.algo_settings import LossConfig
from compassrl.algo.losses import PolicyLoss
from compassrl.data.prompts import DataConfig, load_data
from compassrl.data.tasks import verify
from compassrl.data.tokenizer import EOS_ID, build_tokenizer, encode, response_text
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.records import (
    Batch,
    Prompt,
    Request,
    Sample,
    SamplingParams,
    collate,
    derive_seed,
    select,
)
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.train.torch_train import OptimConfig, TorchTrain

__all__ = ['POLICY', 'tokenizer', 'taught', 'answered', 'moved', 'as_batch']

POLICY = PolicyConfig(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    moe_intermediate_size=32,
    num_experts=4,
    max_position_embeddings=64,
)
tokenizer = build_tokenizer()


def _written(p: Prompt, bare: int) -> Sample:
    ids = encode(tokenizer, '#' + p.answer if bare else p.solution) + [EOS_ID]
    return Sample(p.id, 0, p.token_ids, ids, torch.zeros(len(ids)), None, None, 'stop', -1)


def _nll(log_probs: Tensor, batch: Batch, num_tokens: int, num_samples: int) -> tuple[Tensor, dict]:
    return -(log_probs * batch.response_mask).sum() / num_tokens, {}


def taught() -> tuple[list[Prompt], TorchTrain, list[float]]:
    "128 sums, an engine whose policy has learned them half with working, and its losses"
    prompts, _ = load_data(DataConfig(num_train=128, num_heldout=8, difficulty=0.0), tokenizer, 0)
    torch.manual_seed(0)
    lessons = collate([_written(p, i % 2) for i, p in enumerate(prompts)])
    school = TorchTrain(Policy(POLICY), OptimConfig(lr=1e-2))
    losses = [
        school.update(select(lessons, rows), _nll)[0]['loss']
        for _ in range(60)
        for rows in torch.randperm(128).split(64)
    ]
    return prompts, school, losses


def answered(school: TorchTrain, prompts: list[Prompt]) -> Batch:
    "Eight judged answers to each prompt, with advantages, old log-probs and entropies"
    rollout = TorchRollout(POLICY, 8 * len(prompts))
    rollout.load_weights(school.weights(), 0)
    params = SamplingParams(max_tokens=40, stop_ids=(EOS_ID,))
    asked = {p.id: p for p in prompts}
    requests = [
        Request(i, tuple(p.token_ids), k, derive_seed(0, i, k), params)
        for i, p in asked.items()
        for k in range(8)
    ]
    samples = sorted(rollout.generate(requests), key=lambda s: (s.prompt_id, s.index))
    for s in samples:
        text = response_text(tokenizer, s.response_ids, EOS_ID)
        s.reward = verify(asked[s.prompt_id], text).reward
    batch = collate(samples)
    advantages = group_advantages(batch.rewards, batch.group)
    batch = replace(batch, advantages=per_token(advantages, batch.response_mask))
    return replace(batch, **TorchTrain(school.policy, OptimConfig()).score(batch))


def moved(policy: Policy, batch: Batch, lr: float) -> Tensor:  # [B, T]
    "Log-probs after one update by GRPO at this learning rate"
    e = TorchTrain(deepcopy(policy), OptimConfig(lr=lr))
    e.update(batch, PolicyLoss(LossConfig('grpo', tis='off')))
    return e.score(batch)['old_log_probs']


def as_batch(mask: Tensor, adv: Tensor, old: Tensor, entropy: Tensor) -> Batch:  # [B, T] each
    "Per-token tensors as a `Batch`"
    ids = torch.zeros(mask.shape, dtype=torch.long)
    real = mask.flip(1).cumsum(1).flip(1) > 0  # all up to the last response token
    return Batch(
        token_ids=ids,
        token_mask=real,
        response_mask=mask,
        rollout_log_probs=old,
        group=ids[:, 0],
        rewards=torch.zeros(len(mask)),
        advantages=adv,
        old_log_probs=old,
        entropy=entropy,
    )
