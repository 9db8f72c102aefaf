"""Nothing that a policy may write earns what it has not done, stays, or touches the judge

The tables are examples. The promises of each kind of isolation are tested in test_isolated.py.
"""

import gc
import json
import os
import socket
import tempfile
import time
from pathlib import Path

import pytest

from compassrl.data.tasks import verifiers, verify
from compassrl.judges.verifiers import code
from compassrl.records import Prompt
from compassrl.runs.run_data import unsolved
from compassrl.sandbox import isolated as isolated_programs
from compassrl.sandbox.fork_client import close_fork_servers, warm_server
from compassrl.sandbox.isolated import best_isolation, run_python
from tests.judges.honest_programs import KINDS, honest
from tests.judges.hostile_programs import HOSTILE, REWARD
from tests.judges.object_programs import ATTEMPTS, GAPS, JUDGED, LIARS, PAID
from tests.support import chaos

TESTS = [
    'assert double(21) == 42',
    'assert abs(double(1.25) - 2.5) < 1e-9',
    'xs = [1]\nassert double(xs) == xs + xs',
]
PAIR = dict(stdin='21\n', stdout='42\n')
WORD = '86420.75'
isolated = pytest.mark.skipif(not best_isolation()[0], reason='this machine isolates no program')


def left(folder):
    "What outlives a process: shared memory, folders, open files; `folder` is where ours would be"
    shm = Path('/proc/sysvipc/shm').read_text().count('\n')
    names = [sorted(os.listdir(d)) for d in ('/dev/shm', '/tmp')]
    mine = [n for found in names for n in found if WORD in n] + os.listdir(folder)
    return dict(shm=shm, mine=mine, fds=len(os.listdir('/proc/self/fd')))


def processes_inside():
    "All below this process"
    found, new = [], [os.getpid()]
    while new:
        for p in new[:]:
            new.remove(p)
            try:
                below = Path(f'/proc/{p}/task/{p}/children').read_text().split()
            except OSError:
                continue
            found += below
            new += map(int, below)
    return len(found)


@isolated
@chaos.kind('hostile programs')
def test_hostile_programs(tmp_path, record_property, monkeypatch):
    "No reward, nothing left, the judge untouched; a neighbour is still judged rightly"
    assert len(HOSTILE) > 80
    (tmp_path / 'answers.txt').write_text('42')
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / 'port'))
    server.listen()
    server.setblocking(False)
    (folder := tmp_path / 'sandboxes').mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(folder))
    close_fork_servers()
    good = 'def double(x): return 2 * x'
    assert code(good, json.dumps(TESTS)).reward == 1
    assert run_python('print(1)').status == 'ok'  # the second server is also warm
    gc.collect()  # files that earlier tests of this process forgot close now, not in the middle
    before, inside = left(folder), processes_inside()
    for name, what, program in HOSTILE:
        for mark, value in (
            ('TRAINER', os.getpid()),
            ('WORD', WORD),
            ('SECRET', tmp_path / 'answers.txt'),
            ('PORT', tmp_path / 'port'),
        ):
            program = program.replace(mark, str(value))
        quick = (name, what) in {row[:2] for row in REWARD}
        for tests in (TESTS if quick else TESTS[:1], [PAIR]):
            v = code(program, json.dumps(dict(tests=tests, wall_s=0.6, cpu_s=0.15)))
            assert v.reward == 0 and not v.correct, (name, what, tests, v)
            assert v.status != 'failed', (name, what, tests, v)  # it would get what costs nothing
        assert processes_inside() == inside, (name, what)
        now = left(folder)
        fewest = min(before['fds'], now['fds'])  # others may close a file in the middle
        assert now == before | dict(fds=fewest), (name, what)
        before = now
    with pytest.raises(BlockingIOError):
        server.accept()
    server.close()
    record_property('trials', len(HOSTILE))
    assert code(good, json.dumps(TESTS)).reward == 1


