"nbdev-docs: what Quarto is given. In the place of Quarto stands a program that notes its call"

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import ROOT
from tests.test_notebooks import notebooks

BIN = Path(sys.executable).parent
QUARTO = """\
#!{python}
import json, os, pathlib, sys
pathlib.Path({log!r}).write_text(json.dumps([os.getcwd(), sys.argv[1:]]))
out = pathlib.Path(sys.argv[sys.argv.index('--output-dir') + 1])
out.mkdir(parents=True)
(out / 'index.html').write_text('a page')
"""


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    "A copy of the project, after nbdev-docs"
    new, programs = tmp_path_factory.mktemp('quarto') / 'p', tmp_path_factory.mktemp('bin')
    new.mkdir()
    for file in ('pyproject.toml', 'settings.ini', '_quarto.yml'):
        shutil.copy2(ROOT / file, new / file)
    no_caches = shutil.ignore_patterns('__pycache__', '.ipynb_checkpoints')
    for folder in ('nbs', 'compassrl'):
        shutil.copytree(ROOT / folder, new / folder, symlinks=True, ignore=no_caches)
    quarto = programs / 'quarto'
    quarto.write_text(QUARTO.format(python=sys.executable, log=str(new / 'call.json')))
    quarto.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k != 'IN_TEST'}
    env |= dict(PATH=f'{programs}{os.pathsep}{env["PATH"]}', PYTHONPATH=str(new))
    command = [BIN / 'nbdev-docs', '--n-workers', '1']
    r = subprocess.run(command, cwd=new, capture_output=True, text=True, env=env)
    assert r.returncode == 0, r.stderr[-3000:]
    return new


def test_quarto_is_called_once_for_the_whole_site(project):
    folder, args = json.loads((project / 'call.json').read_text())
    assert folder == str(project / '_proc')
    assert args[0] == 'render' and args[-2:] == ['--output-dir', str(project / '_proc' / '_docs')]
    assert (project / '_docs' / 'index.html').read_text() == 'a page'


def test_quarto_is_given_every_notebook_with_its_stored_outputs(project):
    def outputs(path):
        cells = json.loads(path.read_text())['cells']
        kept = [c for c in cells if '#| hide' not in ''.join(c['source'])]
        return sum(len(c.get('outputs', [])) for c in kept)

    for path in notebooks():
        given = project / '_proc' / path.relative_to(ROOT / 'nbs')
        assert outputs(given) == outputs(path), path


def test_the_pages_that_quarto_is_told_of_are_there(project):
    told = re.findall(r'[\w/]+\.ipynb', (project / '_proc' / 'sidebar.yml').read_text())
    assert len(told) >= len(notebooks()) - 1
    assert [t for t in told if not (project / '_proc' / t).exists()] == []
    assert (project / '_proc' / 'nbdev.yml').exists()
    assert (project / '_proc' / 'styles.css').exists()


def test_quarto_is_given_the_labs_and_told_to_keep_them(project):
    names = {p.name for p in (ROOT / 'nbs' / 'labs').iterdir()}
    assert {p.name for p in (project / '_proc' / 'labs').iterdir()} == names >= {'shared.js'}
    settings = yaml.safe_load((project / '_proc' / '_quarto.yml').read_text())
    assert settings['project']['resources'] == ['labs/*']
    assert 'data-lab' in settings['format']['html']['include-after-body']['text']
