"""ESPO: a loop as oracle for value, gradient and metrics, laws, limits, the paper's numbers,
wrong versions to catch"""

import math
from dataclasses import asdict, replace
from fractions import Fraction
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compassrl.algo.loss_registry import policy_losses
from compassrl.algo.losses import LossConfig, PolicyLoss
from compassrl.algo.losses import espo as espo_module
from compassrl.algo.losses.espo import (
    EspoConfig,
    EspoStep,
    adaptive_clip,
    entropy_groups,
    group_mean,
    group_ratio,
    group_weights,
)
from compassrl.records import Batch, Sample, collate, select
from tests.support import loss_laws as laws
from tests.support.faults import noticed, planted
from tests.support.loss_laws import counts, random, value_and_grad

PLAIN = LossConfig('espo', tis='off')


def library(own, cfg=PLAIN):
    return PolicyLoss(cfg, own)


def close(a, b, tol=1e-12):
    laws.close(a, b, tol)


def double(x):
    return torch.tensor(x, dtype=torch.double)


def as_batch(mask, adv, old, entropy):
    B = len(mask)
    return Batch(
        token_ids=torch.zeros(mask.shape, dtype=torch.long),
        token_mask=mask.flip(1).cumsum(1).flip(1) > 0,
        response_mask=mask,
        rollout_log_probs=old,
        group=torch.zeros(B, dtype=torch.long),
        rewards=torch.zeros(B),
        advantages=adv,
        old_log_probs=old,
        entropy=entropy,
    )


@st.composite
def batches(draw, token_wise=st.booleans()):
    """fp64 rows of unequal prompts and responses, some empty; equal entropies;
    ratios on both sides of the clip range"""
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    B, T = draw(st.integers(1, 6)), draw(st.integers(3, 14))
    start = torch.randint(1, T, (B, 1), generator=g)
    num = torch.randint(draw(st.integers(0, 1)), T, (B, 1), generator=g)
    mask = (torch.arange(T) >= start) & (torch.arange(T) < start + num)
    mask[0, -1] = True

    def uniform(*shape):
        return torch.rand(*shape, generator=g, dtype=torch.double)

    old = -3 * uniform(B, T) - 0.05
    new = old + draw(st.sampled_from([1e-3, 0.01, 0.3])) * (2 * uniform(B, T) - 1)
    entropy = 4 * uniform(B, T) ** 3
    if draw(st.booleans()):
        entropy = (2 * entropy).round() / 2  # ties
    adv = torch.randn(B, T if draw(token_wise) else 1, generator=g).double().expand(B, T) * mask
    return new, as_batch(mask, adv, old, entropy)


configs = st.builds(
    EspoStep,
    alpha=st.sampled_from([0.02, 0.1]),
    eps_min=st.sampled_from([0.0, 3e-4]),
    top_frac=st.sampled_from([0.1, 0.2, 0.4, 1.0]),
    groups=st.sampled_from(['top_frac', 'top_frac', 'bins', 'batch_quantile']),
    num_bins=st.sampled_from([1, 2, 3, 100]),
    low_entropy_weight=st.sampled_from([1.0, 1.0, 0.25, 0.0]),
    ratio=st.sampled_from(['gspo_token', 'literal']),
    vocab_size=st.just(100),
    threshold=st.just(0.8),
)


# ---- the oracle ----------------------------------------------------------------------------------


