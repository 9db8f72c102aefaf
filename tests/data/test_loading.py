"Which rows repeat another one, against a comparison of all pairs"

import random
import re

import pytest

from compassrl.data.loading import repeats, shingles

WORDS = [f'w{i}' for i in range(40)]


def changed(rng, text, times):
    words = text.split()
    for _ in range(times):
        words[rng.randrange(len(words))] = rng.choice(WORDS)
    return ' '.join(words)


def rows(seed, num=120):
    "Long texts and light changes of them, under a few prompts"
    rng, out = random.Random(seed), []
    prompts = [' '.join(rng.choices(WORDS, k=30)) for _ in range(4)]
    for i in range(num):
        if i < 20:
            out.append((rng.choice(prompts), ' '.join(rng.choices(WORDS, k=rng.randrange(3, 90)))))
        else:
            prompt, text = rng.choice(out[:20])
            prompt = changed(rng, prompt, rng.choice([0, 0, 1, 9]))
            out.append((prompt, changed(rng, text, rng.choice([0, 1, 2, 30]))))
    return out


def grams(text):
    words = re.findall(r'\S+', text)
    return {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))}


def by_all_pairs(rows, threshold):
    kept, out = [], []
    for i, row in enumerate(rows):
        same = [j for j in kept if rows[j] == row]
        alike = [
            j
            for j in kept
            if all(
                len(a & b) / len(a | b) >= threshold
                for a, b in ((grams(x), grams(y)) for x, y in zip(row, rows[j]))
            )
        ]
        out.append((same[0], True) if same else (alike[0], False) if alike else None)
        if out[-1] is None:
            kept.append(i)
    return out


@pytest.mark.parametrize('threshold', [0.7, 0.8, 0.9, 1.0])
def test_the_same_as_by_comparing_all_pairs(threshold):
    kinds = set()
    for seed in range(6):
        some = rows(seed)
        found = repeats(some, threshold)
        assert found == by_all_pairs(some, threshold), seed
        kinds |= {r and r[1] for r in found}
    assert kinds >= {None, True} and (threshold == 1 or False in kinds)


def test_both_prompt_and_response_have_to_repeat():
    long, other = (' '.join(f'{w}{i}' for i in range(50)) for w in 'ab')
    assert repeats([(long, 'yes'), (other, 'yes'), (long, 'no')]) == [None] * 3
    assert repeats([(long, other), (long + ' x', other + ' y')]) == [None, (0, False)]
    assert repeats([(long, ' a  b'), (long, 'a b\n')]) == [None, (0, True)]


def test_shingles():
    assert shingles('a b c', 2) == {'a b', 'b c'} and shingles('a', 2) == {'a'}


@pytest.mark.parametrize('threshold', [0.5, 1.1])
def test_a_threshold_that_cannot_be_searched_is_refused(threshold):
    with pytest.raises(ValueError, match=f'threshold={threshold}: use 0.6 to 1'):
        repeats([], threshold)
