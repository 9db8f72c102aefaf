"How the suite is run: what it says while it runs, and which files `-k` imports"

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.support import ROOT, busy
from tests.support import fork_server as forked
from tests.support.progress import Progress, part
from tests.support.scheduler import unit
from tests.support.selection import ignore, may_match
from tools.same_numbers import kernels

TEXT = 'algo/test_losses.py\ntest_gradient\nespo\ngrpo'


@pytest.mark.parametrize(
    'expression, possible',
    [
        ('losses', True),
        ('Losses', True),
        ('losses and espo', True),
        ('losses and not espo', True),  # another test of the file may be without it
        ('not losses', True),
        ('vllm', False),
        ('vllm or grpo', True),
        ('vllm and grpo', False),
        ('not (losses or not vllm)', False),
    ],
)
def test_a_file_is_imported_where_a_test_of_it_may_be_meant(expression, possible):
    assert may_match(expression, TEXT) == possible


@pytest.mark.parametrize(
    'keyword, file, left_out',
    [
        ('espo', 'algo/losses/test_espo.py', None),
        ('genrm', 'plan/test_sizing.py', True),
        ('algo', 'algo/test_losses.py', None),
        ('', 'plan/test_sizing.py', None),
        ('rollout', 'test_notebooks.py', None),  # its tests have the names of notebooks
    ],
)
def test_files_that_k_leaves_out(keyword, file, left_out):
    config = SimpleNamespace(option=SimpleNamespace(keyword=keyword, markexpr=''), rootpath=ROOT)
    assert ignore(ROOT / 'tests' / file, config) is left_out


@pytest.mark.parametrize(
    'file, left_out', [('runs/test_resume.py', None), ('algo/test_losses.py', True)]
)
def test_files_that_chaos_leaves_out(file, left_out):
    config = SimpleNamespace(option=SimpleNamespace(keyword='', markexpr='chaos'), rootpath=ROOT)
    assert ignore(ROOT / 'tests' / file, config) is left_out


NOTEBOOK = 'tests/test_notebooks.py::test_notebook_runs[rollout/fp8]'
LOSSES = 'tests/algo/test_losses.py::test_gradient'


def test_a_file_stays_with_one_worker_and_every_notebook_is_alone():
    other = NOTEBOOK.replace('fp8', 'partial')
    assert unit(LOSSES) == unit(LOSSES + '[espo]') != unit(LOSSES.replace('losses', 'espo'))
    assert unit(NOTEBOOK) != unit(other)


def say_parent():
    print(os.getppid())


def test_workers_share_a_fork_server_that_ends_with_the_last(tmp_path, monkeypatch):
    psutil = pytest.importorskip('psutil')
    monkeypatch.setattr(forked.Shared, 'folder', str(tmp_path))
    servers, parents = [forked.Shared('few') for _ in range(2)], set()
    for server in servers:
        monkeypatch.setattr(forked, '_server', server)
        parents.add(int(forked.run(tmp_path / 'log', say_parent, timeout=60).stdout))
    (pid,) = parents
    server = psutil.Process(pid)
    assert os.getpid() not in [p.pid for p in server.parents()[:1]]  # its trials see no other's
    os.close(servers[0]._forkserver_alive_fd)
    with pytest.raises(psutil.TimeoutExpired):
        server.wait(1)
    os.close(servers[1]._forkserver_alive_fd)
    server.wait(60)
    forked._server = forked.Shared('few')  # starts another one, though a file names the old one
    assert forked.run(tmp_path / 'log', say_parent, timeout=60).stdout.strip() != str(pid)


def test_workers_are_given_whole_files(tmp_path):
    "Two workers, three files whose tests would be dealt out one by one"
    for name in 'abc':
        text = 'import os\ndef write(n):\n    open(f"{n}.worker", "w").write(os.environ["W"])\n'
        text = text.replace('"W"', '"PYTEST_XDIST_WORKER"')
        tests = [f'def test_{i}():\n    write("{name}{i}")\n' for i in range(6)]
        (tmp_path / f'test_{name}.py').write_text(text + ''.join(tests))
    hook = 'import sys\nsys.path.insert(0, {!r})\nfrom tests.conftest import {} as {}\n'
    name = 'pytest_xdist_make_scheduler'
    (tmp_path / 'conftest.py').write_text(hook.format(str(ROOT), name, name))
    command = [sys.executable, '-m', 'pytest', '-q', '-n', '2', '-p', 'no:cacheprovider']
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    for name in 'abc':
        seen = {p.read_text() for p in tmp_path.glob(f'{name}*.worker')}
        assert len(seen) == 1, name
    assert len({p.read_text() for p in tmp_path.glob('*.worker')}) == 2


def test_parts():
    assert part(NOTEBOOK) == 'notebook rollout/fp8' and part(LOSSES) == 'algo/test_losses'


