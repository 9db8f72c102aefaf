"""Policy losses: a loop and TRL's code as oracles, laws over random batches, exact enumeration,
wrong versions to catch"""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compassrl.algo import algo_settings, losses, ratios
from compassrl.algo.advantages import group_advantages
from compassrl.algo.loss_registry import policy_loss
from compassrl.algo.losses import LossConfig, PolicyLoss, aggregate, token_weights
from compassrl.algo.ratios import kl_estimate, ratio_sums, tis_weights
from compassrl.model.log_probs import token_log_probs
from compassrl.records import Batch
from tests.support import loss_laws as laws
from tests.support.faults import noticed, planted
from tests.support.loss_laws import close, counts, random, value_and_grad

MODES = ('seq-mean-token-mean', 'token-mean', 'seq-mean-token-sum-norm', 'seq-mean-token-sum')
NAMES = ('grpo', 'dr_grpo', 'dapo', 'gspo', 'cispo')
configs = st.builds(
    LossConfig,
    name=st.sampled_from(NAMES),
    clip_eps_low=st.sampled_from([None, 0.0, 0.1, 0.2]),
    clip_eps_high=st.sampled_from([None, 0.0, 0.2, 0.28]),
    aggregation=st.sampled_from((None, *MODES)),
    max_response_tokens=st.just(16),
    kl_coef=st.sampled_from([0.0, 0.1]),
    kl_estimator=st.sampled_from(['k1', 'k2', 'k3']),
    tis=st.sampled_from(['off', 'truncate', 'mask']),
    tis_cap=st.sampled_from([1.1, 1.5]),
    tis_low=st.sampled_from([0.5, 0.9]),
)


def fp64(x):
    return torch.tensor(x, dtype=torch.double)


def as_batch(mask, adv, old, ref=None, rollout=None, group=None):
    B = len(mask)
    return Batch(
        token_ids=torch.zeros(mask.shape, dtype=torch.long),
        token_mask=mask.flip(1).cumsum(1).flip(1) > 0,
        response_mask=mask,
        rollout_log_probs=old if rollout is None else rollout,
        rewards=torch.zeros(B),
        group=torch.zeros(B, dtype=torch.long) if group is None else group,
        advantages=adv,
        old_log_probs=old,
        ref_log_probs=ref,
    )


@st.composite
def batches(draw):
    """fp64 rows of unequal prompts and responses, one empty now and then, from unequal groups;
    ratios on both sides of every clip range; advantages per response or per token"""
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    B, T = draw(st.integers(1, 7)), draw(st.integers(3, 12))
    start = torch.randint(1, T, (B, 1), generator=g)
    num = torch.randint(draw(st.integers(0, 1)), T, (B, 1), generator=g)
    mask = (torch.arange(T) >= start) & (torch.arange(T) < start + num)
    mask[0, -1] = True
    new, old, ref, rollout = ((-torch.rand(B, T, generator=g) - 0.05).double() for _ in range(4))
    if draw(st.booleans()):
        new = old + (new - old) * 1e-3  # what GSPO's range is made for
    if draw(st.booleans()):
        ref = ref - 10  # tokens that the reference would hardly draw
    group = torch.randint(3, (B,), generator=g)
    adv = group_advantages(torch.randint(5, (B,), generator=g).double(), group) + 0.1 * torch.randn(
        B, generator=g
    )
    adv = adv[:, None]
    if draw(st.booleans()):
        adv = adv + torch.randn(B, T, generator=g)
    return new, as_batch(mask, (adv * mask).double(), old, ref, rollout, group)


def naive_token(cfg, lp, old, a, mean):
    "Loss of a token and its derivative, in Python floats; `mean` is the response's mean log-ratio"
    name, low, high = cfg.name, 1 - cfg.clip_eps_low, 1 + cfg.clip_eps_high
    r = math.exp(mean if name == 'gspo' else lp - old)
    clipped = min(max(r, low), high)
    if name == 'cispo':
        return -clipped * a * lp, -clipped * a
    return -min(r * a, clipped * a), 0.0 if (a > 0 and r > high) or (a < 0 and r < low) else -r * a


def naive(cfg, new, batch):
    "Value, gradient, and mean KL of a token, token by token in Python floats"
    (n, B), cfg = counts(batch), cfg.resolve()
    total, kls, grad = 0.0, 0.0, torch.zeros_like(new)
    for i, row in enumerate(batch.response_mask.tolist()):
        here = [t for t, m in enumerate(row) if m]
        delta = [float(new[i, t] - batch.old_log_probs[i, t]) for t in here]
        scale = {
            'seq-mean-token-mean': max(len(here), 1) * B,
            'token-mean': n,
            'seq-mean-token-sum-norm': 16 * B,
            'seq-mean-token-sum': B,
        }[cfg.aggregation]
        for t in here:
            lp, old, a, ref, sampled = (
                float(x[i, t])
                for x in (
                    new,
                    batch.old_log_probs,
                    batch.advantages,
                    batch.ref_log_probs,
                    batch.rollout_log_probs,
                )
            )
            loss, slope = naive_token(cfg, lp, old, a, sum(delta) / len(delta))
            rho, d = math.exp(old - sampled), lp - ref
            kept = rho if cfg.tis_low <= rho <= cfg.tis_cap else 0.0
            w = {'off': 1.0, 'truncate': min(rho, cfg.tis_cap), 'mask': kept}[cfg.tis]
            kl, kl_slope = dict(
                k1=(d, 1.0), k2=(d * d / 2, d), k3=(math.exp(-d) - 1 + d, 1 - math.exp(-d))
            )[cfg.kl_estimator]
            total, kls = total + (w * loss + cfg.kl_coef * kl) / scale, kls + kl
            grad[i, t] = (w * slope + cfg.kl_coef * kl_slope) / scale
    return torch.tensor(total, dtype=torch.double), grad, kls / n


# ---- laws: each takes `make(cfg)`, which builds the loss -----------------------------------------


def law_naive(make):
    @settings(random, max_examples=80)
    @given(batches(), configs)
    def check(data, cfg):
        value, grad, metrics = value_and_grad(make(cfg), *data, *counts(data[1]))
        want = naive(cfg, *data)
        close(value, want[0], 1e-12)
        close(grad, want[1], 1e-12)
        if cfg.kl_coef:  # mean over tokens, however the loss is averaged
            close(metrics['kl'], fp64(want[2]), 1e-12)

    check()


def law_split(make):
    laws.split(make, batches(), configs)


def law_every_average(make):
    "Rows one by one, with the counts of all: the parts of every kind of average add up"
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]]).bool()
    new = fp64([[0.0, -0.5, -0.9, -0.2], [0.0, -1.1, 0.0, 0.0], [0.0, -0.3, -0.7, 0.0]])
    batch = as_batch(mask, fp64([[1.0], [-0.5], [0.8]]) * mask, new - 0.1)
    for mode in MODES:
        loss = make(LossConfig(aggregation=mode, max_response_tokens=8))
        rows = [loss(new[i : i + 1], batch.map(lambda t: t[i : i + 1]), 6, 3)[0] for i in range(3)]
        close(sum(rows), loss(new, batch, 6, 3)[0])


