"GRPO's loss: a loop as oracle, laws over random batches, exact enumeration, wrong versions that they must catch"
import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings, strategies as st

from compassrl import losses
from compassrl.advantages import group_advantages
from compassrl.losses import LossConfig, PolicyLoss, aggregate, grpo, kl_estimate, log_ratio, policy_loss, token_weights
from compassrl.records import Batch, select

random = settings(deadline=None, max_examples=40, derandomize=True, report_multiple_bugs=False)
MODES = ('seq-mean-token-mean', 'token-mean', 'seq-mean-token-sum-norm')
configs = st.builds(LossConfig, clip_eps_low=st.sampled_from([.1, .2]), clip_eps_high=st.sampled_from([.2, .28]),
    aggregation=st.sampled_from(MODES), max_response_tokens=st.just(16), kl_coef=st.sampled_from([0., .1]),
    kl_estimator=st.sampled_from(['k1', 'k2', 'k3']))


def close(a, b, tol=1e-13): torch.testing.assert_close(a, b, rtol=tol, atol=tol, check_dtype=False)


def as_batch(mask, adv, old, ref=None):
    B = len(mask)
    return Batch(token_ids=torch.zeros(mask.shape, dtype=torch.long), token_mask=mask.flip(1).cumsum(1).flip(1) > 0,
        response_mask=mask, rollout_log_probs=old, group=torch.zeros(B, dtype=torch.long), rewards=torch.zeros(B),
        advantages=adv, old_log_probs=old, ref_log_probs=ref)


@st.composite
def batches(draw):
    "fp64 rows of unequal prompts and responses, one of them empty now and then; ratios on both sides of the clip range"
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    B, T = draw(st.integers(1, 7)), draw(st.integers(3, 12))
    start = torch.randint(1, T, (B, 1), generator=g)
    num = torch.randint(draw(st.integers(0, 1)), T, (B, 1), generator=g)
    mask = (torch.arange(T) >= start) & (torch.arange(T) < start+num)
    mask[0, -1] = True
    new, old, ref = ((-torch.rand(B, T, generator=g)-.05).double() for _ in range(3))
    adv = (torch.randn(B, 1, generator=g)*mask).double()
    return new, as_batch(mask, adv, old, ref)


def counts(batch): return int(batch.response_mask.sum()), len(batch)


def value_and_grad(loss, x, batch, *num):
    x = x.detach().clone().requires_grad_()
    value, metrics = loss(x, batch, *num)
    return value.detach(), torch.autograd.grad(value, x)[0], metrics


def naive(cfg, new, batch):
    "Token by token in Python floats"
    n, B = counts(batch)
    total = 0.
    for i, row in enumerate(batch.response_mask.tolist()):
        per_token = []
        for t, here in enumerate(row):
            if not here: continue
            lp, old, a = (float(x[i, t]) for x in (new, batch.old_log_probs, batch.advantages))
            r = math.exp(lp-old)
            loss = -min(r*a, min(max(r, 1-cfg.clip_eps_low), 1+cfg.clip_eps_high)*a)
            d = lp-float(batch.ref_log_probs[i, t])
            per_token.append(loss+cfg.kl_coef*dict(k1=d, k2=d*d/2, k3=math.exp(-d)-1+d)[cfg.kl_estimator])
        scale = {'seq-mean-token-mean': max(len(per_token), 1)*B, 'token-mean': n, 'seq-mean-token-sum-norm': 16*B}
        total += sum(per_token)/scale[cfg.aggregation]
    return torch.tensor(total, dtype=torch.double)


# ---- laws: each takes `make(cfg)`, which builds the loss -----------------------------------------------------

def law_naive(make):
    @random
    @given(batches(), configs)
    def check(data, cfg): close(make(cfg)(*data, *counts(data[1]))[0], naive(cfg, *data), 1e-12)
    check()


