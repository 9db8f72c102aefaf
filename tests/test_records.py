"Promise 5: every tensor speaks of the token it stands beside; no sample is lost or comes twice"

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compassrl.records import (
    Batch,
    Request,
    RolloutEngine,
    Sample,
    SamplingParams,
    as_requests,
    collate,
    derive_seed,
    micro_batches,
    select,
)
from tests.support.growing import law_requests_that_grow

random = settings(deadline=None, max_examples=80, derandomize=True)
TAGS = (
    'advantages',
    'old_log_probs',
    'ref_log_probs',
    'log_probs',
    'entropy',
    'routes_agree',
)  # fp32 [B, T] tensors that later stages add


ROUTES = ('routed_experts', 'routes_valid', 'routed_gates')


def sample(number, Tp, Tr, prompt='p', routes=True):
    "Token ids name sample and place (1000 * number + place + 1), and so does every other tensor"
    ids = [1000 * number + t + 1 for t in range(Tp + Tr)]
    t = torch.tensor(ids)
    experts = (
        torch.stack([t, t + 7, t, t + 7], -1).view(-1, 2, 2)[:-1].to(torch.int16)
        if routes
        else None
    )  # [T-1, L=2, K=2]
    return Sample(
        prompt,
        number,
        ids[:Tp],
        ids[Tp:],
        t[Tp:].float(),
        experts,
        t[:-1] % 3 > 0 if routes else None,
        'stop',
        0,
        reward=float(number),
        routed_gates=experts / 2 if routes else None,
    )


@st.composite
def sample_lists(draw, routes=None):
    sizes = draw(
        st.lists(
            st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(0, 2)),
            min_size=1,
            max_size=8,
        )
    )
    keep = (
        [True] * len(sizes)
        if routes is None
        else draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    )
    return [
        sample(i + 1, Tp, Tr, f'p{g}', r) for i, ((Tp, Tr, g), r) in enumerate(zip(sizes, keep))
    ]


def full(samples):
    "A batch with every field set"
    b = collate(samples)
    return replace(
        b, **{k: (b.token_ids * b.response_mask).float() * (i + 2) for i, k in enumerate(TAGS)}
    )


