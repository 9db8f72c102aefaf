"The cold start: what is shown, how it is weighed, in which order, and that it learns"

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compassrl.data.prompts import make_prompts
from compassrl.data.tasks import task_families, verify
from compassrl.data.tokenizer import EOS_ID, build_tokenizer, encode, response_text
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.records import Prompt, Request, SamplingParams, derive_seed, select
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.train.sft import (
    SFTConfig,
    cold_start,
    cosine_lr,
    sft_loss,
    solution_batch,
    without_working,
)
from compassrl.train.torch_train import (
    OptimConfig,
    TorchTrain,
    accumulate_grads,
    response_log_probs,
)

random = settings(deadline=None, max_examples=30, derandomize=True)
TOK = build_tokenizer()
TRAIN = make_prompts('arithmetic', 40, 1, 0, 'train', TOK)
SMALL = PolicyConfig(
    hidden_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    moe_intermediate_size=8,
    num_experts=4,
    max_position_embeddings=64,
)


class Recorder:
    "A train engine that learns nothing and remembers what it was given"

    def __init__(self):
        self.rows, self.lrs, self.sizes = [], [], []

    def update(self, batch, loss, lr=None):
        assert loss is sft_loss
        self.rows += [tuple(r[m].tolist()) for r, m in zip(batch.token_ids, batch.token_mask)]
        self.lrs.append(lr)
        self.sizes.append(len(batch))
        return dict(loss=1.0, grad_norm=2.0), {}


def record(prompts=TRAIN, seed=0, **kw):
    r = Recorder()
    return r, list(cold_start(r, prompts, SFTConfig(**kw), TOK, seed))


def row(p):
    return tuple(p.token_ids + encode(TOK, p.solution) + [EOS_ID])


# those need a sandbox or a model to be judged
DOMAINS = sorted({*task_families} - {'programs', 'shop'})


# ---- what is shown


@pytest.mark.parametrize('domain', DOMAINS)
def test_solutions_as_samples(domain):
    "Prompt, solution, stop token; the response is the last two, and a verifier accepts it"
    prompts = make_prompts(domain, 20, 1.5, 0, 'train', TOK)
    b = solution_batch(prompts, TOK)
    for p, ids, real, response in zip(prompts, b.token_ids, b.token_mask, b.response_mask):
        assert tuple(ids[real].tolist()) == row(p)
        assert (
            ids[response].tolist()[-1] == EOS_ID
            and response_text(TOK, ids[response].tolist()) == p.solution
        )
        assert verify(p, response_text(TOK, ids[response].tolist())).correct
        assert not response[: len(p.token_ids)].any() and int(response.sum()) == len(p.solution) + 1
    assert b.routed_experts is None, 'nobody sampled them, so there is nothing to replay'


def test_another_stop_token():
    assert (
        solution_batch(TRAIN[:2], TOK, eos_id=7)
        .token_ids[0][solution_batch(TRAIN[:2], TOK).token_mask[0]]
        .tolist()[-1]
        == 7
    )


@pytest.mark.parametrize('domain', DOMAINS)
def test_without_working(domain):
    for p in make_prompts(domain, 20, 1, 0, 'train', TOK):
        q = without_working(p)
        assert p.guess or verify(q, q.solution).correct and len(q.solution) <= len(p.solution)
        assert (q.id, q.text, q.answer, q.token_ids) == (p.id, p.text, p.answer, p.token_ids)
        if '#' in p.solution:
            assert q.solution == (p.guess or '#' + p.solution.split('#')[1])
        else:
            assert q == p


# ---- the loss


@random
@given(
    st.lists(st.integers(0, 39), min_size=1, max_size=6, unique=True),
    st.integers(0, 1000),
    st.data(),
)
def test_loss(rows, seed, data):
    "The mean over response tokens, whatever else the tensor holds; parts add up"
    b = solution_batch([TRAIN[i] for i in rows], TOK)
    x = torch.randn(
        b.token_ids.shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed)
    )
    n = int(b.response_mask.sum())
    want = -sum(v for r, m in zip(x, b.response_mask) for v in r[m].tolist()) / n
    assert sft_loss(x, b, n, len(b))[0].item() == pytest.approx(want, rel=1e-12, abs=1e-12)
    k = data.draw(st.integers(0, len(b)))
    parts = [select(b, r) for r in (list(range(k)), list(range(k, len(b)))) if r]
    starts = [0, k] if k else [k]
    total = sum(
        sft_loss(x[s : s + len(p), : p.token_ids.shape[1]], p, n, len(b))[0].item()
        for s, p in zip(starts, parts)
    )
    assert total == pytest.approx(want, rel=1e-12, abs=1e-12)


