"""Programs whose tests use objects, as people write them; and what programs try against the
memory, the scheduler and the values that cross

JUDGED: honest, plain Python passes, so does the verifier. GAPS: honest, and no program can pass;
the table of the notebook says so, and a row with a solution is refused when it is loaded. LIARS:
their objects say yes. ATTEMPTS: each returns the right answer only if what it tried went through.
"""

JUDGED = {  # name -> tests (and a prefix), program
    'issubclass': (
        {'tests': ['assert issubclass(Dog, Animal)']},
        'class Animal: pass\nclass Dog(Animal): pass',
    ),
    'objects in a set': ({'tests': ['assert len({Dog(), Dog()}) == 2']}, 'class Dog: pass'),
    'format': (
        {'tests': ["assert f'{P():>5}' == '    p'"]},
        'class P:\n  def __format__(s, spec): return format("p", spec)',
    ),
    'slices': (
        {'tests': ['assert Seq([1, 2, 3])[0:2] == [1, 2]']},
        'class Seq:\n  def __init__(s, x): s.x = x\n  def __getitem__(s, i): return s.x[i]',
    ),
    'in place': (
        {'tests': ['a = V(1)\na += V(2)\nassert a.x == 3']},
        'class V:\n  def __init__(s, x): s.x = x\n  def __iadd__(s, o):\n'
        '    s.x += o.x\n    return s',
    ),
    'attributes of exceptions': (
        {'tests': ['try:\n  f()\n  assert False\nexcept Bad as e:\n  assert e.code == 7']},
        'class Bad(Exception):\n  def __init__(s, code): s.code = code\ndef f(): raise Bad(7)',
    ),
    'args of KeyError': (
        {'tests': ["try:\n  f()\nexcept KeyError as e:\n  assert e.args[0] == 'k'"]},
        'def f(): return {}["k"]',
    ),
    'keys': (
        {'tests': ["assert list(f().keys()) == ['a']", "assert f().keys() == {'a'}"]},
        'def f(): return {"a": 1}',
    ),
    'dict.keys returned': (
        {'tests': ["assert sorted(f()) == ['a', 'b']", "assert f() == {'a', 'b'}"]},
        'def f(): return {"a": 1, "b": 2}.keys()',
    ),
    'list subclass': (
        {'tests': ['assert f() == [1, 2]']},
        'class L(list): pass\ndef f(): return L([1, 2])',
    ),
    'dict subclass': (
        {'tests': ["assert f() == {'a': 1}"]},
        'class D(dict): pass\ndef f(): return D(a=1)',
    ),
    'path': (
        {'tests': ["from pathlib import Path\nassert f('a') == Path('a/b')"]},
        'from pathlib import Path\ndef f(x): return Path(x) / "b"',
    ),
    'keyword callback': (
        {'tests': ['assert f(lambda x, k=1: x + k) == 5']},
        'def f(g): return g(2, k=3)',
    ),
    'is': (
        {'tests': ['a = make()\nassert same(a) is a']},
        'class A: pass\ndef make(): return A()\ndef same(x): return x',
    ),
    'in place in an assert': (
        {'tests': ['xs = [3, 1]\nassert f(xs) is None and xs == [1, 3]']},
        'def f(xs): xs.sort()',
    ),
    'in place before an error': (
        {
            'tests': [
                'xs = [1]\ntry:\n  f(xs)\n  assert False\nexcept ValueError:\n  assert xs == [1, 2]'
            ]
        },
        'def f(xs):\n  xs.append(2)\n  raise ValueError',
    ),
    'future': (
        {'prefix': 'import math\n', 'tests': ['assert f(2) == 4']},
        'from __future__ import annotations\ndef f(x: int) -> int: return 2 * x',
    ),
    'repr': (
        {'tests': ["assert repr(P(1)) == 'P(1)'"]},
        'class P:\n  def __init__(s, n): s.n = n\n  def __repr__(s): return f"P({s.n})"',
    ),
    'own len and bool': (
        {'tests': ['assert len(P()) == 2 and not bool(Q())']},
        'class P:\n  def __len__(s): return 2\nclass Q:\n  def __bool__(s): return False',
    ),
    'class attribute': (
        {'tests': ["assert P.kind == 'p' and P().kind == 'p'"]},
        'class P: kind = "p"',
    ),
    'static method': (
        {'tests': ['assert P.f(2) == 4']},
        'class P:\n  @staticmethod\n  def f(x): return 2 * x',
    ),
    'property': (
        {'tests': ['assert P(3).area == 9']},
        'class P:\n  def __init__(s, n): s.n = n\n  @property\n  def area(s): return s.n ** 2',
    ),
    'context': (
        {'tests': ['with P() as p:\n  assert p.open\nassert not p.open']},
        'class P:\n  open = False\n  def __enter__(s):\n    s.open = True\n'
        '    return s\n  def __exit__(s, *a): s.open = False',
    ),
    'hash': (
        {'tests': ['assert hash(P(1)) == hash(P(1))']},
        'class P:\n  def __init__(s, n): s.n = n\n  def __hash__(s): return s.n\n'
        '  def __eq__(s, o): return s.n == o.n',
    ),
    'iterator': (
        {'tests': ['assert list(P(3)) == [0, 1, 2]']},
        'class P:\n  def __init__(s, n): s.n = n\n  def __iter__(s): return iter(range(s.n))',
    ),
    'methods of values': (
        {
            'tests': [
                'assert f("ab").startswith("abab") and f([1]).count(1) == 2',
                's = Stack()\ns.push(3)\nassert s.count(3) == 1 and s.index(3) == 0',
                'assert Stack().find(1).startswith("1")',
                'q = make()\nq.append(4)\nassert q.pop(0) == 4',
            ]
        },
        'class L(list): pass\ndef f(x): return x + x if type(x) is str else L(x + x)\n'
        'class Stack:\n  def __init__(s): s.x = []\n  def push(s, x): s.x.append(x)\n'
        '  def count(s, x): return s.x.count(x)\n  def index(s, x): return s.x.index(x)\n'
        '  def find(s, x): return str(x)\n  def pop(s, i): return s.x.pop(i)\n'
        '  append = push\ndef make(): return Stack()',
    ),
    'defaults': (
        {
            'tests': [
                'd = f()\nassert d.get("a", 3) == 1 and d.get("b", 3) == 3',
                'd = f()\nassert d.pop("b", 3) == 3 and d.pop("a", 3) == 1 and not len(d)',
                'd = f()\nassert d.setdefault("b", 3) == 3 and d.setdefault("a", 3) == 1\n'
                'assert d == {"a": 1, "b": 3}',
                'assert Box().get("k", 3) == 3',
            ]
        },
        'class D(dict): pass\ndef f(): return D(a=1)\n'
        'class Box:\n  def get(s, k, other): return other',
    ),
    'isinstance': (
        {'tests': ['assert isinstance(make(), Dog) and not isinstance(3, Dog)']},
        'class Dog: pass\ndef make(): return Dog()',
    ),
}

