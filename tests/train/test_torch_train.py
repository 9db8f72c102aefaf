"Promise 4: nothing depends on micro-batches, order, padding or the split over ranks (in fp64)"

import math
import re
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from compassrl.algo.losses import LossConfig, PolicyLoss
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.records import Sample, collate, micro_batches, select
from compassrl.train.torch_train import (
    OptimConfig,
    TorchTrain,
    accumulate_grads,
    clip_and_step,
    response_log_probs,
)

random = settings(
    deadline=None, max_examples=12, derandomize=True, phases=(Phase.explicit, Phase.generate)
)  # wrong versions need no smallest example
CONFIG = PolicyConfig(
    vocab_size=13,
    hidden_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    moe_intermediate_size=8,
    num_experts=4,
    max_position_embeddings=32,
)
LOSSES = dict(
    grpo=PolicyLoss(LossConfig(tis='off')),
    token_mean=PolicyLoss(LossConfig(aggregation='token-mean')),
    kl=PolicyLoss(
        LossConfig(aggregation='seq-mean-token-sum-norm', max_response_tokens=9, kl_coef=0.1)
    ),
)


def policy(seed=0, dtype=torch.double, scale=10):
    p = Policy(CONFIG, seed).to(dtype)
    with torch.no_grad():
        for w in p.parameters():
            w.mul_(scale if w.dim() > 1 else 1)
    return p


@st.composite
def batches(draw, max_rows=6):
    "Random tokens, routes (some invalid), old log-probs and advantages"
    sizes = draw(
        st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=2, max_size=max_rows)
    )
    return make(sizes, draw(st.integers(0, 10**6)))


def make(sizes, seed=0):
    g = torch.Generator().manual_seed(seed)

    def one(i, Tp, Tr):
        T = Tp + Tr
        ids = torch.randint(0, 13, (T,), generator=g).tolist()
        routes = (
            torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(2 * (T - 1))])
            .view(T - 1, 2, 2)
            .to(torch.uint8)
        )
        return Sample(
            f'p{i // 2}',
            i,
            ids[:Tp],
            ids[Tp:],
            -torch.rand(Tr, generator=g) * 3,
            routes,
            torch.rand(T - 1, generator=g) > 0.3,
            'stop',
            0,
        )

    b = collate([one(i, *s) for i, s in enumerate(sizes)])

    def noise():
        return torch.randn(b.token_ids.shape, generator=g) * b.response_mask

    return replace(
        b,
        advantages=noise(),
        old_log_probs=b.rollout_log_probs + 0.1 * noise(),
        ref_log_probs=b.rollout_log_probs + 0.3 * noise(),
    )


BATCH = make([(2, 5), (1, 1), (4, 9), (1, 3), (3, 7)])


def grads(p):
    return torch.cat([w.grad.flatten() for w in p.parameters()])


def run(b, loss, max_tokens=10**6, accumulate=accumulate_grads):
    p = policy()
    metrics, _ = accumulate(p, b, loss, max_tokens)
    return (
        grads(p),
        metrics['loss'].double(),
        torch.stack([v.double() for k, v in sorted(metrics.items()) if k != 'loss']),
    )


def agree(got, want, tol=1e-12):
    "Gradient and loss to the last digits of fp64; the other metrics are fp32 fractions of counts"
    scale = max(1.0, want[0].abs().max().item())
    for a, b, t in zip(got, want, (tol, tol, 1e-6)):
        torch.testing.assert_close(a, b, rtol=t, atol=t * scale)


def naive(p, b, i, temperature=1.0, replay=True):
    "Log-probs and entropies of the response of row i: no padding, no packing, one token at a time"
    real = b.token_mask[i]
    ids, n = b.token_ids[i][real], int(real.sum())
    routes = (
        (b.routed_experts[i][real][None], b.routes_valid[i][real][None]) if replay else (None, None)
    )
    hidden, _ = p(ids[None], None, *routes)
    out = []
    for t in b.response_mask[i].nonzero()[:, 0].tolist():
        logits = (p.head @ hidden[t - 1]) / temperature
        probs = logits.exp() / logits.exp().sum()
        out.append((probs[ids[t]].log(), -(probs * probs.log()).sum()))
    return n, *(torch.stack(v) for v in zip(*out))


