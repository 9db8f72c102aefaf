"""A batch as a tree of prefixes: against sets of prefixes in Python, and against each row alone"""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.prefix_tree import prefix_tree
from compassrl.records import Batch
from compassrl.train.torch_train import packed_states

VOCAB, EXPERTS = 5, 4
CONFIG = PolicyConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    moe_intermediate_size=8,
    intermediate_size=8,
    num_experts=EXPERTS,
    max_position_embeddings=16,
)
SHAPES = [
    dict(),
    dict(num_key_value_heads=4, mlp_only_layers=(0,)),
    dict(mlp_only_layers=(0, 1)),  # no routes at all
]
# few tokens, so that rows often begin alike; padding also has token 0
rows_of_tokens = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1)
random = settings(deadline=None, max_examples=60, derandomize=True)


def padded(rows):
    T = max(map(len, rows))
    mask = torch.tensor([[t < len(r) for t in range(T)] for r in rows])
    return torch.tensor([r + [0] * (T - len(r)) for r in rows]), mask


def with_routes(rows, seed):
    "Routes that are 0 and 1, or 1 and 2: the same prefix has now this one, now that"
    ids, mask = padded(rows)
    g = torch.Generator().manual_seed(seed)
    first = torch.randint(2, (*ids.shape, CONFIG.num_hidden_layers, 1), generator=g)
    return ids, mask, torch.cat([first, first + 1], -1), torch.rand(ids.shape, generator=g) < 0.7


def keys(ids, mask, routes=None, valid=None):
    "Of each real token: all that its state depends on"
    for i in range(len(ids)):
        key = ()
        for t in range(int(mask[i].sum())):
            sent = None if routes is None or not valid[i, t] else str(routes[i, t].tolist())
            key += ((int(ids[i, t]), sent),)
            yield key


def double(**kw):
    policy = Policy(replace(CONFIG, **kw)).double()
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(8 if p.dim() > 1 else 1)
    return policy


def with_gradient(policy, passes):
    "Hidden states and routes of all tokens, and the gradient of a sum that weighs each its own way"
    hidden, own = (torch.cat(x) for x in zip(*passes))
    up = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
    grads = torch.autograd.grad((hidden * up).sum(), policy.parameters(), materialize_grads=True)
    return hidden.detach(), own, grads


@random
@given(rows_of_tokens)
@example([[1, 0], [1], [1, 0]])  # what pads the second is the last token of the others
def test_a_node_is_a_prefix(rows):
    ids, mask = padded(rows)
    tree, want = prefix_tree(ids, mask), list(keys(ids, mask))
    assert len(tree.row) == len(tree.column) == len(tree.place) == len(set(want))
    assert len({(n, k) for n, k in zip(tree.node.tolist(), want)}) == len(set(want))
    at = dict(zip(map(tuple, mask.nonzero().tolist()), want))
    for node, (row, column) in enumerate(zip(tree.row.tolist(), tree.column.tolist())):
        assert want[tree.node.tolist().index(node)] == at[row, column]


@random
@given(rows_of_tokens)
def test_attention_works_on_rows_that_no_other_begins_with(rows):
    ids, mask = padded(rows)
    tree = prefix_tree(ids, mask)
    firsts = {tuple(r[: len(r) - cut]) for r in rows for cut in range(1, len(r))}
    assert len(tree.cells) == len({tuple(r) for r in rows} - firsts)
    assert tree.cells.flatten()[tree.place].tolist() == list(range(len(tree.row)))


@random
@given(rows_of_tokens, st.integers(0, 99))
def test_other_routes_are_another_prefix(rows, seed):
    "Two tokens have one node only if their valid routes were the same, too"
    batch = with_routes(rows, seed)
    tree, want = prefix_tree(*batch), list(keys(*batch))
    owners = {}
    for node, key in zip(tree.node.tolist(), want):
        assert owners.setdefault(node, key) == key
    ids, mask, routes, valid = batch
    none = prefix_tree(ids, mask, routes, torch.zeros_like(valid))
    assert torch.equal(none.node, prefix_tree(ids, mask).node)


@pytest.mark.parametrize('kw', SHAPES)
@pytest.mark.parametrize('replayed', [False, True])
@random
@given(rows=rows_of_tokens, seed=st.integers(0, 99))
def test_states_and_gradients_are_those_of_each_row_alone(kw, replayed, rows, seed):
    policy, batch = double(**kw), with_routes(rows, seed)
    batch = batch if replayed else batch[:2]
    alone = [[t[i : i + 1, : len(r)] for t in batch] for i, r in enumerate(rows)]
    got = with_gradient(policy, [policy(*batch, share=True)])
    want = with_gradient(policy, [policy(*row) for row in alone])
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_the_train_engine_shares_what_rows_share():
    "The policy works on as many tokens as there are prefixes, with replayed routes and without"
    policy, batch = double(), with_routes([[0, 1, 2], [0, 1, 1, 2], [0, 1, 2], [0, 1]], 0)
    ids, mask, routes, valid = batch
    valid[:], routes[:] = mask, routes[0, 0]  # the same for all
    zeros = torch.zeros(ids.shape)
    b = Batch(
        token_ids=ids,
        token_mask=mask,
        response_mask=mask & (torch.arange(ids.shape[1]) > 0),
        rollout_log_probs=zeros,
        group=torch.zeros(4, dtype=torch.long),
        rewards=zeros[:, 0],
        routed_experts=routes.to(torch.uint8),
        routes_valid=valid,
    )
    lengths, trunk = [], policy.trunk
    policy.trunk = lambda ids, *rest: lengths.append(len(ids)) or trunk(ids, *rest)
    for replay in (True, False):
        hidden, own = packed_states(policy, b, replay)
        assert len(hidden) == len(own) == int(mask.sum()) == 12
    assert lengths == [5, 5]


def test_left_padding_is_refused():
    ids, mask = padded([[1, 2], [1]])
    with pytest.raises(ValueError, match='pad rows on the right'):
        prefix_tree(ids, mask.flip(1))


def test_routes_without_their_mask_are_refused_by_name():
    ids, mask, routes, _ = with_routes([[1, 2], [1]], 0)
    with pytest.raises(ValueError, match='without routes_valid'):
        double()(ids, mask, routes, share=True)
