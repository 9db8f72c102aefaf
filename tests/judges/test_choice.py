"Which text chooses which letter: by hand, and each letter in the forms that everyone reads"

import json

import pytest

from compassrl.judges.gym import choice, read_choice

TEXTS = ['10 cm', '12 cm', 'cat', '-3', '3', '\\frac{1}{2}']


def row(letter, choices=TEXTS):
    return json.dumps(dict(answer=letter, choices=choices))


# X is said to be right, whatever else is said
FORMS = [
    *(
        'X',
        '(X)',
        'X.',
        'X)',
        '**X**',
        '"X"',
        '`X`',
        '$X$',
        '\\(X\\)',
        '__X__',
        'It is X.',
        "It's X.",
    ),
    *('\\boxed{X}', '\\boxed{(X)}', '\\boxed{\\text{X}}', '\\boxed{\\text{(X)}}', '\\fbox{X}'),
    *('$\\boxed{X}$', '\\boxed{\\textbf{X}}', '\\boxed{\\mathrm{X}}', '<answer>X</answer>'),
    *('<answer>(X)</answer>', '<answer>The answer is X.</answer>', 'Answer: X', 'Answer = X'),
    *('answer: x', 'The answer is x.', 'The answer is (x)', '**Answer:** X', '**Answer: X**'),
    *('Answer: **X**', 'ANSWER: X', 'Final answer: (X)', 'The answer is X.', 'The answer is "X".'),
    *('The correct answer is X', 'The answer is option X.', 'The answer is \\text{(X)}.'),
    *('The answer is probably X.', 'The answer would be X.', 'Thus X.', 'So it must be X.'),
    *('Option X', 'option X is correct', '(X) is correct.', 'X is the answer.', 'I choose X.'),
    *("I'd go with (X).", 'I think X.', 'I think that it is X.', 'The correct option is X'),
    *('The best choice is X.', 'Correct choice: X', 'The correct letter is X.', 'I pick X!'),
    *(
        '答案是X',
        '答案是X。',
        '答案：X',
        '答案选X',
        '所以答案是 X。',
        '正确答案为（X）',
        '故选X。',
        '选项X',
    ),
    *('The answer is X because it fits.', 'The answer is X, not Y.', 'Answer: X\n\nI am done.'),
    *('The answer is X. Note that Y is a common distractor.', 'Y is wrong. The answer is X.'),
    *(
        'Option X is the correct answer. Option Y is wrong.',
        'First Y looks right. The answer is X.',
    ),
    *('X\nBecause it fits.', 'It fits.\nX', 'The answer is\nX', 'Answer:\n(X)', '（X）'),
    *('<think>The answer is Y</think>X', 'Y</think>The answer is X', 'X is right since Y is not.'),
    # what is taken back
    *('The answer is Y. No, wait: the answer is X.', 'The answer is Y. Wait, no. X.'),
    *('The answer is Y. Actually, it is X.', 'The answer is Y. Hmm, it should be X.'),
    *('\\boxed{Y}. Wait, no: \\boxed{X}', '<answer>Y</answer> no, <answer>X</answer>'),
    *(
        '答案是Y。不对，答案是X。',
        'The answer is Y? No. It is X.',
        'The answer is Y. The answer is X.',
    ),
]
# Y is named, and not said to be right, or something else is as well
NOT = [
    *('Y or X', 'Y and X', 'Y, X', 'Y/X', '(Y) and (X)', '\\boxed{Y, X}', '\\boxed{Y or X}'),
    *(
        '\\boxed{YX}',
        'YX',
        'The answer is Y or X.',
        'The answer is either Y or X',
        'answer: y or x',
    ),
    *('The answer is not Y.', 'Not Y', 'Y is wrong.', 'Option Y is wrong.', 'I think Y is wrong'),
    *(
        'Option Y is incorrect.',
        '答案不是Y',
        'The answer is Y. Wait, no.',
        'Y\nWait, that is wrong.',
    ),
    *('\\boxed{Y}. Hmm wait: \\boxed{', '\\boxed{Y', '<answer>Y', '\\boxed{}', '', 'no idea', 'y'),
    *(
        '<think>Y</think>',
        '<think>The answer is Y',
        'The answer is Yon.',
        'Yon',
        'The answer is YY',
    ),
    *('Y) one\nX) two', '(Y) one (X) two', 'The answer is Y. Sorry, I do not know.', 'Vitamin Y12'),
    *('The answer is Y. Actually, X.', '\\boxed{Y}. No, \\boxed{X}', 'Maybe Y is right? No.'),
]
LETTERS = 'ABCDEFGHIJ'


