"""Log-probs in chunks: the whole table of logits as oracle, laws over random shapes, memory, wrong
versions to catch"""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical
from torch.utils._python_dispatch import TorchDispatchMode

from compassrl.model import log_probs as module
from compassrl.model.log_probs import dense_log_probs, token_log_probs
from tests.support.faults import noticed, planted

random = settings(deadline=None, max_examples=40, derandomize=True, phases=[Phase.generate])


def close(a, b, tol=1e-11):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@st.composite
def problems(draw):
    """fp64 hidden, head, targets, a weight per token; as keywords a temperature and a chunk of 1
    token or more"""
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    N, D, V = draw(st.integers(1, 12)), draw(st.integers(1, 5)), draw(st.integers(2, 9))
    hidden, head, w = (torch.randn(*s, generator=g).double() for s in ((N, D), (V, D), (N,)))
    kw = dict(
        temperature=draw(st.sampled_from([1.0, 0.5, 2.0])),
        max_logits=draw(st.integers(1, 2 * N * V)),
    )
    return (
        hidden,
        head * draw(st.sampled_from([1.0, 30.0])),
        torch.randint(V, (N,), generator=g),
        w,
    ), kw


def oracle(hidden, head, targets, temperature=1.0, max_logits=None):
    "torch.distributions"
    d = Categorical(logits=hidden @ head.T / temperature)
    return d.log_prob(targets), d.entropy().detach()


def run(fn, data, **kw):
    "Log-probs, entropies, and the gradients that a weight per token leaves"
    hidden, head, targets, w = data
    hidden, head = (x.detach().clone().requires_grad_() for x in (hidden, head))
    lp, entropy = fn(hidden, head, targets, **kw)
    return lp.detach(), entropy, *torch.autograd.grad((lp * w).sum(), (hidden, head))


# ---- laws: each takes the implementation
# ---------------------------------------------------------------------


def law_oracle(fn):
    @random
    @given(problems())
    def check(problem):
        data, kw = problem
        for a, b in zip(run(fn, data, **kw), run(oracle, data, **kw), strict=True):
            close(a, b)

    check()


def law_chunks(fn):
    "However it is cut: the same"

    @random
    @given(problems(), st.integers(1, 300))
    def check(problem, other):
        data, kw = problem
        for a, b in zip(run(fn, data, **kw), run(fn, data, **kw | dict(max_logits=other))):
            close(a, b)

    check()


def law_order(fn):
    "Tokens do not know of each other"

    @random
    @given(problems(), st.randoms(use_true_random=False))
    def check(problem, rnd):
        (hidden, head, y, w), kw = problem
        order = list(range(len(y)))
        rnd.shuffle(order)
        a, b = (
            run(fn, (hidden, head, y, w), **kw),
            run(fn, (hidden[order], head, y[order], w[order]), **kw),
        )
        for i in range(3):
            close(a[i][order], b[i])
        close(a[3], b[3])

    check()


def law_shift(fn):
    """Logits that all move by the same amount per token are the same distribution, and pull on no
    head row as a whole"""

    @random
    @given(problems(), st.floats(-50, 50))
    def check(problem, by):
        (hidden, head, y, w), kw = problem
        ones = torch.ones(len(y), 1, dtype=torch.double)
        wide = (
            torch.cat([hidden, ones], 1),
            torch.cat([head, torch.full((len(head), 1), by).double()], 1),
        )
        a, b = run(fn, (hidden, head, y, w), **kw), run(fn, (*wide, y, w), **kw)
        for i in range(2):
            close(a[i], b[i], 1e-10)
        close(b[3].sum(0), torch.zeros(wide[1].shape[1]).double(), 1e-10)

    check()


