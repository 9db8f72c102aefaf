"Which prompts a step asks, against a list that is walked along by hand"

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compassrl.data.prompts import DataConfig, load_data
from compassrl.data.selection import LEAST, PromptSelection, kinds_of, prompts_of_step
from compassrl.data.tokenizer import build_tokenizer
from compassrl.records import Prompt, derive_seed


def questions(lengths, domains=('a', 'b', 'c')):
    return [
        Prompt(f'p{i}', domains[i % len(domains)], '', [7] * n, '1', 'exact')
        for i, n in enumerate(lengths)
    ]


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=200))
def test_classes_of_length(lengths):
    "Ordered, equal lengths together, at most 16, none much larger than its equals demand"
    prompts = questions(lengths)
    kinds = kinds_of(prompts, 'length')
    found = [kinds[p.id] for p in sorted(prompts, key=lambda p: len(p.token_ids))]
    assert found == sorted(found) and len({*found}) <= 16
    by_length = {}
    for p in prompts:
        by_length.setdefault(len(p.token_ids), set()).add(kinds[p.id])
    assert all(len(k) == 1 for k in by_length.values())
    equals = Counter(lengths)
    for kind, size in Counter(found).items():
        own = [n for n, k in by_length.items() if k == {kind}]
        assert size - equals[max(own)] <= len(lengths) / 16 + 1


def test_domains_are_kinds():
    assert kinds_of(questions([3, 3, 9]), 'domain') == dict(p0='a', p1='b', p2='c')


@pytest.mark.parametrize('level', ['3', 3, 3.0])
def test_a_level_in_a_column_is_a_kind(tmp_path, level):
    "A number will do, as a table with gaps holds it, too"
    rows = [dict(prompt=f'{i}+1=', answer=i + 1, level=level) for i in range(20)]
    (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    cfg = DataConfig(path=f'{tmp_path}/rows.jsonl', columns=dict(domain='level'), num_heldout=4)
    train, _ = load_data(cfg, build_tokenizer(), 0)
    assert set(kinds_of(train, 'domain').values()) == {'3'}


@pytest.mark.parametrize('key', ['domain', 'id', 'answer'])
@pytest.mark.parametrize('value', [float('nan'), float('inf'), True])
def test_what_is_no_number_is_named_with_its_row(tmp_path, key, value):
    rows = [dict(prompt=f'{i}+1=', answer=i + 1) for i in range(20)]
    rows[3][key] = value
    (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    cfg = DataConfig(path=f'{tmp_path}/rows.jsonl', num_heldout=4)
    with pytest.raises(ValueError, match=f"rows.jsonl:4: '{key}' is .*, not a string"):
        load_data(cfg, build_tokenizer(), 0)


def by_hand(prompts, kinds, num, seed, history):
    "Steps of a selection: every place in turn, its lot, its kind's share against the best"
    awake, place = {k: 1.0 for k in kinds.values()}, 0
    for silent_kinds in history:
        chosen = []
        while len(chosen) < num:
            step, place = place, place + 1
            (p,) = prompts_of_step(prompts, step, 1, seed)
            lot = derive_seed(seed, 'select', step, p.id) / 2**63
            if p not in chosen and lot < max(LEAST, awake[kinds[p.id]] / max(awake.values())):
                chosen.append(p)
        yield chosen
        for p in chosen:
            k = kinds[p.id]
            awake[k] += 0.1 * ((k not in silent_kinds) - awake[k])


HISTORY = st.lists(st.sets(st.sampled_from('abc')), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(num=st.integers(1, 9), total=st.integers(9, 60), seed=st.integers(0, 5), history=HISTORY)
def test_a_selection_by_hand(num, total, seed, history):
    prompts = questions([5] * total)
    s = PromptSelection(prompts, 'domain', num, seed)
    for chosen, silent in zip(by_hand(prompts, s.kinds, num, seed, history), history):
        before = s.place
        assert s.next() == chosen
        assert s.skipped == s.place - before - num
        s = reopened(s, prompts, num, seed)
        s.took({p.id: p.domain in silent for p in chosen})


def reopened(s, prompts, num, seed):
    "Another one with the same state, through a file"
    other = PromptSelection(prompts, 'domain', num, seed)
    other.load_state_dict(json.loads(json.dumps(s.state_dict())))
    return other


def test_a_state_from_before_a_kind_was_there():
    "More steps on other data, say: what is new starts awake"
    prompts = questions([5] * 12)
    s = PromptSelection(prompts, 'domain', 2, 0)
    kinds = dict(s.awake)
    s.load_state_dict(dict(place=4, awake={'a': 0.5}))
    assert s.awake == kinds | {'a': 0.5} and len(s.awake) > 1


def test_it_goes_on_where_nobody_is_awake():
    "Thousands of silent groups: the shares are as small as numbers get, and all come in turn"
    prompts = questions([5] * 9)
    s = PromptSelection(prompts, 'domain', 9, 0)
    for _ in range(8000):
        s.took({p.id: True for p in prompts})
    assert 0 < max(s.awake.values()) < 1e-300
    assert {p.id for p in s.next()} == {p.id for p in prompts} and s.skipped == 0


def test_more_prompts_a_step_than_there_are():
    assert len(PromptSelection(questions([5] * 4), 'length', 9, 0).next()) == 4
    twice = questions([5] * 4) * 2
    assert len(PromptSelection(twice, 'length', 9, 0).next()) == 4, 'each once'


def test_what_cannot_be_asked_for():
    with pytest.raises(ValueError, match='select_by'):
        DataConfig(select_by='size')
