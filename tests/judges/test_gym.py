"Verifiers of the gym against small worlds that are listed in full, and its task families"

import itertools
import json
import math
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compassrl.data.rows import Reading, row_prompt
from compassrl.data.tasks import Choices, num_problems, problem, task_families, verifiers, verify
from compassrl.data.tokenizer import UNK_ID, build_tokenizer, encode
from compassrl.judges import tool_calls
from compassrl.judges.instructions import checks, instruction_check
from compassrl.judges.verifiers import asked_verifiers
from compassrl.records import Prompt

TOK = build_tokenizer()
FAMILIES = ('instructions', 'tools', 'programs')


def prompt(answer, verifier):
    return Prompt('p', 'gym', 'q', [], answer, verifier)


def judged(text, answer, verifier):
    return verify(prompt(answer, verifier), text)


def holds(text, **check):
    return judged(text, json.dumps([check]), 'instructions').correct


# ---- instructions

PIECES = ['sun', 'Sun', 'MOON', 'sunny', ',', '.', '\n']
BOUNDS = [
    *(dict(exactly=n) for n in range(4)),
    *(dict(at_least=n) for n in range(4)),
    dict(at_most=1),
    dict(at_least=1, at_most=2),
]


def within(n, at_least=0, at_most=math.inf, exactly=None):
    return n == exactly if exactly is not None else at_least <= n <= at_most


def naive(text):
    "What counts, by splitting and looping: check -> number"
    tokens = [''.join(c for c in t if c.isalpha()) for t in text.split()]
    tokens = [t for t in tokens if t]
    low = [t.lower() for t in tokens]
    return dict(
        num_words=len(tokens),
        num_lines=len([x for x in text.split('\n') if x.strip()]),
        num_characters=len(text.strip()),
        keyword=low.count('sun'),
        letter=sum(c in 'nN' for c in text),
    )


def test_counts_against_splitting_all_small_texts():
    with_argument = dict(keyword=dict(word='SUN'), letter=dict(letter='n'))
    for n in range(1, 5):
        for pieces in itertools.product(PIECES, repeat=n):
            text = ' '.join(pieces)
            if not text.strip():
                continue
            for name, number in naive(text).items():
                bounds = BOUNDS[(n + len(text) + number) % len(BOUNDS)]
                got = holds(text, check=name, **with_argument.get(name, {}), **bounds)
                assert got == within(number, **bounds), (text, name, bounds)


@pytest.mark.parametrize(
    'text, name, number',
    [
        ('It is 3.5 km. Really? Yes!', 'num_sentences', 3),
        ('No mark at the end', 'num_sentences', 1),
        ('He said "go." Then he went.', 'num_sentences', 2),
        ('今日は晴れ。明日は雨。', 'num_sentences', 2),
        ('...', 'num_sentences', 0),
        ("don't stop well-known 'facts'", 'num_words', 4),
        ('a\n\n \nb\nc\n\n\nd', 'num_paragraphs', 3),
        ('* one\n- two\n  * three\n*no\n--- \n4. no', 'num_bullets', 3),
    ],
)
def test_counts_by_hand(text, name, number):
    assert holds(text, check=name, exactly=number)
    assert not holds(text, check=name, at_least=number + 1)


@pytest.mark.parametrize(
    'check, yes, no',
    [
        (dict(check='contains', words=['ice cream', 'c++']), 'Ice cream in C++!', 'ice creams c++'),
        (dict(check='excludes', words=['cat']), 'a category', 'No Cat.'),
        (dict(check='starts_with', prefix='Dear'), '\n Dear Ann', 'dear Ann'),
        (dict(check='ends_with', suffix='bye.'), 'Good bye. \n', 'bye'),
        (dict(check='first_word', word='yes'), '"Yes, sir', 'yesterday'),
        (dict(check='last_word', word='end'), 'the END.', 'the weekend'),
        (dict(check='all_upper'), 'A 1!', '12'),
        (dict(check='all_lower'), 'a 1!', 'a B'),
        (dict(check='no_comma'), 'a; b', 'a，b'),
        (dict(check='json_format'), '```json\n{"a": [1]}\n```', '{"a": 1, "a": 2}'),
        (dict(check='json_format'), '</think> 3', '[NaN]'),
        (dict(check='script', name='cyrillic'), 'да, 3!', 'да yes'),
        (dict(check='script', name='japanese'), '東京タワーへ', '서울'),
        (dict(check='script', name='latin'), 'naïve café', '...'),
    ],
)
def test_checks_by_hand(check, yes, no):
    assert holds(yes, **check) and not holds(no, **check)


