"""Rollout engine: seeds, log-probs and routes against full passes, frequencies, slots, caches, bad
input, mutants"""

import gc
import random
import re
from dataclasses import replace

import pytest
import torch

from compassrl.model.layers import causal_attention, grouped_linear
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import hf_weights
from compassrl.records import Request, SamplingParams, derive_seed
from compassrl.rollout import cached_layers, slots
from compassrl.rollout import torch_rollout as rollout
from compassrl.rollout.slots import sample_tokens, uniforms
from tests.support.faults import planted
from tests.support.growing import law_requests_that_grow

torch.set_num_threads(1)
TINY = dict(
    vocab_size=24,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=64,
)


def make_policy(seed=0, scale=4.0, head=1.0, **changes):
    """Random weights; `scale` makes routers and attention decided, `head` makes the next token
    decided"""
    p = Policy(PolicyConfig(**TINY | changes), seed)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for w in p.parameters():
            w.mul_(scale) if w.dim() > 1 else w.add_(0.2 * torch.randn(w.shape, generator=g))
        p.head.mul_(head)
    return p


def make_engine(policy, num_slots=16, R=rollout, dtype=torch.float32, version=0, **kw):
    e = R.TorchRollout(policy.config, num_slots, dtype, **kw)
    e.load_weights(hf_weights(policy), version)
    return e


def make_requests(
    num,
    seed=0,
    longest=9,
    max_tokens=(1, 12),
    temperature=(1.0,),
    top_p=(1.0,),
    stops=((),),
    group=1,
):
    "`num` requests, neighbours in groups with one prompt"
    rng = random.Random(seed)
    out = []
    while len(out) < num:
        ids, name = tuple(rng.randrange(24) for _ in range(rng.randint(1, longest))), f'p{len(out)}'
        for k in range(min(group, num - len(out))):
            chosen = (
                rng.randint(*max_tokens),
                rng.choice(temperature),
                rng.choice(top_p),
                rng.choice(stops),
            )
            out.append(Request(name, ids, k, derive_seed(seed, name, k), SamplingParams(*chosen)))
    return out


def by_request(samples):
    samples = list(samples)
    out = {(s.prompt_id, s.index): s for s in samples}
    assert len(out) == len(samples), 'a sample came twice'
    return out


def exact(policy, request, response):
    """Probabilities [Tr, V] under the request's parameters, and routes, by one full forward pass;
    fp64 after the logits"""
    ids = torch.tensor([[*request.prompt_ids, *response]])
    with torch.no_grad():
        hidden, routes = policy(ids)
        logits = policy.logits(hidden)[len(request.prompt_ids) - 1 : -1].double()
    p = (logits / request.params.temperature).softmax(-1)
    for row in p:  # nucleus, token by token
        kept, mass = [], 0.0
        for i in sorted(range(len(row)), key=lambda i: (-row[i].item(), i)):
            if mass >= request.params.top_p:
                break
            kept.append(i)
            mass += row[i].item()
        if request.params.top_p < 1:
            keep = torch.zeros_like(row, dtype=torch.bool)
            keep[kept] = True
            row[~keep] = 0
            row /= row.sum()
    return p, routes[:-1]


