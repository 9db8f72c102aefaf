"What a user writes type-checks in strict mode, and most of the package says its types"

import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support import ROOT

OWN = Path(__file__).parent / 'typed/own_engine_and_loss.py'
tool = shutil.which('basedpyright', path=Path(sys.executable).parent)
needs_pyright = pytest.mark.skipif(
    not tool, reason='basedpyright is not installed: pip install compassrl[dev]'
)


@pytest.fixture(scope='module')
def errors(tmp_path_factory):
    "Of pyright in strict mode, by file: a user's own, and one with two mistakes"
    folder, own = tmp_path_factory.mktemp('typed'), OWN.read_text()
    wrong = own.replace('version: int) -> None:', 'version: str) -> None:')
    texts = dict(own=own, wrong=wrong.replace('cfg.optim.lr', 'cfg.optim.rate'))
    for name, text in texts.items():
        (folder / f'{name}.py').write_text(text)
    include = [f'{name}.py' for name in texts]
    settings = dict(typeCheckingMode='strict', extraPaths=[str(ROOT)], include=include)
    (folder / 'pyrightconfig.json').write_text(json.dumps(settings))
    args = [tool, '--outputjson', '--pythonpath', sys.executable, '-p', str(folder)]
    r = subprocess.run(args, capture_output=True, text=True, cwd=folder, env={**os.environ})
    said = json.loads(r.stdout)
    assert said['summary']['filesAnalyzed'] == len(texts), r.stdout
    found = {name: [] for name in texts}
    for d in said['generalDiagnostics']:
        if d['severity'] == 'error':
            found[Path(d['file']).stem].append(d['message'])
    return found


@needs_pyright
def test_own_engine_and_loss_are_strictly_typed(errors):
    assert errors['own'] == []


@needs_pyright
def test_an_engine_of_another_shape_is_noticed(errors):
    found = errors['wrong']
    assert any('load_weights' in m for m in found) and any('"rate"' in m for m in found)


def test_own_engine_and_loss_run():
    "The file that is checked is a program, too"
    code = OWN.read_text() + (
        '\nfrom compassrl import SamplingParams\n'
        "r = Request('p', (1, 2), 0, 0, SamplingParams(4, stop_ids=(3,)))\n"
        'assert [s.response_ids for s in rollout.generate([r])] == [[3]]\n'
    )
    env = {**os.environ, 'PYTHONPATH': str(ROOT)}
    subprocess.run([sys.executable, '-c', code], check=True, env=env)


@needs_pyright
def test_most_public_names_have_types(tmp_path):
    "95 % at least, measured as pyright measures an installed package"
    venv.create(tmp_path / 'env', with_pip=False)
    packages = Path(sysconfig.get_path('purelib', vars=dict(base=str(tmp_path / 'env'))))
    (packages / 'others.pth').write_text('\n'.join(site.getsitepackages()))
    shutil.copytree(ROOT / 'compassrl', packages / 'compassrl')
    planted = 'def without(x):\n    return x\n\n\ndef with_types(x: int) -> int:\n    return x\n'
    (packages / 'compassrl/planted.py').write_text(planted)
    args = [tool, '--verifytypes', 'compassrl', '--ignoreexternal', '--outputjson']
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}  # the copy is to be read
    env['PATH'] = f'{tmp_path}/env/bin{os.pathsep}{env["PATH"]}'
    r = subprocess.run(args, capture_output=True, text=True, cwd=tmp_path, env=env)
    found = json.loads(r.stdout)['typeCompleteness']
    public = [s for s in found['symbols'] if s['isExported']]
    good = {s['name'] for s in public if s['isTypeKnown'] and not s['isTypeAmbiguous']}
    bad = sorted({s['name'] for s in public} - good)
    assert 'compassrl.planted.without' in bad and 'compassrl.planted.with_types' in good
    assert 'compassrl.records.RolloutEngine.generate' in good  # the package was read
    assert found['completenessScore'] >= 0.95, '\n'.join(bad)
