"Bradley and Terry's loss and gradient against the formula in Python's own floats"

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compassrl.algo.bradley_terry import bt_loss

rows = st.lists(
    st.tuples(st.floats(-8, 8), st.floats(-8, 8), st.sampled_from([0.0, 0.5, 1.0])),
    min_size=1,
    max_size=9,
)


def naive(first, second, wins):
    out = 0.0
    for a, b, w in zip(first, second, wins):
        p = math.exp(a) / (math.exp(a) + math.exp(b))
        out -= w * math.log(p) + (1 - w) * math.log(1 - p)
    return out / len(wins)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(rows)
def test_loss_and_gradient(rows):
    a, b, w = ([r[i] for r in rows] for i in range(3))
    x, y = (torch.tensor(v, requires_grad=True) for v in (a, b))
    loss = bt_loss(x, y, torch.tensor(w))
    assert loss.item() == pytest.approx(naive(a, b, w), rel=1e-4, abs=1e-5)
    loss.backward()
    slope = [(1 / (1 + math.exp(q - p)) - v) / len(w) for p, q, v in zip(a, b, w)]
    assert x.grad.tolist() == pytest.approx(slope, abs=1e-5)
    assert y.grad.tolist() == pytest.approx([-s for s in slope], abs=1e-5)


def test_a_tie_pulls_scores_together():
    x, y = torch.tensor([2.0], requires_grad=True), torch.tensor([0.0])
    bt_loss(x, y, torch.tensor([0.5])).backward()
    assert x.grad > 0
    assert bt_loss(y, y, torch.tensor([0.5])).item() == pytest.approx(math.log(2))