PER_TOKEN = ('old_log_probs', 'advantages', 'ref_log_probs', 'rollout_log_probs', 'response_mask')


def law_packing(make):
    laws.packing(make, batches(), configs, PER_TOKEN[:-1])


def law_padding(make):
    laws.padding(make, batches(), configs, PER_TOKEN[:-1])


def law_first_step(make):
    """Ratio 1, old log-probs not even detached: REINFORCE's gradient for every loss;
    minus the mean advantage as value"""

    @random
    @given(batches(), configs)
    def check(data, cfg):
        new, batch = data
        cfg, x = replace(cfg, kl_coef=0.0).resolve(), new.clone().requires_grad_()
        loss, _ = make(cfg)(x, replace(batch, old_log_probs=x), *counts(batch))
        rho = (new - batch.rollout_log_probs).exp()
        keep = (rho >= cfg.tis_low) & (rho <= cfg.tis_cap)
        w = {'off': rho**0, 'truncate': rho.clamp(max=cfg.tis_cap), 'mask': rho * keep}[cfg.tis]
        w = (
            w
            * batch.advantages
            * token_weights(batch.response_mask, cfg.aggregation, *counts(batch), 16, torch.double)
        )
        close(torch.autograd.grad(loss, x)[0], -w)
        close(loss.detach(), -(w * new if cfg.name == 'cispo' else w).sum())

    check()


RATIO = torch.tensor([[0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5] * 2], dtype=torch.double)
SIDES = torch.tensor([[1.0] * 7 + [-1.0] * 7], dtype=torch.double)


def law_clip(make):
    """The gradient stops only where a token has already moved the way its advantage asks;
    sides are counted apart"""
    batch = as_batch(torch.ones(1, 14, dtype=torch.bool), SIDES, torch.zeros_like(SIDES) - 1)
    alive = torch.tensor([[1, 1, 1, 1, 1, 1, 0] + [0, 0, 1, 1, 1, 1, 1]])
    cases = dict(
        grpo=(RATIO * alive, 2, 1), dapo=(RATIO * alive, 2, 1), cispo=(RATIO.clamp(0.8, 1.28), 4, 2)
    )
    for name, (weight, low, high) in cases.items():
        cfg = LossConfig(name, aggregation='token-mean', clip_eps_low=0.2, clip_eps_high=0.28)
        _, grad, metrics = value_and_grad(make(cfg), RATIO.log() - 1, batch, 14, 1)
        close(grad, -weight * SIDES / 14, 1e-12)
        for key, want in dict(clip_frac=low + high, clip_frac_low=low, clip_frac_high=high).items():
            assert metrics[key].item() * 14 == pytest.approx(want)
        if name == 'dapo':  # its paper's range is this one
            paper = value_and_grad(make(LossConfig(name)), RATIO.log() - 1, batch, 14, 1)[1]
            close(paper, grad, 1e-12)


def law_gspo_clip(make):
    "A response is kept or left out as a whole, by the geometric mean of its ratios"
    old = torch.zeros(14, 3).double() - 2
    new = old + RATIO.T.log() + torch.tensor([0.7, -0.3, -0.4], dtype=torch.double)
    batch = as_batch(torch.ones(14, 3, dtype=torch.bool), SIDES.T.expand(14, 3), old)
    cfg = LossConfig('gspo', clip_eps_low=0.2, clip_eps_high=0.28)
    _, grad, metrics = value_and_grad(make(cfg), new, batch, 42, 14)
    alive = torch.tensor([1, 1, 1, 1, 1, 1, 0] + [0, 0, 1, 1, 1, 1, 1])[:, None]
    close(grad, (-RATIO.T * SIDES.T * alive / 42).expand(14, 3), 1e-12)
    for key, want in dict(low=6, high=3).items():
        assert metrics[f'clip_frac_{key}'].item() * 42 == pytest.approx(want)


def law_far(make):
    """Beyond 20 nats a ratio stands still: of a token where tokens have ratios, of the mean where
    the response has one. One token of ten at -50 is a mean of -5"""
    one = torch.ones(1, 10, dtype=torch.bool)
    low, high = torch.zeros(1, 10).double(), torch.zeros(1, 10).double()
    low[0, 3], high[0, 3] = -50, 800
    batch = as_batch(one, one.double(), 0 * low)
    value, grad, metrics = value_and_grad(make(LossConfig('gspo', tis='off')), low, batch, 10, 1)
    close(value, -fp64(-5.0).exp(), 1e-12)
    close(grad, fp64([[-math.exp(-5) / 10] * 10]), 1e-12)
    assert all(m.isfinite() for m in metrics.values())
    unwanted, gspo = as_batch(one, -one.double(), 0 * low), make(LossConfig('gspo', tis='off'))
    value, grad, metrics = value_and_grad(gspo, high, unwanted, 10, 1)
    close(value, fp64(20.0).exp(), 1e-12)
    assert not grad.any() and all(m.isfinite() for m in metrics.values())
    value, grad, _ = value_and_grad(make(LossConfig('grpo', tis='off')), high, unwanted, 10, 1)
    close(value, (fp64(20.0).exp() + 9) / 10, 1e-12)
    assert grad[0, 3] == 0 and (grad[0, :3] != 0).all()
    for far, bounded in ((15.0, 15.0), (-15.0, -15.0), (30.0, 20.0), (-30.0, -20.0)):
        cfg = LossConfig('grpo', tis='off', kl_coef=1.0)
        still = as_batch(one, 0 * low, 0 * low, 0 * low - far)
        value, *_ = value_and_grad(make(cfg), 0 * low, still, 10, 1)
        close(value, fp64(math.exp(-bounded) - 1 + bounded), 1e-12)


def law_impossible(make):
    "A token that neither policy can draw has not moved: no NaN, and no gradient of its own"
    one = torch.ones(1, 3, dtype=torch.bool)
    never = fp64([[-1.0, -math.inf, -2.0]])
    batch = as_batch(one, one.double(), never, never)
    for name in NAMES:
        for kind in ('k1', 'k2', 'k3'):
            cfg = LossConfig(name, kl_coef=0.1, kl_estimator=kind, max_response_tokens=3)
            value, grad, metrics = value_and_grad(make(cfg), never, batch, 3, 1)
            # CISPO's value is a log-prob itself, and its own gradient does not look at it
            assert name == 'cispo' or value.isfinite() and grad[0, 1] == 0, (name, kind)
            assert grad.isfinite().all() and metrics['kl'] == 0


# The policy that is known completely: 4 tokens, 3 positions, 64 responses, a table of logits
RESPONSES = torch.cartesian_prod(*[torch.arange(4)] * 3)
REWARD = (RESPONSES.diff(dim=1) >= 0).all(1).double()


def toy_log_probs(theta, y):
    prefix = torch.stack([0 * y[:, 0], 1 + y[:, 0], 5 + 4 * y[:, 0] + y[:, 1]], 1)
    return theta.log_softmax(-1)[prefix].gather(2, y[..., None]).squeeze(2)


