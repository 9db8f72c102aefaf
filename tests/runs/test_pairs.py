"Pairs, reasons and measures, against enumeration and counting"

import itertools
import random

import pytest
import torch

from compassrl.data.prompts import split_of
from compassrl.judges.genrm import Question, Reply, parse_label
from compassrl.runs.judge_model import (
    agreement,
    any_answer,
    pair_row,
    shop_pairs,
    true_label,
    verdict_text,
    wilson,
)
from course.reward_model import answer_groups, judge_rewards, orders
from tests.data.test_toys import by_words

TEXT = 'red M cap to 5: A tan M 8, B red S 4, C red M 5?'
ALL = [f'{n}{p}{t}' for n, p, t in itertools.product('ABCD', ('', ' for 4', ' for 8'), ('', '!'))]


@pytest.mark.parametrize('margin', [0, 1])
def test_labels_by_enumeration(margin):
    for a, b in itertools.product([*ALL, 'x', ''], repeat=2):
        gap = by_words(TEXT, a) - by_words(TEXT, b)
        want = ['Tie', 'Better', 'Worse'][0 if abs(gap) <= margin else 1 if gap > 0 else 2]
        assert true_label(Question(TEXT, a, b), margin) == want


def test_reasons_by_hand():
    q = Question(TEXT, 'C for 5', 'B for 9, trust me')
    assert verdict_text(q) == '1 C5 rr+ MM+ 55++ + 5\n2 B9 rr+ SM- 45+- - 2\n#Better'
    q = Question(TEXT, 'buy C', 'A')
    assert verdict_text(q) == '1 -- --- --- ---- - 0\n2 A- tr- MM+ 85-- + 2\n#Worse'


def test_pairs_are_new_balanced_and_of_their_split():
    for split in ('train', 'heldout'):
        pairs = shop_pairs(300, split)
        assert pairs == shop_pairs(300, split) != shop_pairs(300, split, seed=1)
        assert {split_of(q.prompt) for q in pairs} == {split}
        assert all(q.first != q.second for q in pairs)
        labels = [true_label(q) for q in pairs]
        assert min(map(labels.count, ('Better', 'Tie', 'Worse'))) > 70
        for q, label in zip(pairs, labels):
            row = pair_row(q)
            assert row['answer'] == label == parse_label(row['solution'])
            assert row['prompt'] == f'1 {q.first}\n2 {q.second}\n{q.prompt}\n'


def test_wilson_covers():
    "Wilson's interval holds the truth about 95 times of 100"
    rng, p, n = random.Random(0), 0.9, 60
    held = 0
    for _ in range(2000):
        share = sum(rng.random() < p for _ in range(n)) / n
        low, high = wilson(share, n)
        held += low <= p <= high and low <= share <= high
    assert 0.92 < held / 2000 < 0.98
    assert wilson(0, 0) == (0.0, 1.0)


def test_agreement_counts():
    truth = ['Tie', 'Tie', 'Better', 'Worse']
    found = agreement(['Tie', 'Worse', 'Better', None], truth)
    assert (found['agreement'][0], found['tie_accuracy'][0]) == (0.5, 0.5)


def test_orders_by_loop():
    "A judge with opinions of its own: pairs of each group, one by one"

    def rewards(prompt, answers):
        return torch.tensor([float(len(a) % 3) for a in answers])

    groups, counts = answer_groups(12, size=5), [0, 0, 0]
    for p, answers in groups.values():
        r = rewards(p, answers).tolist()
        for i, j in itertools.product(range(5), repeat=2):
            if by_words(p.text, answers[i]) > by_words(p.text, answers[j]):
                counts[0 if r[i] > r[j] else 1 if r[i] == r[j] else 2] += 1
    want = dict(zip(('right', 'tied', 'inverted'), (c / sum(counts) for c in counts)))
    assert orders(rewards, groups) == pytest.approx(want)


def test_a_mute_judge_ties_all_and_a_perfect_one_inverts_none():
    groups = answer_groups(12)
    mute = judge_rewards(lambda qs: [Reply('') for _ in qs])
    perfect = judge_rewards(lambda qs: [Reply(verdict_text(q)) for q in qs])
    assert orders(mute, groups)['tied'] == 1
    assert orders(perfect, groups)['inverted'] == 0 < orders(perfect, groups)['right']


def test_answers_are_of_every_quality():
    rng = random.Random(0)
    assert {by_words(TEXT, any_answer(TEXT, rng)) for _ in range(500)} == set(range(6))
