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


def check(folder, text):
    "Errors of pyright in strict mode: (line, message)"
    (folder / 'own.py').write_text(text)
    settings = dict(typeCheckingMode='strict', extraPaths=[str(ROOT)], include=['own.py'])
    (folder / 'pyrightconfig.json').write_text(json.dumps(settings))
    args = [tool, '--outputjson', '--pythonpath', sys.executable, '-p', str(folder)]
    r = subprocess.run(args, capture_output=True, text=True, cwd=folder, env={**os.environ})
    found = json.loads(r.stdout)
    assert found['summary']['filesAnalyzed'] == 1, r.stdout
    wrong = [d for d in found['generalDiagnostics'] if d['severity'] == 'error']
    return [(d['range']['start']['line'] + 1, d['message']) for d in wrong]


@needs_pyright
def test_own_engine_and_loss_are_strictly_typed(tmp_path):
    assert check(tmp_path, OWN.read_text()) == []


@needs_pyright
def test_an_engine_of_another_shape_is_noticed(tmp_path):
    text = OWN.read_text().replace('version: int) -> None:', 'version: str) -> None:')
    text = text.replace('cfg.optim.lr', 'cfg.optim.rate')
    found = [message for _, message in check(tmp_path, text)]
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
