"""Group-relative advantages: an oracle in plain Python, laws over random groups,
wrong versions that they must catch"""

import statistics
from math import comb
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from compassrl.algo import advantages
from compassrl.algo.advantages import (
    AdvantageConfig,
    group_advantages,
    group_stats,
    per_token,
    zero_variance,
)

# examples are small; shrinking them would cost minutes on the mutants
random = settings(
    deadline=None,
    max_examples=60,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate],
)


def oracle(rewards, group, valid=None, estimator='grpo', eps=1e-6, floor=None):
    """Python floats and loops; rewards must be multiples of 1/8 so that equality is exact;
    `floor` maps ids to numbers"""
    rewards, group = rewards.tolist(), group.tolist()
    valid = [True] * len(group) if valid is None else valid.tolist()
    out = []
    for r, g, ok in zip(rewards, group, valid):
        mine = [x for x, h, o in zip(rewards, group, valid) if h == g and o]
        if not ok or len(mine) < 2 or len(set(mine)) == 1:
            out.append(0.0)
        elif estimator == 'rloo':
            out.append(r - (sum(mine) - r) / (len(mine) - 1))
        elif estimator == 'dr_grpo':
            out.append(r - statistics.fmean(mine))
        else:
            out.append(
                (r - statistics.fmean(mine))
                / (max(statistics.stdev(mine), (floor or {}).get(g, 0.0)) + eps)
            )
    return torch.tensor(out)


def close(a, b, tol=1e-6):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol, check_dtype=False)


@st.composite
def groups(draw):
    """Unequal groups, ids with gaps and of any sign, rows in any order,
    some samples without a verdict"""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    ids = draw(
        st.lists(st.integers(-50, 10**9), min_size=len(sizes), max_size=len(sizes), unique=True)
    )
    group = draw(st.permutations([i for i, n in zip(ids, sizes) for _ in range(n)]))
    rewards = draw(
        st.lists(st.integers(-8, 8).map(lambda k: k / 8), min_size=len(group), max_size=len(group))
    )
    valid = draw(
        st.lists(
            st.sampled_from([True, True, True, False]), min_size=len(group), max_size=len(group)
        )
    )
    return torch.tensor(rewards), torch.tensor(group), torch.tensor(valid)


# ---- laws: each takes the implementation ---------------------------------------------------------


def law_oracle(fn):
    @random
    @given(groups())
    def check(data):
        close(fn(*data), oracle(*data))
        close(fn(*data[:2]), oracle(*data[:2]))

    check()


def law_estimators(fn):
    @random
    @given(groups(), st.sampled_from(['dr_grpo', 'rloo']))
    def check(data, name):
        close(fn(*data, estimator=name), oracle(*data, estimator=name))

    check()


def law_floor(fn):
    "One number for all, or one per group in ascending order of id; the std where it is larger"

    @random
    @given(groups(), st.lists(st.sampled_from([0.0, 0.1, 0.4, 1.0]), min_size=5, max_size=5))
    def check(data, floors):
        ids = data[1].unique().tolist()
        close(fn(*data, std_floor=0.4), oracle(*data, floor=dict.fromkeys(ids, 0.4)))
        close(
            fn(*data, std_floor=torch.tensor(floors[: len(ids)])),
            oracle(*data, floor=dict(zip(ids, floors))),
        )

    check()


def law_order(fn):
    @random
    @given(
        groups(), st.randoms(use_true_random=False), st.sampled_from(['grpo', 'dr_grpo', 'rloo'])
    )
    def check(data, rnd, name):
        r, g, v = data
        perm = list(range(len(r)))
        rnd.shuffle(perm)
        close(fn(r[perm], g[perm], v[perm], estimator=name), fn(r, g, v, estimator=name)[perm])

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
            if len(a):
                close(a.mean(), torch.tensor(0.0))
            if a.any():
                close(a.std(), torch.tensor(1.0), 1e-4)

    check()


def law_affine(fn):
    @random
    @given(groups(), st.floats(0.5, 20), st.floats(-5, 5))
    def check(data, scale, shift):
        r, g, v = data
        close(fn(r.double() * scale + shift, g, v), fn(r.double(), g, v), 1e-4)

    check()


def law_failed(fn):
    "A sample without a verdict gets 0 and changes nothing, whatever its reward field holds"

    @random
    @given(groups(), st.sampled_from([0.0, 1e9, float('nan'), float('inf')]))
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
        ulp = torch.finfo(torch.float).eps * max(1.0, abs(value))
        r = torch.tensor(
            [value + rnd.randint(-2, 2) * ulp for _ in range(n)], dtype=torch.double
        ).float()
        assert (fn(r, torch.zeros(n, dtype=torch.long)) == 0).all()

    check()


LAWS = [
    law_oracle,
    law_estimators,
    law_floor,
    law_order,
    law_moments,
    law_affine,
    law_failed,
    law_flat,
]


@pytest.mark.parametrize('law', LAWS, ids=lambda f: f.__name__)
def test_law(law):
    law(group_advantages)


# ---- mutants -------------------------------------------------------------------------------------