def test_gradient_equals_cross_entropy():
    "Against torch's own loss with ignored prompts and padding, in fp64, for any micro-batch"
    b, p = solution_batch(TRAIN[:8], TOK), Policy(SMALL).double()
    logits = torch.zeros(*b.token_ids.shape, SMALL.vocab_size, dtype=torch.double).masked_scatter(
        b.token_mask[..., None], p.logits(p(b.token_ids, b.token_mask)[0])
    )
    labels = b.token_ids.masked_fill(~b.response_mask, -100)
    value = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    value.backward()
    want = [w.grad.clone() for w in p.parameters()]
    for n in (10**6, 70, 1):
        m, _ = accumulate_grads(p, b, sft_loss, n)
        torch.testing.assert_close(m['loss'], value.detach(), rtol=1e-12, atol=1e-12)
        for w, g in zip(p.parameters(), want):
            torch.testing.assert_close(w.grad, g, rtol=1e-9, atol=1e-12)


def test_loss_of_a_new_policy():
    b = solution_batch(TRAIN, TOK)
    log_probs, entropy = response_log_probs(Policy(PolicyConfig()), b)
    assert -log_probs[b.response_mask].mean().item() == pytest.approx(math.log(99), abs=0.1)
    assert entropy[b.response_mask].mean().item() == pytest.approx(math.log(99), abs=0.1)


# ---- the schedule


@random
@given(st.integers(1, 60), st.integers(0, 80), st.floats(1e-5, 1.0))
def test_cosine(steps, warmup, lr):
    "Up in a line to the peak, down to a tenth, never outside (0, peak]"
    cfg = SFTConfig(steps=steps, warmup_steps=warmup, lr=lr)
    values = [cosine_lr(s, cfg) for s in range(steps)]
    assert all(0 < v <= lr * (1 + 1e-6) for v in values)
    up, down = values[:warmup], values[warmup:]
    assert up == pytest.approx([lr * (i + 1) / warmup for i in range(len(up))])
    assert down == sorted(down, reverse=True)
    if down:
        assert down[0] == pytest.approx(lr) and down[-1] >= lr / 10 * (1 - 1e-6)
    assert cosine_lr(max(steps, warmup + 1), cfg) == pytest.approx(lr / 10) or steps <= warmup


def test_lr_reaches_the_engine():
    r, _ = record(steps=30, warmup_steps=5, batch_size=4)
    assert r.lrs == [cosine_lr(s, SFTConfig(steps=30, warmup_steps=5)) for s in range(30)]


# ---- the order


@random
@given(st.integers(1, 12), st.integers(1, 20), st.integers(1, 12), st.integers(0, 5))
def test_every_solution_once_per_epoch(pool, batch_size, steps, seed):
    "Also when an epoch ends inside a batch, or a batch holds several epochs"
    r, metrics = record(TRAIN[:pool], seed, steps=steps, batch_size=batch_size)
    want = sorted(row(p) for p in TRAIN[:pool])
    assert r.sizes == [batch_size] * steps and len(metrics) == steps
    for i in range(0, len(r.rows) - pool + 1, pool):
        assert sorted(r.rows[i : i + pool]) == want


def test_order_depends_on_the_seed_alone():
    rows = [record(seed=s, steps=20, batch_size=7)[0].rows for s in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]
    assert rows[0][:40] != rows[0][40:80], 'each epoch has an order of its own'


def test_num_solutions():
    r, _ = record(steps=20, batch_size=10, num_solutions=7)
    assert set(r.rows) == {row(p) for p in TRAIN[:7]}


@pytest.mark.parametrize('frac', [0.0, 0.5, 1.0])
def test_hasty_frac(frac):
    "The share of bare answers, each prompt always shown in the same way"
    prompts = make_prompts('arithmetic', 400, 1, 0, 'train', TOK)
    r, _ = record(prompts, steps=4, batch_size=200, hasty_frac=frac)
    bare = {row(without_working(p)) for p in prompts}
    assert sum(x in bare for x in r.rows) / len(r.rows) == pytest.approx(
        frac, abs=0.1 if frac == 0.5 else 0
    )
    assert sorted(r.rows[:400]) == sorted(r.rows[400:])


def test_metrics():
    _, m = record(TRAIN[:3], steps=2, batch_size=3)
    assert m[1] == dict(
        step=2, tokens=float(sum(len(p.solution) + 1 for p in TRAIN[:3])), loss=1.0, grad_norm=2.0
    )


# ---- learning


def test_learns_by_heart_and_says_so():
    "Five solutions until the greedy answer to each is right; the same again gives the same weights"

    def run():
        e = TorchTrain(Policy(PolicyConfig(max_position_embeddings=64)), OptimConfig())
        return e, [
            m['loss']
            for m in cold_start(
                e, TRAIN[:5], SFTConfig(steps=60, batch_size=5, lr=1e-2, warmup_steps=5), TOK
            )
        ]

    (a, losses), (b, again) = run(), run()
    assert losses == again and all(
        torch.equal(p, q) for p, q in zip(a.policy.parameters(), b.policy.parameters())
    )
    assert losses[0] == pytest.approx(math.log(99), abs=0.2) and losses[-1] < 0.05
    rollout = TorchRollout(a.policy.config, 8)
    rollout.load_weights(a.weights(), 0)
    greedy = SamplingParams(32, temperature=0.0, stop_ids=(EOS_ID,))
    said = {
        s.prompt_id: s
        for s in rollout.generate(
            [Request(p.id, tuple(p.token_ids), params=greedy) for p in TRAIN[:5]]
        )
    }
    assert all(
        response_text(TOK, said[p.id].response_ids) == p.solution
        and said[p.id].finish_reason == 'stop'
        for p in TRAIN[:5]
    )


