"""Which text pays for which answer: families whose verdict is known by construction, and by hand"""

import sys
import time
from fractions import Fraction

import pytest
from math_verify import parse, verify

from compassrl.judges import mathematics
from compassrl.judges.mathematics import readable, same_maths

VALUES = [('73', '74'), ('-5', '5'), ('1/2', '1/3'), ('0.25', '0.2'), ('1,234', '1,235')]

# what a response makes of its answer X, read by everyone as X
SAID = [
    'X',
    'It is X.',
    'The answer is X.',
    '**X**',
    'So **X**.',
    '**Answer: X**',
    '$X$',
    'thus $X$.',
    '\\boxed{X}',
    'so $\\boxed{X}$',
    '\\boxed {X}',
    '\\fbox{X}',
    '`X`',
    '__X__',
    '*X*',
    'it is `X`, I think',
    'it is *X*, you see',
    '<answer>X</answer>',
    '<answer> $X$ </answer>',
    '<answer>\\boxed{X}</answer>',
    '<answer>**X**</answer>',
    '<answer>The answer is X.</answer>',
    '答案是X。',
    '所以答案是X。',
    '答案：X',
    '\\(X\\)',
    'so \\[X\\]',
    'Final answer: X',
    '# X',
    'x = X',
]

# an answer Y is taken back, and X is said instead
TAKEN_BACK = [
    '\\boxed{Y}. Wait, no: \\boxed{X}',
    '\\fbox{Y} or rather \\boxed{X}',
    '<answer>Y</answer> no, <answer>X</answer>',
    '\\boxed{Y} and so <answer>X</answer>',
    '<answer>Y</answer>, hm, \\boxed{X}',
    'The answer is Y. No, the answer is X.',
    'The final answer is Y. I was wrong, so the answer is X.',
    'it is $Y$, no, it is $X$',
    '答案是Y。不对，答案是X。',
]

# Y is taken back, and nothing is said instead
UNSAID = [
    'so \\boxed{Y}. Hmm wait, no: \\boxed{',
    '\\boxed{Y} or \\boxed',
    '\\boxed{Y}, <answer>Y',
    '<answer>Y</answer>, hm: \\boxed{\\frac{',
    '\\boxed{\\frac{Y}{',
    'so \\boxed{Y',
    '<answer>Y',
    'no idea',
    '',
]

BY_HAND = [
    ('\\boxed{1e3}', '1000', True),
    ('\\boxed{2.5e-1}', '1/4', True),
    ('1e3', '1000', True),
    ('\\boxed{1e3}', '1', False),
    ('4.2e1', '42', True),
    ('\\boxed{50\\%}', '0.5', True),
    ('\\boxed{42\\%}', '42', True),
    ('it is 42%', '42%', True),
    ('\\(4200\\%\\)', '42', False),
    ('<answer>50%</answer>', '0.5', True),
    ('42 apples', '42', True),
    ('\\boxed{42 cm}', '42', True),
    ('\\boxed{42\\text{ apples}}', '42', True),
    ('<answer>42 apples</answer>', '42', True),
    ('it costs $1,234', '1234', True),
    ('\\boxed{1,234}', '1234', True),
    ('\\boxed{12,34}', '1234', False),
    ('\\boxed{\\{1,2\\}}', '\\{2,1\\}', True),
    ('\\boxed{\\{1,2\\}}', '(1,2)', False),
    ('\\boxed{(1,2)}', '(1,2)', True),
    ('\\boxed{(1,2)}', '(2,1)', False),
    ('\\boxed{[0,1)}', '[0,1)', True),
    ('\\boxed{[0,1]}', '[0,1)', False),
    ('\\boxed{(-\\infty,0)\\cup(0,\\infty)}', '(-\\infty,0)\\cup(0,\\infty)', True),
    ('\\boxed{(-∞,0)∪(0,∞)}', '(-\\infty,0)\\cup(0,\\infty)', True),
    ('\\boxed{(-\\infty,0)}', '(-\\infty,0)\\cup(0,\\infty)', False),
    ('\\boxed{1331 \\text{ and } 1728}', '1728', False),
    ('$1331$ and $1728$', '1728', False),
    ('1331 and 1728', '1728', False),
    ('The sum of 1 and 41 is 42', '42', True),
    ('It is 41 or 42.', '42', False),
    ('$(-∞,0)∪(0,∞)$', '(-∞,0)∪(0,∞)', True),
    ('\\boxed{41=42}', '42', False),
    ('\\boxed{40+2=42}', '42', True),
    ('\\boxed{x=42}', '42', True),
    ('2*3*4', '24', True),
    ('$2\\sqrt2$', '\\sqrt{8}', True),
    ('<answer>2\\sqrt{2}</answer>', '\\sqrt{8}', True),
    ('<answer>x^2-1</answer>', '(x-1)(x+1)', True),
    ('<answer>\\frac{1}{2}</answer>', '0.5', True),
    ('$x_1 = 3$', '3', True),
    ('2½', '5/2', True),
    ('it is ¾', '3/4', True),
    ('\\boxed{½}', '0.5', True),
    ('-2 2/3', '-8/3', True),
    ('\\boxed{-2\\frac{2}{3}}', '-8/3', True),
    ('$2\\tfrac23$', '8/3', True),
    ('8/3', '2 2/3', True),
    ('\\boxed{2 2/3}', '2\\frac{2}{3}', True),
    ('2', '2 2/3', False),
    ('2 2/3', '2', False),
    ('2 2/3', '4/3', False),
    ('4/3', '2\\frac{2}{3}', False),
    ('答案是４２。', '42', True),
    ('共有42个苹果。', '42', True),
    ('答案是41。', '42', False),
    ('The answer is $42$, where $n$ is the number of pears.', '42', True),
    ('The answer is 42. I hope this answer helps.', '42', True),
    ('Answer: 42\n\nThat is it.', '42', True),
    ('\\boxed{}', '0', False),
    ('\\boxed{\\left\\{1,2\\right\\}}', '\\{1,2\\}', True),
    ('\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}', '\\begin{pmatrix}1\\\\2\\end{pmatrix}', True),
]


