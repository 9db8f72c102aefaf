"`from compassrl import TrainConfig`: lazy, complete, and names of settings that need no import"

import re
import subprocess
import sys

import pytest

import compassrl
from tests.support import ROOT


def python(code):
    run = [sys.executable, '-c', code]
    return subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def test_the_package_alone_imports_nothing_heavy():
    code = 'import sys, compassrl; print(*(m in sys.modules for m in ("torch", "tokenizers")))'
    assert python(code) == ['False', 'False']


def test_every_name_is_there_and_type_checkers_know_the_same_ones():
    source = (ROOT / 'compassrl' / '__init__.py').read_text()
    typed = dict((n, m) for m, n in re.findall(r'from \.([\w.]+) import (\w+) as \2\n', source))
    assert len(typed) > 40 and typed == compassrl._modules()
    for name, module in typed.items():
        assert getattr(compassrl, name) is getattr(
            sys.modules[f'compassrl.{module}'], name
        ) and name in dir(compassrl)
    assert compassrl.algo.losses.LossConfig is compassrl.LossConfig
    with pytest.raises(AttributeError, match="no attribute 'losses'"):
        _ = compassrl.losses


@pytest.mark.parametrize(
    'code',
    [
        "from compassrl.algo.losses import LossConfig; print(LossConfig('espo').name)",
        "from compassrl.data.prompts import DataConfig as C; print(C(verifier='maths').verifier)",
        "from compassrl.data.prompts import DataConfig as C; print(C(verifier='code').verifier)",
        'from compassrl import TrainConfig; print(TrainConfig().loss.name)',
    ],
)
def test_a_name_needs_no_import_of_its_module(code):
    "In a fresh process, where nothing else was imported"
    assert python(code)[0] in ('espo', 'maths', 'code')


def test_a_lazy_name_becomes_its_function():
    code = (
        'from compassrl.data.tasks import verifiers; import sys; name = "compassrl.judges.genrm"; '
        'print(name in sys.modules, "genrm" in verifiers, callable(verifiers["genrm"]))'
    )
    assert python(code) == ['False', 'True', 'True']
