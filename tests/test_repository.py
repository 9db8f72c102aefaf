"What holds of the whole repository: settings, exports, lint, stored outputs, no trace of a machine"

import ast
import configparser
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest

from tests.support import ROOT
from tests.test_notebooks import name, notebooks

BIN = Path(sys.executable).parent
SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / 'settings.ini')
SETTINGS = SETTINGS['DEFAULT']
PYPROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())
PROJECT, NBDEV = PYPROJECT['project'], PYPROJECT['tool']['nbdev']
VERSION = re.search(
    r"__version__ = ['\"](.+?)['\"]", (ROOT / 'compassrl' / '__init__.py').read_text()
)[1]


def each_notebook(fn):
    return pytest.mark.parametrize('path', notebooks(), ids=name)(fn)


def cells(path, kind):
    return [c for c in json.loads(path.read_text())['cells'] if c['cell_type'] == kind]


def code(cell):
    return ''.join(cell['source'])


def tree(cell):
    "The cell's syntax tree; None for what is not Python (magics, shell lines)"
    try:
        return ast.parse(code(cell))
    except SyntaxError:
        return None


def tracked():
    "Every file that is or would be committed"
    if not (ROOT / '.git').exists():
        pytest.skip('not a git checkout')
    command = ['git', 'ls-files', '-co', '--exclude-standard', '-z']
    names = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split('\0')
    return [ROOT / n for n in names if n and (ROOT / n).is_file() and not (ROOT / n).is_symlink()]


def test_settings_agree():
    "settings.ini (nbdev 2) says what pyproject.toml (nbdev 3) says"
    want = dict(
        lib_name=PROJECT['name'],
        version=VERSION,
        description=PROJECT['description'],
        author=PROJECT['authors'][0]['name'],
        keywords=' '.join(k.replace(' ', '-') for k in PROJECT['keywords']),
        min_python=PROJECT['requires-python'].removeprefix('>='),
        requirements=' '.join(PROJECT['dependencies']),
        dev_requirements=' '.join(PROJECT['optional-dependencies']['dev']),
        git_url=PROJECT['urls']['Repository'],
        console_scripts=' '.join(f'{k}={v}' for k, v in PROJECT['scripts'].items()),
        license={'Apache-2.0': 'apache2'}[PROJECT['license']],
        **{k: str(v) for k, v in NBDEV.items()},
    )
    got = {k: SETTINGS.get(k) for k in want}
    assert got == want
    # the site has no address; with one nbdev would write it into every module
    assert 'doc_host' not in SETTINGS and 'Documentation' not in PROJECT['urls']
    assert PROJECT['dynamic'] == ['version', 'readme']
    assert PYPROJECT['tool']['hatch']['version']['path'] == 'compassrl/__init__.py'


def test_same_pin_in_every_extra():
    "A package that several extras pin is pinned to one version"
    extras = PROJECT['optional-dependencies'].values()
    pins = {}
    for dep in [*PROJECT['dependencies'], *(d for deps in extras for d in deps)]:
        package, pin = re.match(r'([\w.-]+)(?:\[[\w,-]*\])?(.*)', dep).groups()
        pins.setdefault(package.lower(), set()).add(pin)
    assert {k: v for k, v in pins.items() if len(v) > 1} == {}


def ruff(*args):
    r = subprocess.run([BIN / 'ruff', *args, '.'], cwd=ROOT, capture_output=True, text=True)
    return r.returncode, r.stdout + r.stderr


def test_lint():
    "Modules, notebooks, tests, tools and benchmarks"
    code, said = ruff('check', '--output-format', 'concise', '--no-cache')
    assert code == 0, said


def test_format():
    code, said = ruff('format', '--check', '--no-cache')
    assert code == 0, f'{said}\nrun `.venv/bin/ruff format`'


GENERATED = (
    'compassrl/**/*.py',
    'course/stages.py',
    'nbs/*.yml',
    'README.md',
    'readme_files/*.[ps]*',
)