def toy(seed):
    return (
        torch.randn(21, 4, generator=torch.Generator().manual_seed(seed)).double().requires_grad_()
    )


def law_enumeration(make):
    """All 4,096 groups of two: the expected gradient is (1 - 1/2) of the exact gradient of the
    expected reward"""
    theta = toy(0)
    (exact,) = torch.autograd.grad(
        (toy_log_probs(theta, RESPONSES).sum(1).exp() * REWARD).sum(), theta
    )
    pairs = torch.cartesian_prod(torch.arange(64), torch.arange(64))
    prob = toy_log_probs(theta, RESPONSES).sum(1).exp().detach()[pairs].prod(1)
    adv = REWARD[pairs] - REWARD[pairs].mean(1, keepdim=True)
    adv = (adv * prob[:, None] * 4096).flatten()[:, None].expand(-1, 3)
    log_probs = toy_log_probs(theta, RESPONSES[pairs.flatten()])
    batch = as_batch(torch.ones_like(adv, dtype=torch.bool), adv, log_probs.detach())
    for name in NAMES:
        for mode, scale in (
            ('seq-mean-token-sum', 1),
            ('seq-mean-token-mean', 3),
            ('token-mean', 3),
            (MODES[2], 2),
        ):
            loss, _ = make(LossConfig(name, aggregation=mode, max_response_tokens=2))(
                log_probs, batch, 8192 * 3, 8192
            )
            (grad,) = torch.autograd.grad(loss, theta, retain_graph=True)
            close(-grad * scale, exact / 2, 1e-12)