def law_split(make):
    "Any partition of the rows, in any order: values, gradients and metrics add up to the whole"
    @random
    @given(batches(), configs, st.data())
    def check(data, cfg, draw):
        new, batch = data
        num, B = counts(batch), len(batch)
        value, grad, metrics = value_and_grad(make(cfg), new, batch, *num)
        order = draw.draw(st.permutations(range(B)))
        part = draw.draw(st.lists(st.integers(0, 2), min_size=B, max_size=B)) # which micro-batch, or which rank
        total, sums, got = 0., {}, torch.zeros_like(grad)
        for k in set(part):
            rows = [i for i in order if part[i] == k]
            b = select(batch, rows)
            T = b.token_ids.shape[1]
            v, g, m = value_and_grad(make(cfg), new[rows, :T], b, *num)
            got[torch.tensor(rows)[:, None], torch.arange(T)] = g
            total, sums = total+v, {key: sums.get(key, 0.)+x for key, x in m.items()}
        close(total, value)
        close(got, grad)
        assert sums.keys() == metrics.keys()
        for key in sums: close(sums[key], metrics[key], 1e-6)
    check()


def law_padding(make):
    "Padding of any width and content (NaN and infinities included) has no influence and gets a zero gradient"
    @random
    @given(batches(), configs, st.integers(0, 5), st.sampled_from([float('nan'), math.inf, -math.inf, 1e30]))
    def check(data, cfg, extra, junk):
        new, batch = data
        value, grad, _ = value_and_grad(make(cfg), new, batch, *counts(batch))
        mask = batch.response_mask
        def fill(x):
            x = x.masked_fill(~mask, junk)
            return torch.cat([x, x.new_full((len(x), extra), junk)], 1)
        wide = batch.map(lambda t: torch.nn.functional.pad(t, (0, extra)) if t.dim() == 2 else t)
        wide = replace(wide, **{k: fill(getattr(batch, k)) for k in ('old_log_probs', 'advantages', 'ref_log_probs')})
        v, g, metrics = value_and_grad(make(cfg), fill(new), wide, *counts(batch))
        close(v, value)
        close(g[:, :grad.shape[1]], grad)
        assert (g[~wide.response_mask] == 0).all() and all(torch.isfinite(m) for m in metrics.values())
    check()


def law_first_step(make):
    "Ratio 1, old log-probs not even detached: REINFORCE's gradient, and minus the mean advantage as value"
    @random
    @given(batches(), configs)
    def check(data, cfg):
        new, batch = data
        x = new.clone().requires_grad_()
        loss, _ = make(replace(cfg, kl_coef=0.))(x, replace(batch, old_log_probs=x), *counts(batch))
        w = batch.advantages*token_weights(batch.response_mask, cfg.aggregation, *counts(batch), 16, torch.double)
        close(torch.autograd.grad(loss, x)[0], -w)
        close(loss.detach(), -w.sum())
    check()


def law_clip(make):
    "The gradient stops only where a token has already moved the way its advantage asks; sides are counted apart"
    ratio = torch.tensor([[.5, .75, .9, 1., 1.1, 1.25, 1.5]*2], dtype=torch.double)
    adv = torch.tensor([[1.]*7+[-1.]*7], dtype=torch.double)
    batch = as_batch(torch.ones(1, 14, dtype=torch.bool), adv, torch.zeros_like(adv)-1)
    cfg = LossConfig(aggregation='token-mean', clip_eps_low=.2, clip_eps_high=.28)
    value, grad, metrics = value_and_grad(make(cfg), ratio.log()-1, batch, 14, 1)
    alive = torch.tensor([[1, 1, 1, 1, 1, 1, 0]+[0, 0, 1, 1, 1, 1, 1]])
    close(grad, -ratio*adv*alive/14, 1e-12)
    for key, want in dict(clip_frac=3, clip_frac_low=2, clip_frac_high=1).items():
        assert metrics[key].item()*14 == pytest.approx(want)


# The policy that is known completely: 4 tokens, 3 positions, 64 responses, a table of next-token logits
RESPONSES = torch.cartesian_prod(*[torch.arange(4)]*3)
REWARD = (RESPONSES.diff(dim=1) >= 0).all(1).double()


