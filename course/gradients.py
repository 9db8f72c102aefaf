"""Gradients by the public names of their weights, to be compared with another implementation."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from compassrl.model.policy import Policy
from compassrl.model.pretrained import hf_slices


def hf_gradients(policy: Policy) -> Iterator[tuple[str, Tensor]]:  # views, not copies
    "As `hf_weights`, without a router's correction, which has none. Raises ValueError"
    for name, p, at in hf_slices(policy):
        if not isinstance(p, nn.Parameter):
            continue
        if p.grad is None:
            raise ValueError(f'{name} has no gradient: call backward first')
        yield name, p.grad[at]
