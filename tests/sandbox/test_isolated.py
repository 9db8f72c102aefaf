"""The sandbox: every trouble ends in its own status, in time, and nothing is left or reached

Every promise is tested with each kind of isolation that this machine permits.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from datetime import time as clock_time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from compassrl.judges.verifiers import code, maths
from compassrl.sandbox import fork_client, isolated, namespaces, plain_values
from compassrl.sandbox.fork_client import ForkServer, close_fork_servers, warm_server
from compassrl.sandbox.isolated import (
    Limits,
    Outcome,
    best_isolation,
    run_function,
    run_python,
    verdict_budget,
)
from compassrl.sandbox.namespaces import ARM, REFUSED_CALLS
from tests.support import ROOT
from tests.support.faults import places

SMALL = Limits(wall_s=30.0, cpu_s=0.3, memory_mb=200, output_kb=16)
PYTHON = [sys.executable, '-I', '-c']


def run_program(argv, stdin='', isolation=''):
    program = f'import os; os.execvp({argv[0]!r}, {list(argv)!r})'
    return run_python(program, stdin, isolation=isolation)


def permitted(isolation):
    try:
        with warm_server(isolation):
            return True
    except OSError:
        return False


@pytest.fixture(params=['bwrap', 'namespaces'])
def isolation(request):
    if not permitted(request.param):
        pytest.skip(f'this machine has no isolation of the kind {request.param}')
    return request.param


@pytest.fixture(params=['bwrap', 'namespaces', 'none'])
def any_isolation(request):
    if not permitted(request.param):
        pytest.skip(f'this machine has no isolation of the kind {request.param}')
    return request.param


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


def gone(marker, within=10.0):
    until = time.monotonic() + within
    while running(marker) and time.monotonic() < until:
        time.sleep(0.01)
    return not running(marker)


def marker():
    return f'{random.SystemRandom().randrange(10**5, 10**6)}.5'


# ---- troubles


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
        ('killed', 'import os; os.kill(os.getpid(), 11)'),
        ('failed', 'open("x","w").write("y"*10**6)'),
        ('failed', 'x = "\\ud800'),
        ('failed', 'x = 1\0'),
    ],
)
def test_every_trouble_has_its_status(status, program, any_isolation):
    limits = Limits(wall_s=0.7 if status == 'timeout' else 30.0, cpu_s=0.3, memory_mb=200)
    if any_isolation == 'none' and status == 'cpu':
        program += '  # ended by the kernel: whole seconds'
    o = run_python(
        program, limits=Limits(**vars(limits) | dict(output_kb=16)), isolation=any_isolation
    )
    assert o.status == status, o
    assert bool(o.evidence) == (status != 'ok') and '\n' not in o.evidence
    assert o.isolation == any_isolation and o.wall_s < limits.wall_s + 3


@pytest.mark.parametrize(
    'hide', ['', 'os.setsid()', 'os.setsid(); os.fork() and os._exit(0); os.setsid()']
)
@pytest.mark.parametrize('then', ['', 'import time; time.sleep(60)', 'os.kill(os.getpid(), 9)'])
def test_no_grandchild_survives(hide, then, any_isolation):
    word = marker()
    o = run_python(
        f"import os\nif os.fork() == 0:\n  {hide or 'pass'}\n  os.execvp('sleep', ['sleep', "
        f"'{word}'])\n{then}",
        limits=Limits(wall_s=0.4),
        isolation=any_isolation,
    )
    assert not running(word), o


def test_streams_files_and_folder(any_isolation):
    argv = ['sh', '-c', 'cat; echo file > given; cat given; echo oops >&2; pwd; ls']
    o = run_program(argv, 'in\n', isolation=any_isolation)
    # an environment below /tmp is shown there
    assert o.stdout.startswith('in\nfile\n') and {'given', 'main.py'} <= {*o.stdout.split()}, o
    assert o.stderr == 'oops\n' and o.status == 'ok'
    long = run_python('while True: print("x"*99)', limits=SMALL, isolation=any_isolation)
    assert len(long.stdout) <= 16 * 1024
    again = run_python('import os; print(os.listdir(os.getcwd()))', isolation=any_isolation)
    assert 'main.py' in again.stdout and 'given' not in again.stdout, 'a new folder for each'


def test_a_program_is_its_own_main(any_isolation):
    program = (
        'import sys, atexit\n'
        'atexit.register(print, "last")\n'
        'class A: pass\n'
        'import pickle; pickle.loads(pickle.dumps(A()))\n'
        'text = open(__file__).read()\n'
        'print(__name__, sys.argv, __file__, text.count("A"), "json" in globals())\n'
        'print(input(), file=sys.stderr)\n'
    )
    o = run_python(program, 'ü\n', isolation=any_isolation)
    assert (o.status, o.stderr) == ('ok', 'ü\n'), o
    assert o.stdout == "__main__ ['main.py'] main.py 3 False\nlast\n"


def test_the_interpreter_of_the_caller_starts(any_isolation):
    o = run_program(
        [*PYTHON, 'import colorsys, sys; print(sys.version_info[:2])'], isolation=any_isolation
    )
    assert o.stdout == f'{sys.version_info[:2]}\n', o


@pytest.fixture
def below_tmp():
    "A folder where every program gets an empty one"
    with tempfile.TemporaryDirectory(dir='/tmp') as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)
        close_fork_servers()


def test_an_environment_below_tmp(below_tmp, monkeypatch, any_isolation):
    "Its interpreter starts, what it imports late is there, and it cannot be changed"
    (packages := below_tmp / 'packages').mkdir()
    (packages / 'late_part.py').write_text('x = 42')
    (python := below_tmp / 'python').symlink_to(os.path.realpath(sys.executable))
    monkeypatch.setattr(sys, 'executable', str(python))
    close_fork_servers()  # a new one knows this interpreter
    o = run_program([str(python), '-I', '-c', 'print(7)'], isolation=any_isolation)
    assert o.stdout == '7\n', o
    late = 'def f():\n    import late_part\n    return late_part.x'
    with warm_server(any_isolation, late, (str(packages),)) as server:
        o = fork_client.Sandbox(server, dict(call='f', args=[]), SMALL).outcome()
    assert o.stdout == '42', o
    if any_isolation != 'none':
        change = f'def f(): open({str(packages / "late_part.py")!r}, "w")'
        with warm_server(any_isolation, change, (str(packages),)) as server:
            o = fork_client.Sandbox(server, dict(call='f', args=[]), SMALL).outcome()
        assert o.status == 'failed' and 'Errno' in o.evidence, o


def test_environment_is_bare(monkeypatch, any_isolation):
    monkeypatch.setenv('SECRET_OF_THE_CALLER', 'x')
    close_fork_servers()
    o = run_python('import os; print(dict(os.environ))', isolation=any_isolation)
    assert 'HOME' in o.stdout and 'SECRET_OF_THE_CALLER' not in o.stdout


def test_a_missing_program_and_bad_limits():
    assert run_program(['no such program'], isolation='none').status == 'failed'
    for k in ('wall_s', 'cpu_s', 'memory_mb', 'output_kb', 'disk_mb', 'processes'):
        for bad in (0, -1, float('nan'), float('inf')):
            with pytest.raises(ValueError, match=f'{k}=.*: use '):
                Limits(**{k: bad})


def test_a_killed_caller_leaves_nothing(any_isolation, tmp_path):
    word = marker()
    sleep = f'import os; os.execvp("sleep", ["sleep", "{word}"])'
    code = f'from compassrl.sandbox.isolated import run_python\nrun_python({sleep!r}, '
    code += f'isolation={any_isolation!r})'
    env = os.environ | dict(PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path))
    caller = subprocess.Popen([sys.executable, '-c', code], env=env)
    until = time.monotonic() + 30
    while not running(word) and time.monotonic() < until:
        time.sleep(0.01)
    assert running(word)
    caller.kill()
    caller.wait()
    assert gone(word)
    until = time.monotonic() + 10
    while (left := list(tmp_path.glob('compassrl-sandbox-*'))) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left


# ---- isolation


def sees(program, isolation, **kw):
    o = run_python(program, isolation=isolation, **kw)
    assert o.status == 'ok', o
    return o.stdout.strip()


def test_nothing_below_proc_can_be_written(isolation):
    "Who the kernel ends first, how nice a program is, its limits: none is the program's to change"
    program = """import os
