"""Reward models that learn from the verdicts of the run that they serve, and what they add to the
rewards of groups that stay silent."""

from copy import deepcopy

import torch
import torch.nn.functional as F

from compassrl.algo.zero_variance import shape_rewards
from compassrl.experience import silent_groups
from compassrl.records import derive_seed
from compassrl.train.torch_train import OptimConfig, adamw, clip_and_step
from course.reward_model import RewardModel

MEMBERS, UPDATES, BATCH, LR = 4, 3, 64, 3e-3
WEIGHT = 0.4  # most that members add to a reward; below half of what being right earns


def padded(samples):
    "Prompts and responses as token ids, and where they are real, both [B, T]"
    rows = [torch.tensor(s.prompt_ids + s.response_ids) for s in samples]
    mask = torch.arange(max(map(len, rows))) < torch.tensor([len(r) for r in rows])[:, None]
    return torch.zeros(mask.shape, dtype=torch.long).masked_scatter(mask, torch.cat(rows)), mask


class Member:
    "A reward model with the policy's first weights, which learns from a bootstrap of its own"

    def __init__(self, policy, seed):
        self.model = RewardModel(policy.config, 0)
        self.model.trunk.load_state_dict(deepcopy(policy.state_dict()))
        self.optimizer = adamw(self.model, OptimConfig(lr=LR))
        self.lot = torch.Generator().manual_seed(seed)
        self.shares = torch.zeros(0)  # how often its bootstrap has each response

    @torch.no_grad()
    def logits(self, samples):
        "[B] of the probability that a response is right"
        return self.model(*padded(samples))

    def learn(self, memory, num_new):
        new = torch.poisson(torch.ones(num_new), self.lot)
        self.shares = torch.cat([self.shares, new])
        for _ in range(UPDATES):
            rows = torch.multinomial(self.shares, BATCH, True, generator=self.lot)
            drawn = [memory[i] for i in rows.tolist()]
            right = torch.tensor([float(s.verdict.correct) for s in drawn])
            self.model.zero_grad(set_to_none=True)
            F.binary_cross_entropy_with_logits(self.model(*padded(drawn)), right).backward()
            clip_and_step(self.model, self.optimizer, LR, 1.0)


def by_group(samples):
    "[B] the number of each response's group"
    place = {}
    return torch.tensor([place.setdefault(s.prompt_id, len(place)) for s in samples])


def opinions(logits, group):  # [K, B], [B]
    "[K, B] in (-1, 1): how far above its group's mean a member sees a response"
    num = torch.zeros(int(group.max()) + 1).index_add(0, group, torch.ones(len(group)))
    mean = torch.zeros(len(logits), len(num)).index_add(1, group, logits) / num
    return (logits - mean[:, group]).tanh()


def paid(found, by):  # opinions
    "[B] between -WEIGHT / 2 and WEIGHT / 2, or, for disagreement, between 0 and WEIGHT"
    return WEIGHT * (found.mean(0) / 2 if by == 'mean' else found.std(0, correction=0))


def ordered_pairs(found, right, group):
    "Pairs of a right and a wrong response of one group, and those where the right one has more"
    pair = (group[:, None] == group) & right[:, None] & ~right
    gaps = (found[:, None] - found)[pair]
    return int(pair.sum()), float((gaps > 0).sum() + (gaps == 0).sum() / 2)


class Ensemble:
    "Pays silent groups what its members say; learns after each step; `seen` tells how well it knew"

    def __init__(self, policy, by, seed):
        self.members = [Member(policy, derive_seed('member', seed, k)) for k in range(MEMBERS)]
        self.by, self.memory, self.seen = by, [], {}

    def rewards(self, samples, max_tokens, cfg):
        "In place of the library's: the same, and in silent groups what the members add"
        base, group = shape_rewards(samples, max_tokens, cfg), by_group(samples)
        found = opinions(torch.stack([m.logits(samples) for m in self.members]), group)
        silent = torch.tensor(list(silent_groups(samples).values()))[group]
        right = torch.tensor([s.verdict.correct for s in samples])
        pairs, ordered = ordered_pairs(found.mean(0), right, group)
        self.seen |= dict(pairs=pairs, ordered=ordered)
        self.seen |= dict(spread=float(found[:, silent].std(0, correction=0).mean()))
        return base + paid(found, self.by) * silent

    def learn(self, samples):
        self.memory += samples
        for m in self.members:
            m.learn(self.memory, len(samples))
