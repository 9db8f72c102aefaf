"""A policy that repeats one mark until its tokens are spent costs the trainer no time"""

import json
import random
import re

import pytest

from compassrl.data.tasks import verify
from compassrl.judges.instructions import last_word
from compassrl.judges.tool_calls import calls_of
from compassrl.judges.verifiers import program_of
from compassrl.records import Prompt
from tests.judges.test_hostile import ANSWERS, IN_SANDBOXES

NAMES = [n for n in ANSWERS if n not in IN_SANDBOXES]
MARKS = [
    '<tool_call>',
    '</tool_call>',
    '<tool_call></tool_call>',
    '<tool_call>{}</tool_call>',
    '<think>',
    '</think>',
    '#',
    '#1',
    '!',
    'a',
    '1',
    '1,111',
    '1,111 ',
    '1e5 ',
    '.',
    '. ',
    '-',
    '- ',
    '* ',
    '\n',
    ' ',
    '\n \n',
    ' \n',
    ',',
    ';',
    'a,',
    '1. ',
    '\n1. ',
    '"',
    '."',
    '(',
    '(1',
    '[',
    '{',
    '{"a":',
    '```',
    '```\n',
    '```python\n',
    '\\boxed{',
    '\\boxed{1} ',
    '$1',
    "a'",
    'a-',
    'A',
    '。',
    'é',
    'ü!',
    'B',
    'A) ',
    '(B) ',
    'answer is ',
    'the answer is B. ',
    'Wait, no. ',
    'I think ',
    '\nB) 42',
    '\\text{B',
    '答案是',
]
ANSWERS = ANSWERS | dict(
    words=json.dumps(
        [dict(check='last_word', word=w) for w in ('!', 'a', 'a!', 'end')]
        + [dict(check=c, at_least=1) for c in ('num_words', 'num_sentences', 'num_lines')]
        + [dict(check=c, at_least=1) for c in ('num_paragraphs', 'num_bullets', 'num_characters')]
        + [dict(check='first_word', word='a'), dict(check='json_format'), dict(check='all_upper')]
        + [dict(check='script', name='latin'), dict(check='contains', words=['a!', '!'])]
    )
)


@pytest.mark.parametrize('name', [*NAMES, 'words'])
def test_every_mark_many_times(name):
    "A quadratic verifier would need minutes for the last size; here it gets a tenth of one"
    prompt = Prompt('p', 'd', '', [2], ANSWERS[name], 'instructions' if name == 'words' else name)
    for mark in MARKS:
        for text in (mark * 10, mark * 1000, f'a{mark * 100_000}b'):
            v = verify(prompt, text, 6.0)
            assert v.status in ('ok', 'wrong'), (mark, len(text), v)


@pytest.mark.parametrize('mark', MARKS)
def test_the_last_program_of_a_long_response(mark):
    assert isinstance(program_of(mark * 100_000), str)


def naive_last_word(text, word):
    return re.search(rf'(?<!\w){re.escape(word)}\W*\Z', text, flags=re.I) is not None


def test_last_word_is_what_its_pattern_says():
    rng = random.Random(0)
    for _ in range(20_000):
        text = ''.join(rng.choice('aB!. é1') for _ in range(rng.randrange(8)))
        word = ''.join(rng.choice('ab!. é') for _ in range(rng.randrange(1, 4)))
        assert last_word(text, word) == naive_last_word(text, word), (text, word)


@pytest.mark.parametrize(
    'text',
    [
        '<tool_call>{}',
        '<tool_call>1<tool_call>2</tool_call>',
        '<tool_call>1</tool_call><tool_call>',
    ],
)
def test_a_call_that_is_not_closed(text):
    with pytest.raises(ValueError, match='not closed'):
        calls_of(text)