@isolated
@pytest.mark.parametrize('kind', range(len(KINDS)), ids=lambda i: KINDS[i].__name__)
def test_honest_programs_keep_their_reward(kind):
    "Fourteen of each kind, 210 in all"
    for i in range(14):
        tests, program = honest(kind + len(KINDS) * i)
        limits = dict(tests=tests, wall_s=60.0, cpu_s=10.0)  # also on a busy machine
        v = code(f'Here it is:\n```python\n{program}```', json.dumps(limits))
        assert v.reward == 1 and v.correct, (tests, program, v)


@isolated
@pytest.mark.parametrize('kind', range(len(KINDS) - 1), ids=lambda i: KINDS[i].__name__)
@pytest.mark.parametrize(
    'wrong',
    [
        'def solve(*a): return None',
        'def solve(*a): return a[0]',
        'def solve(*a): raise ValueError("positive")',
        'class solve:\n  def __init__(self, *a): pass\n  __eq__ = __lt__ = lambda *a: True\n'
        '  __getattr__ = lambda s, n: s\n  __iter__ = lambda s: iter([s])\n'
        '  __call__ = __sub__ = __round__ = __abs__ = lambda s, *a: s\n'
        'class Stack(solve): pass\nclass Negative(Exception): pass',
    ],
    ids=['nothing', 'echo', 'raises', 'yes to all'],
)
def test_the_honest_tests_are_tests(kind, wrong):
    "Of a wrong program none of the kinds passes all"
    tests, _ = honest(kind)
    assert not code(wrong, json.dumps(dict(tests=tests, cpu_s=1.0))).correct, tests


@pytest.fixture(params=['bwrap', 'namespaces'])
def walls(request, monkeypatch):
    "Each kind of isolation that this machine has"
    try:
        with warm_server(request.param):
            pass
    except OSError as e:
        pytest.skip(str(e))
    monkeypatch.setattr(isolated_programs, 'best_isolation', lambda: (request.param, ''))


def judged(program, spec):
    return code(program, json.dumps(dict(cpu_s=10.0, wall_s=60.0) | spec))


def test_honest_programs_whose_tests_use_objects(walls):
    "Plain Python passes each; what no program can pass is named when its row is loaded"
    for name, (spec, program) in (JUDGED | GAPS).items():
        future = 'from __future__ import annotations\n'
        text = spec.get('prefix', '') + program.replace(future, '')
        exec('\n'.join([text, *spec['tests']]), dict(__name__='plain'))
        if name in JUDGED:
            v = judged(program, spec)
            assert v.reward == 1, (name, v)
    rows = [
        Prompt(name, 'd', '', [2], json.dumps(spec), 'code', f'```python\n{program}```')
        for name, (spec, program) in GAPS.items()
    ]
    with pytest.raises(ValueError, match='asks the program nothing'):
        code('', rows.pop([p.id for p in rows].index('own pow')).answer)
    assert {*unsolved(rows)} == {p.id for p in rows}


def test_what_tests_ask_in_vain(walls):
    "The table of the notebook: paid, though plain Python fails it"
    for name, (tests, program) in PAID.items():
        with pytest.raises(AssertionError):
            exec('\n'.join([program, *tests]), dict(__name__='plain'))
        assert judged(program, dict(tests=tests)).reward == 1, name


def test_objects_that_lie(walls):
    for name, (test, program) in LIARS.items():
        limits = dict(wall_s=5.0, cpu_s=1.0, memory_mb=128)
        assert judged(program, dict(tests=[test]) | limits).reward == 0, name


def test_attempts_on_memory_and_scheduler(walls):
    "None goes through, and none is without a verdict"
    assert len(ATTEMPTS) > 35
    for name, program in ATTEMPTS.items():
        v = judged(program, dict(tests=['assert double(21) == 42']))
        assert (v.reward, v.status) == (0, 'wrong'), (name, v)
        assert judged(program.replace('return None', 'return 2 * x'), dict(tests=TESTS[:1])).correct


# ---- strings

