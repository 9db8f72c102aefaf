"""A reward model is the trunk of a policy with one more vector, which gives each text a number. It
is what a generative judge is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from compassrl.data.tokenizer import encode
from compassrl.judges.genrm import bt_loss
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.records import Metrics, derive_seed
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
