"""Code of users: it may leave, loop, wait, print or start threads; the run goes on and names it"""

import asyncio
import functools
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import pytest
import torch

from compassrl import procs
from compassrl.data.rows import Reading, row_prompt
from compassrl.data.tasks import verifiers, verify
from compassrl.data.tokenizer import build_tokenizer
from compassrl.experience import _reward_by_function
from compassrl.judges import own_reward as module
from compassrl.judges.own_reward import (
    OwnJudge,
    OwnReward,
    RewardFile,
    RewardFunction,
    inputs_of,
    own_reward,
)
from compassrl.judges.reward_settings import RewardConfig
from compassrl.own_code import call_own, own_function
from compassrl.procs import time_limit
from compassrl.records import Prompt, Sample
from tests.support import ROOT

PROMPT = Prompt('p', 'sums', '3+4=', [1], '7', 'own')


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    "Source of reward.py -> what judges with these functions of it"
    monkeypatch.chdir(tmp_path)

    def make(source, *names, **cfg):
        (tmp_path / 'reward.py').write_text(source)
        return own_reward(RewardConfig(function=tuple(f'reward.py:{n}' for n in names), **cfg))

    return make


# ---- loading

SCRIPT = 'import argparse\nargparse.ArgumentParser().parse_args(["--x"])\n'


@pytest.mark.parametrize('source', ['import sys\nsys.exit(0)\n', 'raise SystemExit\n', SCRIPT])
@pytest.mark.parametrize('setting', ['rewards.function', 'loss.name'])
def test_a_file_that_leaves_while_it_is_imported(source, setting, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r'r\.py.*SystemExit.*__main__') as e:
        own_function('r.py:score', setting, source.encode())
    assert setting in str(e.value)
    monkeypatch.chdir(tmp_path)
    name = f'leaving_{abs(hash((source, setting)))}'
    (tmp_path / f'{name}.py').write_text(source)
    with pytest.raises(ValueError, match='SystemExit.*__main__'):
        own_function(f'{name}:score', setting)