@pytest.fixture(scope='module')
def fresh(tmp_path_factory):
    "The notebooks cleaned and exported from scratch in another folder"
    new = tmp_path_factory.mktemp('fresh') / 'p'
    (new / 'compassrl').mkdir(parents=True)
    by_hand = (ROOT / 'compassrl').glob('__*__.py')
    for file in (*(ROOT / f for f in ('pyproject.toml', 'settings.ini', '_quarto.yml')), *by_hand):
        shutil.copy2(file, new / file.relative_to(ROOT))
    names = 'course', 'paper_map', 'scoreboard', 'words'
    typed = [ROOT / 'nbs' / f'{name}.yml' for name in names]
    for path in [*notebooks(), *typed]:
        to = new / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, to)
    os.symlink('../_quarto.yml', new / 'nbs' / '_quarto.yml')
    for folder in ('tools', 'course'):
        skipped = shutil.ignore_patterns('__pycache__', 'stages.py')
        shutil.copytree(ROOT / folder, new / folder, ignore=skipped)
    env = {k: v for k, v in os.environ.items() if k not in ('IN_TEST', 'PYTHONPATH')}
    command = [sys.executable, 'tools/nb.py', 'sync']
    r = subprocess.run(command, cwd=new, capture_output=True, text=True, env=env)
    assert r.returncode == 0, r.stderr[-3000:]
    return new


def test_generated_files_match_notebooks(fresh):
    "Nothing was edited by hand, forgotten or left over: modules, sidebar, README and its figures"

    def generated(root):
        found = [p for pattern in GENERATED for p in root.glob(pattern)]
        return {p.relative_to(root).as_posix(): p.read_bytes() for p in found}

    want, got = generated(fresh), generated(ROOT)
    stale = sorted(k for k in want.keys() | got.keys() if want.get(k) != got.get(k))
    assert stale == [], 'run `make sync`'


def test_notebooks_are_clean_and_say_what_the_course_says(fresh):
    texts = {p.relative_to(ROOT): p.read_text() for p in notebooks()}
    stale = [str(p) for p, text in texts.items() if text != (fresh / p).read_text()]
    assert stale == [], 'run `make sync`'


def test_no_output_is_the_noise_of_a_library():
    "A font that is missing, a warning of a module, a number of a process"
    noise = r'findfont: |\.py:\d+: \w*Warning: |^\[W\d{4} '
    found = [
        (p.stem, m[0])
        for p in notebooks()
        for c in nbformat.read(p, 4).cells
        for o in c.get('outputs', [])
        if (m := re.search(noise, o.get('text', ''), flags=re.M))
    ]
    assert found == []


def shows(cell):
    "Whether a cell surely shows something: it prints or plots at top level, or ends in a value"
    parsed = tree(cell)
    if parsed is None or not parsed.body:
        return False

    def name(e):
        return ast.unparse(e.func) if isinstance(e, ast.Call) else ''

    calls = {name(s.value) for s in parsed.body if isinstance(s, ast.Expr)}
    last = parsed.body[-1]
    value = isinstance(last, ast.Expr) and not isinstance(
        last.value, (ast.Call, ast.Constant, ast.Await)
    )
    known = {
        'print',
        'display',
        'plt.show',
        'pipeline',
        'predict',
        'lesson.pipeline',
        'lesson.predict',
        'interact',
        'playground',
    }
    return value and not code(cell).rstrip().endswith(';') or bool(calls & known)


@each_notebook
def test_outputs_are_stored(path):
    "Executed from top to bottom without an error; what a reader should see is in the file"

    def skipped(c):
        return re.search(r'^#\|\s*(eval\s*:\s*false|slow|gpu)\b', code(c), flags=re.M)

    missing = [
        code(c)[:80]
        for c in cells(path, 'code')
        if shows(c) and not c['outputs'] and not skipped(c)
    ]
    assert missing == [], f'run `python tools/execute_nbs.py {path.relative_to(ROOT)}`'
    assert [
        o.get('evalue')
        for c in cells(path, 'code')
        for o in c['outputs']
        if o['output_type'] == 'error'
    ] == []


@each_notebook
def test_no_output_names_a_part_of_a_plot(path):
    "`ax.legend()` as the last line of a cell would show `<matplotlib.legend.Legend>`"
    outputs = [o for c in cells(path, 'code') for o in c['outputs']]
    texts = [''.join(o.get('data', {}).get('text/plain', '')) for o in outputs]
    assert [t for t in texts if re.search(r'<matplotlib\.|\bText\(\d', t)] == []


def module_of(path):
    "Module name that a notebook exports to, '' if none"
    found = re.search(
        r'^#\|\s*default_exp:?\s+(\S+)', '\n'.join(map(code, cells(path, 'code'))), flags=re.M
    )
    return found[1].removesuffix('.__init__') if found else ''


@each_notebook
def test_a_notebook_has_the_folder_and_the_name_of_its_module(path):
    "The reading order is in nbs/course.yml, not in the names of files"
    folder, stem = path.parent.relative_to(ROOT / 'nbs').parts, path.stem
    assert re.fullmatch(r'[a-z][a-z0-9_]*', stem)
    if module_of(path):
        assert module_of(path) == '.'.join([*folder, stem])