def check_tags(b, tags=TAGS):
    "Each cell of each tensor against the token beside it"
    ids, T = b.token_ids, b.token_ids.shape[1]
    assert (b.token_mask == (ids > 0)).all() and (b.response_mask <= b.token_mask).all()
    assert (b.token_mask.long().diff(dim=1) <= 0).all(), 'right-padded'
    want = (ids * b.response_mask).float()
    assert (b.rollout_log_probs == want).all()
    for i, k in enumerate(TAGS):
        if k in tags:
            assert (getattr(b, k) == want * (i + 2)).all(), k
    if b.routed_experts is not None:
        fed = torch.arange(T) < b.lengths[:, None] - 1
        has = (b.routed_experts.flatten(1) != 0).any(1)[:, None]  # samples that brought routes
        assert (
            b.routed_experts
            == (
                torch.stack([ids, ids + 7, ids, ids + 7], -1).view(len(b), T, 2, 2)
                * (fed & has)[..., None, None]
            )
        ).all()
        assert (b.routes_valid == (fed & has & (ids % 3 > 0))).all()
        assert (b.routed_gates == b.routed_experts / 2).all()
    if len(b):
        assert (b.rewards.long()[:, None] == ids // 1000)[b.token_mask].all()


# ---- collate


@random
@given(sample_lists())
def test_collate(samples):
    b = collate(samples)
    check_tags(b, ())
    assert len(b) == len(samples) and b.token_ids.shape[1] == max(
        len(s.prompt_ids + s.response_ids) for s in samples
    )
    for i, s in enumerate(samples):
        assert b.token_ids[i][b.token_mask[i]].tolist() == s.prompt_ids + s.response_ids
        assert b.token_ids[i][b.response_mask[i]].tolist() == s.response_ids
    assert [[x == y for y in b.group] for x in b.group] == [
        [s.prompt_id == t.prompt_id for t in samples] for s in samples
    ]
    assert set(b.group.tolist()) == set(range(len({s.prompt_id for s in samples})))


def test_dtypes():
    b = collate([sample(1, 2, 3)])
    assert {
        f.name: getattr(b, f.name).dtype for f in fields(b) if getattr(b, f.name) is not None
    } == dict(
        token_ids=torch.int64,
        token_mask=torch.bool,
        response_mask=torch.bool,
        rollout_log_probs=torch.float,
        group=torch.int64,
        rewards=torch.float,
        routed_experts=torch.int16,
        routes_valid=torch.bool,
        routed_gates=torch.float,
    )


@random
@given(sample_lists(routes='some'))
def test_samples_without_routes(samples):
    "They fall back to the live router, the others keep theirs"
    b = collate(samples)
    if all(s.routed_experts is None for s in samples):
        assert b.routed_experts is None and b.routes_valid is None
    else:
        check_tags(b, ())
        for i, s in enumerate(samples):
            assert b.routes_valid[i].any() <= (s.routed_experts is not None)


def test_only_the_response_has_log_probs():
    b = collate([sample(1, 3, 2), sample(2, 1, 1)])
    assert b.rollout_log_probs.tolist() == [[0, 0, 0, 1004, 1005], [0, 2002, 0, 0, 0]]


# ---- select, map


@random
@given(sample_lists(), st.data())
def test_select(samples, data):
    b = full(samples)
    rows = data.draw(st.lists(st.integers(0, len(b) - 1), min_size=1, max_size=10))
    s = select(b, data.draw(st.sampled_from([rows, torch.tensor(rows)])))
    check_tags(s)
    assert (s.token_ids[:, 0] // 1000 - 1).tolist() == rows and (s.group == b.group[rows]).all()
    assert s.token_ids.shape[1] == b.lengths[rows].max()


@random
@given(sample_lists(), st.data())
def test_select_by_mask(samples, data):
    b = full(samples)
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(b), max_size=len(b))))
    s = select(b, keep)
    check_tags(s)
    assert (s.token_ids[:, :1] // 1000 - 1).flatten().tolist() == keep.nonzero()[:, 0].tolist()


def test_select_nothing():
    s = select(full([sample(1, 2, 3)]), [])
    assert len(s) == 0 and s.token_ids.shape == (0, 0) and s.routed_experts.shape == (0, 0, 2, 2)


@random
@given(sample_lists(), st.randoms(use_true_random=False))
def test_chain_of_transformations(samples, rnd):
    "Shuffle, split, select, pad, flip and flip back: the tags hold after every step"
    b = full(samples)
    for _ in range(4):
        order = list(range(len(b)))
        rnd.shuffle(order)
        b = select(b, order)
        check_tags(b)
        b = b.map(lambda t: t if t.dim() == 1 else torch.cat([t, torch.zeros_like(t[:, :2])], 1))
        check_tags(b)
        b = b.map(lambda t: t.flip(0)).map(torch.clone).to('cpu')
        check_tags(b)
    assert sorted(b.rewards.tolist()) == sorted(s.reward for s in samples)


def test_rewards_are_absent_until_all_samples_are_judged():
    judged = [sample(1, 2, 3), sample(2, 1, 2)]
    assert collate(judged).rewards.tolist() == [s.reward for s in judged]
    waits = replace(judged[1], reward=None)
    for samples in ([judged[0], waits], [waits, judged[0]], [waits]):
        b = collate(samples)
        assert b.rewards is None and select(b, [0]).rewards is b.to('cpu').rewards is None
    unjudged = Sample('p', 0, [1], [2], torch.zeros(1), None, None, 'stop', 0)
    assert collate([unjudged]).rewards is None


def test_map_reaches_every_field():
    b, seen = full([sample(1, 2, 3), sample(2, 1, 2)]), []
    b.map(lambda t: seen.append(id(t)) or t)
    assert sorted(seen) == sorted(id(getattr(b, f.name)) for f in fields(Batch)), (
        'a field was forgotten: set it in `full`'
    )


# ---- micro-batches


@random
@given(sample_lists(), st.integers(1, 200))
def test_micro_batches(samples, max_tokens):
    b = full(samples)
    parts = micro_batches(b, max_tokens)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(b))), 'every row once'
    for rows in parts:
        part = select(b, rows)
        check_tags(part)
        assert len(rows) == 1 or part.token_ids.numel() <= max_tokens
    widths = [int(b.lengths[rows].max()) for rows in parts]
    assert widths == sorted(widths, reverse=True), 'the longest come first'
    for rows, width in zip(parts[:-1], widths):
        assert width * (len(rows) + 1) > max_tokens, 'no part could take another row'


def test_micro_batches_of_nothing():
    assert micro_batches(select(full([sample(1, 2, 3)]), []), 10) == []


# ---- mutants


def two():
    return full([sample(1, 2, 3), sample(2, 1, 7), sample(3, 3, 1)])


@pytest.mark.parametrize('field', ['rollout_log_probs', *ROUTES, 'response_mask', 'rewards', *TAGS])
def test_the_tags_see_a_tensor_that_stays_behind(field):
    b = two()
    moved = replace(select(b, [2, 0, 1]), **{field: getattr(b, field)})
    with pytest.raises(AssertionError):
        check_tags(moved)