def toy_log_probs(theta, y):
    prefix = torch.stack([0*y[:, 0], 1+y[:, 0], 5+4*y[:, 0]+y[:, 1]], 1)
    return theta.log_softmax(-1)[prefix].gather(2, y[..., None]).squeeze(2)


def toy(seed): return torch.randn(21, 4, generator=torch.Generator().manual_seed(seed)).double().requires_grad_()


def law_enumeration(make):
    "All 4,096 groups of two: the expected gradient is (1 - 1/2) of the exact gradient of the expected reward"
    theta = toy(0)
    exact, = torch.autograd.grad((toy_log_probs(theta, RESPONSES).sum(1).exp()*REWARD).sum(), theta)
    pairs = torch.cartesian_prod(torch.arange(64), torch.arange(64))
    prob = toy_log_probs(theta, RESPONSES).sum(1).exp().detach()[pairs].prod(1)
    adv = group_advantages(REWARD[pairs].flatten(), torch.arange(4096).repeat_interleave(2), norm_std=False)
    adv = (adv*prob.repeat_interleave(2)*4096)[:, None].expand(-1, 3)
    log_probs = toy_log_probs(theta, RESPONSES[pairs.flatten()])
    batch = as_batch(torch.ones_like(adv, dtype=torch.bool), adv, log_probs.detach())
    for mode, scale in (('seq-mean-token-sum-norm', 1), ('seq-mean-token-mean', 3), ('token-mean', 3)):
        loss, _ = make(LossConfig(aggregation=mode, max_response_tokens=1))(log_probs, batch, 8192*3, 8192)
        grad, = torch.autograd.grad(loss, theta, retain_graph=True)
        close(-grad*scale, exact/2, 1e-12)


def law_kl(make):
    "The KL term over all 64 responses, weighed by their probability, is KL(policy || reference)"
    theta, ref = toy(1), toy(2).detach()
    lp, lr = toy_log_probs(theta, RESPONSES).detach(), toy_log_probs(ref, RESPONSES)
    prob = lp.sum(1).exp()
    exact = (prob*(lp-lr).sum(1)).sum()
    for kind in ('k1', 'k3'):
        cfg = LossConfig(kl_coef=1., kl_estimator=kind, aggregation='seq-mean-token-sum-norm', max_response_tokens=1)
        one = torch.ones(1, 3, dtype=torch.bool)
        each = [make(cfg)(lp[i:i+1], as_batch(one, 0*lp[i:i+1], lp[i:i+1], lr[i:i+1]), 3, 1)[0] for i in range(64)]
        close((prob*torch.stack(each)).sum(), exact, 1e-12)


LAWS = [law_naive, law_split, law_padding, law_first_step, law_clip, law_enumeration, law_kl]


@pytest.mark.parametrize('law', LAWS, ids=lambda f: f.__name__)
def test_law(law): law(PolicyLoss)


# ---- mutants: one name of the module replaced while the loss runs --------------------------------------------

def mutated(**names):
    def make(cfg):
        def loss(*args):
            with patch.multiple(losses, **names): return PolicyLoss(cfg)(*args)
        return loss
    return make


def wrong_side(log_probs, old, adv, mask, cfg):
    r = log_ratio(log_probs, old, mask).exp()
    adv = adv.masked_fill(~mask, 0.)
    clipped = r.clamp(1-cfg.clip_eps_low, 1+cfg.clip_eps_high)
    return -torch.maximum(r*adv, clipped*adv), {}


def swapped_eps(log_probs, old, adv, mask, cfg):
    return grpo(log_probs, old, adv, mask, replace(cfg, clip_eps_low=cfg.clip_eps_high, clip_eps_high=cfg.clip_eps_low))