def test_one_notebook_per_module():
    names = [m for p in notebooks() if (m := module_of(p))]
    assert len(names) == len(set(names)), sorted(names)


MACHINE = (
    r'/(?:root|work|home/(?!someone/)\w+|Users/\w+|opt/\w+)/|/tmp/\w+/|site-[p]ackages|'
    r'(?:download|test)\.pytorch\.org|pypi\.org|pythonhosted\.org|registry\.npmjs'
)


def readable(path):
    "The text that a person reads: of a notebook the sources and text outputs, not the pictures"
    if path.suffix != '.ipynb':
        return path.read_text(errors='ignore')

    def text(o):
        return o.get('text', '') or {
            k: v for k, v in o.get('data', {}).items() if k.startswith('text')
        }

    both = cells(path, 'markdown') + cells(path, 'code')
    return '\n'.join(
        code(c) + '\n' + json.dumps([text(o) for o in c.get('outputs', [])]) for c in both
    )


def test_no_trace_of_a_machine():
    "No absolute path of a machine and no package index in any tracked file"
    own = [
        v
        for k in ('PIP_INDEX_URL', 'PIP_FIND_LINKS', 'UV_INDEX_URL')
        for v in os.environ.get(k, '').split()
    ]
    pattern = '|'.join([MACHINE, *map(re.escape, [*own, str(ROOT)])])
    texts = {
        str(p.relative_to(ROOT)): readable(p)
        for p in tracked()
        if p.suffix not in ('.png', '.gif', '.safetensors')
    }
    assert {
        name: sorted(set(hits))
        for name, text in texts.items()
        if (hits := re.findall(pattern, text))
    } == {}


@pytest.mark.parametrize('script', PROJECT['scripts'])
def test_entry_points_exist(script):
    module, function = PROJECT['scripts'][script].split(':')
    assert callable(getattr(importlib.import_module(module), function))
    assert (BIN / script).exists(), 'install the package: make .venv/.dev'


def test_named_make_targets_exist():
    "Every `make TARGET` of the texts is in the Makefile and in its help"
    listed = set(re.findall(r'^([a-z-]+):.*## ', (ROOT / 'Makefile').read_text(), flags=re.M))
    texts = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *notebooks()]
    used = {
        t
        for p in texts
        for t in re.findall(r'(?:`|^)make ([a-z-]+)(?=`| +#| ARGS|$)', readable(p), flags=re.M)
    }
    assert (
        used - listed == set()
        and {'train', 'test', 'lab', 'docs', 'bench', 'check', 'clean'} <= listed
    )


FOLDERS = '|'.join(('nbs', 'tests', 'tools', 'benchmarks', 'compassrl'))


def test_the_readme_is_a_door():
    "All else is on the front page of the site and in the notebooks"
    text = (ROOT / 'README.md').read_text()
    assert len(text.encode()) <= 9 * 1024
    first_screen = text[: text.index('## ')]
    for word in ('make train', 'make test', '--data.path train.jsonl', 'grpo-lab.gif'):
        assert word in first_screen


@pytest.mark.parametrize('text', ['README.md', 'CONTRIBUTING.md'])
def test_named_files_exist(text):
    named = re.findall(rf'(?<![\w./-])(?:{FOLDERS})/[\w./]*[\w/]', (ROOT / text).read_text())
    assert [n for n in named if not (ROOT / n).exists()] == []


TOP = """.ci .dockerignore .github .gitignore .pre-commit-config.yaml CHANGELOG.md CITATION.cff
CONTRIBUTING.md LICENSE Makefile README.md SECURITY.md _quarto.yml benchmarks compassrl
constraints.lock constraints.txt course docker docs nbs pyproject.toml readme_files settings.ini
tests tools"""


def test_nothing_else_lies_at_the_top():
    assert {p.relative_to(ROOT).parts[0] for p in tracked()} == set(TOP.split())


def test_files_that_belong_together():
    "Changelog and package agree on the version; the licence is whole; CI runs what a person runs"
    changes, licence, ci = (ROOT / n for n in ('CHANGELOG.md', 'LICENSE', '.ci/run'))
    assert re.search(r'^## \[(\d\S*)\]', changes.read_text(), flags=re.M)[1] == VERSION
    for part in ('Apache License', 'END OF TERMS AND CONDITIONS'):
        assert part in licence.read_text()
    assert os.access(ci, os.X_OK) and 'make test' in ci.read_text()
    site = ROOT / 'nbs' / '_quarto.yml'
    assert site.is_symlink() and site.resolve() == ROOT / '_quarto.yml'