@pytest.mark.timeout(300)
def test_end_to_end():
    "The default cold start leaves some samples right and most groups undecided: a start for RL"
    train, heldout = (
        make_prompts('arithmetic', 2048, 1, 0, 'train', TOK),
        make_prompts('arithmetic', 32, 1, 0, 'heldout', TOK),
    )
    e = TorchTrain(Policy(PolicyConfig(max_position_embeddings=64)), OptimConfig())
    losses = [m['loss'] for m in cold_start(e, train, SFTConfig(), TOK)]
    assert losses[0] == pytest.approx(math.log(99), abs=0.2) and sum(losses[-20:]) / 20 < 0.3
    rollout = TorchRollout(e.policy.config, 256)
    rollout.load_weights(e.weights(), 0)
    params = SamplingParams(32, stop_ids=(EOS_ID,))
    by_id = {p.id: p for p in heldout}
    requests = [
        Request(p.id, tuple(p.token_ids), k, derive_seed(p.id, k), params)
        for p in heldout
        for k in range(8)
    ]
    samples = list(rollout.generate(requests))
    right = sum(
        verify(by_id[s.prompt_id], response_text(TOK, s.response_ids)).correct for s in samples
    ) / len(samples)
    assert (
        0.02 < right < 0.8 and sum(s.finish_reason == 'stop' for s in samples) / len(samples) > 0.9
    )


# ---- packed rows


def lively_engine(micro_batch_tokens):
    policy, g = Policy(SMALL, 1).double(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=g, dtype=torch.double))
    return TorchTrain(policy, OptimConfig(micro_batch_tokens=micro_batch_tokens), replay='off')


@random
@given(st.lists(st.integers(0, 39), min_size=2, max_size=6, unique=True), st.integers(0, 39))
def test_a_packed_neighbour_changes_no_log_prob(rows, other):
    "Another text beside it, longer or shorter: nothing is seen of it"
    e, one = lively_engine(10**6), TRAIN[rows[0]]
    want = e.score(solution_batch([one], TOK))['old_log_probs'][0]
    for neighbours in (rows[1:], [other], [*rows[1:], other]):
        b = solution_batch([one, *(TRAIN[i] for i in neighbours)], TOK)
        got = e.score(b)['old_log_probs'][0][: len(want)]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@random
@given(st.lists(st.integers(0, 39), min_size=2, max_size=6, unique=True))
def test_packed_rows_have_the_gradient_of_rows_alone(rows):
    "All in one pass, and each by itself with a loss written out anew"
    b = solution_batch([TRAIN[i] for i in rows], TOK)
    together, alone = lively_engine(10**6), lively_engine(10**6).policy
    accumulate_grads(together.policy, b, sft_loss, 10**6, replay=False)
    num = sum(len(encode(TOK, TRAIN[i].solution)) + 1 for i in rows)
    for i in rows:
        ids = torch.tensor(row(TRAIN[i]))
        start = len(TRAIN[i].token_ids)
        log_probs = alone.logits(alone(ids[None])[0]).log_softmax(-1)
        picked = log_probs[start - 1 : -1].gather(1, ids[start:, None])
        (-picked.sum() / num).backward()
    for (name, p), q in zip(together.policy.named_parameters(), alone.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-9, msg=name)


# ---- errors


@pytest.mark.parametrize(
    'kw',
    [
        dict(steps=-1),
        dict(batch_size=0),
        dict(lr=0.0),
        dict(lr=float('nan')),
        dict(warmup_steps=-1),
        dict(num_solutions=0),
        dict(hasty_frac=1.5),
        dict(hasty_frac=-0.1),
    ],
)
def test_bad_config(kw):
    with pytest.raises(ValueError, match='='.join(map(str, *kw.items()))):
        SFTConfig(**kw)


def test_a_prompt_without_a_solution_is_named_before_any_work():
    prompts = [*TRAIN[:3], Prompt('mine-7', 'data', '1+1=', encode(TOK, '1+1='), '2', 'exact')]
    r = Recorder()
    with pytest.raises(ValueError, match='prompt mine-7 has no solution'):
        next(cold_start(r, prompts, SFTConfig(), TOK))
    assert r.rows == []
    assert len(list(cold_start(r, prompts, SFTConfig(steps=2, num_solutions=3), TOK))) == 2, (
        'only those that are shown need one'
    )


def test_no_prompts_and_no_steps():
    with pytest.raises(ValueError, match='no prompts'):
        next(cold_start(Recorder(), [], SFTConfig(), TOK))
    assert record([], steps=0)[1] == []