wrong_side.needs = swapped_eps.needs = ()
MUTANTS = dict(
    mean_over_padding=mutated(aggregate=lambda v, m, mode, n, B, L=0: v.masked_fill(~m, 0.).mean(1).sum()/B),
    own_count=mutated(aggregate=lambda v, m, mode, n, B, L=0: aggregate(v, m, mode, max(int(m.sum()), 1), len(m), L)),
    missing_detach=mutated(log_ratio=lambda new, old, m: (new-old).masked_fill(~m, 0.)),
    mask_by_product=mutated(log_ratio=lambda new, old, m: (new-old.detach())*m),
    mask_after_exp=mutated(log_ratio=lambda new, old, m: torch.where(m, new-old.detach(), 0*new)),
    wrong_side=mutated(policy_losses={'grpo': wrong_side}),
    swapped_eps=mutated(policy_losses={'grpo': swapped_eps}),
    inverted_kl=mutated(kl_estimate=lambda new, ref, kind: kl_estimate(-new, -ref, kind)),
    reversed_kl=mutated(kl_estimate=lambda new, ref, kind: kl_estimate(ref, new, kind)))


@pytest.mark.parametrize('name', MUTANTS)
def test_some_law_kills_the_mutant(name):
    def broken(law):
        try: law(MUTANTS[name])
        except AssertionError: return True
        return False
    assert any(broken(law) for law in LAWS)


# ---- numbers -------------------------------------------------------------------------------------------------

HAND = torch.tensor([[1., 1.5, 1, 1], [1., .5, 1.1, .9]])
HAND_MASK = torch.tensor([[True, True, False, False], [True]*4])
HAND_ADV = torch.tensor([[1.], [-1.]]).expand(2, 4)


@pytest.mark.parametrize('mode, want', list(zip(MODES, (-.075, 1.6/6, .1))))
def test_by_hand(mode, want):
    batch = as_batch(HAND_MASK, HAND_ADV, torch.full((2, 4), .5).log())
    cfg = LossConfig(aggregation=mode, max_response_tokens=8)
    loss, metrics = PolicyLoss(cfg)(HAND.log()+batch.old_log_probs, batch, 6, 2)
    close(loss, torch.tensor(want), 1e-6)
    close(metrics['ratio_mean'], torch.tensor(1.), 1e-6)
    close(metrics['clip_frac'], torch.tensor(2/6), 1e-6)
    assert all(m.dim() == 0 and not m.requires_grad for m in metrics.values())


def test_loss_is_zero_at_the_first_step():
    "Mean-zero advantages: the value is 0, the gradient is not; with token-mean and unequal lengths it is not even 0"
    batch = as_batch(HAND_MASK, HAND_ADV, torch.zeros(2, 4)-1)
    for mode, zero in zip(MODES, (True, False, False)):
        cfg = LossConfig(aggregation=mode, max_response_tokens=8)
        value, grad, _ = value_and_grad(PolicyLoss(cfg), batch.old_log_probs, batch, 6, 2)
        assert (abs(value.item()) < 1e-7) == zero and grad.norm() > .1


def test_gradcheck():
    "Finite differences, with every mode and estimator, away from the kinks of the clip"
    g = torch.Generator().manual_seed(0)
    mask = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 0, 0], [0, 1, 1, 1, 1]]).bool()
    old, ref = ((-torch.rand(3, 5, generator=g)-.1).double() for _ in range(2))
    ratio = torch.tensor([.5, .7, .9, 1.05, 1.4]).double()[torch.randint(0, 5, (3, 5), generator=g)]
    batch = as_batch(mask, torch.randn(3, 1, generator=g).double()*mask, old, ref)
    for mode in MODES:
        for kind in ('k1', 'k2', 'k3'):
            fn = PolicyLoss(LossConfig(aggregation=mode, max_response_tokens=8, kl_coef=.3, kl_estimator=kind))
            x = (ratio.log()+old).requires_grad_()
            assert torch.autograd.gradcheck(lambda x: fn(x, batch, 8, 3)[0], x)


