"""Isolation: every kind of trouble ends in its own status, in time, and nothing is left

Rewards: maths and code."""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from compassrl.data.tasks import verifiers, verify
from compassrl.judges import isolated
from compassrl.judges import verifiers as rewards
from compassrl.judges.isolated import Limits, Outcome, address_space, run_function, run_program
from compassrl.judges.verifiers import program_of, run_test
from compassrl.records import Prompt
from tests.support.faults import planted

PYTHON = [sys.executable, '-I', '-c']
SMALL = Limits(wall_s=2.0, cpu_s=0.3, memory_mb=200, output_kb=16)


def python(program, **kw):
    return run_program([*PYTHON, program], **{'limits': SMALL} | kw)


def running(marker):
    "Processes that have this word in their command line"
    found = []
    for p in Path('/proc').glob('[0-9]*/cmdline'):
        try:
            if marker.encode() in p.read_bytes().split(b'\0'):
                found.append(int(p.parent.name))
        except OSError:
            pass
    return found


def gone(marker, within=5.0):
    until = time.monotonic() + within
    while running(marker) and time.monotonic() < until:
        time.sleep(0.01)
    return not running(marker)


def marker():
    return f'{random.SystemRandom().randrange(10**5, 10**6)}.5'


# ---- isolated programs


@pytest.mark.parametrize(
    'status, program',
    [
        ('ok', 'print(1)'),
        ('failed', '1/0'),
        ('failed', 'import sys; sys.exit(3)'),
        ('cpu', 'while True: pass'),
        ('timeout', 'import time; time.sleep(60)'),
        ('memory', 'x = bytearray(10**9)'),
        ('killed', 'import os; os.abort()'),
        ('failed', 'open("x","w").write("y"*10**6)'),
        (
            'cpu',
            'import signal\nsignal.signal(signal.SIGPROF, signal.SIG_IGN); '
            'signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass',
        ),
    ],
)
def test_every_trouble_has_its_status(status, program):
    limits = Limits(
        wall_s=0.7 if status == 'timeout' else 30.0, cpu_s=0.3, memory_mb=200, output_kb=16
    )
    o = python(program, limits=limits)
    assert o.status == status, o
    assert (
        bool(o.evidence) == (status != 'ok')
        and '\n' not in o.evidence
        and o.wall_s < limits.wall_s + 1
    )


@pytest.mark.parametrize(
    'hide', ['', 'os.setsid()', 'os.setsid(); os.fork() and os._exit(0); os.setsid()']
)
@pytest.mark.parametrize('then', ['', 'import time; time.sleep(60)', 'os.kill(os.getpid(), 9)'])
def test_no_grandchild_survives(hide, then):
    word = marker()
    o = python(
        f"import os\nif os.fork() == 0:\n  {hide or 'pass'}\n  os.execvp('sleep', ['sleep', "
        f"'{word}'])\n{then}",
        limits=Limits(wall_s=0.4),
    )
    assert not running(word), o


def test_streams_files_and_folder():
    o = run_program(
        ['sh', '-c', 'cat; cat given; echo oops >&2; pwd; ls'], 'in\n', files=dict(given='file\n')
    )
    assert (
        o.stdout.startswith('in\nfile\n')
        and o.stderr == 'oops\n'
        and o.stdout.endswith('\ngiven\n')
    )
    assert not Path(o.stdout.splitlines()[2]).exists()
    assert len(python('while True: print("x"*99)').stdout) <= 16 * 1024


def test_environment_is_bare(monkeypatch):
    monkeypatch.setenv('SECRET_OF_THE_CALLER', 'x')
    assert 'SECRET_OF_THE_CALLER' not in python('import os; print(dict(os.environ))').stdout


def test_the_network_is_gone_where_it_can_be():
    o = python(
        "import socket\ns = socket.socket(); s.bind(('127.0.0.1', 0)); "
        "s.listen()\nsocket.create_connection(s.getsockname(), 1)\nprint('there')"
    )
    assert (o.stdout == 'there\n') != o.offline


def test_a_missing_program_and_bad_limits():
    assert run_program(['no such program']).status == 'failed'
    for k in ('wall_s', 'cpu_s', 'memory_mb', 'output_kb'):
        for bad in (0, -1, float('nan'), float('inf')):
            with pytest.raises(ValueError, match=f'{k}=.*: use '):
                Limits(**{k: bad})


def test_a_killed_caller_leaves_nothing():
    word = marker()
    caller = os.fork()
    if not caller:
        try:
            run_program(['sleep', word])
        finally:
            os._exit(0)
    until = time.monotonic() + 10
    while not running(word) and time.monotonic() < until:
        time.sleep(0.01)
    assert running(word)
    os.kill(caller, signal.SIGKILL)
    os.waitpid(caller, 0)
    assert gone(word)


# ---- isolated functions


def power(a, b):
    return a**b


def leave(code):
    os._exit(code)


def silent_child(word):
    os.fork() or os.execvp('sleep', ['sleep', word])