for folder, folders, files in os.walk('/proc'):
    folders[:] = [f for f in folders if f not in ('fd', 'fdinfo', 'map_files', 'task', 'net')]
    for name in files:
        try:
            os.open(f'{folder}/{name}', os.O_WRONLY)
        except OSError:
            continue
        print(folder, name)
print(open('/proc/self/oom_score_adj').read().strip(), flush=True)
with open('/dev/stdout', 'a') as f:
    f.write('own streams stay open')"""
    assert sees(program, isolation).split('\n') == ['1000', 'own streams stay open']


# numbers of the kernel's own headers: asm/unistd_64.h, and asm-generic/unistd.h for arm64
X86 = """sendfile 40, ptrace 101, setpriority 141, sched_setparam 142, sched_setscheduler 144,
mount 165, sched_setaffinity 203, io_setup 206, mq_open 240, add_key 248, request_key 249,
keyctl 250, ioprio_set 251, inotify_add_watch 254, unshare 272, splice 275, tee 276, vmsplice 278,
perf_event_open 298, fanotify_init 300, setns 308, process_vm_readv 310, process_vm_writev 311,
sched_setattr 314, seccomp 317, memfd_create 319, bpf 321, userfaultfd 323, io_uring_setup 425,
open_tree 428, move_mount 429, fsopen 430, fsmount 432, process_madvise 440,
landlock_create_ruleset 444, memfd_secret 447, shmget 29, semget 64, msgget 68"""
ARM64 = """io_setup 0, inotify_add_watch 27, ioprio_set 30, mount 40, sendfile 71, vmsplice 75,
splice 76, tee 77, unshare 97, ptrace 117, sched_setparam 118, sched_setscheduler 119,
sched_setaffinity 122, setpriority 140, mq_open 180, msgget 186, semget 190, shmget 194,
add_key 217, request_key 218, keyctl 219, perf_event_open 241, fanotify_init 262, setns 268,
process_vm_readv 270, process_vm_writev 271, sched_setattr 274, seccomp 277, memfd_create 279,
bpf 280, userfaultfd 282, io_uring_setup 425, open_tree 428, move_mount 429, fsopen 430,
fsmount 432, process_madvise 440, landlock_create_ruleset 444, memfd_secret 447"""


def test_the_table_has_the_numbers_of_the_kernel():
    "A wrong one refuses another call, and its test would ask for that one"
    for i, numbers in enumerate((X86, ARM64)):
        known = {name: int(n) for name, n in map(str.split, numbers.split(','))}
        assert known == {name: n[i] for name, n in REFUSED_CALLS.items()}


def test_every_refused_call_is_refused(isolation):
    "With arguments of 0, some would succeed and others complain about their arguments"
    numbers = [int(line.split()[1]) for line in (ARM64 if ARM else X86).split(',')]
    program = f"""import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for n in {numbers}:
    zeros = [ctypes.c_long(0)] * 6
    if libc.syscall(ctypes.c_long(n), *zeros) != -1 or ctypes.get_errno() != 1:
        print(n, ctypes.get_errno())
