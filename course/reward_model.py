"""A reward model is the trunk of a policy with one more vector, which gives each text a number. It
is what a generative judge is compared with, by how often either orders a pair wrongly."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from compassrl.algo.advantages import group_advantages
from compassrl.data.prompts import make_prompts
from compassrl.data.tokenizer import build_tokenizer, encode
from compassrl.data.toys import shop_quality
from compassrl.judges.genrm import Ask, Question, bt_loss, compare, label_rewards, pair_order
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.records import Metrics, Prompt, derive_seed
from compassrl.runs.judge_model import any_answer
from compassrl.train.sft import SFTConfig, cosine_lr
from compassrl.train.torch_train import OptimConfig, adamw, clip_and_step


class RewardModel(nn.Module):
    "A policy's trunk and a scalar head"

    def __init__(self, config: PolicyConfig, seed: int = 0) -> None:
        super().__init__()
        self.trunk: Policy = Policy(config, seed)
        self.trunk.head.requires_grad_(False)  # no token is drawn
        self.score: nn.Parameter = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(
        self,
        ids: Tensor,  # [B, T]
        mask: Tensor,  # [B, T] bool: real tokens, on the left
    ) -> Tensor:  # [B]
        hidden, _ = self.trunk(ids, mask)
        return hidden[mask.sum(1).cumsum(0) - 1] @ self.score


def padded(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    "Token ids and where they are real, both [B, T]"
    rows = [torch.tensor(encode(tokenizer, t)) for t in texts]
    mask = torch.arange(max(map(len, rows))) < torch.tensor([len(r) for r in rows])[:, None]
    return torch.zeros(mask.shape, dtype=torch.long).masked_scatter(mask, torch.cat(rows)), mask


@torch.no_grad()
def score_texts(model: RewardModel, texts: Sequence[str], tokenizer: Tokenizer) -> Tensor:  # [B]
    "One number for each text"
    parts = [texts[i : i + 256] for i in range(0, len(texts), 256)]
    return torch.cat([model(*padded(part, tokenizer)) for part in parts])


def train_reward_model(
    model: RewardModel,  # trained in place
    pairs: Sequence[tuple[str, str, float]],  # two texts; 1, 0.5 or 0: did the first win?
    cfg: SFTConfig,  # steps, batch_size, lr, warmup_steps
    tokenizer: Tokenizer,
    seed: int = 0,
) -> Iterator[Metrics]:  # step, loss and grad_norm of every step
    "Bradley and Terry's loss on comparisons, reshuffled every epoch"
    optimizer, order = adamw(model, OptimConfig(lr=cfg.lr)), []
    for step in range(cfg.steps):
        while len(order) < cfg.batch_size:
            gen = torch.Generator().manual_seed(derive_seed(seed, 'reward', step, len(order)))
            order += torch.randperm(len(pairs), generator=gen).tolist()
        rows, order = [pairs[i] for i in order[: cfg.batch_size]], order[cfg.batch_size :]
        first, second, wins = zip(*rows)
        model.zero_grad(set_to_none=True)
        scores = model(*padded([*first, *second], tokenizer)).chunk(2)
        loss = bt_loss(*scores, torch.tensor(wins))
        loss.backward()
        yield dict(
            step=step + 1,
            loss=loss.item(),
            **clip_and_step(model, optimizer, cosine_lr(step, cfg), 1.0),
        )


Answers = dict[str, tuple[Prompt, list[str]]]


def answer_groups(num: int, size: int = 8, seed: int = 0, level: int = 0) -> Answers:
    "Held-out questions by id, each with a group of answers"
    prompts = make_prompts('shop', num, level, seed, 'heldout', build_tokenizer())
    rng = random.Random(derive_seed('groups', seed))
    return {p.id: (p, [any_answer(p.text, rng) for _ in range(size)]) for p in prompts}


def orders(
    rewards: Callable[[Prompt, list[str]], Tensor],  # [G] rewards of one group
    groups: Answers,
) -> dict[str, float]:  # shares of pairs of a group whose true quality differs; they sum to 1
    "Right, tied and inverted pairs after group normalisation"
    value, quality, group = [], [], []
    for n, (p, answers) in enumerate(groups.values()):
        value.append(rewards(p, answers).float())
        quality += [shop_quality(p.text, a) for a in answers]
        group += [n] * len(answers)
    group = torch.tensor(group)
    advantages = group_advantages(torch.cat(value), group)
    return pair_order(advantages, torch.tensor(quality), group)._asdict()


def judge_rewards(ask: Ask) -> Callable[[Prompt, list[str]], Tensor]:
    "Labels against the reference answer, as rewards; without a label 0.5, as if tied"

    def rewards(prompt: Prompt, answers: list[str]) -> Tensor:
        done, _ = compare(ask, [Question(prompt.text, a, prompt.answer) for a in answers])
        return torch.tensor([label_rewards[c.label] if c.label else 0.5 for c in done])

    return rewards
