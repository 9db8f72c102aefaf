"Group-relative advantages: an oracle in plain Python, laws over random groups, wrong versions that they must catch"
import statistics
from math import comb

import pytest
import torch
from hypothesis import given, settings, strategies as st

from compassrl.advantages import AdvantageConfig, group_advantages, group_stats, spread, zero_variance

random = settings(deadline=None, max_examples=60, derandomize=True, report_multiple_bugs=False)


def oracle(rewards, group, valid=None, norm_std=True, eps=1e-6):
    "Python floats and loops; rewards must be multiples of 1/8 so that equality is exact"
    rewards, group = rewards.tolist(), group.tolist()
    valid = [True]*len(group) if valid is None else valid.tolist()
    out = []
    for r, g, ok in zip(rewards, group, valid):
        mine = [x for x, h, o in zip(rewards, group, valid) if h == g and o]
        if not ok or len(mine) < 2 or len(set(mine)) == 1: out.append(0.)
        else: out.append((r-statistics.fmean(mine))/(statistics.stdev(mine)+eps if norm_std else 1.))
    return torch.tensor(out)


def close(a, b, tol=1e-6): torch.testing.assert_close(a, b, rtol=tol, atol=tol, check_dtype=False)


@st.composite
def groups(draw):
    "Unequal groups, ids with gaps and of any sign, rows in any order, some samples without a verdict"
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    ids = draw(st.lists(st.integers(-50, 10**9), min_size=len(sizes), max_size=len(sizes), unique=True))
    group = draw(st.permutations([i for i, n in zip(ids, sizes) for _ in range(n)]))
    rewards = draw(st.lists(st.integers(-8, 8).map(lambda k: k/8), min_size=len(group), max_size=len(group)))
    valid = draw(st.lists(st.sampled_from([True, True, True, False]), min_size=len(group), max_size=len(group)))
    return torch.tensor(rewards), torch.tensor(group), torch.tensor(valid)


# ---- laws: each takes the implementation -------------------------------------------------------------------

def law_oracle(fn):
    @random
    @given(groups())
    def check(data):
        close(fn(*data), oracle(*data))
        close(fn(*data[:2]), oracle(*data[:2]))
    check()


def law_order(fn):
    @random
    @given(groups(), st.randoms(use_true_random=False))
    def check(data, rnd):
        r, g, v = data
        perm = list(range(len(r)))
        rnd.shuffle(perm)
        close(fn(r[perm], g[perm], v[perm]), fn(r, g, v)[perm])
    check()


def law_moments(fn):
    "Zero mean always; unit unbiased std in every group that is not flat"
    @random
    @given(groups())
    def check(data):
        r, g, v = data
        adv = fn(r, g, v).double()
        for i in g.unique():
            a = adv[(g == i) & v]
            if len(a): close(a.mean(), torch.tensor(0.))
            if a.any(): close(a.std(), torch.tensor(1.), 1e-4)
    check()


def law_affine(fn):
    @random
    @given(groups(), st.floats(.5, 20), st.floats(-5, 5))
    def check(data, scale, shift):
        r, g, v = data
        close(fn(r.double()*scale+shift, g, v), fn(r.double(), g, v), 1e-4)
    check()


def law_failed(fn):
    "A sample without a verdict gets 0 and changes nothing, whatever its reward field holds"
    @random
    @given(groups(), st.sampled_from([0., 1e9, float('nan'), float('inf')]))
    def check(data, junk):
        r, g, v = data
        adv = fn(r.masked_fill(~v, junk), g, v)
        assert (adv[~v] == 0).all()
        close(adv[v], fn(r[v], g[v]))
    check()


def law_flat(fn):
    "fp32 noise of equal rewards is exactly 0, at every scale"
    @random
    @given(st.integers(2, 16), st.floats(-100, 100, width=32), st.randoms(use_true_random=False))
    def check(n, value, rnd):
        ulp = torch.finfo(torch.float).eps*max(1., abs(value))
        r = torch.tensor([value+rnd.randint(-2, 2)*ulp for _ in range(n)], dtype=torch.double).float()
        assert (fn(r, torch.zeros(n, dtype=torch.long)) == 0).all()
    check()


