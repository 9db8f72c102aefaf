"Every notebook runs from top to bottom, in a process of its own"

import os
import re
import traceback
from functools import partial
from importlib.util import find_spec
from unittest.mock import patch

import nbformat
import pytest
import yaml

from compassrl.sandbox.isolated import best_isolation
from tests.support import ROOT
from tests.support import fork_server as forked
from tests.support import vllm_fork_server as vllm_forks

FLAGS = os.environ.get('NB_FLAGS', '')  # e.g. NB_FLAGS="slow gpu"


def notebooks():
    "In reading order, without checkpoints and hidden files"

    def hidden(p):
        return any(n.startswith(('.', '_')) for n in p.relative_to(ROOT).parts)

    return sorted(p for p in (ROOT / 'nbs').rglob('*.ipynb') if not hidden(p))


ENGINES = {
    r'vllm\b': 'vllm',
    r'compassrl\.rollout\.vllm\.(?!config|messages|server|auth)': 'vllm',
    r'megatron\b': 'megatron',
    r'compassrl\.train\.megatron\.(?!layout)': 'megatron',
}
WALLED = {'sandbox/isolated', 'judges/verifiers', 'judges/reward_pool'}  # they run programs


def missing(path):
    "Engines that a notebook needs and this environment has not"
    text = path.read_text()
    needed = {e for module, e in ENGINES.items() if re.search(rf'(?:from|import) {module}', text)}
    return {e for e in needed if not find_spec(e)}


def run_cells(path):
    """`nbdev-test PATH`, but no figure is drawn a second time, to find its edges, and what cannot
    be shown is an error: IPython prints its traceback and goes on"""
    import nbdev.test
    from matplotlib_inline.config import InlineBackend

    broken = []

    class Shell(nbdev.test.CaptureShell):
        def showtraceback(self, *args, **kwargs):
            broken.append(traceback.format_exc())
            super().showtraceback(*args, **kwargs)

    InlineBackend.instance().print_figure_kwargs = dict(bbox_inches=None, dpi=50)
    shell = partial(Shell, mpl_format='png')
    with patch.object(nbdev.test, 'CaptureShell', shell):
        nbdev.test.nbdev_test(str(path), flags=FLAGS)
    assert not broken, broken[0]


def name(path):
    return path.relative_to(ROOT / 'nbs').with_suffix('').as_posix()


def longest_first():
    "So that the workers end at about the same time"
    measured = yaml.safe_load((ROOT / 'nbs' / 'course.yml').read_text())['seconds']

    def seconds(path):  # the course knows a notebook without its number
        return measured.get(re.sub(r'(^|/)\d+_', r'\1', name(path)), 0)

    return sorted(notebooks(), key=seconds, reverse=True)


@pytest.mark.parametrize('path', longest_first(), ids=name)
def test_notebook_runs(path, tmp_path):
    if missing(path):
        pytest.skip(f'needs {missing(path)}: python tools/setup_env.py dev engines-cpu')
    if name(path) in WALLED and not best_isolation()[0]:
        pytest.skip('this machine isolates no program: install bubblewrap')
    env = {k: v for k, v in os.environ.items() if k != 'IN_TEST'} | dict(PICTURES='1')
    run = (
        vllm_forks.run
        if re.search(r'(from|import) (vllm|trl)\b|start_server\(|VllmPool\(', path.read_text())
        else forked.run
    )
    r = run(tmp_path / 'log', run_cells, path, env=env, timeout=800)
    assert r.returncode == 0 and 'Success.' in r.stdout, f'{r.stdout[-3000:]}\n{r.stderr[-6000:]}'


@pytest.mark.parametrize(
    'source',
    [
        'class Table:\n    def _repr_html_(self):\n        raise ValueError("no table")\n\nTable()',
        'import matplotlib.pyplot as plt\nplt.figure().text(0, 0, "$\\\\nothing$")',
    ],
    ids=['table', 'figure'],
)
def test_a_notebook_fails_where_something_cannot_be_shown(source, tmp_path):
    path = tmp_path / 'shown.ipynb'
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), path)
    r = forked.run(tmp_path / 'log', run_cells, path, timeout=100)
    assert r.returncode != 0 and 'ValueError' in r.stderr, f'{r.stdout}\n{r.stderr}'
