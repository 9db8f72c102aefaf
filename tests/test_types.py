"""What a user writes type-checks in strict mode. The package does in basic mode, which is looked at
where TYPES is set (`make check`): that takes a minute and 3 GB"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.support import ROOT

OWN = Path(__file__).parent / 'typed/own_engine_and_loss.py'
LEFT = yaml.safe_load((ROOT / 'tests/types.yml').read_text()) or {}
PLANTED = 'def half(x: int) -> str:\n    return x / 2\n'
tool = shutil.which('basedpyright', path=Path(sys.executable).parent)
WHOLE = bool(os.environ.get('TYPES'))
needs_pyright = pytest.mark.skipif(
    not tool, reason='basedpyright is not installed: pip install compassrl[dev]'
)


@pytest.fixture(scope='module')
def errors(tmp_path_factory):
    "File -> messages: the package, a user's own file, the same with two mistakes, a planted error"
    folder, own = tmp_path_factory.mktemp('typed'), OWN.read_text()
    wrong = own.replace('version: int) -> None:', 'version: str) -> None:')
    wrong = wrong.replace('cfg.optim.lr', 'cfg.optim.rate')
    for name, text in dict(own=own, wrong=wrong, planted=PLANTED).items():
        (folder / f'{name}.py').write_text(text)
    package = str(ROOT / 'compassrl')
    settings = dict(
        typeCheckingMode='basic',
        strict=['own.py', 'wrong.py'],
        extraPaths=[str(ROOT)],
        include=[*([package] if WHOLE else []), 'own.py', 'wrong.py', 'planted.py'],
        exclude=[f'{package}/_modidx.py'],
    )
    (folder / 'pyrightconfig.json').write_text(json.dumps(settings))
    args = [tool, '--outputjson', '--pythonpath', sys.executable, '-p', str(folder)]
    r = subprocess.run(args, capture_output=True, text=True, cwd=folder, env={**os.environ})
    said = json.loads(r.stdout)
    modules = [p for p in Path(package).rglob('*.py') if p.name != '_modidx.py']
    assert said['summary']['filesAnalyzed'] == WHOLE * len(modules) + 3, said['summary']
    found = {}
    for d in said['generalDiagnostics']:
        if d['severity'] == 'error':
            path = Path(d['file'])
            inside = path.is_relative_to(package)
            name = str(path.relative_to(package)) if inside else path.stem
            found.setdefault(name, []).append(f'{d["range"]["start"]["line"] + 1}: {d["message"]}')
    return found


def room(file):
    return file.split('/')[0] if '/' in file else 'root'


@needs_pyright
@pytest.mark.skipif(not WHOLE, reason='set TYPES=1, as `make check` does')
@pytest.mark.skipif(not (find_spec('vllm') and find_spec('megatron')), reason='needs the engines')
def test_the_package_is_typed(errors):
    "A room that is not in tests/types.yml has no error; a number there may only fall"
    found = [(room(f), f'{f}:{m}') for f in errors if f.endswith('.py') for m in errors[f]]
    now = Counter(r for r, _ in found)
    more = {r for r in now if now[r] > LEFT.get(r, 0)}
    assert not more, '\n'.join(text for r, text in found if r in more)


@needs_pyright
def test_an_error_of_type_is_noticed(errors):
    assert any('"float" is not assignable to return type "str"' in m for m in errors['planted'])


@needs_pyright
def test_own_engine_and_loss_are_strictly_typed(errors):
    assert errors.get('own', []) == []


@needs_pyright
def test_an_engine_of_another_shape_is_noticed(errors):
    found = errors['wrong']
    assert any('load_weights' in m for m in found) and any('"rate"' in m for m in found)


def test_own_engine_and_loss_run():
    "The file that is checked is also a program"
    code = OWN.read_text() + (
        '\nfrom compassrl import SamplingParams\n'
        "r = Request('p', (1, 2), 0, 0, SamplingParams(4, stop_ids=(3,)))\n"
        'assert [s.response_ids for s in rollout.generate([r])] == [[3]]\n'
    )
    env = {**os.environ, 'PYTHONPATH': str(ROOT)}
    subprocess.run([sys.executable, '-c', code], check=True, env=env)