PIECES = [
    *('#', '$', '\\boxed{', '}', '{', '\\frac', '^', '_', '(', ')', '[', '=', '%', '\\', '/', '!'),
    *('<think>', '</think>', '```', '```python\n', '9^{9^{9}}', '\\sqrt[', '\\int', '\\sum_{i=1}^'),
    *('0', '1', '42', '-', '+', '*', '**', '.', ',', 'x', 'e', 'i', 'pi', 'nan', 'inf', '\\infty'),
    *('\0', '\n', '\r', '\ud800', '\u202e', 'ü', '١', '𝟜', '\x1b[2J', ' ' * 50, '(' * 40, '1' * 60),
    *('__import__("os")', 'lambda:', '\\begin{pmatrix}', '&', '\\\\', '\\text{', '\\{', '\\}'),
    *('"', ']', ':', '[[' * 40, '{"a":' * 40, '"name": "f", "arguments": {', 'null', '1e999'),
]


def hostile_string(rng):
    if rng.random() < 0.1:
        return ''.join(chr(rng.randrange(0x11000)) for _ in range(rng.randrange(200)))
    text = ''.join(rng.choice(PIECES) for _ in range(rng.randrange(1, 14)))
    return f'\\boxed{{{text}}}' if rng.random() < 0.3 else text


ANSWERS = dict(exact='42', final='42', countdown_expression='1 2 3 to 6', maths='42')
ANSWERS['code'] = json.dumps(dict(tests=TESTS[:1], wall_s=5.0, cpu_s=1.0))
ANSWERS['numeric'] = json.dumps(dict(value=42, within=1, unit='m'))
ANSWERS['set_match'] = json.dumps(['a', '42'])
ANSWERS['choice'] = json.dumps(dict(answer='B', choices=['10', '42']))
ANSWERS['tool_call'] = json.dumps(dict(f=dict(a=[[1], {'k': ['x', '']}, ''])))
ANSWERS['instructions'] = json.dumps(
    [dict(check='keyword', word='(', at_least=1), dict(check='json_format'), dict(check='no_comma')]
)
ANSWERS['composite'] = json.dumps(
    [dict(verifier=name, answer=ANSWERS[name]) for name in ('final', 'instructions', 'tool_call')]
)
IN_SANDBOXES = 'maths', 'code'


def test_no_verifier_is_left_out():
    assert {*ANSWERS} == {*verifiers} - {'genrm'}, 'genrm asks a model and reads its reply alone'


@chaos.kind('hostile strings')
@pytest.mark.parametrize('name', [n for n in ANSWERS if n not in IN_SANDBOXES])
def test_thousands_of_hostile_strings(name, record_property):
    "No exception, no failed verdict"
    rng, num = chaos.draw(name), chaos.trials(2_000, 10_000)
    prompt = Prompt('p', 'd', '', [2], ANSWERS[name], name)
    for _ in range(num):
        text = hostile_string(rng)
        v = verify(prompt, text)
        assert v.status in ('ok', 'wrong') and verifiers[name](text, prompt.answer) == v, (text, v)
    record_property('trials', num)


@chaos.kind('hostile strings')
@pytest.mark.parametrize('part', range(chaos.trials(1, 10)))
@pytest.mark.parametrize('name', ['maths', pytest.param('code', marks=isolated)])
def test_hostile_strings_in_sandboxes(name, part, record_property):
    "The same; each within the bound of its sandbox, and with the same server as all others"
    rng, num = chaos.draw(name, part), chaos.trials(60, 1000)
    prompt = Prompt('p', 'd', '', [2], ANSWERS[name], name)
    verify(prompt, '1')
    inside, slowest = processes_inside(), 0.0
    for i in range(num):
        text, began = hostile_string(rng), time.monotonic()
        v = verify(prompt, text)
        slowest = max(slowest, time.monotonic() - began)
        assert v.status in ('ok', 'wrong', 'timeout') and '\n' not in v.evidence, (i, text, v)
    assert processes_inside() == inside
    record_property('trials', num)
    record_property('slowest (s)', slowest)
    assert slowest < 5 + 60  # its bound, and what a busy machine may add
