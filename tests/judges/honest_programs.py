"""Honest solutions, tests and a program that passes them all, made from a seed

The kinds are those of tasks that assert lines and pairs of input and output can ask: numbers,
texts, containers of every kind, classes, exceptions, generators, arguments changed in place,
functions as arguments; and habits of programmers that a sandbox must forgive.
"""

import random

HABITS = [  # what honest programs do besides their task
    '',
    'if __name__ == "__main__":\n    print(solve(int(input())))\n',
    'input = 3\n',
    'def print(*args): pass\n',
    'import sys\nsys.setrecursionlimit(5000)\n',
    'print("hello")\n',
    'import math, collections, itertools, functools, re, heapq, bisect, string\n',
    'from typing import *\nfrom dataclasses import dataclass\n'
    '@dataclass\nclass Unused:\n    x: int\n',
    'list_ = [1]\nfile = open("notes.txt", "w")\nfile.write("x")\n',
    'import random, time\nrandom.seed(0)\ntime.sleep(0)\n',
    'value = passed = expected = result = 7\n',
    'import threading\nt = threading.Thread(target=int)\nt.start()\nt.join()\n',
]


def number(rng):
    a, b = rng.randrange(2, 99), rng.randrange(-99, 99)
    program = f'def solve(x): return {a} * x + {b}\n'
    xs = [rng.randrange(-(10**6), 10**6) for _ in range(2)] + [2**70]
    return [f'assert solve({x}) == {a * x + b}' for x in xs], program


def real(rng):
    a = round(rng.uniform(1, 9), 3)
    tests = [
        f'assert abs(solve(2.0) - {2 * a!r}) < 1e-6',
        f'import math\nassert math.isclose(solve(0.5), {a / 2!r})',
        'assert round(solve(0), 3) == 0',
    ]
    return tests, f'def solve(x): return {a!r} * x\n'


def text(rng):
    word = ''.join(rng.choice('abcüß "\\\'') for _ in range(6))
    tests = [f'assert solve({word!r}) == {word[::-1]!r}', "assert solve('') == ''"]
    return tests, 'def solve(s): return s[::-1]\n'


def containers(rng):
    xs = [rng.randrange(9) for _ in range(6)]
    tests = [
        f'assert solve({xs}) == ({sorted(xs)}, {set(xs)!r}, {{x: {xs}.count(x) for x in {xs}}})',
        f'assert type(solve({xs})) is tuple and type(solve({xs})[1]) is set',
        'assert solve([])[2] == {}',
    ]
    program = (
        'from collections import Counter\ndef solve(xs): return sorted(xs), set(xs), Counter(xs)\n'
    )
    return tests, program


def truth(rng):
    n = rng.randrange(2, 50)
    tests = [f'assert solve({n * 7}, 7)', f'assert not solve({n * 7 + 1}, 7)']
    tests += [f'assert solve({n * 7}, 7) is True', 'assert solve(0, 7) in (True, 1)']
    return tests, 'def solve(a, b): return a % b == 0\n'


def nothing(rng):
    tests = ['assert solve([]) is None', f'assert solve([{rng.randrange(9)}]) is not None']
    return tests, 'def solve(xs): return xs[0] if xs else None\n'


def in_place(rng):
    xs = [rng.randrange(99) for _ in range(5)]
    tests = [f'xs = {xs}\nsolve(xs)\nassert xs == {sorted(xs)}']
    tests += [f'xs = {xs}\nk = solve(xs)\nassert k is None and xs[0] == {min(xs)}']
    return tests, 'def solve(xs): xs.sort()\n'


def fails(rng):
    tests = [
        'try:\n    solve(-1)\nexcept ValueError as e:\n    assert "negative" in str(e)\n'
        'else:\n    assert False',
        'try:\n    solve(-2)\n    assert False\nexcept Negative:\n    pass',
        'assert solve(4) == 2',
    ]
    program = (
        'class Negative(ValueError): pass\n'
        'def solve(x):\n    if x < 0: raise Negative(f"{x} is negative")\n    return x // 2\n'
    )
    return tests, program