def mutant(change=lambda r, g, v: (r, g, v), after=lambda a, r, g, v: a, **kw):
    def fn(r, g, v=None, **more):
        v = torch.ones(len(g), dtype=torch.bool) if v is None else v
        return after(group_advantages(*change(r, g, v), **more | kw), r, g, v)

    return fn


def with_constants(**changed):
    def fn(*args, **kw):
        with patch.multiple(advantages, **changed):
            return group_advantages(*args, **kw)

    return fn


def population(a, r, g, v):
    s = group_stats(r, g, v)
    n = s.num[s.index]
    return (a * (n / (n - 1).clamp(min=1)).sqrt()).to(a.dtype)


def biased_mean(a, r, g, v):
    s = group_stats(r, g, v)
    return torch.where(a != 0, a + 0.01 * s.mean[s.index], 0.0).to(a.dtype)


MUTANTS = dict(
    wrong_axis=mutant(lambda r, g, v: (r, torch.arange(len(g)) % len(g.unique()), v)),
    batch_baseline=mutant(lambda r, g, v: (r, 0 * g, v)),
    population_std=mutant(after=population),
    biased_mean=mutant(after=biased_mean),
    failed_as_wrong=mutant(
        lambda r, g, v: (r.masked_fill(~v, 0.0), g, torch.ones_like(v)), lambda a, r, g, v: a * v
    ),
    failed_not_zeroed=mutant(after=lambda a, r, g, v: a.masked_fill(~v, -1.0)),
    no_tolerance=with_constants(tolerance=0.0, std_eps=0.0),
    no_std=mutant(estimator='dr_grpo'),
    floor_missing=mutant(std_floor=0.0),
    rloo_counts_itself=lambda *a, estimator='grpo', **kw: group_advantages(
        *a, **kw, estimator='dr_grpo' if estimator == 'rloo' else estimator
    ),
    floor_by_appearance=lambda r, g, v=None, std_floor=0.0, **kw: group_advantages(
        r, g, v, **kw, std_floor=std_floor.flip(0) if torch.is_tensor(std_floor) else std_floor
    ),
    floor_added=lambda r, g, v=None, std_floor=0.0, **kw: with_constants(
        std_eps=1e-6 + float(torch.as_tensor(std_floor).max())
    )(r, g, v, **kw),
)


@pytest.mark.parametrize('name', MUTANTS)
def test_some_law_kills_the_mutant(name):
    def broken(law):
        try:
            law(MUTANTS[name])
        except (AssertionError, ValueError):
            return True
        return False

    assert any(broken(law) for law in LAWS)


# ---- numbers -------------------------------------------------------------------------------------


def test_worked_example():
    "Two right of eight: +1.62018 and -0.54006 with the unbiased std"
    r, g = torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0]), torch.zeros(8, dtype=torch.long)
    close(group_advantages(r, g), torch.tensor([1.62018] * 2 + [-0.54006] * 6), 1e-5)
    close(group_advantages(r, g, estimator='dr_grpo'), torch.tensor([0.75] * 2 + [-0.25] * 6), 1e-7)
    by_n = population(group_advantages(r, g), r, g, torch.ones(8, dtype=torch.bool))
    close(by_n, torch.tensor([1.73205] * 2 + [-0.57735] * 6), 1e-5)


def test_near_ties_reach_order_one():
    """Rewards from .48 to .51: std .01, |advantage| above 1

    Near ties must be made equal, or divided by a floor."""
    r = torch.tensor([0.50, 0.51, 0.49, 0.50, 0.50, 0.48, 0.51, 0.50])
    g = torch.zeros(8, dtype=torch.long)
    assert 1.0 < group_advantages(r, g).abs().max() < 2.5
    assert group_advantages(r, g, std_floor=0.1).abs().max() < 0.2


def test_floor_of_a_flat_group_is_still_zero():
    r, g = torch.ones(8), torch.arange(8) % 2
    for floor in (0.1, torch.tensor([0.0, 0.5])):
        assert (with_constants(std_eps=0.0)(r, g, std_floor=floor) == 0).all()


@random
@given(groups())
def test_dr_grpo_is_unnormalised(data):
    close(group_advantages(*data, estimator='dr_grpo'), oracle(*data, estimator='dr_grpo'))


@pytest.mark.parametrize(
    'p, row',
    [
        (0.5, (0.125, 0.0078, 0, 0)),
        (0.8, (0.411, 0.168, 0.028, 0.001)),
        (0.9, (0.656, 0.431, 0.185, 0.034)),
        (0.95, (0.815, 0.663, 0.440, 0.194)),
    ],
)
def test_zero_variance_rate_by_enumeration(p, row):
    "All N + 1 outcomes of a group, weighed by their probability"
    for N, want in zip((4, 8, 16, 32), row):
        k = torch.arange(N + 1)
        silent = zero_variance(
            (torch.arange(N) < k[:, None]).float().flatten(), k.repeat_interleave(N)
        )
        prob = torch.tensor([comb(N, i) * p**i * (1 - p) ** (N - i) for i in range(N + 1)])
        assert (prob * silent).sum().item() == pytest.approx(p**N + (1 - p) ** N, rel=1e-6)
        assert p**N + (1 - p) ** N == pytest.approx(want, abs=1e-3)


