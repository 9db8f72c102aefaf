"What the tests of several losses share: laws that any `LossFn` obeys"

import math
from dataclasses import replace

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from compassrl.records import select

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