def law_entropy_is_a_constant(fn):
    @random
    @given(problems())
    def check(problem):
        (hidden, head, y, w), kw = problem
        hidden = hidden.requires_grad_()
        lp, entropy = fn(hidden, head, y, **kw)
        assert lp.requires_grad and not entropy.requires_grad
        (a,) = torch.autograd.grad((lp * w + entropy).sum(), hidden)
        close(a, run(fn, (hidden, head, y, w), **kw)[2])

    check()


LAWS = [law_oracle, law_chunks, law_order, law_shift, law_entropy_is_a_constant]


@pytest.mark.parametrize('law', LAWS, ids=lambda f: f.__name__)
def test_law(law):
    law(token_log_probs)


@pytest.mark.parametrize('law', LAWS, ids=lambda f: f.__name__)
def test_law_of_the_dense_version(law):
    law(lambda *a, max_logits=None, **kw: dense_log_probs(*a, **kw))


# ---- mutants: a line of the module replaced
# ------------------------------------------------------------------

MUTANTS = dict(
    sign_of_the_gradient=('.exp_().mul_(-g)', '.exp_().mul_(g)'),
    forgotten_target=(
        'd = d.scatter_add_(1, targets[at,None], g).to(h.dtype)',
        'd = d.to(h.dtype)',
    ),
    no_temperature_in_the_gradient=('grad[at,None]/ctx.temperature', 'grad[at,None]'),
    no_temperature_in_the_recomputation=(
        'd = _logits(h, head, ctx.temperature)',
        'd = _logits(h, head, 1.)',
    ),
    last_chunk_alone=('to_head.addmm_(d.mT, h)', 'to_head.copy_(d.mT @ h)'),
    targets_of_the_first_chunk=('targets.split(rows)', '[targets[:rows]] * len(hidden)'),
    entropy_in_bits=(
        'vecdot(log_probs.exp(), log_probs)',
        'vecdot(log_probs.exp(), log_probs)/.6931',
    ),
    entropy_of_logits=(
        'log_probs -= log_z\n    entropy = -torch.linalg.vecdot(log_probs.exp(), log_probs)',
        'entropy = -torch.linalg.vecdot(log_probs.softmax(-1), log_probs)\n    log_probs -= log_z',
    ),
    entropy_with_gradient=('with torch.no_grad(): entropy', 'entropy'),
)


@pytest.mark.parametrize('name', MUTANTS)
def test_some_law_kills_the_mutant(name):
    assert noticed(LAWS, planted(module, *MUTANTS[name]).token_log_probs, RuntimeError)


# ---- memory
# --------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    "The largest tensor that any operation returned"

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.numel())
        return out


def largest(fn, N=40, V=300, D=1):
    data = torch.randn(N, D), torch.randn(V, D), torch.randint(V, (N,)), torch.randn(N)
    with Largest() as mode:
        run(fn, data)
    return mode.numel


@pytest.mark.parametrize('rows', [1, 7, 39])
def test_no_more_than_a_chunk_is_ever_made(rows):
    "Forward and backward; the gradient of the head is as large as a chunk of one token"
    assert largest(lambda *a: token_log_probs(*a, max_logits=rows * 300 + 299)) == rows * 300
    assert largest(dense_log_probs) == 40 * 300


def test_a_chunk_holds_at_least_one_token():
    assert largest(lambda *a: token_log_probs(*a, max_logits=1)) == 300


def test_a_chunk_too_large_is_found_out():
    greedy = planted(
        module, 'rows = max(max_logits//V, 1)', 'rows = max(max_logits//V, 2)'
    ).token_log_probs
    assert largest(lambda *a: greedy(*a, max_logits=300)) == 600


