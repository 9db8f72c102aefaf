"GMPO against its paper's formula, by autograd and token by token, and laws that every loss obeys"

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compassrl.algo.loss_registry import policy_losses
from compassrl.algo.losses import LossConfig, PolicyLoss
from compassrl.algo.losses import gmpo as module
from tests.algo.test_losses import PER_TOKEN, as_batch, batches, fp64
from tests.support import loss_laws as laws
from tests.support.faults import noticed, planted
from tests.support.loss_laws import close, counts, random, value_and_grad

configs = st.builds(
    LossConfig,
    name=st.just('gmpo'),
    clip_eps_low=st.sampled_from([None, 0.0, 0.1, 1.0]),
    clip_eps_high=st.sampled_from([None, 0.0, 0.2]),
    aggregation=st.sampled_from([None, 'token-mean', 'seq-mean-token-sum']),
    tis=st.just('off'),
)


def kept_of(cfg, a, r):
    "What is averaged: the ratio of a token, up to the limit that its advantage asks for"
    return min(r, 1 + cfg.clip_eps_high) if a > 0 else max(r, 1 - cfg.clip_eps_low)


def naive(cfg, new, batch):
    "Value, gradient and clipped tokens, token by token in Python floats"
    (n, B), cfg = counts(batch), cfg.resolve()
    total, clipped, grad = 0.0, 0, torch.zeros_like(new)
    for i, row in enumerate(batch.response_mask.tolist()):
        here = [t for t, m in enumerate(row) if m]
        adv = batch.advantages[i, here].tolist()
        ratios = [math.exp(d) for d in (new - batch.old_log_probs)[i, here].tolist()]
        kept = [kept_of(cfg, a, r) for a, r in zip(adv, ratios)]
        s = math.prod(kept) ** (1 / len(kept)) if kept else 1.0
        scale = {'seq-mean-token-mean': max(len(here), 1) * B, 'token-mean': n}
        for t, a, r, k in zip(here, adv, ratios, kept):
            each = -s * a / scale.get(cfg.aggregation, B)
            total += each
            grad[i, t] = each if k == r else 0.0
            clipped += k != r and a != 0
    return fp64(total), grad, clipped / n


def law_naive(make):
    @random
    @given(batches(), configs)
    def check(data, cfg):
        value, grad, metrics = value_and_grad(make(cfg), *data, *counts(data[1]))
        want = naive(cfg, *data)
        close(value, want[0], 1e-12)
        close(grad, want[1], 1e-12)
        close(metrics['clip_frac'], fp64(want[2]), 1e-6)

    check()


def law_paper(make):
    """With one advantage per response, value and gradient are those of the paper's form: the mean
    of (r^sgn A), clipped in nats on the wanted side, by autograd through all of it"""
    signs = fp64([[1.0], [-1.0]])
    old = torch.zeros(2, 5).double() - 2
    new = old + fp64([[0.1, 0.9, -0.9, 0.3, -0.2]] * 2)
    batch = as_batch(torch.ones(2, 5, dtype=torch.bool), signs.expand(2, 5), old)
    value, grad, metrics = value_and_grad(make(LossConfig('gmpo', tis='off')), new, batch, 10, 2)
    x = new.clone().requires_grad_()
    moved = signs * (x - old)
    ratio = (signs * torch.minimum(moved, moved.clamp(-0.4, 0.4))).mean(1).exp()
    want = -(ratio * signs[:, 0]).mean()
    close(value, want.detach(), 1e-12)
    close(grad, torch.autograd.grad(want, x)[0], 1e-12)
    assert (grad == 0).nonzero().tolist() == [[0, 1], [1, 2]]
    for key in ('low', 'high'):
        assert metrics[f'clip_frac_{key}'].item() == pytest.approx(0.1)


def law_split(make):
    laws.split(make, batches(), configs)


def law_padding(make):
    laws.padding(make, batches(), configs, PER_TOKEN[:-1])


def law_impossible(make):
    "A token that neither policy can draw has not moved"
    never, one = fp64([[-1.0, -math.inf, -2.0]]), torch.ones(1, 3, dtype=torch.bool)
    batch = as_batch(one, one.double(), never, never)
    value, grad, _ = value_and_grad(make(LossConfig('gmpo')), never, batch, 3, 1)
    close(value, fp64(-1.0), 1e-12)
    assert grad.isfinite().all() and grad[0, 1] == 0


def law_far(make):
    "The mean of a response is bounded to 20 nats, not its tokens, as in GSPO and ESPO"
    one, wanted = torch.ones(1, 2, dtype=torch.bool), fp64([[1.0, 1.0]])
    for far, mean in ((-30.0, -15.0), (-60.0, -20.0)):
        batch, new = as_batch(one, wanted, 0 * wanted), fp64([[far, 0.0]])
        value, _, metrics = value_and_grad(make(LossConfig('gmpo', tis='off')), new, batch, 2, 1)
        close(value, -fp64(mean).exp(), 1e-12)
        assert all(m.isfinite() for m in metrics.values())


LAWS = [law_far, law_paper, law_impossible, law_naive, law_split, law_padding]


@pytest.mark.parametrize('law', LAWS, ids=lambda f: f.__name__)
def test_law(law):
    law(PolicyLoss)


def mutant(old, new):
    with patch.dict(policy_losses):
        copy = planted(module, old, new)  # it registers itself

    def make(cfg):
        with patch.dict(policy_losses, gmpo=copy.gmpo):
            return PolicyLoss(cfg)

    return make


KEPT, ROWS = 'kept.detach().sum(-1, keepdim=True)', 'mask.sum(-1, keepdim=True)'
MUTANTS = dict(
    clips_both_sides=(
        'torch.where(adv>0, delta.clamp(max=high), delta.clamp(min=low))',
        'delta.clamp(low, high)',
    ),
    other_side=('torch.where(adv>0, delta.clamp', 'torch.where(adv<0, delta.clamp'),
    mean_before_the_clip=('mean = kept.detach()', 'mean = delta.detach()'),
    own_ratio=('(mean+(kept-kept.detach())).clamp(', 'kept.clamp('),
    mean_over_padding=(f'{KEPT}/{ROWS}.clamp(min=1)', f'{KEPT}/mask.shape[-1]'),
    limits_in_nats=('high = log1p(eps_high)', 'high = eps_high'),
    counts_the_wanted=('(adv<0)&(delta<low)', '(adv>0)&(delta<low)'),
    own_limits=('clip=(-expm1(-0.4), expm1(0.4))', 'clip=(0.2, 0.2)'),
)


@pytest.mark.parametrize('name', MUTANTS)
def test_some_law_kills_the_mutant(name):
    assert noticed(LAWS, mutant(*MUTANTS[name]))
