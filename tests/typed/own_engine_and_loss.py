"What a user writes: an engine, a loss and a loop; pyright reads it in strict mode"

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from compassrl import (
    LossConfig,
    OptimConfig,
    PolicyLoss,
    RolloutEngine,
    TrainConfig,
    TrainEngine,
    Verdict,
    policy_loss,
    verifier,
)
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.records import Batch, Metrics, Request, Sample
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.train.torch_train import TorchTrain


class Constant(RolloutEngine):
    "Answers every prompt with the same token"

    def __init__(self, token: int) -> None:
        self.token = token
        self.version = 0

    def generate(self, requests: Iterable[Request], whole_groups: bool = False) -> Iterator[Sample]:
        for r in requests:
            yield Sample(
                r.prompt_id,
                r.index,
                list(r.prompt_ids),
                [self.token],
                torch.zeros(1),
                None,
                None,
                'stop',
                self.version,
            )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        for _ in weights:
            pass
        self.version = version

    def measured(self) -> Metrics:
        return {'own_number': 1.0}

    def state_dict(self) -> dict[str, Any]:
        return {}


@policy_loss(aggregation='token-mean')
def reinforce(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, cfg: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    return -log_probs * advantages, {'own_sum': mask.sum()}


def step(engine: TrainEngine, batch: Batch, cfg: TrainConfig) -> float:
    learned, _ = engine.update(batch, PolicyLoss(LossConfig('reinforce')))
    loss: float = learned['loss'] or 0.0
    return loss + cfg.optim.lr


@verifier
def longer(text: str, answer: str) -> Verdict:
    return Verdict(1.0, len(text) > len(answer), 'ok', '')


verdict: Verdict = longer('abc', 'ab')
rollout: RolloutEngine = Constant(3)
policy = Policy(PolicyConfig())
engines: tuple[RolloutEngine, TrainEngine] = (
    TorchRollout(policy.config),
    TorchTrain(policy, OptimConfig()),
)
