"""Rewards: maths and code, for honest responses and for those that try something else"""

import json
from dataclasses import replace
from unittest.mock import patch

import pytest

from compassrl.data.tasks import verifiers, verify
from compassrl.judges import verifiers as rewards
from compassrl.judges.verifiers import code, program_of, run_test, starved
from compassrl.records import Prompt
from compassrl.sandbox.isolated import Limits, Outcome, verdict_budget
from tests.support.faults import planted


@pytest.fixture(autouse=True)
def anywhere():
    "The verdicts are the same where a machine isolates no program"
    with verdict_budget(600.0, unsafe=True):
        yield


# ---- mathematics


@pytest.mark.parametrize(
    'text, answer, right',
    [
        ('$\\frac{2}{4}$', '1/2', True),
        ('so \\boxed{0.5}', '\\frac12', True),
        ('$0.49$', '1/2', False),
        ('', '1/2', False),
        ('$(x-1)(x+1)$', 'x^2-1', True),
        ('$\\{3, 1\\}$', '\\{1, 3\\}', True),
        ('$2\\sqrt2$', '\\sqrt{8}', True),
        ('no answer', '$7$', False),
        ('The answer is $7$.', '\\boxed{7}', True),
        ('<think>maybe \\boxed{103}</think> it is 7', '103', False),
        ('<think>maybe \\boxed{7}</think> it is \\boxed{103}', '103', True),
        ('\\boxed{41=42}', '42', False),
        ('\\boxed{42=41}', '42', False),
        ('\\boxed{40+2=42}', '42', True),
        ('\\boxed{x=42}', '42', True),
        ('\\boxed{x=41=42}', '42', False),
        ('\\boxed{42\\%}', '42', True),
        ('\\boxed{4200\\%}', '42', False),
        ('it is $4200\\%$', '42', False),
        ('it is $42\\%$', '42', True),
        ('it is $50\\%$', '0.5', True),
        ('he pays $5 and 20% of $10, which is $7', '7', True),
        ('he pays $0.3 and 20% of $1, which is $0.5$', '0.5', True),
        ('it is $41=42$', '42', False),
        ('as $6\\cdot 7=42$', '42', True),
        ('$41$, no, $x=42$', '42', True),
        ('it is $\\{1,2\\}$', '(1,2)', False),
        ('\\boxed{50\\%}', '0.5', True),
        ('\\boxed{0.5\\%}', '0.5', False),
        ('\\boxed{50\\%}', '50\\%', True),
        ('\\boxed{\\{1,2\\}}', '(1,2)', False),
        ('\\boxed{(1,2)}', '(1,2)', True),
        ('\\boxed{41} or \\boxed{42}', '41', False),
    ],
)
def test_maths(text, answer, right):
    v = verify(Prompt('p', 'm', '', [2], answer, 'maths'), text)
    assert (v.correct, v.reward, v.status) == (right, float(right), 'ok' if right else 'wrong'), v


@pytest.mark.parametrize(
    'wrap', ['{}', '\ufeff{}', '```python\n{}```', 'so\n```\n\ufeff{}```'], ids=range(4)
)
def test_the_mark_of_a_utf8_file_is_no_error(wrap):
    "As Python reads a file: only at its head"
    program = 'def f(x): return 2 * x\n'
    assert program_of(wrap.format(program)) == program
    assert program_of(program + '\ufeff') == program + '\ufeff'


def test_members_of_an_enumeration_are_read_by_their_value():
    program = 'from enum import IntEnum\nclass C(IntEnum):\n    A = 4\ndef f(x): return C.A\n'
    for test, right in (('f(2).value == 4', 1), ('int(f(2)) == 4', 1), ('f(2) == 4', 0)):
        v = code(program, json.dumps([f'assert {test}']))
        assert v.reward == right and ('nobody can trust' in v.evidence) != right, v


def test_maths_that_cannot_be_judged(monkeypatch):
    def q(answer):
        return Prompt('p', 'm', '', [2], answer, 'maths')

    assert (v := verify(q('$ $'), '$1$')).status == 'failed' and 'no mathematics' in v.evidence
    monkeypatch.setattr(rewards, '_maths', Limits(wall_s=60, cpu_s=0.3))
    v = verify(q('$7$'), '$9^{9^{9^{9}}}$')
    assert (v.status, v.reward) == ('wrong', 0) and 'computed' in v.evidence


