"""A made-up world of prompts with known pass rates, in which groups of responses are silent or not:
for the lesson on zero variance and the studies that go on from it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf

import torch
from torch import Tensor

from compassrl.algo.algo_settings import ZeroVarianceConfig
from compassrl.records import Batch, Sample, Verdict, collate

__all__ = ['MAX_TOKENS', 'sample_of', 'respond', 'prompts_of', 'columns', 'as_batch', 'grow_out']

MAX_TOKENS = 32  # budget of a response


def sample_of(id: str, k: int, ids: list[int], reward: float, status: str = 'ok') -> Sample:
    "A judged response"
    verdict = Verdict(reward, reward == 1, status)
    return Sample(id, k, [1], ids, torch.zeros(len(ids)), None, None, 'stop', 0, reward, verdict)


def respond(id: str, k: int, p: float, rng: random.Random) -> Sample:
    "One response to a prompt of pass rate p; one in fifty is too long, and one runs in circles"
    right = rng.random() < p
    length = (
        MAX_TOKENS if rng.random() < 0.02 else rng.randint(4, 16) if right else rng.randint(6, 24)
    )
    ids = rng.choices(range(40), k=length)
    if rng.random() < 0.02:
        ids = (ids[:3] * length)[:length]
    return sample_of(id, k, ids, float(right))


def prompts_of(rng: random.Random, num: int, name: str = 'p') -> dict[str, float]:
    "Ids and pass rates; most prompts are easy or hard"
    return {f'{name}{i}': rng.betavariate(0.4, 0.4) for i in range(num)}


def columns(samples: Iterable[Sample]) -> list[Tensor]:  # [B] each
    "Task reward, group and number of tokens of each sample"
    samples = list(samples)
    place = {id: i for i, id in enumerate(dict.fromkeys(s.prompt_id for s in samples))}
    rows = [(s.verdict.reward, place[s.prompt_id], len(s.response_ids)) for s in samples]
    return [torch.tensor(c) for c in zip(*rows)]


def as_batch(
    samples: list[Sample],
    rewards: Tensor,  # [B] with penalties
    entropies: list[list[float]],  # one row per sample, nats
) -> Batch:
    "Samples as a batch that holds their rewards and entropies"
    batch = collate(samples)
    batch = replace(batch, rewards=rewards, entropy=torch.zeros(batch.token_ids.shape))
    batch.entropy[batch.response_mask] = torch.tensor([h for row in entropies for h in row])
    return batch


def grow_out(
    grow: Callable[..., Tensor],  # the library's `growth`
    p: float,  # pass rate of every group
    trials: int,  # groups
    rng: torch.Generator,
    cfg: ZeroVarianceConfig = ZeroVarianceConfig(),
    N: int = 8,  # responses at first
) -> tuple[Tensor, Tensor]:  # [B] rewards, [B] groups
    "Groups of one pass rate, grown until `grow` asks for no more"
    r = torch.bernoulli(torch.full((trials * N,), p), generator=rng)
    g = torch.arange(trials).repeat_interleave(N)
    while (more := grow(r, g, None, torch.ones(len(r)), cfg, inf)).any():
        r = torch.cat([r, torch.bernoulli(torch.full((int(more.sum()),), p), generator=rng)])
        g = torch.cat([g, torch.arange(trials).repeat_interleave(more)])
    return r, g