def klass(rng):
    xs = [rng.randrange(99) for _ in range(3)]
    tests = [
        f's = Stack()\nfor x in {xs}: s.push(x)\nassert s.pop() == {xs[-1]}\nassert len(s) == 2',
        's = Stack()\nassert s.empty and not s.items',
        f's = Stack({xs})\nassert list(s) == {xs}\nassert {xs[0]} in s and s.items[0] == {xs[0]}',
        'a, b = Stack(), Stack()\na.push(b)\nassert isinstance(a, Stack) and str(b) == "Stack(0)"',
    ]
    program = (
        'class Stack:\n    def __init__(self, items=()): self.items = list(items)\n'
        '    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()\n'
        '    def __len__(self): return len(self.items)\n    def __iter__(self): '
        'return iter(self.items)\n    def __str__(self): return f"Stack({len(self)})"\n'
        '    @property\n    def empty(self): return not self.items\ndef solve(x): return x\n'
    )
    return tests, program


def stream(rng):
    n = rng.randrange(2, 9)
    tests = [
        f'assert list(solve({n})) == {[i * i for i in range(n)]}',
        f'assert sum(x for x in solve({n})) == {sum(i * i for i in range(n))}',
        f'it = solve({n})\nassert next(it) == 0 and next(it) == 1',
    ]
    return tests, 'def solve(n):\n    for i in range(n): yield i * i\n'


def function(rng):
    k = rng.randrange(2, 9)
    tests = [
        f'assert solve(lambda x: x + {k}, [1, 2]) == [{1 + k}, {2 + k}]',
        "assert solve(str, [1]) == ['1'] and solve(len, ['ab']) == [2]",
        f'def f(x):\n    return x * {k}\nassert solve(f, (3,)) == [{3 * k}]',
    ]
    return tests, 'def solve(f, xs): return [f(x) for x in xs]\n'


def closure(rng):
    k = rng.randrange(9)
    tests = [f'assert solve({k})(2) == {k + 2}', f'f = solve({k})\nassert f(0) == f(0) == {k}']
    return tests, 'def solve(k):\n    def add(x): return x + k\n    return add\n'


def rich(rng):
    a, b = rng.randrange(1, 9), rng.randrange(1, 9)
    tests = [
        f'from fractions import Fraction\nassert solve({a}, {b}).ratio == Fraction({a}, {b})',
        f'assert solve({a}, {b})[1] == bytes([{a}, {b}])',
        f'r = solve({a}, {b})\nassert r.word == {"ü" * a!r} and len(r) == 3',
    ]
    program = (
        'from collections import namedtuple\nfrom fractions import Fraction\n'
        'R = namedtuple("R", "ratio raw word")\n'
        'def solve(a, b): return R(Fraction(a, b), bytes([a, b]), "ü" * a)\n'
    )
    return tests, program


def checker(rng):
    n = rng.randrange(3, 9)
    tests = [
        f'def check(candidate):\n    for i in range({n}):\n        assert candidate(i) == i ** 2\n'
        'check(solve)',
        f'for a, b in [(1, 1), ({n}, {n * n})]:\n    assert solve(a) == b, a',
    ]
    return tests, 'def solve(n): return n * n\n'


def pairs(rng):
    a, b = rng.randrange(-99, 99), rng.randrange(-99, 99)
    tests = [dict(stdin=f'{a} {b}\n', stdout=f'{a + b}\n'), dict(stdin='0 0', stdout='0')]
    bodies = [
        'print(sum(map(int, input().split())))\n',
        'import sys\na, b = map(int, sys.stdin.read().split())\nsys.stdout.write(str(a + b))\n',
        'def main():\n    a, b = input().split()\n    print(int(a) + int(b))\n\n'
        'if __name__ == "__main__":\n    main()\n',
        'import sys\nfor line in sys.stdin:\n'
        '    print(eval("+".join(f"({x})" for x in line.split())))\nsys.exit(0)\n',
        'import os\na, b = os.read(0, 99).split()\nprint(int(a) + int(b), flush=True)\n',
        'import subprocess, sys\ncode = "print(sum(map(int, input().split())))"\n'
        'subprocess.run([sys.executable, "-c", code], check=True)\n',
        'print(sum(map(int, open("/dev/stdin").read().split())))\nexit()\n',
        'import asyncio\nasync def main():\n    print(sum(map(int, input().split())))\n'
        'asyncio.run(main())\nquit(0)\n',
        'import multiprocessing as mp\nwith mp.Pool(1) as pool:\n'
        '    print(sum(pool.map(int, input().split())))\n',
    ]
    return tests, rng.choice(bodies)


KINDS = [
    *(number, real, text, containers, truth, nothing, in_place, fails, klass, stream),
    *(function, closure, rich, checker, pairs),
]


def honest(seed):
    "Tests and a program that passes them all"
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    tests, program = kind(rng)
    habit = '' if kind is pairs else HABITS[(seed // len(KINDS)) % len(HABITS)]
    return tests, program + habit