def law_tis(make):
    """One token drawn from another policy mu:
    what each kind of weight makes of the expected gradient, in closed form"""
    theta = torch.randn(4, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    mu = fp64([0.45, 0.05, 0.1, 0.4])
    reward = fp64([0.0, 1, 0, 0.5])
    one = torch.ones(4, 1, dtype=torch.bool)

    def grad(x):
        return torch.autograd.grad(x, theta, retain_graph=True)[0]

    p, lp = theta.softmax(0), theta.log_softmax(0)
    for kind, q in dict(
        off=mu, truncate=torch.minimum(p, 1.5 * mu), mask=p * ((p >= 0.5 * mu) & (p <= 1.5 * mu))
    ).items():
        batch = as_batch(
            one, (mu * reward * 4)[:, None], lp.detach()[:, None], rollout=mu.log()[:, None]
        )
        cfg = LossConfig('grpo', tis=kind, tis_cap=1.5, tis_low=0.5)
        loss, metrics = make(cfg)(lp[:, None], batch, 4, 4)
        close(-grad(loss), grad((q.detach() * reward * lp).sum()), 1e-12)
    exact = grad((p * reward).sum())
    batch = as_batch(
        one, (mu * reward * 4)[:, None], lp.detach()[:, None], rollout=mu.log()[:, None]
    )
    close(-grad(make(LossConfig(tis_cap=1e6))(lp[:, None], batch, 4, 4)[0]), exact, 1e-12)


def law_kl(make):
    "The KL term over all 64 responses, weighed by their probability, is KL(policy || reference)"
    theta, ref = toy(1), toy(2).detach()
    lp, lr = toy_log_probs(theta, RESPONSES).detach(), toy_log_probs(ref, RESPONSES)
    prob = lp.sum(1).exp()
    exact = (prob * (lp - lr).sum(1)).sum()
    for kind in ('k1', 'k3'):
        cfg = LossConfig(kl_coef=1.0, kl_estimator=kind, aggregation='seq-mean-token-sum')
        one = torch.ones(1, 3, dtype=torch.bool)
        each = [
            make(cfg)(
                lp[i : i + 1], as_batch(one, 0 * lp[i : i + 1], lp[i : i + 1], lr[i : i + 1]), 3, 1
            )[0]
            for i in range(64)
        ]
        close((prob * torch.stack(each)).sum(), exact, 1e-12)


LAWS = [
    law_clip,
    law_far,
    law_impossible,
    law_every_average,
    law_gspo_clip,
    law_tis,
    law_kl,
    law_naive,
    law_first_step,
    law_split,
    law_packing,
    law_padding,
    law_enumeration,
]


@pytest.mark.parametrize('law', LAWS, ids=lambda f: f.__name__)
def test_law(law):
    law(PolicyLoss)


# ---- mutants: a line of the module replaced ------------------------------------------------------


def mutant(old, new):
    "`PolicyLoss` of the copy"
    with patch.dict(losses.policy_losses.functions):  # the copy registers its own
        copy = planted((algo_settings, ratios, losses), old, new)
        own = dict(losses.policy_losses.functions)

    def make(cfg):
        with patch.dict(losses.policy_losses.functions, own):
            return copy.PolicyLoss(copy.LossConfig(**vars(cfg)))

    return make


MEAN = 'delta.detach().sum(-1, keepdim=True)'
ROWS = 'mask.sum(-1, keepdim=True)'
RHO = 'rho = log_ratio('
GSPO = '(mean+(delta-delta.detach())).clamp(-max_nats, max_nats).exp()'
OLD_ROLLOUT = 'old_log_probs.detach(), rollout_log_probs, mask)'
MUTANTS = dict(
    mean_over_padding=(
        '(mask.sum(-1, keepdim=True).clamp(min=1)*num_samples)',
        '(mask.shape[-1]*num_samples)',
    ),
    own_token_count=(
        'return mask.to(dtype)/num_tokens',
        'return mask.to(dtype)/mask.sum().clamp(min=1)',
    ),
    own_sample_count=('return mask.to(dtype)/num_samples', 'return mask.to(dtype)/len(mask)'),
    missing_detach=('return new-old.detach()', 'return new-old'),
    mask_by_product=('.masked_fill(~mask, 0.).clamp(-limit, limit)', '.clamp(-limit, limit)*mask'),
    wrong_side=('loss = -torch.minimum(', 'loss = -torch.maximum('),
    no_minimum=(
        'loss = -torch.minimum(ratio*adv, ratio.clamp(low, high)*adv)',
        'loss = -ratio.clamp(low, high)*adv',
    ),
    swapped_eps=('low,high = 1-eps_low, 1+eps_high', 'low,high = 1-eps_high, 1+eps_low'),
    clip_frac_of_both_signs=('(adv<0)&(ratio<low), (adv>0)&', '(ratio<low), '),
    gspo_arithmetic_mean=(
        GSPO,
        f'(delta-delta.detach()).exp()*(mask*delta.detach().exp()).sum(-1)[:,None]/{ROWS}',
    ),
    gspo_sum=(f'mean = {MEAN}/{ROWS}.clamp(min=1)', f'mean = {MEAN}'),
    gspo_mean_over_padding=(f'{MEAN}/{ROWS}.clamp(min=1)', f'{MEAN}/mask.shape[-1]'),
    gspo_mean_over_the_batch=(f'{MEAN}/{ROWS}', 'delta.detach().sum()/mask.sum()'),
    gspo_missing_stop=(
        GSPO,
        f'(delta.sum(-1, keepdim=True)/{ROWS}.clamp(min=1)).exp().expand_as(delta)',
    ),
    gspo_times_the_token_ratio=(GSPO, '(mean+delta).exp()'),
    cispo_with_gradient=('old_log_probs, mask).detach()', 'old_log_probs, mask)'),
    cispo_unclipped=('-ratio.clamp(low, high)*adv*new', '-ratio*adv*new'),
    dapo_symmetric=('clip=(.2,.28)', 'clip=(.28,.28)'),
    tis_upside_down=(RHO + OLD_ROLLOUT, RHO + 'rollout_log_probs, old_log_probs.detach(), mask)'),
    tis_with_gradient=(RHO + OLD_ROLLOUT, RHO + 'old_log_probs, rollout_log_probs, mask)'),
    tis_from_the_policy=(
        'w,hit = tis_weights(batch.old_log_probs,',
        'w,hit = tis_weights(log_probs,',
    ),
    tis_below=('rho.clamp(max=cap), rho>cap', 'rho.clamp(min=1/cap), rho<cap'),
    tis_mask_of_ones=('rho.masked_fill(dropped, 0.)', '(~dropped).to(rho)'),
    tis_of_the_kl=(
        'loss = loss+cfg.kl_coef*aggregate(kl,',
        'loss = loss+cfg.kl_coef*aggregate(kl*(w if cfg.tis!="off" else 1),',
    ),
    gspo_bounds_tokens=(
        'delta = log_ratio(log_probs, old_log_probs, mask, inf)',
        'delta = log_ratio(log_probs, old_log_probs, mask)',
    ),
    gspo_unbounded=('.clamp(-max_nats, max_nats).exp()', '.exp()'),
    metrics_unbounded=('delta = delta.clamp(-max_nats, max_nats)', 'delta = delta'),
    never_is_nan=('at_least_fp32(x).clamp(min=_lowest)', 'at_least_fp32(x)'),
    zero_clip_is_none=('if getattr(self, k) is None', 'if not getattr(self, k)'),
    kl_metric_of_the_loss=(
        "metrics['kl'] = kl.detach().sum()/num_tokens",
        "metrics['kl'] = aggregate(kl, mask, how, *counts).detach()",
    ),
    kl_of_likely_references=(
        'for x in (log_probs, batch.ref_log_probs)',
        'for x in (log_probs, batch.ref_log_probs.clamp(min=-8.))',
    ),
    k3_saturates_early=('d = d.clamp(-max_nats, max_nats)', 'd = d.clamp(-10., 10.)'),
    inverted_kl=('return torch.expm1(-d)+d', 'return torch.expm1(d)-d'),
    reversed_kl=(
        'kl_estimate(new, ref, cfg.kl_estimator)',
        'kl_estimate(ref, new, cfg.kl_estimator)',
    ),
)


@pytest.mark.parametrize('name', MUTANTS)
def test_some_law_kills_the_mutant(name):
    assert noticed(LAWS, mutant(*MUTANTS[name]))


# ---- TRL's own code on the same tensors ----------------------------------------------------------


@pytest.fixture(scope='module')
def trl_loss():
    """`GRPOTrainer._compute_loss` itself;
    what stands in for the trainer hands out our log-probs as the model's"""
    with patch('trl.import_utils.is_vllm_available', lambda **_: False):  # to import it takes long
        from trl import GRPOTrainer

    def compute(x, batch, loss_type, low, high, level='token', beta=0.0, weights=None):
        mask, same = batch.response_mask.long(), lambda v, **_: v
        metrics = defaultdict(list)
        trainer = SimpleNamespace(
            loss_type=loss_type,
            importance_sampling_level=level,
            epsilon_low=low,
            epsilon_high=high,
            beta=beta,
            max_completion_length=16,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            use_vllm=weights is not None,
            vllm_importance_sampling_correction=True,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            current_gradient_accumulation_steps=1,
            model=SimpleNamespace(training=True),
            _metrics=dict(train=metrics),
            args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
            accelerator=SimpleNamespace(num_processes=1, gather=same, reduce=same),
            _get_per_token_logps_and_entropies=lambda *a, **k: (x, torch.zeros_like(x), None),
        )
        no = mask[:, :0]
        loss = GRPOTrainer._compute_loss(
            trainer,
            None,
            dict(
                prompt_ids=no,
                prompt_mask=no,
                completion_ids=mask,
                completion_mask=mask,
                advantages=batch.advantages,
                old_per_token_logps=batch.old_log_probs,
                ref_per_token_logps=batch.ref_log_probs,
                importance_sampling_ratio=weights,
                num_items_in_batch=mask.sum(),
            ),
        )
        return loss, metrics

    return compute


TRL = dict(
    grpo=(LossConfig('grpo'), 'grpo', 0.2, 0.2, {}),
    dr_grpo=(LossConfig('dr_grpo', max_response_tokens=16), 'dr_grpo', 0.2, 0.2, {}),
    dapo=(LossConfig('dapo'), 'dapo', 0.2, 0.28, {}),
    bnpo=(LossConfig('grpo', aggregation='token-mean'), 'bnpo', 0.2, 0.2, {}),
    cispo=(LossConfig('cispo'), 'cispo', 0.2, 5.0, {}),
    tight_cispo=(LossConfig('cispo', clip_eps_high=0.1), 'cispo', 0.2, 1.1, {}),
    gspo=(LossConfig('gspo'), 'grpo', 3e-4, 4e-4, dict(level='sequence')),
    wide_gspo=(
        LossConfig('gspo', clip_eps_low=0.1, clip_eps_high=0.2),
        'grpo',
        0.1,
        0.2,
        dict(level='sequence'),
    ),
    gspo_token_mean=(
        LossConfig('gspo', aggregation='token-mean'),
        'dapo',
        3e-4,
        4e-4,
        dict(level='sequence'),
    ),
    grpo_kl=(LossConfig('grpo', kl_coef=0.04), 'grpo', 0.2, 0.2, dict(beta=0.04)),
    dapo_kl=(LossConfig('dapo', kl_coef=0.5), 'dapo', 0.2, 0.28, dict(beta=0.5)),
)


@pytest.mark.parametrize(
    'dtype, tol', [(torch.double, 1e-11), (torch.float, 1e-6)], ids=['fp64', 'fp32']
)
@pytest.mark.parametrize('name', TRL)
def test_trl(trl_loss, name, dtype, tol):
    "Value and gradient of TRL's loss code; clipped fractions too"
    cfg, loss_type, low, high, kw = TRL[name]
    cfg = replace(cfg, tis='off')

    @settings(random, max_examples=25)
    @given(batches())
    def check(data):
        new = data[0].to(dtype)
        batch = data[1].map(lambda t: t.to(dtype) if t.is_floating_point() else t)
        rows = batch.response_mask.any(1)  # a row without a response is 0/0 in TRL's metrics
        new, batch = new[rows], batch.map(lambda t: t[rows])
        if cfg.name == 'gspo':  # one advantage per response
            first = batch.response_mask.long().argmax(1, keepdim=True)
            batch = replace(
                batch, advantages=batch.advantages.gather(1, first) * batch.response_mask
            )

        def trl(x, b, *_):
            b = (
                replace(b, advantages=b.advantages.sum(1) / b.response_mask.sum(1))
                if cfg.name == 'gspo'
                else b
            )
            return trl_loss(x, b, loss_type, low, high, **kw)

        a, b = (value_and_grad(f, new, batch, *counts(batch)) for f in (PolicyLoss(cfg), trl))
        close(a[0], b[0], tol)
        close(a[1], b[1], tol)
        if cfg.name in ('grpo', 'dapo'):
            for mine, theirs in dict(_low='low', _high='high').items() | {('', 'region')}:
                assert a[2]['clip_frac' + mine].item() == pytest.approx(
                    b[2][f'clip_ratio/{theirs}_mean'][0], abs=1e-6
                )

    check()


@pytest.mark.parametrize('kind', ['truncate', 'mask'])
def test_trl_with_weights(trl_loss, kind):
    """The weights of the engine that sampled go where TRL puts them: on the policy's loss,
    not on the KL"""
    cfg = LossConfig('dapo', tis=kind, tis_cap=1.2, tis_low=0.8, kl_coef=0.1)

    @random
    @given(batches())
    def check(data):
        new, batch = data
        rows = batch.response_mask.any(1)
        new, batch = new[rows], batch.map(lambda t: t[rows])
        rho = (batch.old_log_probs - batch.rollout_log_probs).exp()
        w = (
            rho.clamp(max=1.2)
            if kind == 'truncate'
            else rho.masked_fill((rho < 0.8) | (rho > 1.2), 0.0)
        )

        def trl(x, b, *_):
            return trl_loss(x, b, 'dapo', 0.2, 0.28, beta=0.1, weights=w)

        ours, theirs = (
            value_and_grad(f, new, batch, *counts(batch)) for f in (PolicyLoss(cfg), trl)
        )
        for a, b in zip(ours[:2], theirs):
            close(a, b, 1e-11)

    check()


@pytest.mark.parametrize('max_logits', [1, 700, 2**26])
def test_trl_head(max_logits):
    """Log-probs, entropies and gradients against TRL's fused head,
    which cuts the vocabulary instead of the tokens"""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    torch.manual_seed(0)
    h, head = torch.randn(50, 8).requires_grad_(), torch.randn(333, 8).requires_grad_()
    y, w = torch.randint(333, (50,)), torch.randn(50)
    ours = token_log_probs(h, head, y, 0.7, max_logits)
    theirs = ChunkedLogProbFunction.apply(h, head, None, y, 0.7, 64)[:2]
    grads = [torch.autograd.grad((lp * w).sum(), (h, head)) for lp, _ in (ours, theirs)]
    for a, b in zip((*ours, *grads[0]), (*theirs, *grads[1])):
        close(a.detach(), b.detach(), 2e-5)


# ---- numbers -------------------------------------------------------------------------------------

HAND = torch.tensor([[1.0, 1.5, 1, 1], [1.0, 0.5, 1.1, 0.9]])
HAND_MASK = torch.tensor([[True, True, False, False], [True] * 4])
HAND_ADV = torch.tensor([[1.0], [-1.0]]).expand(2, 4)


@pytest.mark.parametrize('mode, want', list(zip(MODES, (-0.075, 1.6 / 6, 0.1, 0.8))))
def test_by_hand(mode, want):
    batch = as_batch(HAND_MASK, HAND_ADV, torch.full((2, 4), 0.5).log())
    cfg = LossConfig(aggregation=mode, max_response_tokens=8)
    loss, metrics = PolicyLoss(cfg)(HAND.log() + batch.old_log_probs, batch, 6, 2)
    close(loss, torch.tensor(want), 1e-6)
    close(metrics['ratio_mean'], torch.tensor(1.0), 1e-6)
    close(metrics['clip_frac'], torch.tensor(2 / 6), 1e-6)
    assert all(m.dim() == 0 and not m.requires_grad for m in metrics.values())


ESPO_OLD = fp64([[-0.1, -2, -0.05, -1.5, -0.2]])
ESPO_NEW = fp64([[-0.09, -1.9, -0.05, -1.55, -0.21]])


@pytest.mark.parametrize(
    'name, a, want', [('gspo', 1.0, 1.0004), ('gspo', -1.0, math.exp(0.01)), ('grpo', 1.0, None)]
)
def test_gspo_number(name, a, want):
    """exp(mean of .01, .1, 0, -.05, -.01) = exp(.01) = 1.01005, far beyond 1.0004;
    token ratios stay within .2"""
    one = torch.ones(1, 5, dtype=torch.bool)
    batch = as_batch(one, a * torch.ones(1, 5).double(), ESPO_OLD)
    value, grad, metrics = value_and_grad(PolicyLoss(LossConfig(name)), ESPO_NEW, batch, 5, 1)
    if want is None:
        close(metrics['clip_frac'], torch.tensor(0.0))
        return
    close(-value * a, fp64(want), 1e-12)
    assert (grad == 0).all() == (a > 0) and metrics['clip_frac'].item() == (a > 0)


def test_papers_defaults():
    "Averages and ranges as published; CISPO has no lower bound"
    want = dict(
        grpo=('seq-mean-token-mean', 0.2, 0.2),
        dr_grpo=('seq-mean-token-sum-norm', 0.2, 0.2),
        dapo=('token-mean', 0.2, 0.28),
        gspo=('seq-mean-token-mean', 3e-4, 4e-4),
        gmpo=('seq-mean-token-mean', -math.expm1(-0.4), math.expm1(0.4)),
        cispo=('token-mean', 1.0, 4.0),
    )
    for name, values in want.items():
        cfg = PolicyLoss(LossConfig(name, max_response_tokens=3000)).cfg
        assert (cfg.aggregation, cfg.clip_eps_low, cfg.clip_eps_high) == values
        mine = LossConfig(name, clip_eps_low=0.1, aggregation='token-mean').resolve()
        assert (mine.aggregation, mine.clip_eps_low, mine.clip_eps_high) == (
            'token-mean',
            0.1,
            values[2],
        )


def test_a_clip_of_zero_is_a_clip():
    "And not the paper's own: whatever has moved the way it should is left alone"
    cfg = LossConfig('grpo', clip_eps_low=0.0, clip_eps_high=0.0, tis='off')
    assert (cfg.resolve().clip_eps_low, cfg.resolve().clip_eps_high) == (0.0, 0.0)
    batch = as_batch(torch.ones(1, 14, dtype=torch.bool), SIDES, torch.zeros_like(SIDES) - 1)
    _, grad, metrics = value_and_grad(PolicyLoss(cfg), RATIO.log() - 1, batch, 14, 1)
    alive = torch.tensor([[1, 1, 1, 1, 0, 0, 0] + [0, 0, 0, 1, 1, 1, 1]])
    close(grad, -RATIO * SIDES * alive / 14, 1e-12)
    assert metrics['clip_frac'].item() * 14 == pytest.approx(6)


def test_dr_grpo_divides_by_a_constant():
    """Responses of 1 and 3,000 tokens, budget 3,000: 1/6,000 per token;
    GRPO gives the short one 3,000 times that"""
    mask = torch.arange(3000) < torch.tensor([[1], [3000]])
    want = {
        'seq-mean-token-sum-norm': (1 / 6000, 1 / 6000),
        'seq-mean-token-mean': (1 / 2, 1 / 6000),
        'token-mean': (1 / 3001, 1 / 3001),
    }
    for mode, weights in want.items():
        w = token_weights(mask, mode, 3001, 2, 3000, torch.double)
        close(torch.stack([w[0, 0], w[1, -1]]), fp64(weights))


def test_tis_numbers():
    "C = 2 caps, [.5, 2] masks, the log-ratio is bounded to 20 (paper.md section 4.7)"
    rho = fp64([[0.25, 0.5, 1.0, 2.0, 3.0, math.exp(30)]])
    mask = torch.ones(1, 6, dtype=torch.bool)
    weights = {k: tis_weights(rho.log(), 0 * rho, mask, k) for k in ('off', 'truncate', 'mask')}
    close(weights['off'][0], torch.ones(1, 6))
    close(weights['truncate'][0], torch.tensor([[0.25, 0.5, 1, 2, 2, 2]]), 1e-12)
    close(weights['mask'][0], torch.tensor([[0, 0.5, 1, 2, 0, 0]]), 1e-12)
    close(tis_weights(rho.log(), 0 * rho, mask, cap=1e30)[0][0, -1], fp64(math.exp(20)), 1e-12)
    for kind, hit in dict(truncate=[0, 0, 0, 0, 1, 1], mask=[1, 0, 0, 0, 1, 1]).items():
        assert weights[kind][1].int().tolist() == [hit]
    batch = as_batch(mask, 0 * rho + 1, rho.log(), rollout=0 * rho)
    metrics = PolicyLoss()(rho.log(), batch, 6, 1)[1]
    close(metrics['tis_mean'], fp64(7.75 / 6), 1e-12)
    close(metrics['tis_clip_frac'], torch.tensor(2 / 6), 1e-6)
    assert 'tis_mean' not in PolicyLoss(LossConfig(tis='off'))(rho.log(), batch, 6, 1)[1]


def test_k3_of_the_rollout():
    """mean(rho - log rho - 1) over sampled tokens is KL(rollout || old): by enumeration,
    as estimate and as metric"""
    mu, p = (
        torch.randn(4, 1, generator=torch.Generator().manual_seed(s)).double().log_softmax(0)
        for s in (0, 1)
    )
    exact, rho = (mu.exp() * (mu - p)).sum(), (p - mu).exp()
    close((mu.exp() * (rho - rho.log() - 1)).sum(), exact, 1e-12)
    close((mu.exp() * kl_estimate(mu, p)).sum(), exact, 1e-12)
    one = torch.ones(4, 1, dtype=torch.bool)
    each = [
        ratio_sums(p[i : i + 1] - mu[i : i + 1], one[i : i + 1], ~one[i : i + 1], ~one[i : i + 1])[
            'approx_kl'
        ]
        for i in range(4)
    ]
    close((mu.exp()[:, 0] * torch.stack(each)).sum(), exact, 1e-12)


def moments(make, distance, seed):
    "Exact mean and variance of one response's gradient under the old policy, and the true gradient"
    old, step = toy(seed).detach(), toy(seed + 1).detach()
    theta = (old + distance * step).requires_grad_()
    (exact,) = torch.autograd.grad(
        (toy_log_probs(theta, RESPONSES).sum(1).exp() * REWARD).sum(), theta
    )
    lp, lp_old = toy_log_probs(theta, RESPONSES), toy_log_probs(old, RESPONSES)
    adv, one = (REWARD - 0.5)[:, None].expand(64, 3), torch.ones(1, 3, dtype=torch.bool)
    losses = [
        make(lp[i : i + 1], as_batch(one, adv[i : i + 1], lp_old[i : i + 1]), 3, 1)[0]
        for i in range(64)
    ]
    grads = -torch.stack([torch.autograd.grad(x, theta, retain_graph=True)[0] for x in losses])
    prob = lp_old.sum(1).exp()[:, None, None]
    mean = (prob * grads).sum(0)
    return mean, (prob * (grads - mean) ** 2).sum(), exact


OPEN = dict(clip_eps_low=1.0, clip_eps_high=1e9, aggregation='seq-mean-token-sum')


def product(log_probs, batch, n, B):  # the whole response's ratio: unbiased, and the most variable
    delta = (log_probs - batch.old_log_probs).sum(1)
    return -(delta.exp() * batch.advantages[:, 0]).sum() / B, {}


def test_estimators_against_enumeration():
    """64 responses, unclipped: on the policy all are exact with one variance

    Away from it the product of the ratios alone is unbiased. GRPO's mean is, in closed form, each
    token's gradient under the *old* prefixes."""
    for seed in range(3):
        for name in NAMES:
            cfg = LossConfig(name, tis='off', **OPEN)
            mean, var, exact = moments(PolicyLoss(cfg), 0.0, seed)
            close(mean, exact, 1e-12)
            close(var, moments(product, 0.0, seed)[1], 1e-12)
        mean, noisy, exact = moments(product, 1.0, seed)
        close(mean, exact, 1e-12)
        found = {n: moments(PolicyLoss(LossConfig(n, tis='off', **OPEN)), 1.0, seed) for n in NAMES}
        for n, (mean, var, _) in found.items():
            assert (mean - exact).norm() > 0.05 * exact.norm() and var < noisy, n
        close(found['cispo'][0], found['grpo'][0], 1e-12)
        old, step = toy(seed).detach(), toy(seed + 1).detach()
        theta = (old + step).requires_grad_()
        lp, lo = toy_log_probs(theta, RESPONSES), toy_log_probs(old, RESPONSES)
        # old everywhere but at the token itself
        weight = (lo.sum(1, keepdim=True) - lo + lp).exp().detach()
        (want,) = torch.autograd.grad((weight * lp * (REWARD - 0.5)[:, None]).sum(), theta)
        close(found['grpo'][0], want, 1e-12)


def test_clipping_lowers_the_variance():
    for name in ('grpo', 'gspo', 'cispo'):
        clip = dict(clip_eps_low=0.2, clip_eps_high=0.2)
        free, tight = (
            moments(PolicyLoss(LossConfig(name, tis='off', **OPEN | kw)), 1.0, 0)
            for kw in ({}, clip)
        )
        assert tight[1] < free[1], name


@random
@given(
    batches(),
    configs,
    st.randoms(use_true_random=False),
    st.sampled_from(['grpo', 'dr_grpo', 'rloo']),
)
def test_from_rewards_to_gradients_in_any_order(data, cfg, rnd, estimator):
    """Groups of unequal size, rows shuffled before the advantages are made:
    value and gradient move with their rows"""
    new, batch = data
    order = list(range(len(batch)))
    rnd.shuffle(order)
    rewards = torch.arange(len(batch)).double() % 3

    def run(rows):
        adv = (
            group_advantages(rewards[rows], batch.group[rows], estimator=estimator)[:, None]
            * batch.response_mask[rows]
        )
        b = replace(batch.map(lambda t: t[rows]), advantages=adv)
        return value_and_grad(PolicyLoss(cfg), new[rows], b, *counts(b))

    a, b = run(range(len(batch))), run(order)
    close(a[0], b[0])
    close(a[1][order], b[1])


def test_packed_hidden_states():
    """From hidden states to the loss: rows one by one,
    or packed in any order and cut into chunks; both gradients"""
    g = torch.Generator().manual_seed(0)
    mask = torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]).bool()
    old, adv = -torch.rand(3, 5, generator=g).double(), torch.randn(3, 5, generator=g).double()
    hidden, head = (
        torch.randn(*s, 4, generator=g).double().requires_grad_() for s in ((3, 5), (11,))
    )
    ids, n = torch.randint(11, (3, 5), generator=g), int(mask.sum())

    def total(order, size, name):
        rows, cols = mask.nonzero()[list(order)].T
        lp, _ = token_log_probs(hidden[rows, cols - 1], head, ids[rows, cols], max_logits=size)
        table = torch.zeros(3, 5).double().index_put((rows, cols), lp)
        return PolicyLoss(LossConfig(name, max_response_tokens=5))(
            table, as_batch(mask, adv, old), n, 3
        )[0]

    def alone(name):
        loss, b = PolicyLoss(LossConfig(name, max_response_tokens=5)), as_batch(mask, adv, old)
        lp = (hidden @ head.T).log_softmax(-1).roll(1, 1).gather(2, ids[..., None])[..., 0]
        return sum(loss(lp[i : i + 1], b.map(lambda t: t[i : i + 1]), n, 3)[0] for i in range(3))

    for name in NAMES:
        want = alone(name)
        exact = torch.autograd.grad(want, (hidden, head))
        for order, size in ((range(6), 10**6), ([3, 0, 5, 1, 4, 2], 25), (range(5, -1, -1), 1)):
            got = total(order, size, name)
            close(got, want, 1e-12)
            for a, b in zip(torch.autograd.grad(got, (hidden, head)), exact):
                close(a, b, 1e-12)