def test_a_share_is_paid_and_silence_is_not():
    asked = json.dumps(
        [
            dict(check='num_words', at_most=2),
            dict(check='no_comma'),
            dict(check='contains', words=['sun']),
            dict(check='all_lower'),
        ]
    )
    for text, kept in {'sun': 4, 'Sun': 3, 'a, b, c': 1, 'the sun, up': 2, '': 0, ' \n': 0}.items():
        v = judged(text, asked, 'instructions')
        assert (v.reward, v.correct) == (kept / 4, kept == 4), text
    assert judged('many words, NO </think>sun', asked, 'instructions').correct


@pytest.mark.parametrize(
    'answer, why',
    [
        ('3 words', 'is no JSON'),
        ('{}', 'JSON list'),
        ('[3]', 'does not exist'),
        ('[{"check": "no_comma", "at_most": 1}]', 'at_most'),
        ('[{"check": "num_words", "exactly": 3, "at_least": 1}]', 'says no number'),
        ('[{"check": "num_words", "exactly": true}]', 'says no number'),
        ('[{"check": "num_words", "at_least": 3, "at_most": 2}]', 'holds for no number'),
        ('[{"check": "keyword", "at_least": 1}]', "'word'"),
        ('[{"check": "excludes", "words": "cat"}]', 'list'),
        ('[{"check": "script", "name": "dutch"}]', 'use one of'),
    ],
)
def test_instructions_are_checked_when_they_are_loaded(answer, why):
    row = dict(prompt='q', answer=answer, verifier='instructions')
    with pytest.raises(ValueError, match=re.escape(why)):
        row_prompt(Reading(TOK), row)


def test_a_check_of_your_own():
    @instruction_check
    def num_question_marks(text: str) -> int:
        return text.count('?')

    try:
        assert holds('a? b?', check='num_question_marks', exactly=2)
        with pytest.raises(ValueError, match='annotate'):
            instruction_check(lambda text: True)
    finally:
        del checks['num_question_marks']


# ---- tool calls

VALUES = [1, 1.0, True, '1', 'Oslo', 'o.s-LO', [1], [1.0], {'k': 1}, {}, None, '']
ALLOWED = {  # allowed values -> those of VALUES that are right, by number; None: may be left out
    '[1]': {0},
    '[1.0]': {0, 1},
    '["oslo"]': {4, 5},
    '[true, "1"]': {2, 3},
    '[[1]]': {6},
    '[[1.0], ""]': {6, 7, None},
    '[{"k": [1, 2]}]': {8},
    '[{"k": [1, ""]}]': {8, 9},
    '["oslo", ""]': {4, 5, 11, None},
    '[1, ""]': {0, None},
    '[null]': {10},
}


def test_arguments_against_a_table():
    for allowed, right in ALLOWED.items():
        answer = f'{{"name": "f", "arguments": {{"a": {allowed}}}}}'
        assert judged('{"name":"f","arguments":{}}', answer, 'tool_call').correct == (None in right)
        for i, value in enumerate(VALUES):
            call = dict(name='f', arguments=dict(a=value))
            assert judged(json.dumps(call), answer, 'tool_call').correct == (i in right), call
            for other in (call | dict(name='g'), dict(name='f', arguments=dict(a=value, b=1))):
                assert not judged(json.dumps(other), answer, 'tool_call').correct


