"""Recipes of CONTRIBUTING, in one copy of the repository: a loss is one notebook and one line of a
test, a verifier is one function and one line of a test"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.test_repository import tracked

NAME = 'soft_gate'
TEXT = """# %% [markdown]
# # A soft gate
#
# > The gradient of a token fades with its ratio instead of stopping at a limit (SAPO, 2511.20347).

# %%
#| default_exp algo.losses.soft_gate

# %%
#| export
from __future__ import annotations

import torch
from torch import Tensor

from compassrl.algo.loss_registry import policy_loss
from compassrl.algo.losses import LossConfig
from compassrl.algo.ratios import at_least_fp32, log_ratio


# %%
#| export
@policy_loss()
def soft_gate(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, cfg: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    "A sigmoid of the ratio, steeper for unwanted tokens, in the place of the clip"
    ratio = log_ratio(log_probs, old_log_probs, mask).exp()
    adv = at_least_fp32(advantages).detach().masked_fill(~mask, 0.0)
    steepness = 1 + 0.05 * (adv <= 0)
    gate = 4 / steepness * torch.sigmoid(steepness * (ratio - 1))
    return -gate * adv, dict(gate_mean=gate.detach().masked_fill(~mask, 0.0).sum())
"""
NOTEBOOK = f'nbs/algo/losses/{NAME}.ipynb'
LINE = (
    'tests/algo/losses/test_every_loss.py',
    "    'espo': {",
    f"    '{NAME}': {{}},\n    'espo': {{",
)


VERIFIER = """#| export
@verifier
def ends_with(text: str, answer: str) -> Verdict:
    "The response ends with the answer"
    return judge(text.endswith(answer), f'{text[-20:]!r} against {answer!r}')"""
VERIFIERS, HOSTILE = 'nbs/judges/verifiers.ipynb', 'tests/judges/test_hostile.py'


def add_verifier(new):
    path, line = new / VERIFIERS, 'ANSWERS = dict('
    nb = json.loads(path.read_text())
    cells = [''.join(c['source']) for c in nb['cells']]
    after = next(i for i, text in enumerate(cells) if 'def check_isolation' in text)
    cell = dict(cell_type='code', id='0ecca5e0', metadata={}, outputs=[], execution_count=None)
    nb['cells'].insert(after + 1, cell | dict(source=VERIFIER.splitlines(keepends=True)))
    path.write_text(json.dumps(nb))
    test = new / HOSTILE
    assert test.read_text().count(line) == 1
    test.write_text(test.read_text().replace(line, f"{line}ends_with='42', "))


@pytest.fixture(scope='module')
def copy(tmp_path_factory):
    "The repository with a new loss and a new verifier, as CONTRIBUTING says"
    new = tmp_path_factory.mktemp('copy') / 'p'
    for path in tracked():
        to = new / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, to)
    os.symlink('../_quarto.yml', new / 'nbs' / '_quarto.yml')
    run(new, 'git', 'init', '-q')
    run(new, 'git', 'add', '-A')
    python(new, 'tools/nb.py', 'new', f'algo/losses/{NAME}')
    (new / 'nbs_py' / 'algo' / 'losses' / f'{NAME}.py').write_text(TEXT)
    python(new, 'tools/nb.py', 'save', f'algo/losses/{NAME}')
    file, old, line = LINE
    text = (new / file).read_text()
    assert text.count(old) == 1
    (new / file).write_text(text.replace(old, line))
    add_verifier(new)
    python(new, '-m', 'ruff', 'format', '-q', HOSTILE)  # a commit hook does it
    python(new, 'tools/nb.py', 'sync')
    return new


def run(folder, *command):
    env = {k: v for k, v in os.environ.items() if k != 'IN_TEST'}
    env |= dict(PYTHONPATH=str(folder), OMP_NUM_THREADS='1')
    r = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert r.returncode == 0, (r.stdout + r.stderr)[-3000:]
    return r.stdout


def python(folder, *words):
    return run(folder, sys.executable, *words)


def test_only_notebooks_and_lines_are_written_by_hand(copy):
    "All else that differs is what `make sync` makes"
    changed = run(copy, 'git', 'diff', '--name-only').splitlines()
    changed += run(copy, 'git', 'ls-files', '--others', '--exclude-standard').splitlines()
    changed = {*changed} - {NOTEBOOK, LINE[0], VERIFIERS, HOSTILE}
    made = (
        'compassrl/',
        'README.md',
        'CONTRIBUTING.md',
        'index_files/',
        'nbs/sidebar.yml',
        'nbs/nbdev.yml',
    )
    rest = {name for name in changed if not name.startswith(made)}
    # seconds, the list of notebooks, and the neighbours that lead to it
    assert {'nbs/course.yml', 'nbs/index.ipynb'} <= rest and len(rest) <= 4
    before = (ROOT / 'nbs' / 'course.yml').read_text().splitlines()
    after = (copy / 'nbs' / 'course.yml').read_text().splitlines()
    assert [x for x in after if x not in before] == [f'  algo/losses/{NAME}: 1']


def test_the_command_line_knows_it(copy):
    said = python(copy, '-c', f'from compassrl import LossConfig; print(LossConfig({NAME!r}).name)')
    assert said.strip() == NAME
    names = 'from compassrl.algo.loss_registry import policy_losses as p; import sys; '
    said = python(copy, '-c', names + "print('torch' in sys.modules, *p)")
    assert said.split()[0] == 'False' and NAME in said.split()


# what `make check` and the laws say of it; that `sync` is repeatable is tested elsewhere
FILES = 'algo/losses/test_every_loss.py test_repository.py test_architecture.py test_toc.py'
FILES = [f'tests/{name}' for name in f'{FILES} test_paper_map.py'.split()]
WORDS = 'has_its_line lint format arrows circles pieces one_place next_leads tree_names'
WORDS = f'{NAME} {WORDS} lesson_imports map_says per_module every_name_of_the_algorithm'.split()


def test_its_checks_and_laws_are_green(copy):
    words = ' or '.join(WORDS)
    options = '-q -p no:cacheprovider --no-header'.split()
    said = python(copy, '-m', 'pytest', *options, *FILES, '-k', words)
    assert ' passed' in said


def test_a_new_verifier_is_under_the_laws_of_all(copy):
    kinds = 'left_out or thousands_of_hostile_strings and ends_with'
    options = '-q -p no:cacheprovider --no-header'.split()
    assert '2 passed' in python(copy, '-m', 'pytest', *options, HOSTILE, '-k', kinds)