def test_loss_is_zero_at_the_first_step():
    """Mean-zero advantages: the value is 0, the gradient is not;
    with token-mean and unequal lengths it is not even 0"""
    batch = as_batch(HAND_MASK, HAND_ADV, torch.zeros(2, 4) - 1)
    for mode, zero in zip(MODES, (True, False, False, False)):
        cfg = LossConfig(aggregation=mode, max_response_tokens=8)
        value, grad, _ = value_and_grad(PolicyLoss(cfg), batch.old_log_probs, batch, 6, 2)
        assert (abs(value.item()) < 1e-7) == zero and grad.norm() > 0.1


def test_gradcheck():
    "Finite differences, with every mode and estimator, away from the kinks of the clip"
    g = torch.Generator().manual_seed(0)
    mask = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 0, 0], [0, 1, 1, 1, 1]]).bool()
    old, ref = ((-torch.rand(3, 5, generator=g) - 0.1).double() for _ in range(2))
    ratio = torch.tensor([0.5, 0.7, 0.9, 1.05, 1.4]).double()[
        torch.randint(0, 5, (3, 5), generator=g)
    ]
    batch = as_batch(mask, torch.randn(3, 1, generator=g).double() * mask, old, ref)
    for mode in MODES:
        for kind in ('k1', 'k2', 'k3'):
            fn = PolicyLoss(
                LossConfig(aggregation=mode, max_response_tokens=8, kl_coef=0.3, kl_estimator=kind)
            )
            x = (ratio.log() + old).requires_grad_()
            assert torch.autograd.gradcheck(lambda x: fn(x, batch, 8, 3)[0], x)