def test_standing_still_is_wrong_and_starving_is_no_verdict():
    "Of a program that the clock stopped: what did it do all the time?"
    late = Outcome('timeout', 'still running', wall_s=10.0, cpu_s=1.0, waited_s=1.0)
    assert not starved(late) and starved(replace(late, waited_s=6.0))
    assert not starved(replace(late, waited_s=6.0, cpu_s=late.wall_s))  # it kept itself waiting
    assert not starved(replace(late, status='cpu', waited_s=9.0))
    for outcome, status in ((late, 'wrong'), (replace(late, waited_s=6.0), 'timeout')):
        with patch.object(rewards, 'run_function', lambda *a, **k: outcome):
            assert rewards.maths('$1$', '1').status == status
        with patch.object(rewards, 'run_test', lambda *a: (False, outcome)):
            assert rewards.code('x', '["assert x"]').status == status
    starves, fails = replace(late, waited_s=6.0), Outcome('failed', 'wrong', wall_s=0.1)
    sleeps = Outcome('ok', wall_s=30.0)
    for before in ((True, sleeps), (False, fails)):
        outcomes = iter([before, (False, starves)])
        with patch.object(rewards, 'run_test', lambda *a, o=outcomes: next(o)):
            v = rewards.code('x', '["assert x", "assert x"]')
            assert v.status == 'wrong', 'a program cannot choose to have no verdict'
    lost = Outcome('lost', 'its sandbox was lost')
    with patch.object(rewards, 'run_test', lambda *a: (False, lost)):
        assert rewards.code('x', '["assert x"]').status == 'failed'


# ---- programs

GOOD, HALF = 'def double(x): return 2*x', 'def double(x): return 2*x if x else 1/0'
ASSERTS = ['assert double(2) == 4', 'assert double(0) == 0', 'assert double(-3) == -6']


def suite(tests=ASSERTS, **kw):
    return json.dumps(dict(tests=tests, cpu_s=0.5, wall_s=30, **kw))


def rate(text, answer):
    return verifiers['code'](text, answer).reward


def pass_rate(rewards=rewards):
    "The law: as many as pass, of all, whatever the others do"
    code = rewards.code
    assert code(GOOD, suite()).reward == 1 and code(HALF, suite()).reward == pytest.approx(2 / 3)
    for r in (
        'import os; os._exit(0)',
        'print("ok")',
        'raise SystemExit',
        'def double(x): return 7',
    ):
        assert code(r, suite()).reward == 0, r
    assert (
        code(
            'n = 0\ndef double(x):\n  global n; n += 1\n  return 2*x if n == 1 else 0', suite()
        ).reward
        == 1
    ), 'tests do not see each other'


def loops_and_sleeps(rewards=rewards):
    v = rewards.code('while True: pass', suite(ASSERTS[:1]))
    assert v.status == 'wrong' and 'computed' in v.evidence
    sleeps = json.dumps(dict(tests=ASSERTS[:1], wall_s=0.4))
    with patch.dict(rewards.code.fn.__globals__, starved=lambda o: False):  # also on a busy machine
        v = rewards.code('import time; time.sleep(60)', sleeps)
    assert v.status == 'wrong' and 'still running' in v.evidence


def test_pass_rate():
    pass_rate()


def test_loops_and_sleeps_are_wrong():
    loops_and_sleeps()


@pytest.mark.parametrize(
    'old, new, law',
    [
        ("passed = tester.value == 'passed'", 'passed = True', pass_rate),
        (
            'return Verdict(passed/len(tests), v.correct',
            'return Verdict(float(v.correct), v.correct',
            pass_rate,
        ),
        ("if o.status == 'lost' or (late and not first):", "if o.status in ('timeout', 'lost'):",
         loops_and_sleeps),
        ("if o.status == 'lost' or (late and not first):", "if o.status in ('cpu', 'lost'):",
         loops_and_sleeps),
    ],
)  # fmt: skip
def test_planted_faults_in_rewards(old, new, law, monkeypatch):
    for name in ('code', 'maths'):
        monkeypatch.setitem(verifiers, name, verifiers[name])
    mutant = planted(rewards, old, new)
    with pytest.raises(AssertionError):
        law(mutant)


def test_stdin_tests_and_prefixes():
    pairs = json.dumps(
        [
            dict(stdin='3 4\n', stdout='7'),
            dict(stdin='-1 1', stdout='0\n'),
            dict(stdin='', stdout='1'),
        ]
    )
    v = verifiers['code'](
        'thinking</think>\n```python\nprint(1)\n```\nbetter:\n```python\nprint(sum(map(int, '
        'input().split())))\n```',
        pairs,
    )
    assert (
        v.reward == pytest.approx(2 / 3)
        and not v.correct
        and v.evidence.startswith('2 of 3 tests; test 3: EOFError')
    )
    assert rate('    return 2*x', suite(prefix='def double(x):\n')) == 1
    assert program_of('```\na\n```') == 'a\n' and program_of('plain') == 'plain'
    assert run_test('print(input())', dict(stdin='a', stdout='a  \n'))[0]


@pytest.mark.parametrize(
    'answer',
    [
        '',
        'x',
        '[]',
        '{}',
        '[1]',
        '[{"stdin": "1"}]',
        '{"tests": ["assert 1"], "cpu_s": 0}',
        '{"tests": ["assert 1"], "memory": 1}',
    ],
)
def test_bad_tests_are_the_verifiers_fault(answer):
    v = verify(Prompt('p', 'c', '', [2], answer, 'code'), GOOD)
    assert (v.status, v.reward) == ('failed', 0.0) and '\n' not in v.evidence


