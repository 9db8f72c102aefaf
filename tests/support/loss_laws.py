"What the tests of several losses share: random batches, and laws that any `LossFn` obeys"

import math
from dataclasses import replace

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from compassrl.algo.losses import LossConfig, token_weights
from compassrl.records import Batch, select

# shrinking takes long
random = settings(deadline=None, max_examples=30, derandomize=True, phases=[Phase.generate])


# ---- losses: `make(cfg)` builds one, `batches` draws (log-probs, batch) in fp64


def close(a, b, tol=1e-13):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol, check_dtype=False)


def counts(batch):
    return int(batch.response_mask.sum()), len(batch)


def value_and_grad(loss, x, batch, *num):
    x = x.detach().clone().requires_grad_()
    value, metrics = loss(x, batch, *num)
    return value.detach(), torch.autograd.grad(value, x)[0], metrics


def split(make, batches, configs):
    """Any partition of the rows into micro-batches and ranks, in any order: values,
    gradients and metrics add up"""

    @random
    @given(batches, configs, st.data())
    def check(data, cfg, draw):
        new, batch = data
        num, B = counts(batch), len(batch)
        value, grad, metrics = value_and_grad(make(cfg), new, batch, *num)
        order = draw.draw(st.permutations(range(B)))
        # which micro-batch, or which rank
        part = draw.draw(st.lists(st.integers(0, 2), min_size=B, max_size=B))
        total, sums, got = 0.0, {}, torch.zeros_like(grad)
        for k in set(part):
            rows = [i for i in order if part[i] == k]
            b = select(batch, rows)
            T = b.token_ids.shape[1]
            v, g, m = value_and_grad(make(cfg), new[rows, :T], b, *num)
            got[torch.tensor(rows)[:, None], torch.arange(T)] = g
            total, sums = total + v, {key: sums.get(key, 0.0) + x for key, x in m.items()}
        close(total, value)
        close(got, grad)
        assert sums.keys() == metrics.keys()
        for key in sums:
            close(sums[key], metrics[key], 1e-6)

    check()


def padding(make, batches, configs, names):
    """Padding of any width and content, on both sides, NaN and infinities too: no influence,
    and a zero gradient"""

    @random
    @given(
        batches,
        configs,
        st.integers(0, 3),
        st.integers(0, 5),
        st.sampled_from([math.nan, math.inf, -math.inf, 1e30]),
    )
    def check(data, cfg, left, right, junk):
        new, batch = data
        value, grad, _ = value_and_grad(make(cfg), new, batch, *counts(batch))
        mask = batch.response_mask

        def fill(x):
            return torch.nn.functional.pad(x.masked_fill(~mask, junk), (left, right), value=junk)

        wide = batch.map(lambda t: torch.nn.functional.pad(t, (left, right)) if t.dim() == 2 else t)
        wide = replace(wide, **{k: fill(getattr(batch, k)) for k in names})
        v, g, metrics = value_and_grad(make(cfg), fill(new), wide, *counts(batch))
        close(v, value)
        close(g[:, left : left + grad.shape[1]], grad)
        assert (g[~wide.response_mask] == 0).all() and all(
            torch.isfinite(m) for m in metrics.values()
        )

    check()


PER_TOKEN = 'old_log_probs advantages ref_log_probs rollout_log_probs entropy'.split()


def packing(make, batches, configs, names):
    "Where in its row a token stands does not matter: behind any prompt, in pieces, in any order"

    @random
    @given(batches, configs, st.integers(0, 4), st.integers(0, 10**6))
    def check(data, cfg, extra, seed):
        new, batch = data
        value, grad, _ = value_and_grad(make(cfg), new, batch, *counts(batch))
        B, T = new.shape
        places = torch.rand(B, T + extra, generator=torch.Generator().manual_seed(seed))
        to = places.argsort(1)[:, :T]  # new columns

        def move(x):
            return x.new_zeros(B, T + extra).scatter(1, to, x)

        moved = replace(batch, **{k: move(getattr(batch, k)) for k in (*names, 'response_mask')})
        v, g, _ = value_and_grad(make(cfg), move(new), moved, *counts(batch))
        close(v, value)
        close(g, move(grad))

    check()