def test_kl_values():
    """By enumeration of 64 responses: k1 and k3 unbiased, k2 not, the inverted k3 far off;
    k3 is never negative"""
    lp, lr = (toy_log_probs(toy(s), RESPONSES).detach() for s in (1, 2))
    prob = lp.sum(1).exp()
    exact = (prob * (lp - lr).sum(1)).sum()
    mean = {k: (prob * kl_estimate(lp, lr, k).sum(1)).sum() for k in ('k1', 'k2', 'k3')}
    inverted = (prob * (torch.expm1(lp - lr) - (lp - lr)).sum(1)).sum()
    close(mean['k1'], exact, 1e-12)
    close(mean['k3'], exact, 1e-12)
    assert abs(mean['k2'] - exact) > 0.01 * exact and abs(inverted - exact) > 0.2 * exact
    assert (kl_estimate(lp, lr, 'k3') >= 0).all() and (kl_estimate(lp, lr, 'k1') < 0).any()


def test_kl_variance():
    "Close to the reference, k3 has far less variance than k1"
    p = torch.randn(4, generator=torch.Generator().manual_seed(0)).double()
    lp, lr = p.log_softmax(0), (p + 0.1 * torch.tensor([1.0, -1, 0.5, 0])).log_softmax(0)
    std = {
        k: ((e := kl_estimate(lp, lr, k)) * lp.exp() * e)
        .sum()
        .sub((lp.exp() * e).sum() ** 2)
        .sqrt()
        for k in ('k1', 'k3')
    }
    assert std['k3'] < 0.2 * std['k1']