for n in (22, 41, 62):  # a filter of its own, large pages again, a core of its own
    if libc.prctl(n, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 1:
        print('prctl', n, ctypes.get_errno())
for n in (21, 9999):  # to a disk; what no kernel knows
    libc.madvise(None, 0, n)
    print('madvise', ctypes.get_errno())"""
    assert sees(program, isolation) == 'madvise 1\nmadvise 22'


def test_copies_go_without_the_refused_calls(isolation):
    "Python takes the slower way by itself"
    program = """import shutil, socket
open('a', 'w').write('x' * 10**5)
shutil.copyfile('a', 'b')
a, b = socket.socketpair()
with open('b', 'rb') as f:
    print(len(open('b').read()), a.sendfile(f, count=9000), len(b.recv(9000, socket.MSG_WAITALL)))
"""
    assert sees(program, isolation) == '100000 9000 9000'


def test_a_page_that_is_kept_keeps_no_other(isolation):
    "Of a large page the kernel keeps all; the resident size shows the part that is still mapped"
    program = """import ctypes, mmap, re, resource
size, libc = 2**21, ctypes.CDLL(None)
area = mmap.mmap(-1, 8 * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
area.madvise(14)  # MADV_HUGEPAGE
area.write(b'x' * 8 * size)
print(re.findall(r'AnonHugePages: *(\\d+)', open('/proc/self/smaps_rollup').read()))
timers = [ctypes.c_int() for _ in range(4000)]
print(sum(libc.timer_create(1, None, ctypes.byref(t)) == 0 for t in timers))"""
    pages, timers = sees(program, isolation).split('\n')
    assert pages == "['0']" and int(timers) <= 1024


def test_memory_that_no_process_is_charged_for_is_refused(isolation):
    "Touched and given up, pages of a shared mapping stay, and no resident size shows them"
    program = """import mmap, multiprocessing
for flags in (mmap.MAP_SHARED, mmap.MAP_SHARED | 2):  # MAP_SHARED_VALIDATE
    try:
        mmap.mmap(-1, 4096, flags | mmap.MAP_ANONYMOUS)
    except OSError as e:
        print(e.strerror)
try:
    open('/dev/zero')
except OSError as e:
    print(e.strerror)
print(len(mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))
print(multiprocessing.get_context('fork').Array('i', [3])[0])"""
    lines = ['Operation not permitted'] * 2 + ['No such file or directory', '4096', '3']
    assert sees(program, isolation).split('\n') == lines


RECORDS = {
    'mappings': """import ctypes, mmap, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
for _ in range(4): os.fork()
base = libc.mmap(None, ctypes.c_size_t(COUNT * 400 * 4096), 0, 0x22, -1, 0)
for k in range(0, COUNT * 400, 2): libc.mprotect(base + 4096 * k, 4096, 1)
time.sleep(SECONDS)""",
    'descriptors': """import os, select, time
for _ in range(4): os.fork()
polls = [select.epoll() for _ in range(COUNT)]
ends = [end for _ in range(COUNT // 2) for end in os.pipe()]
for p in polls:
    for end in ends: p.register(end, 1)
time.sleep(SECONDS)""",
}


@pytest.mark.parametrize('kind', RECORDS)
def test_what_the_kernel_keeps_for_a_program_is_charged(kind, isolation, monkeypatch):
    "No resident size shows it, and a memory cgroup may not be there"
    monkeypatch.setattr(fork_client, 'memory_group', lambda pids: '')
    server, limits = ForkServer(isolation), Limits(wall_s=30.0, cpu_s=20, memory_mb=200)
    try:
        for count, seconds, status in ((120, 60, 'memory'), (2, 0.5, 'ok')):
            program = RECORDS[kind].replace('COUNT', str(count)).replace('SECONDS', str(seconds))
            o = fork_client.Sandbox(server, dict(program=program), limits).outcome()
            assert o.status == status, o
    finally:
        server.close()


def test_a_memory_cgroup_bounds_a_program(isolation):
    "The kernel ends the program, not its server"
    fill = 'x = bytearray(100 * 2**20)'
    tells = 'print(open("/proc/self/cgroup").read())'
    server = ForkServer(isolation)
    try:
        if not server.group:
            pytest.skip('this process may make no memory cgroup')

        def run(program, **more):
            limits = Limits(wall_s=30.0, **more)
            return fork_client.Sandbox(server, dict(program=program), limits).outcome()

        assert Path(server.group).name in run(tells, disk_mb=64).stdout
        assert run(fill, disk_mb=64).status == 'ok'
        namespaces.limit_group(server.group, 40 * 2**20)
        assert run(fill, disk_mb=64).status == 'killed'
        assert run('print(1)', disk_mb=64).stdout == '1\n'
        assert run(fill, disk_mb=65).status == 'ok'  # each program has its own bound
    finally:
        server.close()
    assert not server.group or not os.path.exists(server.group)


def test_what_is_not_there_cannot_be_reached(isolation, tmp_path):
    "Files, processes, environment, queues: of the caller and of the machine"
    (tmp_path / 'answers').write_text('42')
    look = f'import os; print(os.path.exists({str(tmp_path / "answers")!r}))'
    assert sees(look, isolation) == 'False'
    own = {Path(p).parts[2] for p in (sys.prefix, sys.base_prefix) if p.startswith('/tmp/')}
    in_tmp = set(eval(sees('import os; print(os.listdir("/tmp"))', isolation)))
    assert {'main.py'} <= in_tmp <= {'main.py', *own}
    pids = json.loads(sees('import os; print(sorted(map(int, filter(str.isdigit, '
                           'os.listdir("/proc")))))', isolation))  # fmt: skip
    assert pids == [1, 2]
    for place in (Path.home(), ROOT, '/etc/passwd', '/sys/fs/cgroup', '/run', '/var'):
        o = run_python(f'import os; print(os.listdir({str(place)!r}))', isolation=isolation)
        assert o.status == 'failed' or not set(eval(o.stdout)) & {'README.md', '.bashrc', 'lib'}, o
    assert sees(
        'import socket; print(socket.gethostname())', isolation
    ) != socket.gethostname() or (isolation == 'bwrap')


def test_nothing_can_be_written_outside(isolation):
    program = """
import os
found = []
for folder, folders, _ in os.walk('/'):
    if folder.startswith(('/proc', '/tmp', '/dev/shm')) or folder.count('/') > 3:
        folders.clear()
        continue
    try:
        open(os.path.join(folder, 'mine'), 'w').close()
        found.append(folder)
    except OSError:
        pass
print(found)
"""
    assert sees(program, isolation) == '[]'


def test_no_open_file_of_the_caller(isolation):
    ours = socket.socketpair()
    os.set_inheritable(ours[0].fileno(), True)
    close_fork_servers()
    assert sees('import os; print(sorted(map(int, os.listdir("/proc/self/fd"))))', isolation) == (
        '[0, 1, 2, 3]'  # 3: of the listing itself
    )
    for s in ours:
        s.close()


def test_no_network(isolation):
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
        o = run_python(
            f'import socket; socket.create_connection(("127.0.0.1", {port}), 2)',
            isolation=isolation,
        )
        assert o.status == 'failed' and 'not permitted' in o.evidence
    for family in (2, 10, 16, 40):  # a port of AF_INET would stay busy for the next program
        o = run_python(f'import socket; socket.socket({family})', isolation=isolation)
        assert 'not permitted' in o.evidence, family


def test_the_first_process_can_be_neither_killed_nor_read(isolation):
    program = """
import os, signal, time
for s in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
    try:
        os.kill(1, s)
    except PermissionError:
        pass
try:
    open('/proc/1/mem', 'rb')
    print('read')
except PermissionError:
    print('no')
time.sleep(60)
"""
    o = run_python(program, limits=Limits(wall_s=0.5), isolation=isolation)
    assert (o.status, o.stdout) == ('timeout', ''), 'it is there, and ends what sleeps'
    o = run_python(program.replace('time.sleep(60)', ''), isolation=isolation)
    assert (o.status, o.stdout) == ('ok', 'no\n')
    if not os.getuid():  # root's other groups do not come along
        ask = 'from compassrl.sandbox.isolated import run_python; print(run_python("import os; '
        ask += f'print(os.getgroups())", isolation="{isolation}").stdout)'
        env = os.environ | dict(PYTHONPATH=str(ROOT))
        run = subprocess.check_output([sys.executable, '-c', ask], extra_groups=[4242], env=env)
        assert run.split() == [b'[]']


def test_limits_count_all_processes(isolation):
    loops = 'import os\nfor _ in range(3): os.fork()\nwhile True: pass'
    o = run_python(loops, limits=Limits(cpu_s=0.5, wall_s=4), isolation=isolation)
    assert o.status == 'cpu' and o.cpu_s < 2
    hoard = 'import os, time\nfor _ in range(4): os.fork()\nx = b"x" * 40_000_000\ntime.sleep(60)'
    o = run_python(hoard, limits=Limits(memory_mb=300, wall_s=60), isolation=isolation)
    assert o.status == 'memory' and '300 MB' in o.evidence
    bomb = (
        'import os\nn = 0\ntry:\n  while True:\n    if os.fork() == 0: os.read(os.pipe()[0], 1)\n'
    )
    bomb += '    n += 1\nexcept OSError: print(n)'
    o = run_python(bomb, limits=Limits(processes=20, wall_s=60), isolation=isolation)
    assert 10 <= int(o.stdout) <= 20, o
    disk = 'for i in range(99): open(str(i), "w").write("x" * 200_000)'
    o = run_python(disk, limits=Limits(disk_mb=4), isolation=isolation)
    assert 'No space left' in o.evidence


def test_what_no_process_is_charged_for_is_counted(isolation):
    orphans = (
        'import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n'
        '  if os.fork() == 0: os._exit(0)\n  time.sleep(0.002)'
    )
    o = run_python(orphans, limits=Limits(wall_s=60), isolation=isolation)
    assert (o.status, o.evidence) == ('failed', 'too many processes'), o
    relay = (  # each computes for less than the limit, and takes its time with it
        'import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n'
        'for _ in range(20):\n  if not (pid := os.fork()):\n'
        '    while time.process_time() < 0.3: pass\n    os._exit(0)\n'
        '  while os.path.exists(f"/proc/{pid}"): time.sleep(0.01)'
    )
    o = run_python(relay, limits=Limits(cpu_s=0.6, wall_s=60), isolation=isolation)
    assert o.status == 'cpu', o
    sockets = 'import socket, time\nx = [socket.socketpair() for _ in range(60)]\ntime.sleep(60)'
    o = run_python(sockets, limits=Limits(wall_s=60), isolation=isolation)
    assert (o.status, o.evidence) == ('failed', 'too many sockets'), o


@pytest.mark.parametrize(
    'trick',
    [
        'import ctypes\nassert ctypes.CDLL(None).prctl(15, b"\\xff) \\xfe(", 0, 0, 0) == 0',
        'import resource\nfor k in range(16):\n  try:\n    resource.prlimit(1, k, (0, 0))\n'
        '    print(k)\n  except PermissionError: pass',
    ],
    ids=['a name that is no text', 'limits of the first process'],
)
def test_the_first_process_goes_on_watching(trick, isolation):
    o = run_python(
        f'{trick}\nimport time\ntime.sleep(60)', limits=Limits(wall_s=0.7), isolation=isolation
    )
    assert (o.status, o.stdout) == ('timeout', ''), o


def test_what_a_program_expects_of_python(any_isolation):
    o = run_python('print(open("/dev/stdin").read())\nexit()', 'in', isolation=any_isolation)
    assert (o.status, o.stdout) == ('ok', 'in\n'), o
    assert 'exit code 3' in run_python('quit(3)', isolation=any_isolation).evidence


def test_a_stopped_or_lost_server_does_not_hang_the_caller(monkeypatch):
    "Not even if its first process never answers again"
    r = ForkServer('none')
    os.kill(r.process.pid, signal.SIGSTOP)
    sandbox = fork_client.Sandbox(r, dict(program=''), Limits(wall_s=0.1))
    patience, sandbox.until = sandbox.until - time.monotonic(), time.monotonic() + 0.3
    o = sandbox.outcome()
    assert patience < 30
    assert o.status == 'lost' and r.process.poll() is not None
    with pytest.raises(OSError):
        fork_client.Sandbox(r, dict(program=''), Limits())


def ends_the_monitor_of(word, times, found):
    "Kills, so often, the parent of a process that has given itself this name"
    while len(found) < times:
        for p in Path('/proc').glob('[0-9]*/comm'):
            with suppress(OSError):
                if p.read_text().strip() == word:
                    status = p.with_name('status').read_text()
                    os.kill(int(status.partition('PPid:')[2].split()[0]), signal.SIGKILL)
                    found.append(p.parent.name)
                    time.sleep(0.2)


@pytest.mark.parametrize(
    'times, seconds, verdict', [(1, 60, 'ok'), (2, 60, 'wrong'), (1, 4, 'wrong')]
)
def test_a_lost_sandbox_is_tried_once_more(times, seconds, verdict, isolation, monkeypatch):
    "Lost again, or without time to try again, and another program's is not: it was the program"
    monkeypatch.setattr(isolated, 'best_isolation', lambda: (isolation, ''))
    found, word = [], f'lost{marker()}'
    killer = threading.Thread(target=ends_the_monitor_of, args=(word, times, found))
    program = f"import ctypes, time\nctypes.CDLL(None).prctl(15, b'{word}', 0, 0, 0)\n"
    killer.start()
    with verdict_budget(seconds):  # a row may take ten
        v = code(program + 'time.sleep(0.5)\nprint(4)', '[{"stdin": "", "stdout": "4"}]')
    assert len(found) == times and v.status == verdict, v
    killer.join()


def test_a_machine_that_loses_all_gives_no_verdict(isolation, monkeypatch):
    "No honest program is wrong because of it"
    monkeypatch.setattr(isolated, 'best_isolation', lambda: (isolation, ''))
    plant(monkeypatch, 'fork_server', 'ns.set_dumpable(False)', 'raise OSError("no room")')
    try:
        v = code('print(4)', '[{"stdin": "", "stdout": "4"}]')
    finally:
        close_fork_servers()
    assert v.status == 'failed' and 'no room' in v.evidence, v


def test_two_containers_share_no_user(monkeypatch):
    "Their processes have the same numbers; in each the programs are those of another user"
    ask = 'import os\nfrom compassrl.sandbox.fork_client import _foreign_user\n'
    ask += 'print(os.getpid(), _foreign_user(), flush=True)\ninput()'
    argv = ['unshare', *([] if os.getuid() == 0 else ['--map-root-user']), '--pid', '--fork']
    env, pipe = os.environ | dict(PYTHONPATH=str(ROOT)), subprocess.PIPE
    both = [
        subprocess.Popen([*argv, sys.executable, '-c', ask], env=env, stdin=pipe, stdout=pipe)
        for _ in range(2)
    ]
    said = [p.stdout.readline().split() for p in both]
    for p in both:
        p.communicate(b'\n')
    if not all(said) or os.getuid():
        pytest.skip('this process makes no containers with users')
    (pid, first), (same, second) = said
    assert pid == same and first != second and int(first) > 2**15 < int(second)


@pytest.mark.parametrize(
    'ids, lowest, highest',
    [
        ('0 0 4294967295', 2**30, 2**31),
        ('0 100000 65536', 32768, 65535),
        ('0 1000 1\n1 100000 65536', 32769, 65536),
        ('0 1000 1', 0, 0),
    ],
)
def test_the_user_of_programs_is_one_of_the_map(ids, lowest, highest, monkeypatch):
    "Also where it is short: another id for each process and each namespace, none of the low ones"
    found, stat, read = [], os.stat, Path.read_text
    for inode, pid in ((4026531836, 1), (4026531837, 1), (4026531836, 2)):

        def told(p, *rest, inode=inode, **more):
            here = stat(p, *rest, **more)
            kept = [*here[:1], inode, *here[2:]]
            return os.stat_result(kept) if p == '/proc/self/ns/pid' else here

        monkeypatch.setattr(os, 'getuid', lambda: 0)
        monkeypatch.setattr(os, 'getpid', lambda pid=pid: pid)
        monkeypatch.setattr(os, 'stat', told)
        map_of = lambda p, *a: ids if str(p) == '/proc/self/uid_map' else read(p, *a)  # noqa: E731
        monkeypatch.setattr(Path, 'read_text', map_of)
        found.append(fork_client._foreign_user())
        monkeypatch.undo()
    assert all(lowest <= u <= highest for u in found), found
    assert len({*found}) == (3 if highest else 1), found


def test_a_server_leaves_with_all_that_it_was(any_isolation):
    close_fork_servers()
    before = children()
    run_python('print(1)', isolation=any_isolation)
    assert children() != before
    close_fork_servers()
    assert children() == before


def children():
    return Path(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read_text().split()


def test_a_copy_of_the_caller_has_servers_of_its_own(any_isolation):
    run_python('print(1)', isolation=any_isolation)
    pid = os.fork()
    if not pid:
        try:
            os._exit(run_python('print(2)', isolation=any_isolation).stdout != '2\n')
        finally:
            close_fork_servers()
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert run_python('print(3)', isolation=any_isolation).stdout == '3\n'


BECOME = """import os, sys
from pathlib import Path
from compassrl.sandbox import namespaces as ns
ns.call('unshare', ns.NEW_MOUNTS)
ns.mount(None, '/', None, ns.RECURSIVE | ns.PRIVATE)
places = {p: os.open(p, os.O_PATH) for p in {sys.base_prefix, sys.prefix, ROOT}}
parents = {str(f) for p in places for f in Path(p).parents}
for folder in sorted(f for f in parents if not os.stat(f).st_mode & 1):
    if os.path.exists(folder):  # others may not enter it
        ns.mount('tmpfs', folder, 'tmpfs', 0, 'mode=755')
for p, fd in places.items():
    if not os.path.exists(p):
        ns.bind_at(fd, p, True)
os.setgroups([])
os.setresgid(54321, 54321, 54321)
os.setresuid(54321, 54321, 54321)
os.execv(sys.executable, [sys.executable, '-c', CODE])
"""


@pytest.mark.parametrize('who', ['--map-user=1000 --map-group=1000', '--map-root-user', ''])
def test_a_user_without_rights_has_isolation_too(who):
    "Neither root, nor any id but its own; '' is an ordinary user"
    code = """
from compassrl.judges.verifiers import code
from compassrl.sandbox.fork_client import warm_server
from compassrl.sandbox.isolated import best_isolation, run_python
isolation, why = best_isolation()
assert isolation, why
for kind in ('bwrap', 'namespaces'):
    try:
        with warm_server(kind): pass
    except OSError:
        continue
    for p in ('open("/x", "w")', 'open("/proc/1/mem", "rb")', 'import os; os.listdir("/var")',
              'import resource; resource.prlimit(1, 7, (0, 0))'):
        assert run_python(p, isolation=kind).status == 'failed', (kind, p)
# it waits for its children: what ends before the monitor looks has broken no rule, and a fast
# machine forks a thousand of them until then
bomb = 'import os, time\\nfor _ in range(8192): os.fork() or time.sleep(60)\\n'
o = run_python(bomb + 'print("all of them", flush=True)\\ntime.sleep(60)')
assert not o.stdout, o
# a busy machine may not get a word out of so full a sandbox: its server is then closed, too
assert o.status in ('failed', 'memory', 'timeout', 'lost'), o
v = code(bomb, '[{"stdin": "", "stdout": "x"}]')
assert v.status == 'wrong', v
print('isolation', isolation)
"""
    argv = ['unshare', '--user', *who.split(), sys.executable, '-c', code]
    env = os.environ | dict(PYTHONPATH=str(ROOT), PYTHONDONTWRITEBYTECODE='1')
    if not who and os.getuid():
        pytest.skip('the other tests are run by an ordinary user here')
    if not who:
        argv = [sys.executable, '-c', f'ROOT, CODE = {str(ROOT)!r}, {code!r}\n{BECOME}']
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env)
    if 'unshare' in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.stdout.startswith('isolation '), done.stderr


# ---- where nothing isolates


@pytest.fixture
def no_isolation(monkeypatch):
    "As in a container that permits no namespaces, and has no bwrap"

    def refuse(self, isolation, *rest, make=ForkServer.__init__):
        if isolation != 'none':
            raise OSError(f'{isolation}: Operation not permitted')
        make(self, isolation, *rest)

    close_fork_servers()
    best_isolation.cache_clear()
    monkeypatch.setattr(ForkServer, '__init__', refuse)
    yield
    best_isolation.cache_clear()


def test_programs_are_refused_where_nothing_isolates_them(no_isolation):
    with pytest.raises(ValueError, match='isolates no program.*bubblewrap.*rewards.unsafe'):
        run_python('print(1)')
    with pytest.raises(ValueError, match='Operation not permitted'):
        run_program(['true'])
    with verdict_budget(60.0, unsafe=True):
        o = run_python('print(1)')
    assert (o.status, o.isolation, o.stdout) == ('ok', 'none', '1\n')
    assert maths('$0.5$', '1/2').correct, 'mathematics is no program'


# ---- functions of ours

POWER = 'import os, time\ndef power(a, b): return a ** b\ndef leave(code): os._exit(code)\n'
POWER += 'def sleep(s): time.sleep(s)\ndef fill(n): return bytearray(n)\ndef say(x): print(x)\n'


def test_functions():
    def call(name, *args, **kw):
        return run_function(POWER, name, *args, **kw)

    assert call('power', 3, 5).value == 243 and call('say', 'x').value is None
    assert call('power', 0, -1).evidence.startswith('ZeroDivisionError')
    assert call('leave', 3).evidence == 'left with exit code 3'
    assert (o := call('leave', 0)).status == 'failed' and 'before it returned' in o.evidence
    assert call('sleep', 60, limits=Limits(wall_s=0.2)).status == 'timeout'
    assert call('fill', 10**10).status == 'memory'
    assert call('power', 10, 10**5, limits=SMALL).status == 'failed', 'a result is output, too'


def test_from_a_thread():
    found = []

    def work():
        found.append((run_function(POWER, 'power', 2, 9).value, maths('$0.5$', '1/2')))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [(a, v.correct) for a, v in found] == [(512, True)] * 3


def test_a_verdict_has_a_bound_over_all_its_programs():
    with verdict_budget(0.5, unsafe=True):
        for _ in range(3):
            assert run_python('import time; time.sleep(60)', isolation='none').wall_s < 3


def test_outcomes_compare():
    assert Outcome('ok') == Outcome('ok') != Outcome('failed')


# ---- planted faults, in what runs inside


def plant(monkeypatch, name, old, new):
    close_fork_servers()
    text = fork_client.module_text(name)
    [(begin, end)] = places(text, old)

    def planted(module, texts=fork_client.module_text):
        return text[:begin] + new + text[end:] if module == name else texts(module)

    monkeypatch.setattr(fork_client, 'module_text', planted)


@pytest.mark.parametrize(
    'module, old, new, law',
    [
        ('fork_server', 'flags = ns.NEW_PIDS | ns.NEW_MOUNTS', 'flags = ns.NEW_MOUNTS',
         test_what_is_not_there_cannot_be_reached),
        ('fork_server', 'ns.close_from(len(fds) - 1)', 'pass', test_no_open_file_of_the_caller),
        ('fork_server', 'cpu > limits["cpu_s"]', 'False', test_limits_count_all_processes),
        ('fork_server', 'ns.set_limit(resource.RLIMIT_NPROC, limits["processes"])', 'pass',
         test_limits_count_all_processes),
        ('fork_server', 'ns.refuse_calls()', 'pass', test_no_network),
    ],
)  # fmt: skip
def test_planted_faults(module, old, new, law, monkeypatch, tmp_path):
    if not permitted('namespaces'):
        pytest.skip('no namespaces here')
    plant(monkeypatch, module, old, new)
    try:
        with pytest.raises((AssertionError, ValueError)):
            law('namespaces', tmp_path) if law is test_what_is_not_there_cannot_be_reached else law(
                'namespaces'
            )
    finally:
        close_fork_servers()


def test_inside_needs_nothing_of_the_package():
    "What runs inside is text: it must not import what is not there"
    taken = dict(
        fork_server='from compassrl.sandbox import namespaces as ns',
        rpc='from compassrl.sandbox.plain_values import pack, unpack',
    )
    for name in fork_client._inside + ('rpc',):
        lines = fork_client.module_text(name).splitlines()
        ours = [x for x in lines if x.startswith(('from .', 'import compassrl', 'from compassrl'))]
        assert ours == [taken[n] for n in taken if n == name]


LIES = [
    {'late': ['os.system', ['touch FILE']]},
    {'late': ['builtins.open', ['FILE', 'w']]},
    {'late': ['pathlib.Path', ['FILE']]},
    {'late': ['subprocess.Popen', [['touch', 'FILE']]]},
    {'type': 'eval'},
    {'system': ['touch FILE']},
    {'named': ['x', ['__class__'], [1]]},
    {'named': ['x=open("FILE","w")', ['a'], [1]]},
    {'named': ['x', ['a=open("FILE","w")'], [1]]},
    {'list': [1], 'tuple': [1]},
    {},
]


@pytest.mark.parametrize('lie', LIES, ids=json.dumps)
def test_only_types_of_the_table_come_out(lie, tmp_path):
    "A program may write any message; the trainer's process makes no other object of it"
    lie = json.loads(json.dumps(lie).replace('FILE', str(tmp_path / 'file')))
    for message in (lie, [lie], {'tuple': [lie]}, {'dict': [['a', lie]]}):
        with pytest.raises((ValueError, KeyError)):
            plain_values.unpack(message, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    'x',
    [
        2**53,
        -(2**64),
        datetime(2026, 1, 2, 3, 4, 5, 6),
        timedelta(days=-1, seconds=2, microseconds=3),
        Decimal('-1.50'),
        Fraction(-3, 7),
        {(1, 2): {3}, 'a': [None, True, 1.5, 'x', b'y']},
        deque([1], 3),
        int,
    ],
    ids=repr,
)
def test_plain_values_come_out_as_they_were(x):
    packed = json.loads(json.dumps(plain_values.pack(x, None)))
    out = plain_values.unpack(packed, None)
    assert out == x and type(out) is type(x)


def test_a_time_with_a_zone_stays_where_it_is():
    "Without its zone it would be another moment"
    for x in (datetime(2026, 1, 2, tzinfo=UTC), clock_time(1, tzinfo=UTC)):
        assert plain_values.pack([x], lambda x: {'ref': 7}) == [{'ref': 7}]


ENDINGS = {
    'text without a line end': 'print("x", end="")',
    'a function for the end': 'import atexit\natexit.register(print, "bye")\nprint("x")',
    'a thread': 'import threading, time\ndef f():\n  time.sleep(0.05)\n  print("late")\n'
    'threading.Thread(target=f).start()\nprint("x")',
    'a file that nobody closes': 'f = open(1, "w", closefd=False)\nf.write("kept")',
    'such a file in a cycle': 'class A: pass\na = A()\na.f = open(1, "w", closefd=False)\n'
    'a.a = a\na.f.write("kept")\ndel a',
    'an object that says goodbye': 'class A:\n  def __del__(self): print("gone")\na = A()',
    'a generator that says goodbye': 'def f():\n  try: yield\n  finally: print("gone")\n'
    'g = f()\nnext(g)',
    'its own output': 'import sys\nsys.stdout = open(1, "w", closefd=False)\nprint("x")',
    'a closed output': 'import sys\nprint("x")\nsys.stdout.close()',
    'no output': 'import sys\nprint("x")\nsys.stdout = None',
    'a full output': 'import sys\nsys.stdout = open("/dev/full", "w")\nprint("x")',
    'an exit': 'import sys\nprint("x")\nsys.exit(3)',
    'an exit with words': 'print("x")\nraise SystemExit("words")',
    'an error': 'print("x")\n1 / 0',
}


@pytest.mark.parametrize('name', ENDINGS)
def test_a_program_ends_as_in_plain_python(name):
    plain = subprocess.run([sys.executable, '-I', '-c', ENDINGS[name]], capture_output=True)
    o = run_python(ENDINGS[name])
    assert o.stdout == plain.stdout.decode()
    assert (o.status == 'ok') == (plain.returncode == 0), (o, plain)