def test_parallel_calls_against_all_orders():
    "Every pair of expectations of a small world, and every list of up to three calls"
    world = [dict(name='f', arguments=a) for a in ({}, dict(a=1), dict(a=2))]
    expected = [
        dict(f=dict(a=v)) for v in ([1], [2], [1, 2], [1, ''], [1, 2, ''])
    ]  # BFCL writes them like this

    def fits(call, e):
        a = call['arguments'].get('a', '')
        return a in e['f']['a']

    for pair in itertools.combinations_with_replacement(expected, 2):
        for n in range(4):
            for calls in itertools.product(world, repeat=n):
                want = n == 2 and any(
                    all(map(fits, order, pair)) for order in itertools.permutations(calls)
                )
                got = judged(json.dumps(calls), json.dumps(pair), 'tool_call')
                assert got.correct == want, (pair, calls)


def greedy(fits):  # BFCL's own way: the first that fits
    taken = set()
    for row in fits:
        j = next((j for j, fit in enumerate(row) if fit and j not in taken), None)
        if j is None:
            return None
        taken.add(j)
    return [0] * len(fits)


def test_a_greedy_pairing_would_be_noticed(monkeypatch):
    monkeypatch.setattr(tool_calls, 'pairing', greedy)
    with pytest.raises(AssertionError):
        test_parallel_calls_against_all_orders()


CALL = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    'text, right',
    [
        (f'<tool_call>\n{CALL}\n</tool_call>', True),
        (f'I think.</think>\n\n<tool_call>{CALL}</tool_call>', True),
        (f'```json\n[{CALL}]\n```', True),
        (f'<tool_call>{CALL}', False),
        (f'<tool_call>{CALL}</tool_call><tool_call>', False),
        (f'Here: {CALL}', False),
        (CALL[:-1] + ', "name": "f"}', False),
        (CALL[:-1] + ', "id": 1}', False),
        ('{"name": "f", "arguments": "{}"}', False),
        ('[' * 99_999, False),
        ('', False),
    ],
)
def test_how_a_call_is_written(text, right):
    v = judged(text, '{"name": "f", "arguments": {"a": [1]}}', 'tool_call')
    assert (v.status, v.reward) == (('ok', 1) if right else ('wrong', 0))
    assert judged(text, '[]', 'tool_call').correct != right


# ---- numbers and sets


@pytest.mark.parametrize(
    'text, answer, right',
    [
        ('1.1', '{"value": 1, "within": 0.1}', True),
        ('1.1000001', '{"value": 1, "within": 0.1}', False),
        ('-1,234.50', '-1234.5', True),
        ('12,34', '1234', False),
        ('1e3', '1000', True),
        ('1e999', '1', False),
        ('5 or 6', '5', False),
        ('6 and 7, #5', '5', True),
        ('#5 #6', '5', False),
        ('5 km.', '{"value": 5, "unit": "km"}', True),
        ('5 miles', '{"value": 5, "unit": "km"}', False),
        ('102', '{"value": 100, "relative": 0.02}', True),
        ('102.1', '{"value": 100, "relative": 0.02}', False),
        ('five', '5', False),
        ('٥', '5', True),
    ],
)
def test_numbers(text, answer, right):
    assert judged(text, answer, 'numeric').status == ('ok' if right else 'wrong')


@settings(max_examples=60, deadline=None)
@given(st.integers(-(10**9), 10**9), st.integers(0, 6))
def test_every_number_is_itself(n, places):
    text = f'{n / 10**places:.{places}f}'
    assert judged(text, text, 'numeric').correct
    assert not judged(text + '1', text + '2', 'numeric').correct


def test_sets_against_python_sets():
    due = {'red', 'blue', 'sky high'}
    for n in range(5):
        for named in itertools.permutations(['Red', ' blue.', 'sky  high', 'green'], n):
            got = {' '.join(x.strip(' .').lower().split()) for x in named}
            for text in (', '.join(named), '\n'.join(f'- {x}' for x in named)):
                v = judged(text, json.dumps(sorted(due)), 'set_match')
                assert v.reward == len(due & got) / len(due | got)
                assert v.correct == (got == due)


# ---- several verifiers

PARTS = [
    dict(verifier='instructions', answer=[dict(check='all_lower')], weight=1),
    dict(verifier='set_match', answer=['a', 'b'], weight=2),
    dict(verifier='exact', answer='a, b', weight=0.5),
]