def test_the_command_says_so_and_fails(tmp_path):
    "Exit code 0 without a line is what a job script takes for success"
    (tmp_path / 'r.py').write_text('import sys\nsys.exit(0)\n')
    argv = [sys.executable, '-m', 'compassrl', 'train', 'smoke-cpu', '--run-dir', 'run']
    o = subprocess.run(
        [*argv, '--rewards.function', 'r.py:score'],
        cwd=tmp_path,
        env=os.environ | dict(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
    )
    assert o.returncode == 1 and 'SystemExit: 0 (r.py:2)' in o.stderr, o


def test_it_may_import_its_neighbours(rewards, tmp_path):
    (tmp_path / 'helper_of_mine.py').write_text('def half(x): return x / 2\n')
    own = rewards('from helper_of_mine import half\ndef f(text): return half(1)\n', 'f')
    assert own.judge_one(PROMPT, '').reward == 0.5


# ---- calls

SWALLOWS = 'while True:\n        try:\n            while True: pass\n        except Exception: pass'
BODIES = {
    'while True: pass': 'timeout',
    'import time; time.sleep(60)': 'timeout',
    SWALLOWS: 'timeout',
    'import sys; sys.exit()': 'failed',
    'import sys; sys.exit(0)': 'failed',
    'raise GeneratorExit': 'failed',
    'raise BaseException("x")': 'failed',
    '1 / 0': 'failed',
    'raise TimeoutError("the server was silent")': 'timeout',
}


@pytest.mark.parametrize('body', BODIES)
@pytest.mark.parametrize('signature', ['def f(text)', 'def f(texts)', 'async def f(text)'])
def test_whatever_a_function_does_has_a_verdict(body, signature, rewards, monkeypatch):
    monkeypatch.setattr(module, 'GRACE', 0.1)
    own = rewards(f'{signature}:\n    {body}\n', 'f')
    start = time.monotonic()
    [v] = own.judge_many([PROMPT], ['7'], wall_s=0.1)
    assert (v.status, v.reward) == (BODIES[body], 0.0), v
    assert 'reward.py' in v.evidence and time.monotonic() - start < 30, v


def test_one_that_hangs_does_not_spoil_the_others(rewards):
    own = rewards('import asyncio\nasync def f(text): await asyncio.sleep(float(text))\n', 'f')
    own.functions[0].fn = functools.partial(own.functions[0].fn)  # a partial of one is one
    assert [v.status for v in own.judge_many([PROMPT] * 2, ['0', '60'], wall_s=0.2)] == [
        'failed',  # None: it has nothing to say
        'timeout',
    ]


def test_a_limit_within_a_limit():
    "The outer one is not taken for the inner one, and goes on after it"
    with pytest.raises(TimeoutError, match='after 0.05 s'), time_limit(0.05):
        with time_limit(60):
            while True:
                pass
    with pytest.raises(TimeoutError, match='after 0.3 s'), time_limit(0.3):
        with pytest.raises(TimeoutError, match='after 0.05 s'), time_limit(0.05):
            time.sleep(60)
        time.sleep(60)
    time.sleep(0.01)  # nothing rings any more


def test_the_clock_of_another_thread():
    "It gets no signals; the exception comes between two lines of Python"
    found = []

    def loop():
        while True:
            pass

    def work():
        try:
            call_own(loop, 0.05)
        except TimeoutError as e:
            found.append(str(e))

    (thread := threading.Thread(target=work, daemon=True)).start()
    thread.join(60)
    assert found == ['still running after 0.05 s']


def test_many_threads_share_one_watchdog():
    "Each is stopped at its own time, at its own limit; none begins a thread for a verdict"

    def loop():
        while True:
            pass

    def spin(seconds):
        with pytest.raises(TimeoutError):
            call_own(loop, seconds)
        return time.monotonic() - start

    with ThreadPoolExecutor(8) as pool:
        meet = threading.Barrier(8)  # all eight have begun
        list(pool.map(lambda _: call_own(meet.wait, 60), range(8)))
        begun, count = threading.Thread.start, []
        with mock.patch.object(threading.Thread, 'start', lambda t: count.append(begun(t))):
            assert list(pool.map(call_own, [str] * 400, [60] * 400, range(400))) == [
                str(i) for i in range(400)
            ]
        assert not count, 'threads were begun'
        start, limits = time.monotonic(), [0.1, 0.7, 0.3, 0.2, 0.4]  # shorter than those before
        took = list(pool.map(spin, limits))
    assert all(a <= b for a, b in zip(limits, took)) and max(took) < 30, took


@pytest.fixture
def thrown(monkeypatch):
    "Exceptions that limits raise in other threads; here they are noted only"
    calls = []
    monkeypatch.setattr(procs, '_throw', lambda me, what: calls.append((me.value, bool(what))))
    return calls


def test_a_limit_rings_each_second_until_it_has_ended(thrown):
    late = []
    limit = procs._Limit(7, 10.0, late)
    for now in (9.9, 10.1, 10.9, 11.2):  # not due, due, too early, due again
        limit.ring(now)
    assert thrown == [(7, True)] * 2 and late == [True] * 2
    limit.off()
    limit.ring(1e9)
    assert thrown == [(7, True), (7, True), (7, False)], 'what was pending is taken back, once'


def test_a_limit_that_rings_has_rung_before_its_end(monkeypatch, thrown):
    "Else its exception would arrive after it, in code that has no limit"
    inside, go_on = threading.Event(), threading.Event()
    limit = procs._Limit(7, 0.0, [])
    note = procs._throw

    def slow(me, what):
        if what:
            inside.set()
            go_on.wait(60)
        note(me, what)

    monkeypatch.setattr(procs, '_throw', slow)
    with ThreadPoolExecutor(2) as pool:
        rings = pool.submit(limit.ring, 1.0)
        inside.wait(60)
        ends = pool.submit(limit.off)
        time.sleep(0.05)
        assert not ends.done()
        go_on.set()
        rings.result(60), ends.result(60)
    assert thrown == [(7, True), (7, False)]


def test_a_limit_that_comes_while_the_watchdog_looks_is_seen(thrown):
    dog, late = procs._Watchdog(), []

    class Limits(set):
        looked = 0

        def __iter__(self):
            yield from list(super().__iter__())
            self.looked += 1
            if self.looked == 2:  # just too late to be looked at
                dog.add(procs._Limit(7, time.monotonic(), late))

    dog.looks, dog.limits = 0.0, Limits()  # a limit was due just before
    dog.news.put(None)
    end = time.monotonic() + 30
    while not late and time.monotonic() < end:
        time.sleep(0.01)
    dog.limits.clear()  # its thread goes on
    assert late


def test_a_forked_process_has_a_watchdog_of_its_own():
    code = """
import os, threading
from compassrl.own_code import call_own
def loop():
    while True: pass
def late(name):
    try:
        call_own(loop, 0.05)
    except TimeoutError:
        print(name, flush=True)
def apart(name):
    (t := threading.Thread(target=late, args=(name,), daemon=True)).start()
    t.join(30)
apart('parent')
if not (pid := os.fork()):
    apart('child')
    os._exit(0)
os.waitpid(pid, 0)
"""
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ['parent', 'child'], done.stderr


def test_verify_has_a_clock(monkeypatch):
    def loops(text, answer):
        while True:
            pass

    monkeypatch.setitem(verifiers.functions, 'loops', loops)
    monkeypatch.setattr('compassrl.data.tasks.GRACE', 0.1)
    v = verify(replace(PROMPT, verifier='loops'), '', 0.01)
    assert v.status == 'timeout' and 'test_own_reward.py' in v.evidence


def test_prints_and_threads_do_no_harm(tmp_path):
    "A thread that never ends does not keep the process"
    code = """
from compassrl.own_code import call_own, own_function
text = b'''
import threading, time
def loop():
    while True: time.sleep(0.01)
threading.Thread(target=loop).start()
def f():
    print("hello")
    threading.Thread(target=loop).start()
    return 1
'''
assert call_own(own_function('r.py:f', 'rewards.function', text), 5.0) == 1
"""
    env = os.environ | dict(PYTHONPATH=str(ROOT))
    o = subprocess.run([sys.executable, '-c', code], env=env, cwd=tmp_path, timeout=60)
    assert o.returncode == 0


# ---- what is awaited


class Instance:
    async def __call__(self, text):
        await asyncio.sleep(0)
        return len(text)


async def coroutine(text):
    return len(text)


async def of_many(texts):
    return [len(t) for t in texts]


@functools.wraps(coroutine)
def wrapped(*args, **kwargs):
    return coroutine(*args, **kwargs)


@pytest.mark.parametrize(
    'fn',
    [
        Instance(),
        coroutine,
        of_many,
        functools.partial(coroutine),
        functools.partial(Instance()),
        wrapped,
        lambda text: coroutine(text),
        Instance().__call__,
    ],
)
@pytest.mark.filterwarnings('error')
def test_all_that_can_be_awaited_is(fn):
    f = RewardFunction('f', fn, 1.0)
    inputs = [inputs_of(PROMPT, t) for t in ('', 'ab')]
    assert [v.reward for v in f.verdicts(inputs)] == [0.0, 2.0]

    async def in_a_loop():  # a notebook has one
        return f.verdicts(inputs)

    assert [v.reward for v in asyncio.run(in_a_loop())] == [0.0, 2.0]


# ---- what a function sees

TRUTHS = [{'target': 7, 'numbers': [3, 4]}, [1, 'a'], 11, 0, 1.5, True, 'text']


@pytest.mark.parametrize('truth', TRUTHS, ids=str)
@pytest.mark.parametrize('where', ['reward_model.ground_truth', 'ground_truth', 'answer', 'label'])
def test_the_answer_reaches_the_function_as_it_stands(truth, where, rewards):
    row = dict(prompt='a')
    if '.' in where:
        row['reward_model'] = dict(ground_truth=truth)
    else:
        row[where] = truth
    columns = dict(answer='label') if where == 'label' else {}
    prompt = row_prompt(Reading(build_tokenizer(), columns, keep_row=True), row)
    same = f'lambda x: type(x) is {type(truth).__name__} and x == {truth!r}'
    own = rewards(f'same = {same}\ndef f(text, ground_truth): return same(ground_truth)\n', 'f')
    assert own.judge_one(prompt, '').reward == 1
    if where != 'label' and '.' not in where:
        own = rewards(f'same = {same}\ndef f(text, {where}): return same({where})\n', 'f')
        assert own.judge_one(prompt, '').reward == 1
    assert isinstance(prompt.answer, str)
    if isinstance(truth, (dict, list)):
        assert json.loads(prompt.answer) == truth


def test_each_sample_has_the_whole_time(rewards):
    "Four whose programs take a third of it each; a column that a row lacks is None"
    own = rewards(
        'from compassrl.sandbox.isolated import run_python\ndef f(text, level):\n'
        '  o = run_python("import time; time.sleep(0.6)", isolation="none")\n'
        '  return (level or 3) if o.status == "ok" else 0',
        'f',
    )
    prompts = [replace(PROMPT, id='a', columns=dict(level=2)), replace(PROMPT, id='b')]
    tokenizer = build_tokenizer()
    own.check(prompts)
    judge = OwnJudge(prompts, tokenizer, 1, own, RewardConfig(wall_s=2.0))
    samples = [
        Sample(p.id, i, [1], [5], torch.zeros(1), None, None, 'stop', 0)
        for i in range(2)
        for p in prompts
    ]
    judge.settle(samples)
    assert [s.verdict.reward for s in samples] == [2.0, 3.0] * 2, samples[-1].verdict


def test_each_of_several_functions_has_a_mean(rewards):
    source = 'def a(text): return 2.0\ndef b(text): return None if text else -1.0\n'
    own = rewards(source, 'a', 'b', weights=(1.0, 0.5))
    verdicts = own.judge_many([PROMPT] * 2, ['', 'x'])
    assert [v.reward for v in verdicts] == [1.5, 2.0]
    assert _reward_by_function(verdicts) == {'reward/a': 2.0, 'reward/b': -1.0}
    one = rewards(source, 'a').judge_many([PROMPT], [''])
    assert _reward_by_function(one) == {}, 'the mean reward says it already'


def test_two_functions_of_one_name_keep_their_files():
    files = [RewardFile(f'{n}.py:f', b'def f(text): return 1\n') for n in 'ab']
    assert OwnReward(files, (), 1.0).short_names == ['a.py:f', 'b.py:f']