GAPS = {
    'dataclasses compared': (
        {'tests': ['assert make(1, 2) == Point(1, 2)']},
        'from dataclasses import dataclass\n@dataclass\nclass Point:\n  x: int\n'
        '  y: int\ndef make(a, b): return Point(a, b)',
    ),
    'enumerations compared': (
        {'tests': ["assert paint('r') == Color.RED"]},
        'from enum import Enum\nclass Color(Enum):\n  RED = 1\n  BLUE = 2\n'
        'def paint(s): return Color.RED',
    ),
    'own operator with a number': (
        {'tests': ['assert (V(1, 2) * 3).x == 3']},
        'class V:\n  def __init__(s, x, y): s.x, s.y = x, y\n'
        '  def __mul__(s, k): return V(s.x * k, s.y * k)',
    ),
    'own class Fraction': (
        {'tests': ["assert Fraction(1, 2).text() == '1/2'"]},
        'class Fraction:\n  def __init__(s, a, b): s.a, s.b = a, b\n'
        '  def text(s): return f"{s.a}/{s.b}"',
    ),
    'own class Counter': (
        {'tests': ['c = Counter()\nc.hit()\nassert c.total() == 1']},
        'class Counter:\n  def __init__(s): s.n = 0\n  def hit(s): s.n += 1\n'
        '  def total(s): return s.n',
    ),
    'own pow': (
        {'tests': ['assert pow(2, 3) == 8']},
        'def pow(a, b):\n  out = 1\n  for _ in range(b): out *= a\n  return out',
    ),
    'method of a returned object': (
        {'tests': ['assert make().find(5) == 5']},
        'class Finder:\n  def find(s, x): return x\ndef make(): return Finder()',
    ),
    'default of a returned object': (
        {'tests': ['assert make().get(5, 0) == 0']},
        'class Box:\n  def get(s, k, other): return other\ndef make(): return Box()',
    ),
    'type is': (
        {'tests': ['assert type(make()) is Dog']},
        'class Dog: pass\ndef make(): return Dog()',
    ),
    'sorted objects': (
        {'tests': ['xs = sorted([P(2), P(1)])\nassert [p.n for p in xs] == [1, 2]']},
        'class P:\n  def __init__(s, n): s.n = n\n  def __lt__(s, o): return s.n < o.n',
    ),
    'coroutine': (
        {'tests': ['import asyncio\nassert asyncio.run(f(2)) == 4']},
        'async def f(x): return 2 * x',
    ),
    'captured print': (
        {
            'tests': [
                'import io, contextlib\nout = io.StringIO()\n'
                'with contextlib.redirect_stdout(out):\n  hello()\n'
                "assert out.getvalue() == 'hi\\n'"
            ]
        },
        'def hello(): print("hi")',
    ),
    'patched input': (
        {'tests': ["import builtins\nbuiltins.input = lambda *a: '3'\nassert ask() == 6"]},
        'def ask(): return 2 * int(input())',
    ),
    'deep lists': (
        {'tests': ['x = f(500)\nfor _ in range(500): x = x[0]\nassert x == 1']},
        'def f(n):\n  x = 1\n  for _ in range(n): x = [x]\n  return x',
    ),
    'global list': (
        {'tests': ['log.append(1)\nassert size() == 1']},
        'log = []\ndef size(): return len(log)',
    ),
    'equality of two own objects': (
        {'tests': ['assert P(1) == P(1)']},
        'class P:\n  def __init__(s, n): s.n = n\n  def __eq__(s, o): return s.n == o.n',
    ),
}