@pytest.mark.parametrize('gates', [*itertools.product([False, True], repeat=3)])
def test_composite_is_a_weighted_mean_behind_its_gates(gates):
    parts = [p | dict(required=r) for p, r in zip(PARTS, gates)]
    for text in ('a, b', 'b, a', 'A, B', 'a', 'C', ''):
        each = [judged(text, json.dumps(p['answer']), p['verifier']) for p in PARTS[:2]]
        each += [judged(text, 'a, b', 'exact')]
        open_ = all(v.correct for v, r in zip(each, gates) if r)
        mean = sum(p['weight'] * v.reward for p, v in zip(PARTS, each)) / 3.5
        v = judged(text, json.dumps(parts), 'composite')
        assert v.reward == pytest.approx(mean if open_ else 0)
        assert v.correct == all(x.correct for x in each)


def test_composite_has_no_verdict_where_a_part_has_none():
    def lost(text, answer):
        raise RuntimeError('no sandbox')

    verifiers['lost'] = lost
    parts = [dict(verifier='exact', answer='1', required=True), dict(verifier='lost')]
    try:
        v = judged('1', json.dumps(parts), 'composite')
        assert v.status == 'failed' and 'no sandbox' in v.evidence and v.reward == 0
        assert judged('2', json.dumps(parts), 'composite').status == 'wrong', (
            'a gate is asked first'
        )
    finally:
        del verifiers['lost']


@pytest.mark.parametrize(
    'answer, why',
    [
        ([], 'list of parts'),
        ([dict(answer='1')], 'give an object'),
        ([dict(verifier='exact', answer='1', wieght=1)], 'give an object'),
        ([dict(verifier='composite', answer=[])], 'cannot be a part'),
        ([dict(verifier='genrm', answer='')], 'cannot be a part'),
        ([dict(verifier='exact', answer='1', weight=-1)], 'weight=-1'),
        ([dict(verifier='exact', answer='1', weight=True)], 'weight=True'),
        ([dict(verifier='exact', answer='1', required='yes')], "required='yes'"),
        ([dict(verifier='exact', answer='1', weight=0)], 'above 0'),
        ([dict(verifier='code', answer=[3])], 'tests='),
    ],
)
def test_composite_is_checked_when_it_is_loaded(answer, why):
    row = dict(prompt='q', answer=answer, verifier='composite')
    with pytest.raises(ValueError, match=re.escape(why)):
        row_prompt(Reading(TOK), row)


def test_who_is_asked_within_a_composite_is_known_before_a_run():
    parts = [dict(verifier='code', answer=['assert f']), dict(verifier='exact', answer='1')]
    found = asked_verifiers([prompt(json.dumps(parts), 'composite'), prompt('1', 'final')])
    assert found == {'composite', 'code', 'exact', 'final'}


@pytest.mark.parametrize(
    'name', ['instructions', 'tool_call', 'numeric', 'set_match', 'choice', 'composite']
)
@settings(max_examples=40, deadline=None)
@given(text=st.text(), data=st.data())
def test_no_response_breaks_a_verifier(name, text, data):
    answers = dict(
        instructions='[{"check": "keyword", "word": "(", "at_least": 1}, {"check": "json_format"}]',
        tool_call='{"f": {"a": [{"k": [1]}, [2], ""]}}',
        numeric='{"value": 1, "within": 1, "unit": "m"}',
        set_match='["a", "b"]',
        choice='{"answer": "B", "choices": ["a", "0"]}',
        composite=json.dumps(PARTS),
    )
    given_ = data.draw(st.sampled_from([text, json.dumps(text), f'[{text}]', f'#{text}', '{}']))
    v = judged(given_, answers[name], name)
    assert v.status in ('ok', 'wrong') and 0 <= v.reward <= 1 and v.evidence.isprintable()
    assert v.correct == (v.status == 'ok') and (not v.correct or v.reward == 1)


# ---- task families


def some_problems(domain, level, num=150):
    rng, size = random.Random(level), num_problems(domain, level)
    found = (problem(domain, level, rng.randrange(size)) for _ in range(num))
    return [p for p in found if p]


