"The shop: questions whose answers have a true quality, against a walk over words"

import random

import pytest

from compassrl.data.prompts import make_prompts
from compassrl.data.tasks import num_problems, problem
from compassrl.data.tokenizer import UNK_ID, build_tokenizer, encode
from compassrl.data.toys import read_question, shop_quality

TOK = build_tokenizer()


def by_words(text, response):
    "No pattern: the question word by word, the answer letter by letter"
    head, _, listing = text.rstrip('?').partition(': ')
    colour, size, _, _, limit = head.split(' ')
    items = dict(item.split(' ', 1) for item in listing.split(', '))
    name, rest = response[:1], response[1:]
    if name not in items or not name or rest[:1].isalnum() or rest[:1] == '_':
        return 0
    has, is_size, price = items[name].split(' ')
    points = (has == colour) + (is_size == size) + (int(price) <= int(limit))
    told = rest[5:6] if rest.startswith(' for ') else ''
    if told.isdigit() and not (rest[6:7].isalnum() or rest[6:7] == '_'):
        points += told == price
    return points + (len(response) <= 8)


def answers(rng):
    for _ in range(60):
        words = rng.choices(
            ['A', 'B', 'C', 'D', 'Z', 'M', ' for ', '4', '7', ' ', '!', 'x', '\n'], k=3
        )
        end = rng.choice(['', '', '!', ', a great buy', 'x'])
        yield f'{rng.choice("ABC")} for {rng.randint(0, 12)}{end}'
        yield ''.join(words)


@pytest.mark.parametrize('level', range(3))
def test_questions_and_qualities(level):
    "One item fits; prompts and answers are short; quality is what the words say"
    rng, size = random.Random(level), num_problems('shop', level)
    made = [p for _ in range(400) if (p := problem('shop', level, rng.randrange(size)))]
    assert len(made) > 100
    for p in made:
        assert len(p.text) <= 60 and len(p.solution) <= 40 and p.verifier == 'genrm'
        assert UNK_ID not in encode(TOK, p.text + p.solution)
        wanted, items = read_question(p.text)
        assert len(items) == level + 2 and [*items] == sorted(items)
        whole = [i for i in items.values() if all(i.met(wanted))]
        assert [f'{i.name} for {i.price}' for i in whole] == [p.solution]
        assert by_words(p.text, p.solution) == 5 and 2 <= by_words(p.text, p.answer) <= 4
        for text in answers(rng):
            assert shop_quality(p.text, text) == by_words(p.text, text), (p.text, text)


def test_it_is_a_family_like_the_others():
    prompts = make_prompts('shop', 60, 1.5, 0, 'train', TOK)
    assert len({p.text for p in prompts}) == 60
    assert {len(read_question(p.text)[1]) for p in prompts} == {3, 4}
    with pytest.raises(ValueError, match="'1\\+1=' is no question of the shop"):
        shop_quality('1+1=', 'A')