def test_odd_responses():
    for text in ('', '\0', '\ud800', '```python\n', 'def', '("' * 500):
        v = verify(Prompt('p', 'c', '', [2], suite(ASSERTS[:1]), 'code'), text)
        assert v.reward == 0 and v.status in ('wrong', 'failed'), (text, v)


# ---- tests as rewards: what is changed in place, and what no program could pass

IN_PLACE = 'def srt(xs):\n    xs.sort()\n    return xs\ndef fill(xs): xs.append(3)\n'
PURE = 'def srt(xs): return sorted(xs)\ndef fill(xs): xs.append(3)\n'


@pytest.mark.parametrize(
    'test, program, right',
    [
        ('xs = [3, 1]\nassert srt(xs) == [1, 3]\nassert xs == [3, 1]', PURE, 1),
        ('xs = [3, 1]\nassert srt(xs) == [1, 3]\nassert xs == [3, 1]', IN_PLACE, 0),
        ('xs = [1]\nassert fill(xs) is None and xs == [1, 3]', PURE, 1),
        (
            'xs = [1]\ntry:\n  assert fill(xs)\nexcept AssertionError: pass\nassert xs == [1, 3]',
            PURE,
            1,
        ),
        (
            'xs = [1]\ntry:\n  assert srt(0)\nexcept TypeError: 0\nfill(xs)\nassert xs == [1, 3]',
            PURE,
            1,
        ),
        (
            'xs = [3, 1]\nassert srt(xs) == sorted(xs)',
            'def srt(xs):\n    xs.clear()\n    return []',
            0,
        ),
    ],
)
def test_changes_in_place_count_when_the_assert_ends(test, program, right):
    v = code(program, json.dumps([test]))
    assert v.reward == right, v


def test_future_imports_stay_above_the_prefix():
    answer = json.dumps(dict(tests=['assert f(1) == 2'], prefix='import math\n'))
    for names in ('annotations', '(\n    annotations,\n)'):
        v = code(f'from __future__ import {names}\ndef f(x: math.foo): return 2 * x', answer)
        assert v.reward == 1, v


@pytest.mark.parametrize(
    'test, why',
    [
        ('assert ((', 'is no Python'),
        ('', 'asks the program nothing'),
        ('# nothing', 'asks the program nothing'),
        ('assert True', 'asks the program nothing'),
        ('import math\nx = 2\nassert math.sqrt(4) == x', 'asks the program nothing'),
        (dict(stdin='', stdout='x' * 300_000), 'set "output_kb" to 293'),
        (dict(stdin='', stdout=1), 'use a list of'),
        ('assert f(1)', ''),
        ('assert copy([1]) == [1]', ''),  # the program's, not the module
        ('assert globals()["f"](1)', ''),
        (dict(stdin='', stdout='x' * 3_000), ''),
    ],
)
def test_a_test_that_no_program_passes_is_refused_at_load(test, why):
    check = code.check_answer
    if not why:
        check(json.dumps([test]))
        return
    with pytest.raises(ValueError, match=why):
        check(json.dumps([test]))


def test_a_long_output_is_welcome_where_the_row_says_so():
    pair = dict(stdin='', stdout='x' * 300_000)
    answer = json.dumps(dict(tests=[pair], output_kb=400))
    code.check_answer(answer)
    assert code('print("x" * 300_000)', answer).reward == 1


def test_reasoning_that_never_ends_has_said_nothing():
    block = '```python\ndef f(x): return 2 * x\n```'
    tests = json.dumps(['assert f(1) == 2'])
    assert code(block, tests).reward == 1 and code(f'<think>maybe {block}', tests).reward == 0
    for name, answer, text in (
        ('maths', '42', '\\boxed{42}'),
        ('numeric', '42', '42'),
        ('set_match', '["a"]', 'a'),
        ('choice', 'A', 'A'),
        ('tool_call', '[{"name": "f", "arguments": {}}]', '{"name": "f", "arguments": {}}'),
        ('instructions', '[{"check": "keyword", "word": "a", "at_least": 1}]', 'a'),
    ):
        q = Prompt('p', 'd', '', [2], answer, name)
        assert verify(q, f'<think>b</think>{text}').correct, name
        assert not verify(q, f'<think>{text}').correct, name


@pytest.mark.parametrize(
    'out, paid',
    [('\\n1', True), ('\\n \\n1\\n\\n', True), ('1', True), ('\\n2', False), ('1\\n\\n1', False)],
)
def test_a_blank_first_line_is_ignored(out, paid):
    "As LiveCodeBench and APPS do; a blank line between two others is not"
    assert code(f'print("{out}")', '[{"stdin": "", "stdout": "1"}]').correct is paid
    assert code('print("1")', json.dumps([dict(stdin='', stdout='\n1')])).correct