def said(form, x, y):
    small = 'x' in form and 'X' not in form and '\\' not in form
    form = form.replace('x', 'X').replace('y', 'Y') if small else form
    x, y = (x.lower(), y.lower()) if small else (x, y)
    return form.replace('Yon', f'{y}on').replace('X', x).replace('Y', y)


@pytest.mark.parametrize('x', LETTERS)
def test_a_letter_is_paid_in_every_form(x):
    for y in set(LETTERS) - {x}:
        for form in FORMS:
            text = said(form, x, y)
            assert choice(text, x).correct and not choice(text, y).correct, text


@pytest.mark.parametrize('y', LETTERS)
def test_what_says_no_letter_or_two_is_not_paid(y):
    for x in set(LETTERS) - {y}:
        for form in NOT:
            text = said(form, x, y)
            assert not choice(text, y).correct, (text, choice(text, y))


BY_HAND = [
    *(('B', t) for t in ('B) 12 cm', '(B) 12 cm', 'B. 12 cm', 'B: 12 cm', 'B - 12 cm', '12 cm')),
    *(
        ('B', t)
        for t in ('\\boxed{B) 12 cm}', '\\boxed{12 cm}', '\\boxed{12\\text{ cm}}', '12 CM.')
    ),
    *(('B', t) for t in ('<answer>B) 12 cm</answer>', 'The answer is 12 cm.', 'Answer: 12 cm')),
    *(
        ('B', t)
        for t in ('The answer is B (12 cm).', 'The answer is B) 12 cm.', 'So: 10 + 2.\n12 cm')
    ),
    *(('B', t) for t in ('The answer is **B) 12 cm**', 'B) 12 cm\n\nThis follows from the sum.')),
    *(('B', t) for t in ('Of A) 10 cm and B) 12 cm\nthe answer is (B): 12 cm', '答案是12 cm。')),
    *(('D', t) for t in ('-3', 'The answer is -3', '\\boxed{-3}', 'D) -3')),
    *(('E', t) for t in ('3', 'The answer is 3.', '\\boxed{3}')),
    *(
        ('F', t)
        for t in ('\\boxed{\\frac{1}{2}}', '$\\frac{1}{2}$', 'The answer is $\\frac{1}{2}$.')
    ),
    *(('C', t) for t in ('cat', 'Cat.', 'The answer is cat.', 'C) cat', 'A cat sat here.\nC')),
    *(
        ('A', t)
        for t in ('A', 'The answer is A 10 cm', 'A) 10 cm', 'The answer is A, as it is 10.')
    ),
    *(('', t) for t in ('A cat', 'A cat sat.', 'The answer is A cat.', 'The answer is a cat.')),
    *(
        ('', t)
        for t in ('I am not sure.', 'The answer is a bit unclear.', '\\boxed{\\text{A cat}}')
    ),
    *(
        ('', t)
        for t in ('B) 10 cm', 'The answer is B) 10 cm.', '\\boxed{B) 10 cm}', '12', '3 or -3')
    ),
    *(
        ('', t)
        for t in ('12 cm or 10 cm', 'A) 10 cm\nB) 12 cm\nC) cat', 'K', 'answer: e.g. the cat')
    ),
]


@pytest.mark.parametrize('letter, text', BY_HAND)
def test_the_text_of_an_option_by_hand(letter, text):
    assert [x for x in 'ABCDEF' if choice(text, row(x)).correct] == [*letter], choice(
        text, row('A')
    )


@pytest.mark.parametrize(
    'answer',
    [
        *('', 'b', 'K', 'AB', '(B)', '{', '{"answer": "B", "choices": "AB"}', '{"choices": ["a"]}'),
        *('{"answer": "C", "choices": ["a", "b"]}', '{"answer": "A", "choices": ["a", "A."]}'),
        *(
            '{"answer": "A", "choices": [1]}',
            '{"answer": "A", "more": 1}',
            '{"answer": "A", "choices": ["a"], "more": 1}',
        ),
        *(json.dumps(dict(answer='A', choices=[*map(str, range(11))])), '{"answer": ["A"]}'),
    ],
)
def test_a_row_that_names_no_option_is_refused(answer):
    with pytest.raises(ValueError):
        read_choice(answer)