def test_kl_values():
    "By enumeration of 64 responses: k1 and k3 unbiased, k2 not, the inverted k3 far off; k3 is never negative"
    lp, lr = (toy_log_probs(toy(s), RESPONSES).detach() for s in (1, 2))
    prob = lp.sum(1).exp()
    exact = (prob*(lp-lr).sum(1)).sum()
    mean = {k: (prob*kl_estimate(lp, lr, k).sum(1)).sum() for k in ('k1', 'k2', 'k3')}
    inverted = (prob*(torch.expm1(lp-lr)-(lp-lr)).sum(1)).sum()
    close(mean['k1'], exact, 1e-12)
    close(mean['k3'], exact, 1e-12)
    assert abs(mean['k2']-exact) > .01*exact and abs(inverted-exact) > .2*exact
    assert (kl_estimate(lp, lr, 'k3') >= 0).all() and (kl_estimate(lp, lr, 'k1') < 0).any()


def test_kl_variance():
    "Close to the reference, k3 has far less variance than k1"
    p = torch.randn(4, generator=torch.Generator().manual_seed(0)).double()
    lp, lr = p.log_softmax(0), (p+.1*torch.tensor([1., -1, .5, 0])).log_softmax(0)
    std = {k: ((e := kl_estimate(lp, lr, k))*lp.exp()*e).sum().sub((lp.exp()*e).sum()**2).sqrt() for k in ('k1', 'k3')}
    assert std['k3'] < .2*std['k1']


def test_kl_gradients():
    "As a loss: k1 has no expected gradient, k2 that of KL(p || ref), k3 that of KL(ref || p)"
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, generator=g).double().requires_grad_()
    ref = torch.randn(4, generator=g).double().log_softmax(0)
    lp = logits.log_softmax(0)
    p = lp.exp().detach()
    def grad(x): return torch.autograd.grad(x, logits, retain_graph=True)[0]
    want = dict(k1=torch.zeros(4), k2=grad((lp.exp()*(lp-ref)).sum()), k3=grad(-(ref.exp()*lp).sum()))
    for kind, w in want.items(): close(grad((p*kl_estimate(lp, ref, kind)).sum()), w, 1e-12)


@random
@given(batches())
def test_silent_groups_move_only_through_kl(data):
    new, batch = data
    silent = replace(batch, advantages=0*batch.advantages)
    assert value_and_grad(PolicyLoss(), new, silent, *counts(batch))[1].norm() == 0
    assert value_and_grad(PolicyLoss(LossConfig(kl_coef=.1)), new, silent, *counts(batch))[1].norm() > 0


# ---- numerics ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('dtype, tol', [(torch.bfloat16, .02), (torch.float16, 2e-3), (torch.float, 1e-6)])
def test_low_precision_inputs_reduce_in_fp32(dtype, tol):
    g = torch.Generator().manual_seed(0)
    new, old = ((-torch.rand(8, 500, generator=g)-.1).to(dtype) for _ in range(2))
    mask = torch.ones(8, 500, dtype=torch.bool)
    batch = as_batch(mask, torch.randn(8, 1, generator=g).expand(8, 500), old, old)
    loss, _ = PolicyLoss(LossConfig(kl_coef=.1))(new, batch, 4000, 8)
    wide = batch.map(lambda t: t.double() if t.is_floating_point() else t)
    assert loss.dtype == torch.float
    close(loss.double(), PolicyLoss(LossConfig(kl_coef=.1))(new.double(), wide, 4000, 8)[0], 1e-6)


@pytest.mark.parametrize('gap', [50., 1e4, 1e30])
def test_extreme_ratios_stay_finite(gap):
    "A token that went from impossible to certain, and back: finite value, finite gradient, whatever its advantage"
    new, old = torch.tensor([[0., -gap, 0., -gap, 0.]]), torch.tensor([[-gap, 0., -gap, 0., -gap]])
    batch = as_batch(torch.ones(1, 5, dtype=torch.bool), torch.tensor([[1., 1, -1, -1, 0]]), old, old)
    value, grad, metrics = value_and_grad(PolicyLoss(LossConfig(kl_coef=.1)), new, batch, 5, 1)
    assert value.isfinite() and grad.isfinite().all() and all(m.isfinite() for m in metrics.values())