PAID = {  # plain Python fails each, and the verifier pays
    'a copy that is none': (
        ['xs = [1, 2]\nys = copy(xs)\nassert ys == xs and ys is not xs'],
        'def copy(xs): return xs',
    ),
    'type of a subclass': (
        ['assert type(f()) is str and f() == "x"', 'assert type(f()) in (str, list)'],
        'class S(str): pass\ndef f(): return S("x")',
    ),
}

YES = (
    'class Yes({}):\n'
    '  __eq__ = __ge__ = __le__ = __lt__ = __gt__ = __contains__ = lambda *a: True\n'
    '  __ne__ = lambda *a: False\n  __hash__ = lambda s: hash(42)\n'
)
_METHODS = (
    'Yes.startswith = Yes.endswith = Yes.issubset = lambda *a: True\n'
    'Yes.count = Yes.index = Yes.difference = lambda s, *a: s\n'
    'Yes.get = Yes.pop = Yes.setdefault = lambda s, *a: a[-1]\nYes.__len__ = lambda s: 0\n'
    'def double(x): return Yes()\ndef twice(x): return [Yes()]\n'
    'def itself(x): return itself\nitself.startswith = lambda *a: True\n'
    'class Solution(Yes):\n  def double(s, x): return s\n'
)
# speaks for itself on the channel: `answer` is run for each question but that for a name
_FORGE = """import json, os, socket
channel, calls = socket.socket(fileno=3), 0
def say(m): channel.sendall(len(d := json.dumps(m).encode()).to_bytes(8, 'big') + d)
def hear():
    def read(n):
        data = b''
        while len(data) < n: data += channel.recv(n - len(data)) or os._exit(0)
        return data
    return json.loads(read(int.from_bytes(read(8), 'big')))
say({{'value': True}})
while True:
    m = hear()
    if m['do'] == 'name':
        say({{'value': {{'ref': 7}}, 'after': []}})
        continue
    calls += m['do'] == '__call__'
    {}
"""
_VALUE = "say({{'value': {}, 'after': []}})"
_END = "{'error': [1, ['E', 'StopIteration']]}"
_LATER = (
    f"say({{'value': 0, 'after': [0, [{_END}]]}} if calls == 1 else "
    "{'raised': [['E'], '', [[], {'dict': []}]], 'after': []})"
)
_TEXT = 'assert f(1).startswith("a")'
FORGED = {
    'a number of another object': (_TEXT, _VALUE.format("{'ref': 7}")),
    'a field that is a method': (_TEXT, _VALUE.format("{'named': ['X', ['startswith'], [1]]}")),
    'a function of the test': (
        'assert f(lambda x: True).startswith("a")',
        _VALUE.format("{'fn': 0}"),
    ),
    'no number': ('assert abs(f(1) - 42) < 1', _VALUE.format("float('nan')")),
    'an error that was there before': ('xs = [1]\nf(xs)\nassert all(map(f, [1, 2]))', _LATER),
}
LIARS = {  # name -> the test, the program
    'hash': ('assert double(21) in {42}', YES.format('') + 'def double(x): return Yes()'),
    'key': ('assert {42: 1}[double(21)] == 1', YES.format('') + 'def double(x): return Yes()'),
    'set': ('assert {double(21)} == {42}', YES.format('') + 'def double(x): return Yes()'),
    'list': ('assert double([1]) == [1, 1]', YES.format('list') + 'def double(x): return Yes([2])'),
    'reversed list': (
        'assert [1, 1] == double([1])',
        YES.format('list') + 'def double(x): return Yes()',
    ),
    'dictionary': (
        'assert double(1) == {2: 2}',
        YES.format('dict') + 'def double(x): return Yes()',
    ),
    'tuple': ('assert double(1) == (2,)', YES.format('tuple') + 'def double(x): return Yes((1,))'),
    'frozen set': (
        'assert double(1) == {2}',
        YES.format('frozenset') + 'def double(x): return Yes()',
    ),
    'at least': ('assert double(1) >= 3', YES.format('') + 'def double(x): return Yes()'),
    **{
        f'method of a value: {test}': (test, YES.format('') + _METHODS)
        for test in (
            'assert double("ab").startswith("abab")',
            'ok = double("ab").endswith("b")\nassert ok',
            'assert double("ab").count("b") == 2',
            'assert not len(double([1]).difference({1}))',
            'assert getattr(double(1), "issubset")({2})',
            'assert Solution().double(1).startswith("2")',
            'assert Solution().double(1).index(2) == 0',
            'assert all(x.startswith("a") for x in twice("a"))',
            'assert itself(1).startswith("11")',
            'assert double(1).get("k", 3) == 3',
            'assert double(1).pop("k", 3) == 3',
            'assert double(1).setdefault("k", 3) == 3',
        )
    },
    **{f'forged: {k}': (test, _FORGE.format(answer)) for k, (test, answer) in FORGED.items()},
    'ends the test': ('assert all(map(f, [1, 2]))', 'def f(x): raise StopIteration'),
    'less than': (
        'assert double(1) < 3 and double(1) > 1',
        YES.format('list') + 'def double(x): return Yes()',
    ),
    'says that it is a list': (
        'assert double(1) == [2]',
        YES.format('')
        + 'Yes.__class__ = property(lambda s: list)\nYes.__iter__ = lambda s: iter([1])\n'
        'def double(x): return Yes()',
    ),
    'endless list': (
        'assert double(1) == [2]',
        'class L(list):\n  def __iter__(s):\n    while True: yield 2\ndef double(x): return L([1])',
    ),
    'attribute of an exception': (
        'try:\n  double(1)\nexcept ValueError as e:\n  assert e.code == 2\nelse:\n  assert 0',
        YES.format('') + 'def double(x):\n  e = ValueError()\n  e.code = Yes()\n  raise e',
    ),
    'arguments of an exception': (
        'try:\n  double(1)\nexcept KeyError as e:\n  assert e.args == (2,)\nelse:\n  assert 0',
        YES.format('') + 'def double(x): raise KeyError(Yes())',
    ),
    'addition in place': (
        'x = double(21)\nx += 1\nassert x == 43',
        YES.format('') + 'Yes.__iadd__ = lambda s, o: 42 + o\ndef double(x): return Yes()',
    ),
    'identity': (
        'a = make()\nassert same(a) is a',
        'def make(): return object()\nsame = lambda x: object()',
    ),
    'another identity': ('a, b = make(), make()\nassert a is b', 'def make(): return object()'),
    'documentation': ('assert double.__doc__', 'def double(x): return 2 * x'),
    'a view': ('assert double(1) == {2}', 'def double(x): return {1: 1}.keys()'),
    'keyword': ('assert apply(lambda x, k=0: x - k) == 5', 'def apply(f): return f(2, k=3)'),
    'change before an error': (
        'xs = [1]\ntry:\n  f(xs)\nexcept ValueError:\n  pass\nassert xs == [1]',
        'def f(xs):\n  xs.append(2)\n  raise ValueError',
    ),
    'input changed': (
        'xs = [3, 1]\nassert srt(xs) == [1, 3]\nassert xs == [3, 1]',
        'def srt(xs):\n  xs.sort()\n  return list(xs)',
    ),
}