LAWS = [law_oracle, law_order, law_moments, law_affine, law_failed, law_flat]


@pytest.mark.parametrize('law', LAWS, ids=lambda f: f.__name__)
def test_law(law): law(group_advantages)


# ---- mutants -----------------------------------------------------------------------------------------------

def mutant(change=lambda r, g, v: (r, g, v), after=lambda a, r, g, v: a, **kw):
    def fn(r, g, v=None):
        v = torch.ones(len(g), dtype=torch.bool) if v is None else v
        return after(group_advantages(*change(r, g, v), **kw), r, g, v)
    return fn


def population(a, r, g, v):
    s = group_stats(r, g, v)
    n = s.num[s.index]
    return (a*(n/(n-1).clamp(min=1)).sqrt()).to(a.dtype)


def biased_mean(a, r, g, v):
    s = group_stats(r, g, v)
    return torch.where(a != 0, a+.01*s.mean[s.index], 0.).to(a.dtype)


MUTANTS = dict(
    wrong_axis=mutant(lambda r, g, v: (r, torch.arange(len(g)) % len(g.unique()), v)),
    batch_baseline=mutant(lambda r, g, v: (r, 0*g, v)),
    population_std=mutant(after=population),
    biased_mean=mutant(after=biased_mean),
    failed_as_wrong=mutant(lambda r, g, v: (r.masked_fill(~v, 0.), g, torch.ones_like(v)), lambda a, r, g, v: a*v),
    failed_not_zeroed=mutant(after=lambda a, r, g, v: a.masked_fill(~v, -1.)),
    no_tolerance=mutant(tol=0., eps=0.),
    no_std=mutant(norm_std=False))


@pytest.mark.parametrize('name', MUTANTS)
def test_some_law_kills_the_mutant(name):
    def broken(law):
        try: law(MUTANTS[name])
        except AssertionError: return True
        return False
    assert any(broken(law) for law in LAWS)


# ---- numbers -----------------------------------------------------------------------------------------------

def test_worked_example():
    "Two right of eight: +1.62018 and -0.54006 with the unbiased std"
    r, g = torch.tensor([1., 1, 0, 0, 0, 0, 0, 0]), torch.zeros(8, dtype=torch.long)
    close(group_advantages(r, g), torch.tensor([1.62018]*2+[-.54006]*6), 1e-5)
    close(group_advantages(r, g, norm_std=False), torch.tensor([.75]*2+[-.25]*6), 1e-7)
    by_n = population(group_advantages(r, g), r, g, torch.ones(8, dtype=torch.bool))
    close(by_n, torch.tensor([1.73205]*2+[-.57735]*6), 1e-5)


def test_near_ties_reach_order_one():
    "Rewards {.49 .. .51}: std .01, |advantage| above 1: why near ties must be made equal before this stage"
    a = group_advantages(torch.tensor([.50, .51, .49, .50, .50, .48, .51, .50]), torch.zeros(8, dtype=torch.long))
    assert 1. < a.abs().max() < 2.5


@random
@given(groups())
def test_dr_grpo_is_unnormalised(data):
    close(group_advantages(*data, norm_std=False), oracle(*data, norm_std=False))


@pytest.mark.parametrize('p, row', [(.5, (.125, .0078, 0, 0)), (.8, (.411, .168, .028, .001)),
    (.9, (.656, .431, .185, .034)), (.95, (.815, .663, .440, .194))])