@pytest.mark.parametrize('level', range(6))
@pytest.mark.parametrize('domain', FAMILIES)
def test_families_fit_a_small_model(domain, level):
    found = some_problems(domain, level)
    assert len(found) > 40 and num_problems(domain, level) < 2**63, 'each choice has to count'
    for p in found:
        assert len(p.text) <= 60 and len(p.solution) <= 44, p
        assert UNK_ID not in encode(TOK, p.text + p.solution)
        verifiers[p.verifier].check_answer(p.answer)
        if domain != 'programs':
            assert judged(p.solution, p.answer, p.verifier).correct, p


@pytest.mark.parametrize('domain', FAMILIES)
@pytest.mark.parametrize('level', range(4))
def test_a_family_asks_for_the_same_choices_whatever_was_chosen(domain, level):
    size = num_problems(domain, level)
    for i in range(60):
        task_families[domain](level, choices := Choices(random.Random(i).randrange(size)))
        assert choices.size == size


def left_to_right(text, x):
    "A formula in words, one operation after another"
    ops = dict(plus=lambda a, b: a + b, minus=lambda a, b: a - b, times=lambda a, b: a * b)
    for op, n in re.findall(r'(\w+) (\d)', text):
        x = ops[op](x, int(n))
    return x


@pytest.mark.parametrize('level', range(4))
def test_programs_compute_what_the_words_say(level):
    for p in some_problems('programs', level, 60):
        space = {}
        exec(p.solution, space)
        assert [space['f'](x) for x in range(-3, 12)] == [
            left_to_right(p.text, x) for x in range(-3, 12)
        ]
        (test,) = json.loads(p.answer)
        exec(test, space)
        space['f'] = lambda x: left_to_right(p.text, x) + (x == 10)
        with pytest.raises(AssertionError):
            exec(test, space)


@pytest.mark.parametrize('level', range(4))
def test_instructions_ask_for_what_the_prompt_says(level):
    "The demands are read from the text again, and judge random responses as the verifier does"
    rng = random.Random(level)
    for p in some_problems('instructions', level, 60):
        n, word = re.match(r'(\d) words with (\w+)', p.text).groups()
        first, last, no = (re.search(rf'{k} (\w+)', p.text) for k in (', first', ', last', ', no'))
        pool = [*re.findall(r'[a-z]{3}\b', p.text), 'oh']
        for _ in range(20):
            said = [rng.choice(pool) for _ in range(int(n) + rng.choice([0, 0, 0, 1, -1]))]
            if rng.random() < 0.5:
                said = p.solution.lower().split()[: len(said)]
            shout = rng.random() < 0.5
            want = len(said) == int(n) and word in said and (shout or 'capitals' not in p.text)
            want = want and (not first or said[0] == first[1])
            want = want and (not last or said[-1] == last[1])
            want = want and not (no and no[1] in said)
            text = ' '.join(said).upper() if shout else ' '.join(said)
            assert judged(text, p.answer, 'instructions').correct == bool(want), (p, text)


@pytest.mark.parametrize('level', range(4))
def test_tools_accept_what_the_request_means(level):
    "The signatures are read from the text; all calls of a small world are compared with them"
    for p in some_problems('tools', level, 40):
        offered, request = p.text[:-1].split(': ')
        name, *values = request.split()
        letters = dict(re.findall(r'(\w+)\((.*?)\)', offered))[name].split(',')
        usual = int(letters[1].partition('=')[2]) if '=' in letters[-1] else None
        keys = [x.partition('=')[0] for x in letters]
        want = dict(zip(keys, map(int, values)))
        meant = want | ({keys[1]: usual} if usual is not None and len(values) == 1 else {})
        for given_ in ({}, want, meant, want | {'z': 1}, {k: v + 1 for k, v in want.items()}):
            full = given_ | (
                {keys[1]: usual} if usual is not None and keys[1] not in given_ else {}
            )
            call = json.dumps(dict(name=name, arguments=given_))
            assert judged(call, p.answer, 'tool_call').correct == (full == meant), (p, call)
