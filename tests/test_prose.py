"Prose in code obeys the rules that a program can check; what is left may only become less"

import pytest
import yaml

from tests.support import ROOT
from tools.prose import Fault, comments, counts, english, faults, of_code, of_text, settings

LEFT = yaml.safe_load((ROOT / 'tests/prose.yml').read_text()) or {}


@pytest.fixture(scope='module')
def found():
    return list(faults())


@pytest.mark.parametrize('rule', ['fragment', 'setting', 'english'])
def test_no_new_faults(rule, found):
    "A room that is not in tests/prose.yml has none"
    now, left = counts(found).get(rule, {}), LEFT.get(rule) or {}
    more = {room for room, n in now.items() if n > left.get(room, 0)}
    texts = [f'{f.where}: {f.text}' for f in found if f.rule == rule and f.room in more]
    assert not more, '\n'.join(texts)


def test_a_setting_is_described_by_a_noun_or_a_verb(found):
    assert [f for f in found if f.rule == 'setting'] == []
    code = (ROOT / 'compassrl/algo/algo_settings.py').read_text()
    assert len(list(settings(code))) > 20  # the comments were read


FRAGMENTS = """
x = 1  # of all that is drawn
y = [  # shapes
    2,  # as it was
]
# a comment of two lines, the second of which begins
# of itself with such a word
z = 3  # whose names
"""


def test_a_fragment_is_noticed():
    texts = [f.text for f in of_code('algo', 'a', FRAGMENTS) if f.rule == 'fragment']
    assert texts == ['of all that is drawn', 'as it was', 'whose names']
    assert [line for line, _ in comments(FRAGMENTS)] == [2, 3, 4, 6, 8]


def test_a_field_without_a_noun_or_a_verb_is_noticed():
    code = (
        '@dataclass\nclass AConfig:\n    # what it does\n    a: int = 1\n    b: int = 2  # Rows\n'
    )
    assert [text for _, text in settings(code)] == ['what it does', 'Rows']


@pytest.mark.parametrize(
    'text',
    [
        'Who comes from verl finds their names.',
        'It is done anew at every sync.',
        'The paper could not be had.',
        'They are not to be told from GRPO.',
        'It stands beside the code.',
        'Padding has no say.',
        'The value is to be set by hand.',
        'A group is asked as often again.',
        'This holds for experts, too.',
    ],
)
def test_a_broken_rule_of_english_is_noticed(text):
    assert english(text)
    planted = [f.rule for f in of_code('algo', 'a', f'"{text}"')]
    assert planted == ['english']


@pytest.mark.parametrize(
    'text',
    [
        'Who asks?',
        'Readers who come from verl find their names.',
        'Use it again, next to the code.',
        'The box is to the left.',
        'The word `beside` is a name.',
    ],
)
def test_plain_english_is_no_fault(text):
    assert not english(text)


def test_faults_are_counted_by_rule_and_room():
    some = [Fault('algo', 'a', 'english', ''), Fault('algo', 'b', 'english', '')]
    assert counts(some) == {'english': {'algo': 2}}


def test_the_text_of_a_notebook_is_read_sentence_by_sentence():
    text = 'Who asks? A model. It holds here, too.\n```\nx, too.\n```\n- Who asks, waits.'
    assert [f.text.partition('  ->')[0] for f in of_text('algo', 'a', text)] == [
        'It holds here, too.'
    ]