def test_zero_variance_rate_by_enumeration(p, row):
    "All N + 1 outcomes of a group, weighed by their probability"
    for N, want in zip((4, 8, 16, 32), row):
        k = torch.arange(N+1)
        silent = zero_variance((torch.arange(N) < k[:, None]).float().flatten(), k.repeat_interleave(N))
        prob = torch.tensor([comb(N, i)*p**i*(1-p)**(N-i) for i in range(N+1)])
        assert (prob*silent).sum().item() == pytest.approx(p**N+(1-p)**N, rel=1e-6)
        assert p**N+(1-p)**N == pytest.approx(want, abs=1e-3)


def test_expected_gradient_of_dr_grpo():
    "Bernoulli policy, every outcome enumerated: (1 - 1/N) of the true gradient, for every pass rate"
    p = torch.linspace(.01, .99, 21).double()
    for N in (2, 3, 8):
        correct = (torch.arange(N) < torch.arange(N+1)[:, None]).double()
        group = torch.arange(N+1).repeat_interleave(N)
        adv = group_advantages(correct.flatten(), group, norm_std=False).view(N+1, N, 1)
        prob = torch.stack([comb(N, k)*p**k*(1-p)**(N-k) for k in range(N+1)])
        close((prob*(adv*(correct[..., None]-p)).mean(1)).sum(0), (1-1/N)*p*(1-p), 1e-12)


# ---- zero_variance, spread, errors -------------------------------------------------------------------------

@random
@given(groups())
def test_zero_variance(data):
    r, g, v = data
    want = [len(set(r[(g == i) & v].tolist())) < 2 for i in g.unique()]
    assert zero_variance(r, g, v).tolist() == want
    assert ((group_advantages(r, g, v) == 0) | ~torch.tensor(want)[group_stats(r, g, v).index]).all()


def test_no_valid_sample_at_all():
    r, g = torch.full((4,), float('nan')), torch.tensor([0, 0, 1, 1])
    none = torch.zeros(4, dtype=torch.bool)
    assert (group_advantages(r, g, none) == 0).all() and zero_variance(r, g, none).all()


def test_empty_batch():
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_textbook_variance_would_miss_equal_rewards():
    r = torch.linspace(0, 1, 2001)[:, None].expand(-1, 8).contiguous()
    textbook = ((r*r).mean(1)-r.mean(1)**2).clamp(min=0).sqrt()
    assert textbook.max() > 1e-4
    assert zero_variance(r.flatten(), torch.arange(2001).repeat_interleave(8)).all()


def test_spread():
    mask = torch.tensor([[False, True, True], [False, True, False]])
    out = spread(torch.tensor([1.5, -.5], dtype=torch.double), mask)
    assert out.dtype == torch.float and out.tolist() == [[0, 1.5, 1.5], [0, -.5, 0]]


@pytest.mark.parametrize('dtype, out', [(torch.float, torch.float), (torch.double, torch.double),
    (torch.bfloat16, torch.float), (torch.long, torch.float)])
def test_dtypes(dtype, out):
    assert group_advantages(torch.tensor([1, 0, 1, 0]).to(dtype), torch.tensor([0, 0, 1, 1])).dtype == out


@pytest.mark.parametrize('args, message', [
    ((torch.ones(2, 4), torch.arange(2)), 'repeat_interleave'),
    ((torch.ones(8), torch.arange(4)), r'rewards \[8\] and group \[4\]'),
    ((torch.ones(4), torch.ones(4)), 'integer ids'),
    ((torch.ones(4), torch.ones(4, dtype=torch.long), torch.ones(4)), 'bool mask'),
    ((torch.ones(4), torch.ones(4, dtype=torch.long), torch.ones(3, dtype=torch.bool)), 'bool mask'),
    ((torch.tensor([1., float('nan')]), torch.tensor([0, 0])), r'rewards\[1\] = nan')])
def test_bad_input(args, message):
    with pytest.raises(ValueError, match=message): group_advantages(*args)


@pytest.mark.parametrize('kw', [dict(eps=-1.), dict(tol=float('nan')), dict(tol=float('inf'))])
def test_bad_config(kw):
    with pytest.raises(ValueError, match='='.join(map(str, *kw.items()))): AdvantageConfig(**kw)