FUNCTIONS = [  # real at the same points and equal there?
    ('\\sqrt{1/n}', '\\frac{1}{\\sqrt{n}}', True),
    ('\\frac{1}{\\sqrt{2n}}', '\\sqrt{\\frac{1}{2n}}', True),
    ('n^{-1/2}', '\\sqrt{\\frac1n}', True),
    ('\\frac{\\sqrt{x}}{x}', '\\sqrt{\\frac1x}', True),
    ('\\sqrt{\\frac{a}{b}}', '\\frac{\\sqrt{a}}{\\sqrt{b}}', True),
    ('\\sqrt{x^2}', '|x|', True),
    ('\\sqrt{(x-1)^2}', '|1-x|', True),
    ('\\ln x^2', '2\\ln |x|', True),
    ('x', '|x|', False),
    ('\\sqrt{x^2}', 'x', False),
    ('\\sqrt{(x-1)^2}', 'x-1', False),
    ('\\ln x^2', '2\\ln x', False),
    ('\\ln(xy)', '\\ln x+\\ln y', False),
    ('\\sqrt{xy}', '\\sqrt{x}\\sqrt{y}', False),
    ('\\frac{a}{|a|}', '1', False),
    ('\\sqrt{1/n}', '\\frac{1}{\\sqrt{m}}', False),
    ('|x-1000|', '1000-x', False),
    ('|x-10^8|', '10^8-x', False),
    ('x+10^{-20}', 'x', False),
    ('\\sqrt{-1-x^2}', '\\sqrt{-2-x^2}', False),
    ('(-1)^n', '\\cos(\\pi n)', False),
    ('\\sqrt{1-\\sin^2 x}', '\\cos x', False),
    ('9^{9^{9^{x}}}', 'x', False),
    ('x!!!!', 'x!', False),
    ('+'.join(f'x^{{{i}}}' for i in range(40)), 'x', False),
]


def fill(pattern, x, y=''):
    return pattern.replace('X', x).replace('Y', y)


def pairs():
    "Text, answer, does it pay?"
    for x, y in VALUES:
        for p in SAID:
            yield fill(p, x), x, True
            yield fill(p, x), y, False
        for p in TAKEN_BACK:
            yield fill(p, x, y), x, True
            yield fill(p, x, y), y, False
        for p in UNSAID:
            yield fill(p, '', y), y, False
    yield from BY_HAND


def engine(text, answer):
    "math-verify alone, as its README calls it"
    gold = parse(f'${answer}$', parsing_timeout=None)
    return bool(verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None))


def test_every_pair_is_judged_rightly(record_property):
    table = [*pairs()]
    assert len(table) > 400
    wrong = [(t, a, r) for t, a, r in table if (same_maths(t, a)[0] == 'ok') != r]
    assert not wrong, f'{len(wrong)} of {len(table)}: {wrong[:20]}'


@pytest.mark.parametrize('one, other, right', FUNCTIONS)
def test_real_functions(one, other, right):
    "Each way round, and in bounded time: towers and long sums are not compared"
    for text, answer in ((one, other), (other, one)):
        began = time.process_time()
        assert (same_maths(f'${text}$', answer)[0] == 'ok') == right
        assert time.process_time() - began < 1.5  # its sandbox has two seconds


def test_math_verify_alone_is_wrong_where_the_table_says_so():
    "Were it right, the rules here would be superfluous"
    for text, answer, right in [
        ('so \\boxed{7}. Hmm wait, no: \\boxed{8', '7', False),
        ('2 2/3', '2', False),
        ('`73`', '73', True),
        ('<answer>42</answer>', '42', True),
        ('答案是42。', '42', True),
    ]:
        assert engine(text, answer) != right and (same_maths(text, answer)[0] == 'ok') == right, (
            text
        )


@pytest.mark.parametrize('whole', range(1, 11))
def test_mixed_numbers(whole):
    "360 of them: as a fraction, and never as the whole part"
    for d in range(2, 10):
        for n in range(1, d):
            value, text = whole + Fraction(n, d), f'{whole} {n}/{d}'
            assert same_maths(f'The answer is {text}', str(value))[0] == 'ok', text
            assert same_maths(f'\\boxed{{{whole}\\frac{{{n}}}{{{d}}}}}', text)[0] == 'ok', text
            assert same_maths(text, str(whole))[0] == 'wrong', text


def test_a_missing_module_is_no_verdict(monkeypatch):
    "The engine swallows the error, and would call a right answer wrong"
    read = mathematics._read

    def needs_more(text):
        try:
            import sympy.no_such_part  # noqa: F401
        except ImportError:
            return []
        return read(text)

    assert same_maths('$x^2$', 'x^2')[0] == 'ok'
    monkeypatch.setattr(mathematics, '_read', needs_more)
    status, why = same_maths('$x^2$', 'x^2')
    assert status == 'failed' and 'sympy.no_such_part' in why
    assert not any(type(f).__name__ == '_Absent' for f in sys.meta_path)


def test_only_a_proper_fraction_makes_a_mixed_number():
    assert readable('2 2/3') == '8/3' and readable('2 5/3') == '2 5/3'