# ----------------------------------------------------------------------------------- random numbers
def splitmix(seed, step):
    "The published generator, in Python's unbounded integers"
    mask = (1 << 64) - 1
    z = (seed + (step + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return ((z ^ (z >> 31)) >> 11) / 2**53


def test_uniforms_are_splitmix64():
    seeds = [
        0,
        1,
        -1,
        1234567,
        2**62 + 12345,
        2**63 - 1,
        -(2**63),
        *(derive_seed(i) for i in range(40)),
    ]
    got = uniforms(torch.tensor(seeds), torch.arange(30))
    assert got.dtype == torch.float64
    assert got.tolist() == [[splitmix(s, t) for t in range(30)] for s in seeds]
    later = uniforms(torch.tensor(seeds), torch.tensor([7, 29, 100_000]))
    assert (later[:, :2] == got[:, [7, 29]]).all() and later[0, 2] == splitmix(0, 100_000)
    # the first output of the published test vector
    assert splitmix(1234567, 0) == (6457827717110365317 >> 11) / 2**53


@pytest.mark.parametrize('seed', [int, lambda i: derive_seed('u', i)], ids=['counted', 'hashed'])
def test_uniforms_are_uniform_and_independent(seed):
    u = uniforms(torch.tensor([seed(i) for i in range(2000)]), torch.arange(50))
    assert 0 <= u.min() and u.max() < 1
    for x in (u.flatten(), u[:, 0], u[0]):  # along both axes; 5 sigma
        assert (
            abs(x.mean() - 0.5) < 5 * (1 / 12 / x.numel()) ** 0.5
            and abs(x.var() - 1 / 12) < 5 * (1 / 180 / x.numel()) ** 0.5
        )

    def chi2(cells, k):
        return ((cells.bincount(minlength=k) - cells.numel() / k) ** 2).sum().item() / (
            cells.numel() / k
        )

    assert chi2((u * 64).long().flatten(), 64) < 63 + 5 * (2 * 63) ** 0.5
    a = (u * 8).long()
    for b, c in ((a[:, :-1], a[:, 1:]), (a[:-1], a[1:])):  # neighbours in time, neighbours in seed
        assert chi2((b * 8 + c).flatten(), 64) < 63 + 5 * (2 * 63) ** 0.5


# ------------------------------------------------------------------------------------------ drawing
def test_sample_tokens_inverts_the_cumulative_distribution():
    g = torch.Generator().manual_seed(0)
    logits, u = (
        2 * torch.randn(300, 7, generator=g),
        torch.rand(300, generator=g, dtype=torch.float64),
    )
    t = torch.rand(300, generator=g, dtype=torch.float64) * 2 + 0.1
    tokens, log_probs = sample_tokens(logits, u, t)
    assert log_probs.dtype == torch.float32
    for row, ui, ti, token, lp in zip(logits.double(), u, t, tokens, log_probs):
        p = (row / ti).softmax(-1)
        below = p[:token].sum()
        assert (
            below <= ui + 1e-12
            and ui < below + p[token] + 1e-12
            and abs(lp - p[token].log()) < 1e-6
        )


@pytest.mark.parametrize('u', [0.0, 0.3, 1 - 2**-53])
def test_sample_tokens_never_draws_what_has_no_probability(u):
    logits = torch.tensor(
        [[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf], [-5000.0, 2000.0, 0.0, 2000.0, -9000.0]]
    )
    u, ones = torch.full((2,), u, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    for t, top_p in ((ones, None), (ones * 0.01, None), (ones, ones * 0.6), (ones, ones * 1e-9)):
        tokens, log_probs = sample_tokens(logits, u, t, top_p)
        assert (
            all(i in (1, 3) for i in tokens.tolist())
            and log_probs.isfinite().all()
            and (log_probs <= 0).all()
        )
    # the most likely alone is left
    assert sample_tokens(logits, u, ones, ones * 1e-9)[1].tolist() == [0, 0]


def test_top_p_that_is_reached_exactly_needs_no_further_token():
    "Half, a quarter, a quarter: the first alone has the mass of 0.5, the first two have 0.75"
    logits = torch.tensor([[0.5, 0.25, 0.25]]).double().log().expand(99, 3)
    u, one = (torch.arange(99).double() + 0.5) / 99, torch.ones(99).double()
    for top_p, kept in ((0.5, 1), (0.75, 2), (0.76, 3)):
        tokens, _ = sample_tokens(logits, u, one, top_p * one)
        assert tokens.unique().tolist() == list(range(kept)), top_p


def test_top_p_keeps_the_smallest_set_and_leaves_other_rows_alone():
    p = torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64)
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    cases = {
        0.39: [1, 0, 0, 0],
        0.41: [4 / 7, 0, 3 / 7, 0],
        0.71: [4 / 9, 0, 3 / 9, 2 / 9],
        0.95: [0.4, 0.1, 0.3, 0.2],
    }
    for top_p, want in cases.items():
        row, rows = p.log().expand(1000, -1), torch.full_like(grid, top_p)
        tokens, lp = sample_tokens(row, grid, torch.ones_like(grid), rows)
        freq = tokens.bincount(minlength=4) / 1000
        torch.testing.assert_close(freq.double(), torch.tensor(want).double(), atol=2e-3, rtol=0)
        assert all(abs(x.exp() - want[t]) < 1e-6 for t, x in zip(tokens.tolist(), lp))
    g = torch.Generator().manual_seed(0)
    logits, u = torch.randn(50, 9, generator=g), torch.rand(50, generator=g, dtype=torch.float64)
    t = torch.ones_like(u)
    top_p = torch.where(torch.arange(50) % 2 == 0, 1.0, 0.5).double()
    plain, mixed = sample_tokens(logits, u, t), sample_tokens(logits, u, t, top_p)
    assert all((a[::2] == b[::2]).all() for a, b in zip(plain, mixed)), (
        'a neighbour with top_p changed a row without'
    )


def truncated(p, top_p, top_k, min_p):
    "By hand, with lists of numbers: what is left of a distribution"
    ranked = sorted(range(len(p)), key=lambda i: -p[i])
    ranked = [i for i in ranked if p[i] >= min_p * p[ranked[0]]][: top_k or len(p)]
    total, kept, mass = sum(p[i] for i in ranked), [], 0.0
    for i in ranked:
        if mass >= top_p * total:
            break
        kept, mass = [*kept, i], mass + p[i]
    return [p[i] / mass if i in kept else 0.0 for i in range(len(p))]


@pytest.mark.parametrize(
    'top_p, top_k, min_p',
    [(1.0, 3, 0.0), (1.0, 0, 0.3), (0.8, 5, 0.0), (0.7, 0, 0.2), (0.75, 4, 0.25), (1.0, 99, 0.0)],
)
@pytest.mark.parametrize('temperature', [1.0, 0.6, 1.7])
def test_what_is_left_after_truncation(temperature, top_p, top_k, min_p):
    "Eight tokens, each drawn as often as enumeration says, with the log-prob of that share"
    logits = torch.tensor([0.3, -1.2, 1.9, 0.8, -0.4, 1.1, -2.0, 0.1]).double()
    want = torch.tensor(
        truncated((logits / temperature).softmax(-1).tolist(), top_p, top_k, min_p)
    ).double()
    u = (torch.arange(4000).double() + 0.5) / 4000
    row = torch.ones_like(u)
    limits = row * top_p, (row * top_k).long(), row * min_p
    tokens, lp = sample_tokens(logits.expand(4000, -1), u, row * temperature, *limits)
    shares = tokens.bincount(minlength=8).double() / 4000
    torch.testing.assert_close(shares, want, atol=5e-4, rtol=0)
    torch.testing.assert_close(lp, want[tokens].log().float())
    mixed = [torch.cat([t[:9], t[:9] * 0 + free]) for t, free in zip(limits, (1, 0, 0))]
    both = sample_tokens(logits.expand(18, -1), u[-18:], row[:18] * temperature, *mixed)
    plain = sample_tokens(logits.expand(9, -1), u[-9:], row[:9] * temperature)
    assert all(a[9:].equal(b) for a, b in zip(both, plain)), 'rows that cut nothing'


# ----------------------------------------------------------------------- laws, also used on mutants
VARIANTS = dict(
    plain={},
    unnormalised=dict(norm_topk_prob=False),
    dense_first=dict(mlp_only_layers=(0,)),
    sparse_every_second=dict(decoder_sparse_step=2),
    all_dense=dict(mlp_only_layers=(0, 1)),
    tied=dict(tie_word_embeddings=True),
    one_expert=dict(num_experts_per_tok=1, num_key_value_heads=4),
    odd_widths=dict(
        moe_intermediate_size=10, hidden_size=36, num_attention_heads=3, num_key_value_heads=1
    ),
)
MIXED = dict(temperature=(0.5, 1.0, 1.7), top_p=(1.0, 0.8), stops=((), (3,), (1, 5, 7)))


def log_probs_and_routes_hold(R, num=60, variant='plain', dtype=torch.float32, tol=1e-5):
    """What the engine reports is what a full forward pass says, for mixed parameters and slots that
    are refilled"""
    policy = make_policy(**VARIANTS[variant])
    c = policy.config
    requests = make_requests(num, **MIXED, group=3)
    samples = by_request(make_engine(policy, 7, R, dtype, version=5).generate(requests))
    if dtype == torch.float64:
        policy = policy.double()
    assert len(samples) == num
    for r in requests:
        s = samples[r.prompt_id, r.index]
        p, routes = exact(policy, r, s.response_ids)
        want = p.gather(-1, torch.tensor(s.response_ids)[:, None])[:, 0].log().float()
        assert (
            s.rollout_log_probs.dtype == torch.float32 and s.rollout_log_probs.shape == want.shape
        )
        gap = (s.rollout_log_probs - want).abs().max().item()
        assert gap <= tol, f'log-probs are off by {gap}'
        T = len(r.prompt_ids) + len(s.response_ids)
        assert s.routed_experts.shape == (T - 1, c.num_hidden_layers, c.num_experts_per_tok)
        assert s.routed_experts.dtype == torch.uint8
        assert s.routes_valid.tolist() == [True] * (T - 1)
        assert (s.routed_experts == routes).all(), 'routes differ'
        for layer in range(c.num_hidden_layers):
            if not c.is_sparse(layer):
                assert not s.routed_experts[:, layer].any()
        stopped = [i for i, t in enumerate(s.response_ids) if t in r.params.stop_ids]
        if stopped:
            assert s.finish_reason == 'stop' and stopped == [len(s.response_ids) - 1]
        else:
            assert s.finish_reason == 'length' and len(s.response_ids) == r.params.max_tokens
        assert s.prompt_ids == list(r.prompt_ids) and s.weight_version == 5
        assert s.timings['rollout_end'] >= s.timings['rollout_start']


def seeds_hold(R, num=60, dtype=torch.float32, slots=(1, 7, 64), needed=1.0, tol=1e-5, **policy_kw):
    """Alone, in a batch, in any order: the same tokens and log-probs; `needed` of the requests at
    least"""
    policy = make_policy(**policy_kw)
    requests = make_requests(num, **MIXED, group=2)
    shuffled = random.Random(1).sample(requests, num)
    plans = [(slots[0], requests), *((n, q) for n in slots[1:] for q in (requests, shuffled))]
    runs = [by_request(make_engine(policy, n, R, dtype).generate(q)) for n, q in plans]
    same = 0
    for key, s in runs[0].items():
        others = [run[key] for run in runs[1:]]
        if all(o.response_ids == s.response_ids for o in others):
            same += 1
            for o in others:
                assert (o.rollout_log_probs - s.rollout_log_probs).abs().max() <= tol
                assert o.finish_reason == s.finish_reason
                if dtype == torch.float64:
                    assert (o.routed_experts == s.routed_experts).all()
    assert same >= needed * num, f'{num - same} of {num} requests differ'
    return runs[0]


def weights_are_fresh(R):
    "After `load_weights` an engine that has run samples as a new one does"
    old, new = make_policy(0), make_policy(1)
    requests = make_requests(20, **MIXED, group=2)
    e = make_engine(old, 16, R)  # room for all prompts
    first = by_request(e.generate(requests))
    e.load_weights(hf_weights(new), 7)
    again, want = (
        by_request(e.generate(requests)),
        by_request(make_engine(new, 16, R, version=7).generate(requests)),
    )
    assert {s.weight_version for s in first.values()} == {0} and {
        s.weight_version for s in again.values()
    } == {7}
    for k, s in again.items():
        assert s.response_ids == want[k].response_ids, 'samples of old weights'
        assert (s.rollout_log_probs == want[k].rollout_log_probs).all()
        assert (s.routed_experts == want[k].routed_experts).all()
    assert any(s.response_ids != first[k].response_ids for k, s in again.items())


def folding_keeps_the_policy(R):
    "The engine's own policy stays the function that was loaded, however often"
    policy, ids = make_policy(**VARIANTS['dense_first']), torch.arange(24).view(2, 12)
    e = make_engine(policy, R=R)
    for version in range(3):
        e.load_weights(hf_weights(policy), version)
        got, want = (p.logits(p(ids)[0]) for p in (e.policy, policy))
        assert (got - want).abs().max() < 1e-5 * want.abs().max()


def slots_are_refilled_at_once(R):
    """A free slot never waits while there are requests, and no request is taken before there is a
    slot for it"""
    policy, taken, running = make_policy(), [], []
    budgets = [random.Random(i).randint(1, 9) for i in range(40)]

    def feed():
        for i, b in enumerate(budgets):
            taken.append(i)
            yield Request(f'p{i}', (1, 2), 0, i, SamplingParams(b))

    e = make_engine(policy, 4, R)

    def spy():
        running.append(e.slots.num_running)
        return R.TorchRollout.step(e)

    e.step, done = spy, []
    for s in e.generate(feed()):
        done.append(int(s.prompt_id[1:]))
        assert len(taken) - len(done) <= 4
    # the same schedule by hand: the first token comes with admission, each step adds one to all
    left, want, queue = {}, [], list(enumerate(budgets))
    steps = 0
    while queue or left:
        while queue and len(left) < 4:
            i, b = queue.pop(0)
            if b > 1:
                left[i] = b - 1
        if not left:
            break
        steps += 1
        want.append(len(left))
        left = {i: b - 1 for i, b in left.items() if b > 1}
    assert running == want and sorted(done) == list(range(40)) and done != sorted(done)


def frequencies_hold(R, temperature=1.0, top_p=1.0):
    "Chi-square of the first two tokens against exact probabilities"
    policy = make_policy(2, head=2.0, vocab_size=6, max_position_embeddings=8)
    params = SamplingParams(2, temperature, top_p)
    requests = [Request('p', (1, 4, 2), k, derive_seed('chi', k), params) for k in range(20_000)]
    pairs = torch.tensor(
        [
            s.response_ids
            for s in make_engine(policy, 4000, R, return_routes=False).generate(requests)
        ]
    )
    counts = (pairs[:, 0] * 6 + pairs[:, 1]).bincount(minlength=36).double()
    first = exact(policy, requests[0], [0])[0][0]
    want = torch.cat([first[a] * exact(policy, requests[0], [a, 0])[0][1] for a in range(6)]) * len(
        requests
    )
    assert counts[want == 0].sum() == 0
    cells = want > 0
    chi2 = ((counts - want)[cells] ** 2 / want[cells]).sum().item()
    dof = int(cells.sum()) - 1
    assert chi2 < dof + 5 * (2 * dof) ** 0.5, f'chi-square {chi2} with {dof} degrees of freedom'
    assert dof > 5


def cool_frequencies_hold(R):
    frequencies_hold(R, temperature=0.6)


# ----------------------------------------------------------------------------------------- the laws
@pytest.mark.parametrize('variant', VARIANTS)
def test_log_probs_and_routes_are_those_of_a_full_forward(variant):
    log_probs_and_routes_hold(rollout, variant=variant)


def test_log_probs_and_routes_in_float64():
    log_probs_and_routes_hold(rollout, variant='dense_first', dtype=torch.float64, tol=1e-6)


@pytest.mark.parametrize('head', [1.0, 6.0], ids=['flat', 'peaked'])
def test_seeds_fp32(head):
    # logits `head` times as large
    seeds_hold(rollout, 200, needed=0.995, head=head, tol=1e-5 * head)


def test_seeds_float64():
    seeds_hold(rollout, 120, torch.float64, needed=1.0, tol=1e-6, head=3.0)


@pytest.mark.parametrize(
    'params', [dict(), dict(temperature=0.6), dict(temperature=1.5, top_p=0.85)], ids=str
)
def test_frequencies(params):
    frequencies_hold(rollout, **params)


def test_new_weights_drop_every_cache():
    weights_are_fresh(rollout)


def test_folding_keeps_the_policy():
    folding_keeps_the_policy(rollout)


def test_a_finished_slot_is_refilled_at_once():
    slots_are_refilled_at_once(rollout)


def test_other_seeds_other_tokens():
    e = make_engine(make_policy())

    def ask(run):
        return [Request('p', (1, 2), k, derive_seed(run, k), SamplingParams(10)) for k in range(16)]

    a, b = ([s.response_ids for s in e.generate(ask(run))] for run in (0, 1))
    assert a != b and len(set(map(tuple, a))) > 8


def test_greedy_is_the_argmax_loop():
    policy = make_policy(3)
    requests = make_requests(40, max_tokens=(8, 8), temperature=(0.0, 0.0, 1.0))
    samples = by_request(make_engine(policy, 9).generate(requests))
    checked = 0
    for r in requests:
        s = samples[r.prompt_id, r.index]
        if r.params.temperature > 0:
            assert (s.rollout_log_probs < 0).all()
            continue
        ids = list(r.prompt_ids)
        for _ in range(8):
            ids.append(int(policy.logits(policy(torch.tensor([ids]))[0])[-1].argmax()))
        assert s.response_ids == ids[len(r.prompt_ids) :] and (s.rollout_log_probs == 0).all()
        checked += 1
    assert checked > 10


def test_a_group_is_prefilled_once_and_the_last_prompt_token_is_not_decoded(monkeypatch):
    policy, calls, forward = make_policy(), [], rollout.TorchRollout.forward

    def counted(engine, ids, *args):
        calls.append(len(ids))
        return forward(engine, ids, *args)

    monkeypatch.setattr(rollout.TorchRollout, 'forward', counted)
    e, requests = make_engine(policy, 32), make_requests(32, max_tokens=(1, 1), group=8)
    assert {len(s.response_ids) for s in e.generate(requests)} == {1}
    assert calls == [sum(len(i) for i in {r.prompt_id: r.prompt_ids for r in requests}.values())]
    list(e.generate(requests))
    assert len(calls) == 1, 'a cached prompt was computed again'


def test_the_prefix_cache_is_bounded():
    e = make_engine(make_policy(), 3)
    requests = make_requests(50, longest=4, max_tokens=(1, 3))
    list(e.generate(requests))
    assert len(e.prefixes) <= 3


def test_cache_grows_while_requests_run():
    policy = make_policy(1)
    requests = [
        Request('a', (1,), 0, 1, SamplingParams(20)),
        Request('b', (1, 2), 0, 2, SamplingParams(3)),
        Request('c', tuple(range(20)), 0, 3, SamplingParams(30, stop_ids=(1, 2, 3))),
        Request('d', (4,), 0, 4, SamplingParams(63)),
    ]
    samples = by_request(make_engine(policy, 2).generate(iter(requests)))
    for r in requests:
        s = samples[r.prompt_id, 0]
        want = (
            exact(policy, r, s.response_ids)[0]
            .gather(-1, torch.tensor(s.response_ids)[:, None])[:, 0]
            .log()
            .float()
        )
        torch.testing.assert_close(s.rollout_log_probs, want, atol=1e-5, rtol=0)


def test_without_routes():
    policy, requests = make_policy(), make_requests(9)
    with_routes = by_request(make_engine(policy).generate(requests))
    without = by_request(make_engine(policy, return_routes=False).generate(requests))
    for k, s in without.items():
        assert (
            s.routed_experts is None
            and s.routes_valid is None
            and s.response_ids == with_routes[k].response_ids
        )


def test_many_experts_need_more_than_a_byte():
    policy = make_policy(num_experts=300, moe_intermediate_size=8)
    r = make_requests(4)
    for s in make_engine(policy).generate(r):
        assert s.routed_experts.dtype == torch.int16
        request = next(q for q in r if q.prompt_id == s.prompt_id)
        assert (s.routed_experts == exact(policy, request, s.response_ids)[1]).all()


def test_bfloat16_runs_and_stays_near():
    policy = make_policy(scale=2.0)
    for s in make_engine(policy, dtype=torch.bfloat16).generate(requests := make_requests(20)):
        r = next(q for q in requests if q.prompt_id == s.prompt_id)
        want = (
            exact(policy, r, s.response_ids)[0]
            .gather(-1, torch.tensor(s.response_ids)[:, None])[:, 0]
            .log()
        )
        assert (s.rollout_log_probs - want).abs().max() < 0.1


# -------------------------------------------------------------------------------- another precision
def coarse(t):
    return (t * 16).round() / 16


def other_precision_holds(R):
    """A subclass's keys and values are what prefill and decoding look at: a full forward pass with
    the same rounding agrees"""

    class Coarse(R.TorchRollout):
        def cached(self, kv):
            return coarse(kv)

    policy = make_policy(scale=2.0)
    e = Coarse(policy.config, 5)
    e.load_weights(hf_weights(policy), 0)
    for s in e.generate(make_requests(20)):
        ids = torch.tensor(s.prompt_ids + s.response_ids)
        inner = causal_attention(torch.ones(1, len(ids), dtype=torch.bool))
        with torch.no_grad():

            def attend(layer, q, k, v):
                return inner(layer, q, coarse(k), coarse(v))

            hidden, _ = policy.trunk(ids, torch.arange(len(ids)), attend)
            want = policy.logits(hidden)[len(s.prompt_ids) - 1 : -1].log_softmax(-1)
        want = want.gather(-1, torch.tensor(s.response_ids)[:, None])[:, 0]
        # a rare value on the edge between two steps may round the other way
        gap = (s.rollout_log_probs - want).abs()
        assert gap.median() < 1e-4 and gap.max() < 0.2


def test_keys_and_values_of_another_precision():
    other_precision_holds(rollout)


@pytest.mark.parametrize('variant', ['plain', 'dense_first'])
def test_every_product_with_a_weight_can_be_replaced(variant):
    "By fp64 ones here: the samples stay, and the number of calls is that of the layers' products"
    calls = dict.fromkeys(('product', 'expert_product', 'cached'), 0)

    class Wide(rollout.TorchRollout):
        def product(self, x, w):
            calls['product'] += 1
            return (x.double() @ w.double()).float()

        def expert_product(self, x, w, ends):
            calls['expert_product'] += 1
            return grouped_linear(x.double(), w.double(), ends).float()

        def cached(self, kv):
            calls['cached'] += 1
            assert kv.shape[1:] == (2 * self.config.num_key_value_heads, self.config.head_dim)
            return kv

    policy = make_policy(**VARIANTS[variant])
    e, request = Wide(policy.config, 4), Request('p', (1, 2, 3), 0, 1, SamplingParams(6))
    e.load_weights(hf_weights(policy), 0)
    (wide,) = e.generate([request])
    (plain,) = make_engine(policy, 4).generate([request])
    assert wide.response_ids == plain.response_ids
    assert 0 < (wide.rollout_log_probs - plain.rollout_log_probs).abs().max() < 1e-5
    sparse, L, passes = sum(map(policy.config.is_sparse, range(2))), 2, 6  # one prefill, five steps
    want = dict(
        product=passes * (2 * L + 2 * (L - sparse)),
        expert_product=passes * 2 * sparse,
        cached=passes * L,
    )
    assert calls == want


# -------------------------------------------------------------------------------- life of an engine
def test_weights_first():
    e = rollout.TorchRollout(PolicyConfig(**TINY))
    with pytest.raises(RuntimeError, match='load_weights'):
        next(e.generate(make_requests(1)))
    with pytest.raises(ValueError, match='missing'):
        e.load_weights(list(hf_weights(make_policy()))[:-1], 0)
    with pytest.raises(RuntimeError, match='load_weights'):
        next(e.generate(make_requests(1)))


def test_weights_that_arrive_half_leave_an_engine_that_does_not_sample():
    policy = make_policy()
    e = make_engine(policy)

    def torn():
        yield next(iter(hf_weights(make_policy(1))))
        raise OSError('the connection is gone')

    with pytest.raises(OSError, match='is gone'):
        e.load_weights(torn(), 1)
    with pytest.raises(RuntimeError, match='no weights: call `load_weights` first'):
        list(e.generate(make_requests(2)))
    e.load_weights(hf_weights(policy), 2)
    assert {s.weight_version for s in e.generate(make_requests(2))} == {2}


def test_no_weights_while_requests_run_and_one_generate_at_a_time():
    policy = make_policy()
    e = make_engine(policy, 4)
    running = e.generate(make_requests(8, max_tokens=(1, 9)))
    next(running)
    with pytest.raises(RuntimeError, match='requests are running'):
        e.load_weights(hf_weights(policy), 1)
    with pytest.raises(RuntimeError, match='one `generate`'):
        next(e.generate(make_requests(1)))
    running.close()
    e.load_weights(hf_weights(policy), 1)


@pytest.mark.parametrize('how', ['close', 'forget', 'error in the requests', 'bad request'])
def test_a_generator_that_ends_early_leaves_a_clean_engine(how):
    policy = make_policy()
    requests = make_requests(30, **MIXED)
    e, want = make_engine(policy, 5), by_request(make_engine(policy, 5).generate(requests))

    def broken():
        yield from requests[:12]
        if how == 'bad request':
            yield Request('bad', (), 0)
        raise OSError('the source of requests broke')

    running = e.generate(broken() if how in ('error in the requests', 'bad request') else requests)
    next(running)
    assert e.slots.num_running > 0
    if how == 'close':
        running.close()
    elif how == 'forget':
        del running
        gc.collect()
    else:
        with pytest.raises((OSError, ValueError)):
            list(running)
    assert e.slots.num_running == 0 and not e.slots.requests
    again = by_request(e.generate(requests))
    assert {k: s.response_ids for k, s in again.items()} == {
        k: s.response_ids for k, s in want.items()
    }


@pytest.mark.parametrize('num_slots', [1, 3, 64])
def test_requests_that_grow(num_slots):
    law_requests_that_grow(make_engine(make_policy(), num_slots), make_requests(20, **MIXED))


def test_weights_that_overflow_leave_no_trace():
    policy = make_policy()
    e, requests = make_engine(policy, 4), make_requests(12, max_tokens=(4, 12))
    e.load_weights([(n, w * torch.nan if 'v_proj' in n else w) for n, w in hf_weights(policy)], 1)
    list(e.generate(requests))
    e.load_weights(hf_weights(policy), 2)
    want = by_request(make_engine(policy, 4).generate(requests))
    for s in e.generate(requests):
        assert s.response_ids == want[s.prompt_id, s.index].response_ids


def test_sampling_tracks_no_gradient_and_copies_weights():
    policy = make_policy()
    e = make_engine(policy)
    s = next(e.generate(make_requests(1)))
    assert not s.rollout_log_probs.requires_grad and not s.rollout_log_probs.is_inference()
    assert not s.routed_experts.is_inference(), 'training could not save these for backward'
    with torch.no_grad():
        policy.blocks[0].qkv.zero_()
    assert e.policy.blocks[0].qkv.abs().sum() > 0


def test_samples_own_their_tensors():
    e = make_engine(make_policy(), 2)
    first = list(e.generate(r := make_requests(6)))
    before = [(s.rollout_log_probs.clone(), s.routed_experts.clone()) for s in first]
    list(e.generate(make_requests(6, seed=1)))
    assert all(
        (s.rollout_log_probs == a).all() and (s.routed_experts == b).all()
        for s, (a, b) in zip(first, before)
    )
    assert {id(s.prompt_ids) for s in first}.isdisjoint({id(q.prompt_ids) for q in r})


def test_no_requests_and_equal_requests():
    e = make_engine(make_policy(), 3)
    assert list(e.generate([])) == [] and list(e.generate(iter(()))) == []
    r = make_requests(1, max_tokens=(5, 5))[0]
    out = list(e.generate([r] * 7))
    assert len(out) == 7 and len({tuple(s.response_ids) for s in out}) == 1


OK = Request('q', (1, 2, 3), 0, 0, SamplingParams(4))
BAD = dict(
    empty=(dict(prompt_ids=()), "prompt 'q' is empty"),
    too_long=(dict(prompt_ids=(1,) * 61), '61 tokens and max_tokens=4 exceed the context of 64'),
    budget=(dict(params=SamplingParams(62)), '3 tokens and max_tokens=62 exceed the context of 64'),
    high=(dict(prompt_ids=(1, 24)), r'token id 24 is outside 0\.\.23'),
    low=(dict(prompt_ids=(1, -1)), r'token id -1 is outside 0\.\.23'),
    stop=(dict(params=SamplingParams(4, stop_ids=(2, 99))), 'token id 99 is outside'),
    seed=(dict(seed=1 << 64), 'exceeds 64 bits'),
)


@pytest.mark.parametrize('bad', BAD)
def test_bad_requests(bad):
    change, message = BAD[bad]
    e = make_engine(make_policy(), 4)
    with pytest.raises(ValueError, match=message) as err:
        list(e.generate([OK, replace(OK, **change)]))
    assert '\n' not in str(err.value) and "'q'" in str(err.value)
    # the longest that fits
    assert len(list(e.generate([OK, replace(OK, prompt_ids=(1,) * 60)]))) == 2


@pytest.mark.parametrize(
    'name, value',
    [
        ('num_slots', 0),
        ('temperature', -1.0),
        ('temperature', float('nan')),
        ('top_p', 0.0),
        ('top_p', 1.5),
        ('top_k', -1),
        ('min_p', 1.5),
        ('stop', ('',)),
        ('max_tokens', 0),
        ('quantization', 'int4'),
        ('kv_cache_dtype', 'fp4'),
    ],
)
def test_bad_config(name, value):
    with pytest.raises(ValueError, match=re.escape(f'{name}={value!r}')):
        rollout.RolloutConfig(**{name: value})


def test_bad_slots():
    with pytest.raises(ValueError, match='num_slots=0'):
        rollout.TorchRollout(PolicyConfig(**TINY), 0)


# ------------------------------------------------------------------------------- tests of the tests
MUTANTS = {
    log_probs_and_routes_hold: dict(
        no_mask=('.masked_fill_(hidden, -torch.inf)', ''),
        mask_one_short=(
            'places >= prompt_tokens[:, None])',
            'places >= prompt_tokens[:, None] - 1)',
        ),
        wrong_position=('t.index_select(0, place)', 't.index_select(0, place.clamp(max=6))'),
        log_prob_before_temperature=(
            'log_probs = probs.gather',
            'log_probs = logits.double().softmax(-1).gather',
        ),
        log_prob_before_top_p=(
            'torch.where(cut[:,None], kept/kept.sum(-1, keepdim=True), probs)',
            'kept',
        ),
        top_p_ignored=('.masked_fill(p.cumsum(-1)-p>=top_p[:,None], 0)', ''),
        gates_unnormalised=(
            'gates = chosen.softmax(-1, dtype=wide)',
            'gates = logits.softmax(-1).gather(-1, idx)',
        ),
        keys_stay_when_slots_move=(
            'self.kv.index_copy_(2, to, self.kv.index_select(2, source))',
            'pass',
        ),
        mask_stays_when_slots_move=("'log_probs', 'bias', ", "'log_probs', "),
        newest_stays_hidden=('slots.bias[:n].scatter_', 'slots.bias[:n].clone().scatter_'),
        requests_stay_when_slots_move=('row_of[hole] = row_of[mover]', 'pass'),
        routes_one_late=('slots.routes[rows, place] =', 'slots.routes[rows, place + 1] ='),
        stop_ids_ignored=(
            '(self.limit[rows] <= place[:,0]) | stopped',
            'self.limit[rows] <= place[:,0]',
        ),
        budget_one_long=('self.limit[rows] <= place', 'self.limit[rows] < place'),
    ),
    folding_keeps_the_policy: dict(norm_folded_twice=('norm.fill_(D**-.5)', 'pass')),
    seeds_hold: dict(
        shared_generator=(
            'uniforms(seeds, places - prompt_tokens[:, None])',
            'torch.rand(len(requests), self.capacity, dtype=torch.float64)',
        ),
        seed_of_the_slot=(
            '[r.seed for r in requests]',
            '[r.seed + rows.start + i for i, r in enumerate(requests)]',
        ),
        step_of_the_engine=(
            'self.uniforms[rows].gather(1, place)',
            'self.uniforms[rows].gather(1, place * 0 + self.num_draws)',
        ),
    ),
    other_precision_holds: dict(
        prefill_looks_at_exact_ones=(
            'causal(layer, qkv[:,:H], *kv.chunk(2, 1))',
            'causal(layer, qkv[:,:H], *qkv[:,H:].chunk(2, 1))',
        ),
        steps_cache_exact_ones=(
            'kept.index_put_((newest,), self.cached(qkv[:,H:]))',
            'kept.index_put_((newest,), qkv[:,H:])',
        ),
    ),
    weights_are_fresh: dict(stale_prefix=('self.prefixes.clear()', 'pass')),
    slots_are_refilled_at_once: dict(
        refill_in_waves=(
            'slots.num_slots - slots.num_running + len(finished)',
            'slots.num_slots if slots.num_running == len(finished) else 0',
        ),
        intake_of_everything=(
            'waiting = self.slots, as_requests(requests)',
            'waiting = self.slots, as_requests(list(requests))',
        ),
    ),
    frequencies_hold: dict(
        other_distribution=('cdf = probs.cumsum(-1)', 'cdf = probs.square().cumsum(-1)')
    ),
    cool_frequencies_hold: dict(temperature_ignored=('/temperature[:,None]', '')),
}
CASES = {
    name: (law, *change) for law, changes in MUTANTS.items() for name, change in changes.items()
}


@pytest.mark.parametrize('name', CASES)
def test_mutants_are_caught(name):
    law, old, new = CASES[name]
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        law(planted((cached_layers, slots, rollout), old, new))  # or an index out of range