def test_functions():
    assert run_function(power, 3, 5).value == 243 and run_function(lambda: None).status == 'ok'
    assert run_function(power, 0, -1).evidence.startswith('ZeroDivisionError')
    assert run_function(leave, 3).evidence == 'left with exit code 3'
    assert (
        o := run_function(leave, 0)
    ).status == 'failed' and o.evidence == 'left with exit code 0'
    assert run_function(time.sleep, 60, limits=Limits(wall_s=0.2)).status == 'timeout'
    assert run_function(bytearray, 10**10).status == 'memory'
    assert run_function(lambda: b'x' * 10**6, limits=SMALL).status == 'failed', (
        'a result is output, too'
    )
    word = marker()
    assert run_function(silent_child, word).status == 'ok' and not running(word)


def test_from_a_thread():
    found = []
    t = threading.Thread(
        target=lambda: found.append(
            (run_function(power, 2, 9).value, verifiers['maths']('$0.5$', '1/2').correct)
        )
    )
    t.start()
    t.join()
    assert found == [(512, True)]


def test_a_sandbox_within_a_sandbox_gets_no_more():
    size = address_space() + 4 * 10**8
    maps = (
        f'import mmap\ntry: mmap.mmap(-1, {size}, flags=mmap.MAP_PRIVATE | '
        'mmap.MAP_ANONYMOUS)\nexcept OSError: raise MemoryError'
    )

    def program():
        return run_program([*PYTHON, maps], limits=Limits(memory_mb=size // 10**6 + 4000)).status

    assert program() == 'ok'
    o = run_function(program, limits=Limits(memory_mb=200))
    assert o.value == 'memory', o


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
    ],
)
def test_maths(text, answer, right):
    v = verify(Prompt('p', 'm', '', [2], answer, 'maths'), text)
    assert (v.correct, v.reward, v.status) == (right, float(right), 'ok' if right else 'wrong'), v


def test_maths_that_cannot_be_judged(monkeypatch):
    def q(answer):
        return Prompt('p', 'm', '', [2], answer, 'maths')

    assert (v := verify(q('$ $'), '$1$')).status == 'failed' and 'no mathematics' in v.evidence
    monkeypatch.setattr(rewards, '_maths', Limits(wall_s=0.3))
    monkeypatch.setattr(rewards, 'same_maths', lambda *a: time.sleep(60))
    assert verify(q('1'), '$1$').status == 'timeout'


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
    assert (
        v := rewards.code('while True: pass', suite(ASSERTS[:1]))
    ).status == 'wrong' and 'computed' in v.evidence
    assert (
        rewards.code(
            'import time; time.sleep(60)', json.dumps(dict(tests=ASSERTS[:1], wall_s=0.4))
        ).status
        == 'timeout'
    )


def test_pass_rate():
    pass_rate()


def test_loops_are_wrong_and_sleeps_are_no_verdict():
    loops_and_sleeps()


@pytest.mark.parametrize(
    'old, new, law',
    [
        ('and _lines(o.stdout)[-1:]==[word], o', "or 'ok' in o.stdout, o", pass_rate),
        (
            'return Verdict(passed/len(tests), v.correct',
            'return Verdict(float(v.correct), v.correct',
            pass_rate,
        ),
        (
            "if o.status=='timeout': return no_verdict(o)",
            "if o.status=='never': return no_verdict(o)",
            loops_and_sleeps,
        ),
        (
            "if o.status=='timeout': return no_verdict(o)",
            "if o.status in ('timeout', 'cpu'): return no_verdict(o)",
            loops_and_sleeps,
        ),
    ],
)
def test_planted_faults_in_rewards(old, new, law, monkeypatch):
    for name in ('code', 'maths'):
        monkeypatch.setitem(verifiers, name, verifiers[name])
    mutant = planted(rewards, old, new)
    with pytest.raises(AssertionError):
        law(mutant)


def nothing_survives(module=isolated):
    word = marker()
    try:
        o = module.run_program(
            [
                *PYTHON,
                f"import subprocess\nsubprocess.Popen(['sleep', '{word}'], start_new_session=True)",
            ],
            limits=module.Limits(wall_s=30),
        )
        assert o.status == 'ok' and not running(word)
        o = module.run_program(
            [*PYTHON, 'import time; time.sleep(9)'], limits=module.Limits(wall_s=0.3)
        )
        assert o.status == 'timeout' and o.wall_s < 3  # of nine
        o = module.run_program(
            [*PYTHON, 'while True: pass'], limits=module.Limits(wall_s=30, cpu_s=0.2)
        )
        assert o.status == 'cpu' and o.cpu_s < 0.8
    finally:
        for pid in running(word):
            os.kill(pid, signal.SIGKILL)


def test_nothing_survives():
    nothing_survives()


@pytest.mark.parametrize(
    'old, new',
    [
        ("_linux('prctl', _subreaper, 1, 0, 0, 0)", 'pass'),
        ('start+limits.wall_s, caller', 'start+limits.wall_s+4, caller'),
        ('signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)', 'pass'),
    ],
)
def test_planted_faults_in_isolation(old, new):
    mutant = planted(isolated, old, new)
    with pytest.raises(AssertionError):
        nothing_survives(mutant)


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


def test_outcomes_compare():
    assert Outcome('ok') == Outcome('ok') != Outcome('failed')