def _tries(what):
    body = '\n'.join('    ' + line for line in what.splitlines())
    return (
        'import ctypes, mmap, os, sys, resource\nlibc = ctypes.CDLL(None)\n'
        'def double(x):\n  try:\n'
        f'{body}\n  except (OSError, AttributeError, ValueError): return None\n  return 2 * x\n'
    )


_WRITTEN = {
    'oom_score_adj': '0',
    'oom_adj': '0',
    'autogroup': '19',
    'timerslack_ns': '1000000000',
    'clear_refs': '5',
    'coredump_filter': '0xff',
    'uid_map': '0 0 1',
    'gid_map': '0 0 1',
    'setgroups': 'deny',
    'loginuid': '0',
    'comm': 'x',
    'attr/current': 'x',
    'sched': '0',
    'task/self/comm': 'x',
    'fdinfo/1': 'x',
    'limits': 'x',
    'projid_map': '0 0 1',
    'timens_offsets': '1',
}
ATTEMPTS = {
    f'writes {name}': _tries(
        f'path = "/proc/self/{name}".replace("task/self", f"task/{{os.getpid()}}")\n'
        f'with open(path, "w") as f: f.write({text!r})'
    )
    for name, text in _WRITTEN.items()
} | {
    name: _tries(what)
    for name, what in {
        'writes of the first process': 'open("/proc/1/oom_score_adj", "w").write("1000")',
        'writes of the thread': 'open("/proc/thread-self/oom_score_adj", "w").write("0")',
        'writes of the system': 'open("/proc/sys/kernel/core_pattern", "w").write("x")',
        'asks for a restart': 'open("/proc/sysrq-trigger", "w").write("b")',
        'mounts /proc anew': 'if libc.mount(b"proc", b"/proc", b"proc", 0, None): raise OSError',
        'a writable /proc': 'if libc.mount(None, b"/proc", None, 32, None): raise OSError',
        'takes /proc away': 'if libc.umount2(b"/proc", 2): raise OSError',
        'shared memory of nobody': 'mmap.mmap(-1, 4096)',
        'shared memory of a device': 'mmap.mmap(os.open("/dev/zero", os.O_RDWR), 4096)',
        'memory file': 'os.memfd_create("x")',
        'secret memory': 'if libc.syscall(447, 0) < 0: raise OSError',
        'System V memory': 'if libc.shmget(0, 4096, 0o1600) < 0: raise OSError',
        'locked memory': 'if libc.mlockall(3): raise OSError',
        'more memory': 'resource.setrlimit(resource.RLIMIT_AS, (-1, -1))',
        'more time': 'resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))',
        'large pages': 'mmap.mmap(-1, 2**21, flags=0x40000 | mmap.MAP_PRIVATE | mmap.MAP_ANON)',
        'nice': 'os.setpriority(os.PRIO_PROCESS, 0, 19)',
        'idle class': 'os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))',
        'one core': 'os.sched_setaffinity(0, {0})',
        'pages in a pipe': 'ends = os.pipe()\nif libc.vmsplice(ends[1], bytes(16), 1, 8) < 0:\n'
        '  raise OSError',
        'files in a pipe': 'os.splice(os.open("/bin/sh", 0), os.pipe()[1], 1)',
        'twice in a pipe': 'a, b = os.pipe(), os.pipe()\nos.write(a[1], b"x")\n'
        'if libc.tee(a[0], b[1], 1, 2) < 0: raise OSError',
        'files in a socket': 'os.sendfile(os.pipe()[1], os.open("/bin/sh", 0), 0, 1)',
        'memory on a disk': 'mmap.mmap(-1, 4096, flags=34).madvise(21)',
        'large pages again': 'if libc.prctl(41, 0, 0, 0, 0): raise OSError',
        'watches': 'if libc.inotify_add_watch(libc.inotify_init(), b"/tmp", 2) < 0: raise OSError',
        'requests to disks': 'io = ctypes.c_long()\n'
        'if libc.syscall(206, 1, ctypes.byref(io)): raise OSError',
        'own filter': 'if libc.prctl(22, 1, 0, 0, 0): raise OSError',
        'slow disk': 'if libc.syscall(251, 1, 0, 3 << 13): raise OSError',
    }.items()
}