def naive_groups(H, own):
    "Sets of places, the most uncertain first; H: entropies of one response"
    order = sorted(range(len(H)), key=lambda t: (-H[t], t))
    if own.groups == 'batch_quantile':
        sets = [
            [t for t in order if H[t] >= own.threshold],
            [t for t in order if H[t] < own.threshold],
        ]
    elif own.groups == 'bins':
        k = min(own.num_bins, len(H))
        sets = [[t for place, t in enumerate(order) if place * k // len(H) == j] for j in range(k)]
    else:
        top = math.ceil(Fraction(str(own.top_frac)) * len(H))
        sets = [order[:top], order[top:]]
    return [(j, s) for j, s in enumerate(sets) if s]


def naive(own, new, batch):
    "Equations 5 to 10 and the gradient of section 2 of the notes, token by token in Python floats"
    n, B = counts(batch)
    value, grad = 0.0, torch.zeros_like(new)
    sums = dict.fromkeys(
        'clip_frac clip_frac_low clip_frac_high clip_frac_high_entropy clip_frac_low_entropy '
        'high_entropy_frac clip_eps ratio_mean approx_kl'.split(),
        0.0,
    )
    for i, row in enumerate(batch.response_mask.tolist()):
        at = [t for t, here in enumerate(row) if here]
        if not at:
            continue
        lp, old, A, H = (
            [float(x[i, t]) for t in at]
            for x in (new, batch.old_log_probs, batch.advantages, batch.entropy)
        )
        groups = naive_groups(H, own)
        for j, tokens in groups:
            size = len(tokens)
            s = math.prod(math.exp(lp[t] - old[t]) for t in tokens) ** (1 / size)
            eps = max(
                own.alpha * sum(H[t] for t in tokens) / size / math.log(own.vocab_size), own.eps_min
            )
            say = [1.0 if k == 0 else own.low_entropy_weight for k, _ in groups]
            weight = (1.0 if j == 0 else own.low_entropy_weight) / ((sum(say) or 1) * size * B)
            for t in tokens:
                r = math.exp(lp[t] - old[t])
                x = s * r if own.ratio == 'literal' else s
                low, high = A[t] < 0 and x < 1 - eps, A[t] > 0 and x > 1 + eps
                value -= weight * A[t] * (1 - eps if low else 1 + eps if high else x)
                grad[i, at[t]] = 0.0 if low or high else -weight * A[t] * x
                for k, v in dict(
                    clip_frac=low or high,
                    clip_frac_low=low,
                    clip_frac_high=high,
                    ratio_mean=r,
                    clip_frac_high_entropy=(low or high) and j == 0,
                    clip_frac_low_entropy=(low or high) and j > 0,
                    high_entropy_frac=j == 0,
                    clip_eps=eps,
                    approx_kl=r - 1 - (lp[t] - old[t]),
                ).items():
                    sums[k] += v
    return value, grad, {k: v / n for k, v in sums.items()}


# ---- laws: each takes `make(own)`, which builds the loss -----------------------------------------


def law_naive(make):
    @random
    @given(batches(), configs)
    def check(data, own):
        got, want = value_and_grad(make(own), *data, *counts(data[1])), naive(own, *data)
        close(got[0], double(want[0]))
        close(got[1], want[1])
        assert got[2].keys() - {'loss', 'policy_loss'} == want[2].keys()
        for k, v in want[2].items():
            close(got[2][k].double(), double(v), 1e-6)

    check()


def law_split(make):
    laws.split(make, batches(), configs)


def law_padding(make):
    laws.padding(make, batches(), configs, ('old_log_probs', 'advantages', 'entropy'))


def law_first_step(make):
    """Ratio 1: nothing is clipped, not even at a clip range of 0; the gradient is REINFORCE's,
    weighed by group"""

    @random
    @given(batches(), configs)
    def check(data, own):
        new, batch = data
        value, grad, metrics = value_and_grad(make(own), batch.old_log_probs, batch, *counts(batch))
        groups = entropy_groups(batch.entropy, batch.response_mask, own)
        w = group_weights(groups, batch.response_mask, own.low_entropy_weight, torch.double) / len(
            batch
        )
        close(grad, -w * batch.advantages)
        close(value, -(w * batch.advantages).sum())
        assert metrics['clip_frac'] == 0

    check()


def law_one_group(make):
    "K = 1 and a fixed clip: GSPO-token"

    @random
    @given(batches(), st.sampled_from([3e-4, 0.01, 0.2]))
    def check(data, eps):
        own = EspoStep(alpha=0.0, eps_min=eps, groups='bins', num_bins=1, vocab_size=100)
        gspo = PolicyLoss(LossConfig('gspo', clip_eps_low=eps, clip_eps_high=eps, tis='off'))
        same(make(own), gspo, *data)

    check()


def law_own_groups(make):
    """One token per group and a fixed clip: GRPO

    With one token GSPO-token's form is the token's ratio."""

    @random
    @given(batches(), st.sampled_from([3e-4, 0.01, 0.2]))
    def check(data, eps):
        own = EspoStep(alpha=0.0, eps_min=eps, groups='bins', num_bins=10**6, vocab_size=100)
        same(
            make(own),
            PolicyLoss(LossConfig('grpo', clip_eps_low=eps, clip_eps_high=eps, tis='off')),
            *data,
        )

    check()


def same(a, b, new, batch):
    a, b = (value_and_grad(f, new, batch, *counts(batch)) for f in (a, b))
    close(a[0], b[0])
    close(a[1], b[1])
    for k in b[2]:
        close(a[2][k], b[2][k], 1e-6)


def law_finite_differences(make):
    """The value moves as the gradient says, where the tokens of a group share an advantage:
    sg[] changes nothing there"""

    @settings(random, max_examples=8)
    @given(batches(token_wise=st.just(False)), configs)
    def check(data, own):
        new, batch = data
        loss = make(replace(own, ratio='gspo_token'))
        _, grad, metrics = value_and_grad(loss, new, batch, *counts(batch))
        h = 1e-6
        for i, t in batch.response_mask.nonzero().tolist():
            up, down = new.clone(), new.clone()
            up[i, t] += h
            down[i, t] -= h
            (a, m), (b, k) = loss(up, batch, *counts(batch)), loss(down, batch, *counts(batch))
            if m['clip_frac'] == k['clip_frac'] == metrics['clip_frac']:
                close((a - b) / (2 * h), grad[i, t], 2e-8)

    check()


def law_far(make):
    "The bound of 20 nats is for the mean of a group, as in GSPO for that of a response"
    far = torch.zeros(1, 10).double()
    far[0, 3] = -50
    one = torch.ones(1, 10, dtype=torch.bool)
    gspo = PolicyLoss(LossConfig('gspo', clip_eps_low=0.1, clip_eps_high=0.1, tis='off'))
    own = EspoStep(alpha=0.0, eps_min=0.1, groups='bins', num_bins=1, vocab_size=100)
    for sign in (1.0, -1.0):
        for new in (far, -6 * far):
            batch = as_batch(one, sign * one.double(), 0 * far, 1 + 0 * far)
            same(make(own), gspo, new, batch)
    batch = as_batch(one, one.double(), 0 * far, torch.arange(10.0).double()[None])
    value, grad, metrics = value_and_grad(
        make(replace(own, num_bins=2)), far, batch, *counts(batch)
    )  # tokens 0 to 4 are the less uncertain half
    close(value, -double((math.exp(-10) + 1) / 2))
    close(grad[0, :5], double([-math.exp(-10) / 10] * 5))
    assert all(m.isfinite() for m in metrics.values())


def law_kl(make):
    """A KL term is a mean over a response's tokens, whatever their groups weigh: where all tokens
    are as far from the reference, the KL of one token"""
    cfg = replace(PLAIN, kl_coef=1.0)
    want = math.exp(-0.5) - 1 + 0.5
    for lengths in ((1, 1), (8, 8), (64, 64), (3, 50)):
        mask = torch.arange(64) < torch.tensor(lengths)[:, None]
        zero = torch.zeros(2, 64).double()
        H = torch.rand(2, 64, generator=torch.Generator().manual_seed(0)).double()
        batch = replace(as_batch(mask, zero, zero - 1, H), ref_log_probs=zero - 1.5)
        for weight in (1.0, 0.0):
            own = EspoStep(vocab_size=100, low_entropy_weight=weight)
            value, metrics = make(own, cfg)(zero - 1, batch, *counts(batch))
            close(value, double(want))
            close(metrics['kl'], double(want))


def law_constants(make):
    "Entropies, old log-probs and advantages get no gradient, attached or not"
    new, batch = batches_once(0)
    leaves = {
        k: getattr(batch, k).clone().requires_grad_()
        for k in ('entropy', 'old_log_probs', 'advantages')
    }
    value, _ = make(EspoStep(vocab_size=100))(
        new.clone().requires_grad_(), replace(batch, **leaves), *counts(batch)
    )
    assert torch.autograd.grad(value, list(leaves.values()), allow_unused=True) == (None,) * 3


def batches_once(seed, B=6, T=12):
    g = torch.Generator().manual_seed(seed)
    mask = (torch.arange(T) >= 2) & (torch.arange(T) < torch.randint(4, T + 1, (B, 1), generator=g))
    old = -torch.rand(B, T, generator=g).double() * 3 - 0.05
    new = old + 0.02 * torch.randn(B, T, generator=g).double()
    adv = torch.randn(B, 1, generator=g).double() * mask
    return new, as_batch(mask, adv, old, 3 * torch.rand(B, T, generator=g).double() ** 2)


LAWS = [
    law_naive,
    law_split,
    law_padding,
    law_first_step,
    law_one_group,
    law_far,
    law_kl,
    law_own_groups,
    law_finite_differences,
    law_constants,
]


@pytest.mark.parametrize('law', LAWS, ids=lambda f: f.__name__)
def test_law(law):
    law(library)


# ---- mutants: a line of the module replaced ------------------------------------------------------


def mutant(old, new):
    with patch.dict(policy_losses):
        copy = planted(espo_module, old, new)  # it registers itself

    def make(own, cfg=PLAIN):
        with patch.dict(policy_losses, espo=copy.espo):
            return PolicyLoss(cfg, copy.EspoStep(**asdict(own)))

    return make


MUTANTS = dict(
    bounds_tokens=(
        'log_ratio(log_probs, old_log_probs, mask, inf)',
        'log_ratio(log_probs, old_log_probs, mask)',
    ),
    kl_of_the_sum=("kl_aggregation='seq-mean-token-mean',", ''),
    mean_over_padding=(
        'num = group_sums(mask.to(values), groups, mask)',
        'num = group_sums(torch.ones_like(values), groups, mask|True)',
    ),
    top_of_the_batch=(
        'n = mask.sum(1, keepdim=True)',
        'n = mask.sum(); rank = entropy.masked_fill(~mask, '
        '-inf).flatten().argsort().argsort().view_as(mask)\n'
        '    rank = rank.numel()-1-rank',
    ),
    quantile_of_the_rows_at_hand=(
        '(entropy<cfg.threshold) & mask',
        '(entropy<entropy[mask].quantile(.8)) & mask',
    ),
    missing_detach=(
        'mean = group_mean(delta.detach(), groups, mask)',
        'mean = group_mean(delta, groups, mask)',
    ),
    arithmetic_mean=(
        'mean = group_mean(delta.detach(), groups, mask)',
        'mean = group_mean(delta.detach().exp(), groups, mask).log()',
    ),
    sum_for_mean=(
        'mean = group_mean(delta.detach(), groups, mask)',
        'mean = group_sums(delta.detach(), groups, mask).gather(1, groups)',
    ),
    wrong_side=(
        'clipped_surrogate(ratio, advantages, mask, eps, eps)',
        '(lambda x, low, high: (-x, low, high))('
        '*clipped_surrogate(ratio, -advantages, mask, eps, eps))',
    ),
    eps_from_the_new_policy=(
        'entropy.detach().to(delta.dtype)',
        '-log_probs.detach().to(delta.dtype)',
    ),
    eps_per_token=(
        'adaptive_clip(group_mean(entropy, groups, mask), own)',
        'adaptive_clip(entropy, own)',
    ),
    eps_with_gradient=('entropy = entropy.detach()', 'entropy = entropy'),
    log_base_2=('/log(cfg.vocab_size)', '*1.4427/log(cfg.vocab_size)'),
    no_floor=('.clamp(min=cfg.eps_min)', ''),
    lowest_entropies=('descending=True', 'descending=False'),
    floor_for_ceil=('.ceil()', '.floor()'),
    tokens_alike=(
        'weight = say/share.masked_fill(share==0, 1.0)',
        'weight = (say>0).to(dtype)/mask.sum(1, keepdim=True).clamp(min=1)',
    ),
    empty_groups_count=('say = say.masked_fill(size==0, 0.0)', 'say = say'),
    low_weight_on_top=('say[:, 0] = 1.0', 'say[:, 0], say[:, 1:] = low_weight, 1.0'),
    halved_without_the_rest=('say.sum(1, keepdim=True)', '(size>0).sum(1, keepdim=True)'),
    swapped_forms=(
        'delta if literal else delta-delta.detach()',
        'delta-delta.detach() if literal else delta',
    ),
    ratio_in_the_gradient_alone=('return (mean+own)', 'return own'),
)


@pytest.mark.parametrize('name', MUTANTS)
def test_some_law_kills_the_mutant(name):
    assert noticed(LAWS, mutant(*MUTANTS[name]), RuntimeError)  # shapes that no longer fit


# ---- groups --------------------------------------------------------------------------------------


@random
@given(batches(), configs)
def test_groups_of_a_response(data, own):
    """Groups are numbered from the most uncertain, without gaps;
    every entropy of one is at least those of the next"""
    _, batch = data
    groups = entropy_groups(batch.entropy, batch.response_mask, own)
    assert (groups[~batch.response_mask] == 0).all()
    for g, H, m in zip(groups, batch.entropy, batch.response_mask):
        want = naive_groups(H[m].tolist(), own)
        assert g[m].tolist() == [next(j for j, s in want if t in s) for t in range(int(m.sum()))]
        for (_, a), (_, b) in zip(want, want[1:]):
            assert min(H[m][a]) >= max(H[m][b])


@random
@given(batches(), configs)
def test_weights_of_a_response(data, own):
    "They sum to 1 where groups count alike"
    _, batch = data
    groups = entropy_groups(batch.entropy, batch.response_mask, own)
    total = group_weights(groups, batch.response_mask, 1.0, torch.double).sum(1)
    close(total, batch.response_mask.any(1).double())


def test_top_share_is_exact():
    "ceil(frac * n) of decimal fractions, at every length up to 2,000"
    n = torch.arange(1, 2001)
    share = espo_module._share
    for percent in range(1, 101):
        want = [-(-percent * k // 100) for k in n.tolist()]
        assert share(n, percent / 100).tolist() == want


# ---- what only the whole batch knows -------------------------------------------------------------


@random
@given(batches(), st.sampled_from([0.1, 0.2, 0.5, 1.0]), st.randoms(use_true_random=False))
def test_threshold_of_the_batch(data, frac, rnd):
    """The ceil(frac*n)-th largest entropy of the response tokens,
    in any order of the rows and with any padding"""
    _, batch = data
    mask = batch.response_mask
    values = sorted(batch.entropy[mask].tolist(), reverse=True)
    want = values[math.ceil(Fraction(str(frac)) * len(values)) - 1]
    own = EspoConfig(groups='batch_quantile', top_frac=frac)
    order = list(range(len(batch)))
    rnd.shuffle(order)
    junk = replace(batch, entropy=batch.entropy.masked_fill(~mask, math.inf))
    for b in (batch, select(batch, order), junk):
        filled = own.for_batch(b, 100)
        assert filled == EspoStep(**asdict(own), vocab_size=100, threshold=want)
        high = (entropy_groups(b.entropy, b.response_mask, filled) == 0) & b.response_mask
        assert high.sum() == sum(v >= want for v in values) >= frac * len(values)


@random
@given(st.integers(1, 200), st.integers(0, 10**6))
def test_threshold_picks_what_a_quantile_picks(n, seed):
    """At 20% the same tokens as `entropy >= torch.quantile(entropy, .8)`,
    which is how TRL states the rule"""
    H = torch.rand(1, n, generator=torch.Generator().manual_seed(seed)).double()
    batch = as_batch(torch.ones(1, n, dtype=torch.bool), 0 * H, 0 * H, H)
    own = EspoConfig(groups='batch_quantile').for_batch(batch, 99)
    at = H[0].quantile(0.8) * (1 - 1e-12)  # an interpolation may round up
    assert ((entropy_groups(H, batch.response_mask, own) == 0) == (H >= at)).all()


def test_for_batch_leaves_the_rest():
    "Groups of a response need no threshold"
    own = EspoConfig(alpha=0.05, top_frac=0.3)
    _, batch = batches_once(0)
    assert own.for_batch(batch, 99) == EspoStep(**asdict(own), vocab_size=99)


def test_split_moves_the_quantile_but_not_the_loss():
    "The threshold of half a batch is another; the one of the whole makes halves add up"
    new, batch = batches_once(3, B=8)
    own = EspoConfig(groups='batch_quantile')
    whole, half = own.for_batch(batch, 99), own.for_batch(select(batch, list(range(4))), 99)
    assert whole.threshold != half.threshold
    value = library(whole)(new, batch, *counts(batch))[0]
    parts = [select(batch, list(r)) for r in (range(4), range(4, 8))]
    cut = [
        library(whole)(x[:, : b.token_ids.shape[1]], b, *counts(batch))[0]
        for x, b in zip(new.split(4), parts)
    ]
    close(sum(cut), value, 1e-13)


# ---- the paper's numbers -------------------------------------------------------------------------

OLD, NEW = (
    double([x]) for x in ([-0.1, -2, -0.05, -1.5, -0.2], [-0.09, -1.9, -0.05, -1.55, -0.21])
)
H = double([[0.1, 2, 0.05, 1.5, 0.2]])
ALL = torch.ones(1, 5, dtype=torch.bool)
WORKED = EspoStep(top_frac=0.4, eps_min=0.0, vocab_size=100)


@pytest.mark.parametrize(
    'entropy, eps',
    [
        (1.0, '1.68e-03'),
        (2.0, '3.35e-03'),
        (0.3, '5.0e-04'),
        (0.05, '8.4e-05'),
        (0.01, '1.7e-05'),
        (0.0, '0e+00'),
        (math.log(151_936), '2.00e-02'),
    ],
)
def test_clip_of_a_qwen_vocabulary(entropy, eps):
    got = [
        adaptive_clip(double(entropy), EspoStep(eps_min=e, vocab_size=151_936)).item()
        for e in (0.0, 3e-4)
    ]
    assert f'{got[0]:.{max(len(eps) - 6, 0)}e}' == eps
    assert got[1] == max(got[0], 3e-4)


def test_worked_example():
    groups = entropy_groups(H, ALL, WORKED)
    assert groups.tolist() == [[1, 0, 1, 0, 1]]
    ratio = group_ratio(NEW - OLD, groups, ALL)
    close(ratio, torch.tensor([[1, 1.025315, 1, 1.025315, 1]]), 5e-7)
    eps = adaptive_clip(group_mean(H, groups, ALL), WORKED)
    close(eps, double([[5.0668e-4, 7.6002e-3, 5.0668e-4, 7.6002e-3, 5.0668e-4]]), 1e-5)
    one = group_ratio(NEW - OLD, 0 * groups, ALL)
    close(one, torch.full((1, 5), 1.010050), 5e-7)
    for sign, dead in ((1.0, 2), (-1.0, 0)):
        batch = as_batch(ALL, sign * ALL.double(), OLD, H)
        _, grad, metrics = value_and_grad(library(WORKED), NEW, batch, 5, 1)
        assert (
            round(metrics['clip_frac_high_entropy'].item() * 5) == dead
            and metrics['clip_frac_low_entropy'] == 0
        )
        close(grad[0, [1, 3]], torch.full((2,), 0.0 if dead else 1.025315 / 4), 5e-7)
        close(grad[0, [0, 2, 4]], torch.full((3,), -sign / 6), 5e-7)


def test_emphasis_of_the_top_fifth():
    "2.5/L against .625/L: four times; a low_entropy_weight of 4 takes it back"
    L = 50
    mask = torch.ones(1, L, dtype=torch.bool)
    groups = entropy_groups(
        torch.rand(1, L, generator=torch.Generator().manual_seed(0)), mask, EspoConfig()
    )
    w = group_weights(groups, mask, 1.0, torch.double)
    close(w[groups == 0].unique(), double([2.5 / L]))
    close(w[groups == 1].unique(), double([0.625 / L]))
    close(group_weights(groups, mask, 4.0, torch.double), double([[1 / L] * L]))


@pytest.mark.parametrize('weight', [0.0, 0.25, 1.0, 4.0])
def test_a_response_weighs_as_much_however_little_its_sure_tokens_do(weight):
    mask = torch.arange(12) < torch.tensor([12, 5, 1, 0])[:, None]
    groups = entropy_groups(
        torch.rand(4, 12, generator=torch.Generator().manual_seed(0)), mask, EspoConfig()
    )
    w = group_weights(groups, mask, weight, torch.double)
    close(w.sum(1), double([1, 1, 1, 0]))
    assert weight or not w[groups > 0].any()


def test_zero_variance_advantages_decide_token_by_token():
    """RL-ZVP on the worked entropies: the clip looks at the sign of each token;
    the value is s times the weighted mean"""
    for adv, dead in (
        ([0.01, 0.2, 0.005, 0.15, 0.02], [1, 3]),
        ([-0.19, 0, -0.195, -0.05, -0.18], []),
    ):
        adv = double([adv])
        _, grad, _ = value_and_grad(library(WORKED), NEW, as_batch(ALL, adv, OLD, H), 5, 1)
        s = double([[1, math.exp(0.025), 1, math.exp(0.025), 1]])
        w = double([[1 / 6, 1 / 4, 1 / 6, 1 / 4, 1 / 6]])
        want = -s * w * adv
        want[0, dead] = 0
        close(grad, want)


def test_low_precision_in_full_precision_out():
    new, batch = batches_once(1)
    half = batch.map(lambda t: t.bfloat16() if t.is_floating_point() else t)
    value, metrics = library(EspoStep(vocab_size=99))(new.bfloat16(), half, *counts(batch))
    assert value.dtype == torch.float and all(
        m.dim() == 0 and not m.requires_grad for m in metrics.values()
    )


def test_expected_gradient_by_enumeration():
    """All 64 responses of a known policy: with tokens alike the gradient of the reward is exact,
    with groups alike not"""
    responses = torch.cartesian_prod(*[torch.arange(4)] * 3)
    theta = torch.randn(21, 4, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    prefix = torch.stack(
        [0 * responses[:, 0], 1 + responses[:, 0], 5 + 4 * responses[:, 0] + responses[:, 1]], 1
    )
    table = theta.log_softmax(-1)
    lp = table[prefix].gather(2, responses[..., None])[..., 0]
    entropy = -(table.exp() * table).sum(-1)[prefix].detach()
    prob = lp.sum(1).exp()
    reward = (responses.diff(dim=1) >= 0).all(1).double()
    (exact,) = torch.autograd.grad((prob * reward).sum(), theta, retain_graph=True)

    def expected(weight, reward):
        adv = (prob.detach() * reward * 64)[:, None].expand(64, 3)
        own = EspoStep(top_frac=1 / 3, low_entropy_weight=weight, vocab_size=4)
        value, _ = library(own)(
            lp, as_batch(torch.ones(64, 3).bool(), adv, lp.detach(), entropy), 192, 64
        )
        return -torch.autograd.grad(value, theta, retain_graph=True)[0]

    close(3 * expected(2.0, reward), exact)
    close(expected(2.0, torch.ones(64).double()), 0 * exact)
    assert expected(1.0, torch.ones(64).double()).norm() > 1e-3


# ---- what a user gets wrong ----------------------------------------------------------------------


@pytest.mark.parametrize(
    'kw, message',
    [
        (dict(alpha=-1), 'alpha=-1'),
        (dict(eps_min=2), 'eps_min=2'),
        (dict(top_frac=0), 'top_frac=0'),
        (dict(top_frac=1.5), 'top_frac=1.5'),
        (dict(num_bins=0), 'num_bins=0'),
        (dict(groups='top'), 'use one of'),
        (dict(ratio='gspo'), 'use one of'),
        (dict(vocab_size=-1), 'vocab_size=-1'),
        (dict(low_entropy_weight=math.nan), 'low_entropy_weight=nan'),
    ],
)
def test_bad_config(kw, message):
    with pytest.raises(ValueError, match=message):
        EspoStep(**kw)


@pytest.mark.parametrize(
    'own, cfg, message',
    [
        (EspoStep(), PLAIN, 'vocab_size=0'),
        (EspoStep(vocab_size=99, groups='batch_quantile'), PLAIN, 'threshold=None'),
        (EspoStep(vocab_size=99), replace(PLAIN, clip_eps_high=0.28), 'clip_eps_high=0.28'),
        (EspoStep(vocab_size=99), replace(PLAIN, clip_eps_low=0.1), 'clip_eps_low=0.1'),
        (
            EspoStep(vocab_size=99),
            replace(PLAIN, aggregation='token-mean'),
            "aggregation='token-mean'",
        ),
    ],
)
def test_bad_combination(own, cfg, message):
    new, batch = batches_once(2)
    with pytest.raises(ValueError, match=message):
        library(own, cfg)(new, batch, *counts(batch))


def test_a_batch_without_response_tokens_has_no_threshold():
    _, batch = batches_once(2)
    none = replace(batch, response_mask=torch.zeros_like(batch.response_mask))
    with pytest.raises(ValueError, match='no response tokens: batch_quantile needs some'):
        EspoConfig(groups='batch_quantile').for_batch(none, 99)
    EspoConfig().for_batch(none, 99)  # groups of a response need no threshold


def test_no_entropy():
    new, batch = batches_once(2)
    with pytest.raises(ValueError, match='entropy is None'):
        library(EspoStep(vocab_size=99))(new, replace(batch, entropy=None), *counts(batch))


# ---- with a policy: packing, micro-batches, ranks ------------------------------------------------


@pytest.mark.parametrize(
    'own',
    [
        EspoConfig(),
        EspoConfig(ratio='literal'),
        EspoConfig(groups='bins', num_bins=3),
        EspoConfig(groups='batch_quantile'),
    ],
    ids=lambda c: f'{c.groups}-{c.ratio}',
)
def test_gradient_of_a_policy_however_the_rows_are_cut(own):
    """fp64: parameters get the same gradient from one packed pass, from many,
    and as a sum over two ranks"""
    from compassrl.model.policy import Policy, PolicyConfig
    from compassrl.train.torch_train import accumulate_grads, response_log_probs

    torch.manual_seed(0)
    policy = Policy(
        PolicyConfig(
            vocab_size=29,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            moe_intermediate_size=16,
            num_experts=4,
        )
    ).double()
    g = torch.Generator().manual_seed(1)

    def ids(n):
        return torch.randint(3, 29, (n,), generator=g).tolist()

    samples = [
        Sample(str(i // 2), i % 2, ids(2 + i), ids(n), torch.zeros(n), None, None, 'stop', 0)
        for i, n in enumerate((9, 1, 5, 12, 3, 7))
    ]
    batch = collate(samples)
    with torch.no_grad():
        old, entropy = response_log_probs(policy, batch)
    batch = replace(
        batch,
        entropy=entropy,
        old_log_probs=old + 0.01 * torch.randn(old.shape, generator=g).double(),
        advantages=torch.randn(6, 1, generator=g).double() * batch.response_mask,
    )
    loss, num = library(own.for_batch(batch, 29)), counts(batch)

    def grads():
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])

    whole, _ = accumulate_grads(policy, batch, loss, 10**6)
    want = grads()
    small, _ = accumulate_grads(policy, batch, loss, 20)
    close(grads(), want, 1e-12)
    for k in whole:
        close(small[k], whole[k], 1e-6)
    total = 0.0
    for rows in ([4, 0, 3], [5, 1, 2]):  # a rank knows its own rows and the counts of all
        rank, _ = accumulate_grads(
            policy, select(batch, rows), lambda x, b, *own_num: loss(x, b, *num), 25
        )
        total = total + grads()
        assert rank['clip_frac'] <= whole['clip_frac']
    close(total, want, 1e-12)