def test_kl_gradients():
    "As a loss: k1 has no expected gradient, k2 that of KL(p || ref), k3 that of KL(ref || p)"
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, generator=g).double().requires_grad_()
    ref = torch.randn(4, generator=g).double().log_softmax(0)
    lp = logits.log_softmax(0)
    p = lp.exp().detach()

    def grad(x):
        return torch.autograd.grad(x, logits, retain_graph=True)[0]

    want = dict(
        k1=torch.zeros(4), k2=grad((lp.exp() * (lp - ref)).sum()), k3=grad(-(ref.exp() * lp).sum())
    )
    for kind, w in want.items():
        close(grad((p * kl_estimate(lp, ref, kind)).sum()), w, 1e-12)


@random
@given(batches())
def test_silent_groups_move_only_through_kl(data):
    new, batch = data
    silent = replace(batch, advantages=0 * batch.advantages)
    assert value_and_grad(PolicyLoss(), new, silent, *counts(batch))[1].norm() == 0
    assert (
        value_and_grad(PolicyLoss(LossConfig(kl_coef=0.1)), new, silent, *counts(batch))[1].norm()
        > 0
    )


# ---- numerics ------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float])
def test_low_precision_inputs_reduce_in_fp32(dtype, name):
    g = torch.Generator().manual_seed(0)
    new, old = ((-torch.rand(8, 500, generator=g) - 0.1).to(dtype) for _ in range(2))
    mask = torch.ones(8, 500, dtype=torch.bool)
    batch = as_batch(mask, torch.randn(8, 1, generator=g).expand(8, 500), old, old)
    fn = PolicyLoss(LossConfig(name, kl_coef=0.1, max_response_tokens=500))
    loss, _ = fn(new, batch, 4000, 8)
    wide = batch.map(lambda t: t.double() if t.is_floating_point() else t)
    assert loss.dtype == torch.float
    close(loss.double(), fn(new.double(), wide, 4000, 8)[0], 1e-6)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('gap', [50.0, 1e4, 1e30])
