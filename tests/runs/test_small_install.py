"A core install has no TensorBoard, matplotlib, math-verify: a run goes on, and says what it lacks"

import json
import os
import subprocess
import sys

import pytest

from tests.support import ROOT

HIDDEN = "import sys; sys.modules |= dict.fromkeys(['tensorboard', 'matplotlib', 'math_verify'])\n"
HERE = 'import os, compassrl; assert compassrl.__file__.startswith(os.getcwd())\n'
MAIN = 'from compassrl.__main__ import main; main()'


@pytest.fixture(scope='module')
def command(tmp_path_factory):
    "The command line of a package that was built and installed alone, with none of the extras"
    pytest.importorskip('hatchling', reason='make .venv/.dev')
    there = tmp_path_factory.mktemp('installed')
    alone = '--offline', '--no-deps', '--no-build-isolation', '--target', there
    install = sys.executable, '-m', 'uv', 'pip', 'install', '--quiet', *alone, ROOT
    subprocess.run(install, check=True)

    def call(*args):
        code = [sys.executable, '-c', HIDDEN + HERE + MAIN, *map(str, args)]
        env = os.environ | dict(PYTHONPATH=str(there))
        return subprocess.run(code, cwd=there, env=env, capture_output=True, text=True)

    return call


@pytest.fixture(scope='module')
def run(command, tmp_path_factory):
    folder = tmp_path_factory.mktemp('small') / 'run'
    r = command('train', 'smoke-cpu', '--steps', 2, '--run-dir', folder)
    assert r.returncode == 0, r.stderr
    return folder, r.stdout


def test_a_run_says_in_one_line_what_it_leaves_out(run):
    folder, said = run
    lines = [line for line in said.splitlines() if 'compassrl[report]' in line]
    assert len(lines) == 1 and 'TensorBoard' in lines[0] and 'curves.png' in lines[0]
    assert 'tracker tensorboard' not in said  # it was not tried


def test_a_run_has_its_numbers_and_a_report_without_pictures(run):
    folder, _ = run
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    assert [r['step'] for r in rows] == [1, 2]
    text = (folder / 'report.md').read_text()
    assert 'avg@' in text and '![' not in text
    assert not any((folder / n).exists() for n in ('curves.png', 'gantt.png', 'tensorboard'))


def test_the_pictures_can_be_drawn_later(run):
    folder, _ = run
    pytest.importorskip('matplotlib')
    subprocess.run([sys.executable, '-m', 'compassrl', 'report', folder], cwd=ROOT, check=True)
    assert (folder / 'curves.png').stat().st_size > 10_000
    assert '![curves](curves.png)' in (folder / 'report.md').read_text()


def test_the_verifier_maths_names_its_extra_before_anything_is_sampled(command, tmp_path):
    rows = [dict(prompt=f'{i}+1=', answer=str(i + 1), solution=f'#{i + 1}') for i in range(40)]
    (tmp_path / 'sums.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
    data = '--data.path', tmp_path / 'sums.jsonl', '--data.verifier', 'maths'
    r = command('train', 'smoke-cpu', '--run-dir', tmp_path / 'run', *data)
    assert r.returncode != 0 and 'Traceback' not in r.stderr
    assert 'maths needs `math-verify`: pip install "compassrl[maths]"' in r.stderr
    assert not (tmp_path / 'run' / 'metrics.jsonl').exists()