def test_progress_says_how_far_it_is_what_runs_and_what_failed():
    lines, clock = [], [0.0]
    p = Progress(lines.append, now=lambda: clock[0])
    clock[0] = 61
    assert p.line() == ' 1:01  collecting'
    p.pytest_xdist_node_collection_finished(ids=['a'] * 8)
    p.pytest_runtest_logstart(LOSSES)
    p.pytest_runtest_logreport(SimpleNamespace(failed=True, nodeid=LOSSES))
    p.pytest_runtest_logfinish(LOSSES)
    p.pytest_runtest_logstart(NOTEBOOK)
    clock[0] = 75
    assert lines == [f' 1:01  FAILED {LOSSES}']
    assert p.line() == ' 1:15   12 %  1 of 8, 1 failed  notebook rollout/fp8 (14 s)'


@pytest.mark.parametrize(
    'when, outcome, kind',
    [
        ('call', 'passed', 'passed'),
        ('call', 'failed', 'failed'),
        ('setup', 'failed', 'error'),
        ('setup', 'skipped', 'skipped'),
        ('call', 'skipped', 'skipped'),
    ],
)
def test_every_outcome_is_counted_as_pytest_counts_it(when, outcome, kind):
    report = SimpleNamespace(when=when, outcome=outcome, failed=outcome == 'failed')
    assert Progress(print).pytest_report_teststatus(report) == (kind, '', '')
    passed = SimpleNamespace(when='setup', outcome='passed', failed=False)
    assert Progress(print).pytest_report_teststatus(passed) is None


def test_busy_keeps_one_process_at_work(monkeypatch):
    "Started once, by the session and not by its workers; gone with the session"
    config, worker = SimpleNamespace(), SimpleNamespace(workerinput={})
    monkeypatch.delenv('BUSY', raising=False)
    busy.start(config)
    assert not hasattr(config, 'busy')
    monkeypatch.setenv('BUSY', '1')
    busy.start(worker)
    busy.start(config)
    assert not hasattr(worker, 'busy') and config.busy.poll() is None
    busy.stop(config)
    assert config.busy.poll() is not None


FIRST_WEIGHTS = """
import json, torch
from compassrl.model.policy import Policy, PolicyConfig

def weights():
    torch.manual_seed(0)
    policy = Policy(PolicyConfig(vocab_size=9, hidden_size=8))
    return [w for p in policy.parameters() for w in p.double().flatten().tolist()]

print(json.dumps([weights(), weights()]))
"""


def first_weights(shake):
    "Of two small policies that are made alike, in a process of their own"
    path = f'{ROOT}:{ROOT / "tests/support/another_machine"}'
    env = os.environ | dict(PYTHONPATH=path, SHAKE=shake)
    out = subprocess.check_output([sys.executable, '-c', FIRST_WEIGHTS], env=env, text=True)
    return json.loads(out)


def test_shaken_weights_are_off_by_a_millionth():
    (plain, _), (one, again), (two, _) = (first_weights(shake) for shake in ('', '1', '2'))
    assert one == again and one != two
    off = [abs(a / b - 1) for a, b in zip(one, plain) if b]
    assert 1e-7 < sum(off) / len(off) < 2e-6 and max(off) < 1e-5


def test_a_skewed_clock_goes_forwards_and_back_and_others_do_not():
    code = (
        'import time\nfor _ in range(9): print(time.time() - m0, time.monotonic()); time.sleep(0.1)'
    )
    code = code.replace('for _', 'm0 = time.time_ns() / 1e9\nfor _')
    env = os.environ | dict(PYTHONPATH=str(ROOT / 'tests/support/another_machine'), SKEW='0.2')
    out = subprocess.check_output([sys.executable, '-c', code], env=env, text=True)
    wall, steady = zip(*(map(float, line.split()) for line in out.splitlines()))
    steps = [round((b - a) / 3600) for a, b in zip(wall, wall[1:])]
    assert min(steps) < 0 < max(steps) and set(steps) <= {-20, 0, 10}
    assert steady[0] < steady[-1] < steady[0] + 60


def test_waits_are_measured_by_a_clock_that_nobody_sets():
    "Programs that are judged may look at any clock; a clock that jumps is imitated here"
    files = [
        p for f in ('tests', 'tools', 'nbs', 'course', 'benchmarks') for p in (ROOT / f).rglob('*')
    ]
    files = [p for p in files if p.suffix in ('.py', '.ipynb') and p.name != 'hostile_programs.py']
    named = [str(p) for p in files if 'time.' + 'time()' in p.read_text()]
    assert [n for n in named if not n.endswith('tests/test_suite.py')] == []


@pytest.mark.skipif(not kernels(), reason='this processor has no AVX2')
def test_every_processor_computes_with_the_same_kernels():
    "In a worker, and in a process that somebody starts there"
    code = 'import torch; print(torch.backends.cpu.get_cpu_capability())'
    asked = dict(env=os.environ, capture_output=True, text=True)
    said = subprocess.run([sys.executable, '-c', code], **asked).stdout.strip()
    assert [torch.backends.cpu.get_cpu_capability(), said] == 2 * [
        os.environ['ATEN_CPU_CAPABILITY'].upper()
    ]
    assert {*kernels()} <= {*os.environ}