# ---- laws of every loss: `make(**settings)` builds the one of a name


@st.composite
def any_batch(draw):
    """fp64 rows of unequal prompts and responses; ratios from tiny to far; one advantage per
    response; entropies without ties"""
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    B, T = draw(st.integers(1, 6)), draw(st.integers(3, 12))
    start = torch.randint(1, T, (B, 1), generator=g)
    num = torch.randint(1, T, (B, 1), generator=g)
    mask = (torch.arange(T) >= start) & (torch.arange(T) < start + num)

    def uniform():
        return torch.rand(B, T, generator=g, dtype=torch.double)

    old, ref, rollout = (-uniform() - 0.05 for _ in range(3))
    new = old + draw(st.sampled_from([1e-3, 0.3, 2.0])) * (2 * uniform() - 1)
    return new, Batch(
        token_ids=torch.zeros(B, T, dtype=torch.long),
        token_mask=torch.ones_like(mask),
        response_mask=mask,
        rollout_log_probs=rollout,
        rewards=torch.zeros(B),
        group=torch.zeros(B, dtype=torch.long),
        advantages=torch.randn(B, 1, generator=g).double().expand(B, T) * mask,
        old_log_probs=old,
        ref_log_probs=ref,
        entropy=3 * uniform(),
    )


def any_config(name):
    return st.builds(
        LossConfig,
        name=st.just(name),
        max_response_tokens=st.just(16),
        kl_coef=st.sampled_from([0.0, 0.1]),
        tis=st.sampled_from(['off', 'truncate', 'mask']),
    )


def law_cut(make, name):
    "The loss of a batch does not depend on how it is cut into micro-batches and ranks"
    split(make, any_batch(), any_config(name))


def law_padding(make, name):
    "What stands outside the responses has no influence, whatever it is"
    padding(make, any_batch(), any_config(name), PER_TOKEN)


def law_place(make, name):
    "Where in its row a token stands does not matter"
    packing(make, any_batch(), any_config(name), PER_TOKEN)


def law_first_update(make, name):
    "At ratio 1 the gradient is that of plain policy gradient, with the loss's own average"

    @random
    @given(any_batch())
    def check(data):
        new, batch = data
        loss = make(LossConfig(name, max_response_tokens=16, tis='off'))
        x = new.clone().requires_grad_()
        value, _ = loss(x, replace(batch, old_log_probs=x), *counts(batch))
        mode = loss.cfg.aggregation
        weights = token_weights(batch.response_mask, mode, *counts(batch), 16, torch.double)
        close(torch.autograd.grad(value, x)[0], -batch.advantages * weights, 1e-6)

    check()


def law_silent(make, name):
    "Where every advantage is 0, nothing moves"

    @random
    @given(any_batch())
    def check(data):
        new, batch = data
        batch = replace(batch, advantages=0 * batch.advantages)
        loss = make(LossConfig(name, max_response_tokens=16))
        assert not value_and_grad(loss, new, batch, *counts(batch))[1].any()

    check()


def law_far(make, name):
    "However far a token has moved, value, gradient and metrics are finite"
    for distance in (-800.0, 800.0):
        for sign in (1.0, -1.0):
            one = torch.ones(1, 4, dtype=torch.bool)
            old = torch.full((1, 4), -1.0).double()
            new = old + distance * torch.tensor([[0.0, 1.0, 0.0, 0.0]])
            batch = Batch(
                token_ids=torch.zeros(1, 4, dtype=torch.long),
                token_mask=one,
                response_mask=one,
                rollout_log_probs=old,
                rewards=torch.zeros(1),
                group=torch.zeros(1, dtype=torch.long),
                advantages=sign * one.double(),
                old_log_probs=old,
                entropy=torch.tensor([[1.0, 0.5, 2.0, 0.1]]).double(),
            )
            loss = make(LossConfig(name, max_response_tokens=16))
            value, grad, metrics = value_and_grad(loss, new, batch, 4, 1)
            assert value.isfinite() and grad.isfinite().all()
            assert all(m.isfinite() for m in metrics.values())


EVERY = [law_cut, law_padding, law_place, law_first_update, law_silent, law_far]