@pytest.mark.parametrize('field', ['rollout_log_probs', *ROUTES, 'response_mask', *TAGS])
def test_the_tags_see_a_shift_by_one(field):
    b = two()
    with pytest.raises(AssertionError):
        check_tags(replace(b, **{field: getattr(b, field).roll(1, 1)}))


# ---- errors, seeds


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(rollout_log_probs=torch.zeros(2)), 'rollout_log_probs has 2 rows; .* need 3'),
        (dict(token_versions=torch.zeros(4)), 'token_versions has 4 rows; .* need 3'),
        (dict(routed_experts=torch.zeros(5, 1, 1)), 'routed_experts has 5 rows; .* need 4'),
        (dict(routes_valid=torch.ones(3, dtype=torch.bool)), 'routes_valid has 3 rows'),
        (dict(routed_experts=torch.zeros(4, 1, 3)), r'\[1, 3\], \[2, 2\].*one policy'),
        (dict(routes_valid=None), 'no routes_valid'),
        (dict(prompt_ids=[]), 'has no prompt'),
    ],
)
def test_a_sample_that_does_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        collate([sample(1, 2, 3), replace(sample(2, 2, 3), **change)])


def test_fed_mask():
    "All tokens but the last of each sample, also where a row fills the batch"
    b = collate([sample(1, 2, 3), sample(2, 1, 1)])
    assert b.fed_mask.tolist() == [[True] * 4 + [False], [True] + [False] * 4]


def test_no_samples():
    with pytest.raises(ValueError, match='no samples'):
        collate([])


@pytest.mark.parametrize(
    'kw',
    [
        dict(max_tokens=0),
        dict(temperature=-0.1),
        dict(temperature=float('nan')),
        dict(top_p=0),
        dict(top_p=1.1),
        dict(top_k=-1),
        dict(min_p=-0.1),
    ],
)
def test_sampling_params(kw):
    with pytest.raises(ValueError, match='='.join(map(str, *kw.items()))):
        SamplingParams(**kw)


@random
@given(st.lists(st.integers(), max_size=3), st.lists(st.integers(), max_size=3))
def test_seeds_depend_on_the_parts(a, b):
    assert (derive_seed(*a) == derive_seed(*b)) == (a == b) and 0 <= derive_seed(*a) < 2**63


ASKED = [Request(f'p{i}', (5, 6), seed=i) for i in range(7)]


@random
@given(st.lists(st.one_of(st.none(), st.integers(0, 4)), max_size=12), st.booleans())
def test_polls_give_each_request_once_and_in_order(sizes, later):
    "Whatever was ready later goes first; `done` is never said too early, and holds"
    source, out, added = as_requests(iter(ASKED)), [], []
    for k, n in enumerate(sizes):
        if later and k == 3:
            added = [Request('later', (1,))]
            source.ready.extend(added)
        was_done, new = source.done, source.poll(n)
        out += new
        assert not (was_done and new and not added)
        assert n is None or len(new) <= n
    out += source.poll()
    assert [r for r in out if r.prompt_id != 'later'] == ASKED
    assert len(out) == len(set(r.prompt_id for r in out)) == 7 + len(added)
    assert source.done and source.poll() == source.poll(3) == list(source) == []


def test_a_source_that_ended_is_not_asked_again():
    "An iterator that would begin again has no say"

    class Again:
        left = 2

        def __iter__(self):
            return self

        def __next__(self):
            self.left -= 1
            if self.left == 0:
                raise StopIteration
            return ASKED[0]

    source = as_requests(Again())
    assert source.poll() == [ASKED[0]] and source.done
    assert source.poll() == [] and as_requests(source) is source


def test_a_source_is_read_no_further_than_it_is_polled():
    read = []
    source = as_requests(read.append(r.prompt_id) or r for r in ASKED)
    assert source.poll(0) == [] and not read and not source.done
    assert source.poll(2) == ASKED[:2] and read == ['p0', 'p1']
    assert next(iter(source)) == ASKED[2] and len(read) == 3


class OneByOne(RolloutEngine):
    def generate(self, requests, whole_groups=False):
        for r in requests:
            yield Sample(r.prompt_id, r.index, [5], [r.seed], torch.zeros(1), *NOTHING)


class AllAtOnce(OneByOne):
    def generate(self, requests, whole_groups=False):
        yield from super().generate(list(requests))


NOTHING = None, None, 'stop', 0


def test_engines_that_know_of_lists_alone():
    "What was not ready comes in the next call of `generate`"
    law_requests_that_grow(OneByOne(), ASKED)
    law_requests_that_grow(AllAtOnce(), ASKED, calls=3)


def test_seeds_are_the_same_on_every_machine():
    assert derive_seed(0, 'rollout', 7) == 5703918832696801055