# ---- numerics
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('max_logits', [64, 2**26])
@pytest.mark.parametrize(
    'dtype, tol', [(torch.bfloat16, 0.02), (torch.float16, 3e-3), (torch.float, 1e-5)]
)
def test_low_precision(dtype, tol, max_logits):
    """Results in fp32; values and gradients as near to fp64 as the inputs' precision allows;
    gradients in their dtype"""
    torch.manual_seed(0)
    data = torch.randn(200, 16), torch.randn(64, 16), torch.randint(64, (200,)), torch.randn(200)
    low = [x.to(dtype) if x.is_floating_point() else x for x in data]
    lp, entropy, *grads = run(token_log_probs, [*low[:3], data[3]], max_logits=max_logits)
    assert lp.dtype == entropy.dtype == torch.float and all(g.dtype == dtype for g in grads)
    exact = run(oracle, [x.double() if x.is_floating_point() else x for x in [*low[:3], data[3]]])
    for a, b in zip((lp, entropy, *grads), exact):
        assert (a.double() - b).norm() < tol * b.norm()


def test_the_head_gradient_is_summed_in_fp32():
    "1,000 chunks in bf16: as good as one"
    torch.manual_seed(0)
    data = (
        torch.randn(1000, 8).bfloat16(),
        torch.randn(16, 8).bfloat16(),
        torch.randint(16, (1000,)),
        torch.ones(1000),
    )
    exact = run(oracle, [x.double() if x.is_floating_point() else x for x in data])[3]
    for size in (1, 10**9):
        got = run(token_log_probs, data, max_logits=size)[3].double()
        assert (got - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize('max_logits', [1, 2**26])
def test_sure_tokens_are_finite(max_logits):
    "Logits of 1e4: probabilities of exactly 0 and 1"
    data = (
        torch.tensor([[1.0], [-1.0], [1.0]]),
        torch.tensor([[1e4], [-1e4]]),
        torch.tensor([0, 1, 1]),
        torch.ones(3),
    )
    lp, entropy, *grads = run(token_log_probs, data, max_logits=max_logits)
    close(lp, torch.tensor([0.0, 0.0, -2e4]))
    assert (entropy == 0).all() and all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize('frozen', ['hidden', 'head'])
def test_only_what_learns_gets_a_gradient(frozen):
    torch.manual_seed(0)
    x = dict(hidden=torch.randn(9, 4).double(), head=torch.randn(7, 4).double())
    (learns,) = (v.requires_grad_() for k, v in x.items() if k != frozen)
    y = torch.arange(9) % 7
    got, want = (
        torch.autograd.grad(fn(**x, targets=y)[0].sum(), learns)[0]
        for fn in (lambda **k: token_log_probs(**k, max_logits=1), oracle)
    )
    close(got, want)
    with torch.no_grad():
        assert not token_log_probs(**x, targets=y, max_logits=1)[0].requires_grad


def test_gradcheck():
    torch.manual_seed(0)
    h, w, y = (
        torch.randn(5, 3).double().requires_grad_(),
        torch.randn(6, 3).double().requires_grad_(),
        torch.arange(5),
    )
    assert torch.autograd.gradcheck(
        lambda h, w: token_log_probs(h, w, y, 0.7, max_logits=12)[0], (h, w)
    )


def test_no_tokens():
    lp, entropy = token_log_probs(
        torch.zeros(0, 3), torch.zeros(5, 3), torch.zeros(0, dtype=torch.long)
    )
    assert lp.shape == entropy.shape == (0,)


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(temperature=0.0), 'temperature=0.0'),
        (dict(temperature=-1.0), 'temperature=-1.0'),
        (dict(temperature=float('nan')), 'temperature=nan'),
        (dict(max_logits=0), 'max_logits=0: use at least 1'),
        (dict(targets=torch.zeros(3, dtype=torch.long)), r'targets \[3\]'),
        (dict(head=torch.zeros(5, 2)), r'head \[5, 2\]'),
    ],
)
def test_misuse(change, message):
    kw = (
        dict(
            hidden=torch.zeros(4, 3),
            head=torch.zeros(5, 3),
            targets=torch.zeros(4, dtype=torch.long),
        )
        | change
    )
    with pytest.raises(ValueError, match=message):
        token_log_probs(**kw)