@pytest.mark.parametrize('name', ['dr_grpo', 'rloo'])
def test_expected_gradient(name):
    """Bernoulli policy, every outcome enumerated: Dr.GRPO (1 - 1/N) of the true gradient,
    leave-one-out all of it"""
    p = torch.linspace(0.01, 0.99, 21).double()
    for N in (2, 3, 8):
        correct = (torch.arange(N) < torch.arange(N + 1)[:, None]).double()
        group = torch.arange(N + 1).repeat_interleave(N)
        adv = group_advantages(correct.flatten(), group, estimator=name).view(N + 1, N, 1)
        prob = torch.stack([comb(N, k) * p**k * (1 - p) ** (N - k) for k in range(N + 1)])
        share = dict(dr_grpo=1 - 1 / N, rloo=1)[name]
        close((prob * (adv * (correct[..., None] - p)).mean(1)).sum(0), share * p * (1 - p), 1e-12)


# ---- zero_variance, spread, errors ---------------------------------------------------------------


@random
@given(groups())
def test_zero_variance(data):
    r, g, v = data
    want = [len(set(r[(g == i) & v].tolist())) < 2 for i in g.unique()]
    assert zero_variance(r, g, v).tolist() == want
    assert (
        (group_advantages(r, g, v) == 0) | ~torch.tensor(want)[group_stats(r, g, v).index]
    ).all()


def test_rewards_that_differ_by_the_tolerance_are_equal():
    "By no more: the limit itself is flat, and without a tolerance equal rewards still are"
    g = torch.zeros(2, dtype=torch.long)
    for scale in (1, 1000):
        at = torch.tensor([0.0, 1.0]).double() * advantages.tolerance * scale
        assert zero_variance(at, g).item() == (scale == 1)
    near = torch.tensor([1000.0, 1000.0 + 900 * advantages.tolerance]).double()
    assert zero_variance(near, g).item(), 'the tolerance is relative above 1'
    with patch.object(advantages, 'tolerance', 0.0):
        assert zero_variance(torch.tensor([0.3, 0.3]), g).item()


def test_no_valid_sample_at_all():
    r, g = torch.full((4,), float('nan')), torch.tensor([0, 0, 1, 1])
    none = torch.zeros(4, dtype=torch.bool)
    assert (group_advantages(r, g, none) == 0).all() and zero_variance(r, g, none).all()


def test_empty_batch():
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_textbook_variance_would_miss_equal_rewards():
    r = torch.linspace(0, 1, 2001)[:, None].expand(-1, 8).contiguous()
    textbook = ((r * r).mean(1) - r.mean(1) ** 2).clamp(min=0).sqrt()
    assert textbook.max() > 1e-4
    assert zero_variance(r.flatten(), torch.arange(2001).repeat_interleave(8)).all()


def test_spread():
    mask = torch.tensor([[False, True, True], [False, True, False]])
    out = per_token(torch.tensor([1.5, -0.5], dtype=torch.double), mask)
    assert out.dtype == torch.float and out.tolist() == [[0, 1.5, 1.5], [0, -0.5, 0]]


@pytest.mark.parametrize(
    'dtype, out',
    [
        (torch.float, torch.float),
        (torch.double, torch.double),
        (torch.bfloat16, torch.float),
        (torch.long, torch.float),
    ],
)
def test_dtypes(dtype, out):
    assert (
        group_advantages(torch.tensor([1, 0, 1, 0]).to(dtype), torch.tensor([0, 0, 1, 1])).dtype
        == out
    )


@pytest.mark.parametrize(
    'args, message',
    [
        ((torch.ones(2, 4), torch.arange(2)), 'repeat_interleave'),
        ((torch.ones(8), torch.arange(4)), r'rewards \[8\] and group \[4\]'),
        ((torch.ones(4), torch.ones(4)), 'integer ids'),
        ((torch.ones(4), torch.ones(4, dtype=torch.long), torch.ones(4)), 'bool mask'),
        (
            (torch.ones(4), torch.ones(4, dtype=torch.long), torch.ones(3, dtype=torch.bool)),
            'bool mask',
        ),
        ((torch.tensor([1.0, float('nan')]), torch.tensor([0, 0])), r'rewards\[1\] = nan'),
        ((torch.ones(2), torch.arange(2), None, 'grppo'), "estimator='grppo': use one of"),
        (
            (torch.ones(2), torch.arange(2), None, 'grpo', torch.ones(3)),
            r'std_floor \[3\]: .* \[2\]',
        ),
        ((torch.ones(2), torch.arange(2), None, 'grpo', -0.1), r'std_floor=-0.1: use 0 or more'),
        ((torch.ones(2), torch.arange(2), None, 'grpo', float('nan')), r'std_floor=nan'),
    ],
)
def test_bad_input(args, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(*args)


def test_unknown_estimator_in_the_config():
    with pytest.raises(ValueError, match="estimator='z': use one of 'grpo', 'dr_grpo', 'rloo'"):
        AdvantageConfig('z')
