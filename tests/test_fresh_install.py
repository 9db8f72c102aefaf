"""The package as pip installs it, in a fresh environment below /tmp and in one elsewhere, gives the
same verdicts. It needs minutes and an index: FRESH=1 make test ARGS=tests/test_fresh_install.py
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support import ROOT

sys.path.append(str(ROOT / 'tools'))
import setup_env  # noqa: E402

pytestmark = pytest.mark.skipif(not os.environ.get('FRESH'), reason='FRESH=1 installs twice')
PLACES = {'below /tmp': '/tmp', 'elsewhere': os.environ.get('FRESH_FOLDER', str(Path.home()))}


@pytest.fixture(scope='module', params=PLACES)
def verdicts(request, monkeypatch_module):
    "What the sixty cases give there, and whether the package is that of the environment"
    folder = Path(tempfile.mkdtemp(dir=PLACES[request.param], prefix='fresh-'))
    monkeypatch_module.setattr(setup_env, 'VENV', folder / 'venv')
    monkeypatch_module.setattr(setup_env, 'PYTHON', folder / 'venv/bin/python')
    setup_env.make_venv()
    setup_env.install_torch()
    assert setup_env.install(f'{ROOT}[maths]')
    code = 'import runpy, sys, compassrl; print(compassrl.__file__); sys.argv = sys.argv[1:]; '
    code += 'runpy.run_path(sys.argv[0], run_name="__main__")'
    words = [setup_env.PYTHON, '-c', code, ROOT / 'tests/support/verdicts.py', folder]
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    r = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    shutil.rmtree(folder)
    assert r.returncode == 0, r.stderr
    file, found = r.stdout.splitlines()
    assert file.startswith(str(folder)), 'another installation was imported'
    return json.loads(found)


@pytest.fixture(scope='module')
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as m:
        yield m


_first: list = []


def test_each_verdict_is_right_and_the_same_in_both(verdicts):
    assert len(verdicts) >= 55
    wrong = [v for v in verdicts if v[2] != v[3] or v[4] not in ('ok', 'wrong')]
    assert not wrong, wrong
    _first.append(verdicts)
    assert verdicts == _first[0]