def test_a_row_without_response_is_harmless():
    mask = torch.zeros(2, 3, dtype=torch.bool)
    batch = as_batch(mask, torch.ones(2, 3), torch.zeros(2, 3))
    value, grad, _ = value_and_grad(PolicyLoss(), torch.zeros(2, 3), batch, 5, 4)
    assert value == 0 and (grad == 0).all()


# ---- configuration, registry, errors -------------------------------------------------------------------------

@pytest.mark.parametrize('kw, message', [
    (dict(name='grppo'), "name='grppo': use one of"), (dict(aggregation='mean'), "aggregation='mean': use one of"),
    (dict(kl_estimator='k4'), "kl_estimator='k4'"), (dict(clip_eps_low=-.1), 'clip_eps_low=-0.1'),
    (dict(clip_eps_low=1.5), 'clip_eps_low=1.5'), (dict(clip_eps_high=float('nan')), 'clip_eps_high=nan'),
    (dict(kl_coef=-1), 'kl_coef=-1'), (dict(kl_coef=float('inf')), 'kl_coef=inf'),
    (dict(max_response_tokens=-5), 'max_response_tokens=-5'),
    (dict(aggregation='seq-mean-token-sum-norm'), 'max_response_tokens=0')])
def test_bad_config(kw, message):
    with pytest.raises(ValueError, match=message): LossConfig(**kw)


@pytest.mark.parametrize('change, num, cfg, message', [
    (dict(old_log_probs=None), (6, 2), {}, 'old_log_probs is None'),
    (dict(advantages=None), (6, 2), {}, 'advantages is None'),
    (dict(ref_log_probs=None), (6, 2), dict(kl_coef=.1), 'ref_log_probs is None'),
    (dict(advantages=torch.ones(2)), (6, 2), {}, r'advantages \[2\] is not aligned'),
    (dict(old_log_probs=torch.ones(2, 3)), (6, 2), {}, 'column 0 is unused'),
    (dict(), (0, 2), {}, 'num_tokens=0'), (dict(), (6, 0), {}, 'num_samples=0')])
def test_misuse(change, num, cfg, message):
    batch = replace(as_batch(HAND_MASK, HAND_ADV, torch.zeros(2, 4)), **change)
    with pytest.raises(ValueError, match=message): PolicyLoss(LossConfig(**cfg))(torch.zeros(2, 4), batch, *num)


def test_log_probs_off_by_one():
    with pytest.raises(ValueError, match=r'log_probs \[2, 3\]'):
        PolicyLoss()(torch.zeros(2, 3), as_batch(HAND_MASK, HAND_ADV, torch.zeros(2, 4)), 6, 2)


def test_aggregate_rejects_unknown_mode_and_budget():
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match="mode='sum'"): aggregate(ones, ones.bool(), 'sum', 2, 1)
    with pytest.raises(ValueError, match='max_tokens=0'): aggregate(ones, ones.bool(), 'seq-mean-token-sum-norm', 2, 1)
    with pytest.raises(ValueError, match="kind='k0'"): kl_estimate(torch.ones(1), torch.ones(1), 'k0')


def test_a_registered_loss_gets_what_it_needs():
    with patch.dict(losses.policy_losses):
        @policy_loss('entropy')
        def weighted(log_probs, old_log_probs, advantages, mask, cfg, entropy):
            return -advantages*log_probs*entropy, dict(entropy=(entropy*mask).sum())
        loss = PolicyLoss(LossConfig(name='weighted'))
        batch = as_batch(HAND_MASK, HAND_ADV, torch.zeros(2, 4))
        with pytest.raises(ValueError, match='entropy is None'): loss(torch.zeros(2, 4), batch, 6, 2)
        _, metrics = loss(torch.zeros(2, 4), replace(batch, entropy=torch.full((2, 4), .5)), 6, 2)
        assert metrics['entropy'].item() == pytest.approx(.5)
    assert 'weighted' not in losses.policy_losses