def test_extreme_ratios_stay_finite(gap, name):
    """A token that went from impossible to certain, and back: finite value, finite gradient,
    whatever its advantage"""
    new = torch.tensor([[0.0, -gap, 0.0, -gap, 0.0]])
    old = torch.tensor([[-gap, 0.0, -gap, 0.0, -gap]])
    batch = as_batch(
        torch.ones(1, 5, dtype=torch.bool), torch.tensor([[1.0, 1, -1, -1, 0]]), old, old
    )
    cfg = LossConfig(name, kl_coef=0.1, max_response_tokens=5)
    value, grad, metrics = value_and_grad(PolicyLoss(cfg), new, batch, 5, 1)
    assert (
        value.isfinite() and grad.isfinite().all() and all(m.isfinite() for m in metrics.values())
    )


def test_a_row_without_response_is_harmless():
    mask = torch.zeros(2, 3, dtype=torch.bool)
    batch = as_batch(mask, torch.ones(2, 3), torch.zeros(2, 3))
    value, grad, _ = value_and_grad(PolicyLoss(), torch.zeros(2, 3), batch, 5, 4)
    assert value == 0 and (grad == 0).all()


# ---- configuration, registry, errors -------------------------------------------------------------


@pytest.mark.parametrize(
    'kw, message',
    [
        (dict(name='grppo'), "name='grppo': use one of"),
        (dict(aggregation='mean'), "aggregation='mean': use one of"),
        (dict(kl_estimator='k4'), "kl_estimator='k4'"),
        (dict(clip_eps_low=-0.1), 'clip_eps_low=-0.1'),
        (dict(clip_eps_low=1.5), 'clip_eps_low=1.5'),
        (dict(clip_eps_high=float('nan')), 'clip_eps_high=nan'),
        (dict(kl_coef=-1), 'kl_coef=-1'),
        (dict(kl_coef=float('inf')), 'kl_coef=inf'),
        (dict(max_response_tokens=-5), 'max_response_tokens=-5'),
        (dict(aggregation='seq-mean-token-sum-norm'), 'max_response_tokens=0'),
        (dict(name='dr_grpo'), 'max_response_tokens=0'),
        (dict(tis='on'), "tis='on': use one of"),
        (dict(tis_cap=0.5), 'tis_cap=0.5: .* use at least 1'),
        (dict(tis_low=2.0), 'tis_low=2.0'),
        (dict(tis_cap=float('nan')), 'tis_cap=nan'),
        (dict(tis_cap=float('inf')), 'tis_cap=inf'),
    ],
)
def test_bad_config(kw, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**kw).resolve()


@pytest.mark.parametrize(
    'change, num, cfg, message',
    [
        (dict(old_log_probs=None), (6, 2), {}, 'old_log_probs is None'),
        (dict(advantages=None), (6, 2), {}, 'advantages is None'),
        (dict(ref_log_probs=None), (6, 2), dict(kl_coef=0.1), 'ref_log_probs is None'),
        (dict(rollout_log_probs=torch.ones(2, 3)), (6, 2), {}, r'rollout_log_probs \[2, 3\]'),
        (dict(advantages=torch.ones(2)), (6, 2), {}, r'advantages \[2\] is not aligned'),
        (dict(old_log_probs=torch.ones(2, 3)), (6, 2), {}, 'column 0 is unused'),
        (dict(), (0, 2), {}, 'num_tokens=0'),
        (dict(), (6, 0), {}, 'num_samples=0'),
    ],
)
def test_misuse(change, num, cfg, message):
    batch = replace(as_batch(HAND_MASK, HAND_ADV, torch.zeros(2, 4)), **change)
    with pytest.raises(ValueError, match=message):
        PolicyLoss(LossConfig(**cfg))(torch.zeros(2, 4), batch, *num)


def test_log_probs_off_by_one():
    with pytest.raises(ValueError, match=r'log_probs \[2, 3\]'):
        PolicyLoss()(torch.zeros(2, 3), as_batch(HAND_MASK, HAND_ADV, torch.zeros(2, 4)), 6, 2)


def test_aggregate_rejects_unknown_mode_and_budget():
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match="mode='sum'"):
        aggregate(ones, ones.bool(), 'sum', 2, 1)
    with pytest.raises(ValueError, match='max_tokens=0'):
        aggregate(ones, ones.bool(), 'seq-mean-token-sum-norm', 2, 1)
    with pytest.raises(ValueError, match="kind='k0'"):
        kl_estimate(torch.ones(1), torch.ones(1), 'k0')
    with pytest.raises(ValueError, match="kind='both'"):
        tis_weights(ones, ones, ones.bool(), 'both')


def test_a_registered_loss_gets_what_it_needs():
    with patch.dict(losses.policy_losses):

        @policy_loss('entropy')
        def weighted(log_probs, old_log_probs, advantages, mask, cfg, entropy):
            return -advantages * log_probs * entropy, dict(entropy=(entropy * mask).sum())

        loss = PolicyLoss(LossConfig(name='weighted'))
        batch = as_batch(HAND_MASK, HAND_ADV, torch.zeros(2, 4))
        with pytest.raises(ValueError, match='entropy is None'):
            loss(torch.zeros(2, 4), batch, 6, 2)
        _, metrics = loss(torch.zeros(2, 4), replace(batch, entropy=torch.full((2, 4), 0.5)), 6, 2)
        assert metrics['entropy'].item() == pytest.approx(0.5)
    assert 'weighted' not in losses.policy_losses


@dataclass(frozen=True)
class Power:  # settings of a loss that is registered below
    of: float = 1.0


def test_a_registered_loss_has_choices_and_settings_of_its_own():
    with patch.dict(losses.policy_losses):

        @policy_loss(aggregation='token-mean', clip=(0.1, 0.3), config=Power)
        def powered(log_probs, old_log_probs, advantages, mask, cfg, own):
            assert (cfg.aggregation, cfg.clip_eps_low, cfg.clip_eps_high) == (
                'token-mean',
                0.1,
                0.3,
            )
            return -advantages * log_probs**own.of, {}

        batch = as_batch(HAND_MASK, HAND_ADV, torch.zeros(2, 4))
        for own, want in ((None, -2.0), (Power(2.0), 4.0), (Power(3.0), -8.0)):
            got = PolicyLoss(LossConfig('powered'), own)(torch.full((2, 4), -2.0), batch, 6, 2)[0]
            close(got, torch.tensor(want * (-2 + 4) / 6), 1e-6)
        assert PolicyLoss(LossConfig('grpo'), Power(2.0)).own == ()