# ---- log-probs


@random
@given(batches(), st.sampled_from([0.5, 1.0, 1.7]), st.booleans())
def test_log_probs_equal_the_loop(b, temperature, replay):
    p = policy()
    got, entropy = response_log_probs(p, b, temperature, replay)
    assert (
        got.dtype == entropy.dtype == torch.double
        and got.requires_grad
        and not entropy.requires_grad
    )
    assert (got[~b.response_mask] == 0).all() and (entropy[~b.response_mask] == 0).all()
    for i in range(len(b)):
        _, log_probs, h = naive(p, b, i, temperature, replay)
        torch.testing.assert_close(got[i][b.response_mask[i]], log_probs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(entropy[i][b.response_mask[i]], h, rtol=1e-12, atol=1e-12)


class Counted(TorchTrain):
    "Counts the forward passes of its policy"

    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.passes = 0
        self.policy.register_forward_hook(self.count)

    def count(self, *args):
        self.passes += 1


def entropy_loss(log_probs, batch, num_tokens, num_samples):
    "Of the old policy, too: what `score` has found is in it"
    ratio = (log_probs - batch.old_log_probs).exp() * batch.entropy
    return (ratio * batch.response_mask).sum() / num_tokens, {}


def stepped(change=lambda e, b: b, replay='R3', **optim):
    "Score, perhaps a change, update -> passes of the update, weights, and what the loss saw"
    engine = Counted(
        policy(), OptimConfig(**dict(lr=1e-2, micro_batch_tokens=10**6) | optim), 1.3, replay
    )
    scored = replace(BATCH, **engine.score(BATCH))
    scored = change(engine, scored)
    before = engine.passes
    _, seen = engine.update(scored, entropy_loss)
    return engine.passes - before, list(engine.policy.parameters()), seen['log_probs']


def copied(engine, batch):
    return replace(batch, token_ids=batch.token_ids.clone())


@pytest.mark.parametrize('replay', ['off', 'R2', 'R3'])
def test_one_pass_is_enough_for_a_batch_that_is_one_micro_batch(replay):
    "The same step to the last bit as that of an engine which computes again"
    (none, kept, saw), (one, anew, seen) = stepped(replay=replay), stepped(copied, replay)
    assert (none, one) == (0, 1) and torch.equal(saw, seen)
    assert all(torch.equal(p, q) for p, q in zip(kept, anew, strict=True))


def moved(engine, batch):
    with torch.no_grad():
        engine.policy.embed.add_(0.01)
    return batch


def loaded(engine, batch):
    engine.load_state_dict(TorchTrain(policy(3), engine.config).state_dict())
    return batch


def rerouted(engine, batch):
    return replace(batch, routed_experts=batch.routed_experts.flip(-1).clone())


def updated(engine, batch):
    engine.update(batch, entropy_loss)
    return batch


def learned_elsewhere(engine, batch):
    "A fused step does not raise the version of a weight by itself"
    accumulate_grads(engine.policy, batch, entropy_loss, 10**6)
    engine.optimizer.step()
    return batch


def swapped(engine, batch):
    for p in engine.policy.parameters():
        p.data = 1.01 * p.data
    return batch


def hotter(engine, batch):
    engine.temperature = 2.0
    return batch


CHANGES = [copied, moved, loaded, rerouted, updated, learned_elsewhere, swapped, hotter]


@pytest.mark.parametrize('change', CHANGES)
def test_a_pass_is_not_used_after_a_change(change):
    "Weights, tokens or routes: the loss sees what the engine computes now"
    seen = []

    def noted(engine, batch):
        batch = change(engine, batch)
        with torch.no_grad():
            seen.append(response_log_probs(engine.policy, batch, engine.temperature)[0])
        return batch

    passes, _, saw = stepped(noted)
    assert passes == 1
    torch.testing.assert_close(saw, seen[0].float())


def test_a_pass_is_kept_for_one_update_of_one_micro_batch_alone():
    sizes = dict(num_mini_batches=2), dict(micro_batch_tokens=20)
    for optim in sizes:
        engine = Counted(policy(), OptimConfig(**optim))
        engine.score(BATCH)
        assert engine.last_pass is None, optim
    frozen = Counted(policy().requires_grad_(False), OptimConfig())
    frozen.score(BATCH)
    assert frozen.last_pass is None
    engine = TorchTrain(policy(), OptimConfig())
    engine.score(BATCH)
    assert engine.last_pass and deepcopy(engine).last_pass is None


def test_the_future_has_no_influence():
    "Token t's log-prob is the same whatever comes after it, and changes with what came before"
    p, t = policy(), 6
    base = response_log_probs(p, BATCH)[0][2]
    for change, differs in ((t + 1, False), (t - 1, True)):
        ids = BATCH.token_ids.clone()
        ids[2, change] = (ids[2, change] + 1) % 13
        got = response_log_probs(p, replace(BATCH, token_ids=ids))[0][2, t]
        # other experts may have another number of rows, and their product another last bit
        assert bool((got - base[t]).abs() > 1e-12) == differs


@pytest.mark.parametrize('max_tokens', [1, 20, 10**6])
@pytest.mark.parametrize('temperature', [1.0, 0.7])
def test_engine_log_probs(max_tokens, temperature):
    e = TorchTrain(policy(), OptimConfig(micro_batch_tokens=max_tokens), temperature)
    scores = e.score(BATCH)
    log_probs, entropy = scores['old_log_probs'], scores['entropy']
    assert log_probs.dtype == torch.float and not log_probs.requires_grad
    for got, want in zip((log_probs, entropy), response_log_probs(e.policy, BATCH, temperature)):
        torch.testing.assert_close(got, want.float(), rtol=1e-6, atol=1e-6)


def test_bf16_weights_give_fp32_log_probs():
    "Temperature and softmax are computed in fp32 whatever the weights are"
    p = policy(dtype=torch.bfloat16)
    got, entropy = response_log_probs(p, BATCH, 0.7)
    hidden, _ = p(BATCH.token_ids, BATCH.token_mask, BATCH.routed_experts, BATCH.routes_valid)
    at = BATCH.response_mask[BATCH.token_mask].nonzero()[:, 0]
    logits = p.logits(hidden[at - 1]).float() / 0.7
    want = logits.log_softmax(-1).gather(-1, BATCH.token_ids[BATCH.response_mask][:, None])[:, 0]
    assert got.dtype == entropy.dtype == torch.float
    torch.testing.assert_close(got[BATCH.response_mask], want, rtol=1e-6, atol=1e-6)


# ---- replay


def own_routes(b):
    "The routes that the policy takes by itself"
    own = torch.zeros_like(b.routed_experts)
    own[b.token_mask] = policy()(b.token_ids, b.token_mask)[1].to(own.dtype)
    return replace(b, routed_experts=own, routes_valid=b.token_mask.clone())


def test_own_routes_change_nothing():
    b = own_routes(BATCH)
    agree(
        run(b, LOSSES['grpo'], accumulate=lambda *a: accumulate_grads(*a, replay=True)),
        run(b, LOSSES['grpo'], accumulate=lambda *a: accumulate_grads(*a, replay=False)),
    )


def test_bf16_passes_over_fp32_masters_give_the_gradient_of_fp32():
    "Routes are given: a router that is free may choose another expert"
    found = []
    for dtype in (torch.float, torch.bfloat16):
        p = policy(dtype=torch.float, scale=3)
        p.compute_dtype = dtype
        accumulate_grads(p, own_routes(BATCH), LOSSES['grpo'], 10**6)
        assert {w.dtype for w in p.parameters()} == {torch.float}
        found.append(grads(p))
    off = float((found[1] - found[0]).norm() / found[0].norm())
    assert 1e-4 < off < 2e-2, off


def test_other_routes_do_and_only_where_valid():
    p, b = policy(), own_routes(BATCH)
    other = replace(b, routed_experts=(b.routed_experts + 1) % 4)
    live = response_log_probs(p, b)[0]
    assert (response_log_probs(p, other)[0] - live).abs().max() > 1e-3
    for same in (
        replace(other, routes_valid=torch.zeros_like(b.routes_valid)),
        replace(other, routed_experts=None, routes_valid=None),
    ):
        assert torch.equal(response_log_probs(p, same)[0], live)
    assert torch.equal(response_log_probs(p, other, replay=False)[0], live)


def test_replayed_routers_still_learn():
    p = policy()
    accumulate_grads(p, BATCH, LOSSES['grpo'], 20)
    assert all(b.mlp.router.grad.abs().max() > 0 for b in p.blocks)


def test_engine_replays_or_not():
    losses = [
        TorchTrain(policy(), OptimConfig(), replay=r).update(BATCH, LOSSES['grpo'])[0]['loss']
        for r in ('R3', 'off')
    ]
    assert losses[0] != losses[1]


# ---- the gradient


def law_naive(accumulate):
    @random
    @given(batches())
    def check(b):
        p = policy()
        adv, old = b.advantages.double(), b.old_log_probs.double()
        total = 0.0
        for i in range(len(b)):
            m = b.response_mask[i]
            ratio = (naive(p, b, i)[1] - old[i][m]).exp()
            total = total - torch.minimum(
                ratio * adv[i][m], ratio.clamp(0.8, 1.2) * adv[i][m]
            ).mean() / len(b)
        total.backward()
        agree(run(b, LOSSES['grpo'], 30, accumulate)[:2], (grads(p), total.detach()), 1e-11)

    check()


def law_split(accumulate):
    @random
    @given(batches(), st.integers(1, 60), st.sampled_from(sorted(LOSSES)))
    def check(b, n, name):
        agree(run(b, LOSSES[name], n, accumulate), run(b, LOSSES[name]))

    check()


def law_order(accumulate):
    @random
    @given(batches(), st.randoms(use_true_random=False))
    def check(b, rnd):
        rows = list(range(len(b)))
        rnd.shuffle(rows)
        agree(run(select(b, rows), LOSSES['kl'], 20, accumulate), run(b, LOSSES['kl']))

    check()


def law_padding(accumulate):
    "More columns, with junk in them"

    @random
    @given(batches(), st.integers(1, 5))
    def check(b, extra):
        def junk(t):
            new = torch.full_like(t[:, :1], {torch.bool: 0, torch.long: 7}.get(t.dtype, 3)).repeat(
                1, extra, *[1] * (t.dim() - 2)
            )
            return torch.cat([t, new], 1)

        wide = b.map(lambda t: t if t.dim() == 1 else junk(t))
        agree(run(wide, LOSSES['grpo'], 10**6, accumulate), run(b, LOSSES['grpo']))

    check()


def law_ranks(accumulate):
    "Two ranks, each with some rows and the counts of all: gradients and metrics add up"

    @random
    @given(batches(), st.sampled_from(sorted(LOSSES)), st.integers(1, 40), st.data())
    def check(b, name, n, data):
        N, B = int(b.response_mask.sum()), len(b)
        k = data.draw(st.integers(1, B - 1))

        def rank(rows):
            return run(
                select(b, rows), lambda lp, part, *_: LOSSES[name](lp, part, N, B), n, accumulate
            )

        parts = [rank(list(range(k))), rank(list(range(k, B)))]
        agree([sum(x) for x in zip(*parts)], run(b, LOSSES[name]))

    check()


LAWS = [law_naive, law_split, law_order, law_padding, law_ranks]


@pytest.mark.parametrize('law', LAWS, ids=lambda f: f.__name__)
def test_law(law):
    law(accumulate_grads)


def faulty(
    log_probs_of=response_log_probs,
    counts=lambda whole, part: whole,
    keep=lambda parts: parts,
    scale=lambda parts: 1,
):
    def accumulate(p, b, loss, max_tokens):
        p.zero_grad()
        total, parts = {}, keep(micro_batches(b, max_tokens))
        for rows in parts:
            part = select(b, rows)
            c = counts(b, part)
            value, extra = loss(log_probs_of(p, part)[0], part, int(c.response_mask.sum()), len(c))
            (value * scale(parts)).backward()
            for k, v in extra.items():
                total[k] = total.get(k, 0) + v * scale(parts)
        return total, None

    return accumulate


def same_row(p, b, **kw):
    hidden, _ = p(b.token_ids, b.token_mask, b.routed_experts, b.routes_valid)
    logits = p.logits(hidden).log_softmax(-1)
    chosen = logits.gather(-1, b.token_ids[b.token_mask][:, None])[:, 0]
    return chosen.new_zeros(b.token_mask.shape).masked_scatter(
        b.token_mask, chosen
    ) * b.response_mask, None


def late_routes(p, b, **kw):
    return response_log_probs(
        p,
        replace(
            b, routed_experts=b.routed_experts.roll(1, 1), routes_valid=b.routes_valid.roll(1, 1)
        ),
    )


def padded(p, b, **kw):
    "Padding seen as tokens: a mean over columns instead of tokens"
    return response_log_probs(p, b)[0] * b.token_ids.shape[1] / 12, None


MUTANTS = dict(
    off_by_one=faulty(same_row),
    late_routes=faulty(late_routes),
    no_replay=faulty(lambda p, b: response_log_probs(p, b, replay=False)),
    mean_of_means=faulty(counts=lambda whole, part: part, scale=lambda parts: 1 / len(parts)),
    local_counts=faulty(counts=lambda whole, part: part),
    drops_the_last=faulty(keep=lambda parts: parts[:-1] or parts),
    counts_columns=faulty(padded),
    averages_the_parts=faulty(scale=lambda parts: 1 / len(parts)),
)


def test_the_faulty_frame_is_right_without_a_fault():
    for law in LAWS:
        law(faulty())


@pytest.mark.parametrize('name', MUTANTS)
def test_some_law_kills_the_mutant(name):
    def broken(law):
        try:
            law(MUTANTS[name])
        except (AssertionError, BaseExceptionGroup):
            return True
        return False

    assert any(broken(law) for law in LAWS)


# ---- contracts


def test_what_a_loss_is_given():
    "Rows with all their tensors, log-probs with a gradient, and the counts of the whole mini-batch"
    seen = []

    def spy(log_probs, part, num_tokens, num_samples):
        assert (
            log_probs.requires_grad
            and log_probs.shape == part.token_ids.shape
            and (log_probs[~part.response_mask] == 0).all()
        )
        assert (num_tokens, num_samples) == (int(BATCH.response_mask.sum()), len(BATCH))
        seen.append(part.advantages.sum().item())
        return log_probs.sum() / num_tokens, dict(
            rows=torch.tensor(float(len(part))), tokens=part.response_mask.sum() / num_tokens
        )

    m, _ = accumulate_grads(policy(), BATCH, spy, 20)
    assert len(seen) == len(micro_batches(BATCH, 20)) > 2 and sum(seen) == pytest.approx(
        BATCH.advantages.sum().item(), abs=1e-5
    )
    assert m['rows'] == len(BATCH) and m['tokens'] == pytest.approx(1)


def test_the_loss_that_is_reported_is_the_one_that_is_minimised():
    m, _ = accumulate_grads(policy(), BATCH, lambda lp, b, n, B: (lp.sum() / n, {}), 20)
    assert m['loss'] == pytest.approx(
        (response_log_probs(policy(), BATCH)[0].sum() / BATCH.response_mask.sum()).item(), rel=1e-12
    )


@pytest.mark.parametrize('num', [1, 2])
def test_an_update_says_what_the_loss_saw(num):
    "`log_probs` are those of the weights that each mini-batch met"
    e, b = TorchTrain(policy(), OptimConfig(num_mini_batches=num, micro_batch_tokens=20)), BATCH
    first = e.score(b)['old_log_probs']
    seen = e.update(b, LOSSES['grpo'], lr=0.01)[1]['log_probs']
    assert seen.shape == b.token_ids.shape and not seen.requires_grad
    half = len(b) if num == 1 else 3
    torch.testing.assert_close(seen[:half], first[:half])
    if num == 2:
        assert (seen[half:] - first[half:]).abs().max() > 1e-4


# ---- update


def nll(log_probs, batch, num_tokens, num_samples):
    return -log_probs.sum() / num_tokens, {}


@pytest.mark.parametrize('rows, num, want', [(4, 2, 2), (5, 2, 2), (5, 4, 4), (5, 1, 1), (2, 5, 2)])
def test_one_step_per_mini_batch(rows, num, want):
    "Also where the batch cannot be divided evenly; never an empty one"
    e = TorchTrain(policy(), OptimConfig(num_mini_batches=num))
    e.update(select(BATCH, list(range(rows))), nll)
    assert e.num_steps == want == int(e.optimizer.state[e.policy.embed]['step'])


def test_mini_batches_are_steps():
    "Two mini-batches at once = one after the other; metrics are their mean"
    a, b = (TorchTrain(policy(), OptimConfig(num_mini_batches=n)) for n in (2, 1))
    both, _ = a.update(BATCH, nll)
    parts = [b.update(select(BATCH, rows), nll)[0] for rows in ([0, 1, 2], [3, 4])]
    assert all(torch.equal(p, q) for p, q in zip(a.policy.parameters(), b.policy.parameters()))
    assert both == pytest.approx({k: (parts[0][k] + parts[1][k]) / 2 for k in both}, rel=1e-12)


def test_metrics_are_means_over_the_updates_that_were_made():
    "More mini-batches asked for than there are rows: three updates, and means over three"
    e = TorchTrain(policy(), OptimConfig(num_mini_batches=8))
    m, _ = e.update(select(BATCH, [0, 1, 2]), nll, lr=0.25)
    assert e.num_steps == 3 and m['lr'] == pytest.approx(0.25) and m['weights_finite'] == 1


def test_rows_without_a_response():
    b = replace(BATCH, response_mask=BATCH.response_mask.clone())
    b.response_mask[1:] = False
    e = TorchTrain(policy(), OptimConfig(micro_batch_tokens=1))
    assert e.update(b, nll)[0]['loss'] == pytest.approx(
        TorchTrain(policy(), OptimConfig()).update(select(BATCH, [0]), nll)[0]['loss'], rel=1e-12
    )
    b.response_mask[:] = False
    assert e.update(b, nll)[0] == {} and e.num_steps == 1, 'nothing to learn from is no step'


def test_warm_up_and_given_lr():
    c = OptimConfig(lr=0.1, warmup_steps=3)
    e = TorchTrain(policy(), c)
    assert [e.update(BATCH, nll)[0]['lr'] for _ in range(5)] == pytest.approx(
        [0.025, 0.05, 0.075, 0.1, 0.1]
    )
    assert e.update(BATCH, nll, lr=0.5)[0]['lr'] == 0.5 and [
        c.lr_at(i) for i in (0, 3, 1000)
    ] == pytest.approx([0.025, 0.1, 0.1])


def test_learning_rate_falls_to_the_end_of_a_run():
    c = OptimConfig(lr=0.1, warmup_steps=1, final_lr_frac=0.2)
    assert [c.lr_at(i, i / 4) for i in range(5)] == pytest.approx([0.05, 0.08, 0.06, 0.04, 0.02])
    assert c.lr_at(3) == 0.1, 'of unknown length'
    constant = replace(c, final_lr_frac=1.0)
    assert [constant.lr_at(i, i / 4) for i in range(4)] == [constant.lr_at(i) for i in range(4)]
    with pytest.raises(ValueError, match='final_lr_frac=1.5'):
        replace(c, final_lr_frac=1.5)


def moves(a, b):
    return torch.cat(
        [(p - q).detach().abs().flatten() for p, q in zip(a.parameters(), b.parameters())]
    )


def test_the_first_step_has_the_size_of_lr():
    for scale in (1e-3, 1, 1e3):
        e = TorchTrain(policy(), OptimConfig(grad_clip=0.0))
        e.update(BATCH, lambda *a: (scale * nll(*a)[0], {}), lr=1e-4)
        g = grads(e.policy).abs()
        torch.testing.assert_close(
            moves(e.policy, policy())[g > 1e-5],
            torch.full((int((g > 1e-5).sum()),), 1e-4, dtype=torch.double),
            rtol=2e-3,
            atol=0,
        )


@pytest.mark.parametrize('clip', [0.0, 1e-3, 1e9])
def test_clipping(clip):
    p = policy()
    accumulate_grads(p, BATCH, nll, 100)
    before = grads(p)
    m = clip_and_step(p, torch.optim.SGD(p.parameters()), 0.0, clip)
    assert m['grad_norm'] == pytest.approx(before.norm().item(), rel=1e-9)
    torch.testing.assert_close(
        grads(p), before * (clip / before.norm() if clip == 1e-3 else 1), rtol=1e-2, atol=0
    )


def test_weight_decay_spares_the_norms():
    "With no gradient at all, matrices shrink and norms stay"
    e = TorchTrain(policy(), OptimConfig(weight_decay=0.5))
    e.update(BATCH, lambda lp, *_: (0 * lp.sum(), {}), lr=0.1)
    for p, q in zip(e.policy.parameters(), policy().parameters()):
        torch.testing.assert_close(p, q * (0.95 if p.dim() > 1 else 1.0), rtol=1e-9, atol=0)


@pytest.mark.parametrize('bad', [float('nan'), float('inf')])
def test_gradients_that_are_not_finite_are_skipped_and_counted(bad):
    "One bad number in one micro-batch of one of two mini-batches: the other one is a step"

    def loss(lp, b, n, B):
        return nll(lp, b, n, B)[0] * (
            bad if (b.token_ids[:, 0] == BATCH.token_ids[4, 0]).all() and len(b) == 1 else 1
        ), {}

    c = OptimConfig(num_mini_batches=2, micro_batch_tokens=1)
    rows = [i for i in range(4) if BATCH.token_ids[i, 0] != BATCH.token_ids[4, 0]]
    e, clean = TorchTrain(policy(), c), TorchTrain(policy(), replace(c, num_mini_batches=1))
    m, _ = e.update(select(BATCH, [*rows[:2], 3, 4]), loss)
    assert m['skipped_frac'] == 0.5 and e.num_steps == 2
    clean.update(select(BATCH, rows[:2]), nll)
    assert all(torch.equal(p, q) for p, q in zip(e.policy.parameters(), clean.policy.parameters()))
    assert TorchTrain(policy(), c).update(BATCH, nll)[0]['skipped_frac'] == 0


@pytest.mark.parametrize('constant', [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_skipped_though_its_gradient_is(constant):
    e = TorchTrain(policy(), OptimConfig(micro_batch_tokens=1))

    def loss(lp, b, n, B):
        one = (b.token_ids[:, 0] == BATCH.token_ids[4, 0]).all()
        return nll(lp, b, n, B)[0] + (constant if one else 0.0), {}

    m, _ = e.update(BATCH, loss)
    assert m['skipped_frac'] == 1 and not math.isfinite(m['loss']) and m['weights_finite'] == 1
    assert all(torch.equal(p, q) for p, q in zip(e.policy.parameters(), policy().parameters()))


def test_an_engine_says_that_its_weights_have_overflowed():
    e = TorchTrain(policy(0, torch.float), OptimConfig(grad_clip=0.0))
    assert e.update(BATCH, nll, lr=1e-3)[0]['weights_finite'] == 1
    m, _ = e.update(BATCH, nll, lr=1e30)
    assert m['weights_finite'] == 0 and m['skipped_frac'] == 0, 'the gradient was fine'
    with pytest.raises(ValueError, match='^model.embed_tokens.weight is not finite'):
        TorchTrain(e.policy, OptimConfig())


# ---- resume

CFG = OptimConfig(
    lr=0.01, warmup_steps=5, num_mini_batches=2, micro_batch_tokens=30, weight_decay=0.1
)


def steps(e, num):
    return [e.update(BATCH, LOSSES['kl'])[0] for _ in range(num)]


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.policy.parameters(), b.policy.parameters()))


@pytest.mark.parametrize('dtype', [torch.float, torch.double])
def test_resume_is_bitwise(dtype, tmp_path):
    through, first, second = (TorchTrain(policy(seed, dtype), CFG) for seed in (0, 0, 5))
    curve = steps(through, 5)
    steps(first, 2)
    torch.save(first.state_dict(), tmp_path / 'state.pt')
    second.load_state_dict(torch.load(tmp_path / 'state.pt', weights_only=True))
    assert steps(second, 3) == curve[2:] and same(second, through)


def test_loading_leaves_the_source_alone():
    "Two engines with one past have two futures"
    a, b = TorchTrain(policy(), CFG), TorchTrain(policy(5), CFG)
    steps(a, 2)
    state = deepcopy(a.state_dict())
    b.load_state_dict(a.state_dict())
    steps(b, 3)
    alone = TorchTrain(policy(5), CFG)
    alone.load_state_dict(state)
    assert steps(a, 2) == steps(alone, 2) and same(a, alone)


def test_weights_by_public_names():
    names = [n for n, _ in TorchTrain(policy(), CFG).weights()]
    assert (
        len(names) == len(set(names))
        and 'model.embed_tokens.weight' in names
        and 'model.layers.1.mlp.experts.3.down_proj.weight' in names
    )


# ---- errors


@pytest.mark.parametrize(
    'kw',
    [
        dict(lr=0.0),
        dict(lr=float('nan')),
        dict(betas=(0.9, 1.0)),
        dict(num_mini_batches=0),
        dict(micro_batch_tokens=0),
        dict(warmup_steps=-1),
        dict(grad_clip=-1.0),
        dict(weight_decay=-0.1),
        dict(adam_eps=-1e-8),
    ],
)
def test_bad_config(kw):
    ((name, value),) = kw.items()
    if name == 'betas':
        name, value = 'betas[1]', value[1]
    with pytest.raises(ValueError, match=re.escape(f'{name}={value}: use ')):
        OptimConfig(**kw)


@pytest.mark.parametrize('temperature', [0.0, -1.0, float('nan')])
def test_bad_temperature(temperature):
    with pytest.raises(ValueError, match='temperature='):
        TorchTrain(policy(), CFG, temperature)


def test_a_response_without_a_prompt():
    with pytest.raises(ValueError, match='column 0'):
        response_log_probs(policy(), replace(BATCH, response_mask=BATCH.token_mask))


def kept_bytes(p, batch):
    "Of the tensors that one forward pass keeps for its backward pass, weights aside"
    weights = {w.data_ptr() for w in p.parameters()}
    kept = {}

    def pack(t):
        if t.data_ptr() not in weights:
            kept[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        log_probs, _ = response_log_probs(p, batch)
    log_probs.sum().backward()
    return sum(kept.values())


def test_recomputing_blocks_keeps_less():
    "The bits are equal (tests/test_pretend_gpu.py), and the memory is what it is for"
    whole, batch = policy(), make([(3, 9), (2, 7), (4, 8), (1, 9)])
    less = deepcopy(whole)
    less.recompute = True
    assert kept_bytes(less, batch) < kept_bytes(whole, batch) / 3
    for a, b in zip(whole.parameters(), less.parameters()):
        assert a.grad is b.grad is None or a.grad.equal(b.grad)
