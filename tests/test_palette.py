"""One palette for the lessons: teal is ours or right, orange wrong or marked, grey all else.

A figure that tells more than three kinds apart may have colours of its own, named here by cell.
"""

import ast
import os
import re
import subprocess
import sys

import pytest

from tests.support import ROOT

sys.path.insert(0, str(ROOT / 'tools'))
import fonts  # noqa: E402
from alt import directives  # noqa: E402
from toc import Course, read, source  # noqa: E402

TEALS = '0f766e 5eaaa2 5eada5 5eb5aa 7cc0b8 99f6e4 ccfbf1 d7efec teal'
ORANGES = 'c2410c fb923c fdba74 fed7aa orange Oranges'
GREYS = '1c1917 44403c 57534e 78716c a8a29e d6d3d1 e7e5e4 f5f5f4 fafaf9 ffffff'
PALETTE = set(f'{TEALS} {ORANGES} {GREYS} black white k w none Greys GnBu'.split())
OWN = {
    'train/megatron/batch 10d90168': 'one colour for each of twelve rows',
    'paper_map 9d23cf55': 'what is here, in part, absent: green, amber, red',
}
COURSE = Course(ROOT)


def colours(code):
    "Hex codes anywhere, and the names that a call is given as colour"
    found = set(re.findall(r'#([0-9a-f]{6})\b', code.lower()))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.keyword) and re.fullmatch(r'c|cmap|\w*color', node.arg or ''):
            value = getattr(node.value, 'value', None)
            found |= {value} if isinstance(value, str) and value[:1] != '#' else set()
    return found


def cells():
    for name, part in COURSE.order.items():
        if part.kind == 'lesson':
            for c in read(COURSE.nbs / COURSE.paths[name])['cells']:
                if c['cell_type'] == 'code':
                    yield f'{name} {c["id"]}', colours(directives(source(c))[1])


FOREIGN = {where: found - PALETTE for where, found in cells() if found - PALETTE}


def test_lessons_keep_to_the_palette():
    assert {where: found for where, found in FOREIGN.items() if where not in OWN} == {}
    assert OWN.keys() <= FOREIGN.keys()  # an exception that is not needed goes


def test_a_line_without_a_colour_takes_one_of_the_palette():
    cycle = re.findall(r"'([0-9a-f]{6})'", (ROOT / 'tools' / 'matplotlibrc').read_text())
    assert len(cycle) == 6 and set(cycle) <= PALETTE


@pytest.mark.parametrize(
    'code, found',
    [
        ("ax.plot(x, color='#C2410C')", {'c2410c'}),
        ("ax.bar(x, y, color=['#0f766e', '#4338ca'])", {'0f766e', '4338ca'}),
        ("ax.plot(x, c='pink')\nax.imshow(x, cmap='viridis')", {'pink', 'viridis'}),
        ("ax.barh(x, y, edgecolor='w', label='#1')", {'w'}),
    ],
)
def test_colours_are_found(code, found):
    assert colours(code) == found


def test_every_kernel_of_the_environment_knows_the_font_of_the_figures(tmp_path):
    fonts.configure(tmp_path)
    code = 'from matplotlib.font_manager import findfont as f; print(f("Inter"), f("Inter:bold"))'
    words = '--no-banner', '--config', tmp_path / 'ipython_config.py', '-c', code
    env = {**os.environ, 'IPYTHONDIR': str(tmp_path)}
    run = [sys.executable, '-m', 'IPython', *words]
    said = subprocess.run(run, capture_output=True, text=True, env=env, check=True).stdout
    assert re.findall(r'Inter-\w+', said) == ['Inter-Regular', 'Inter-SemiBold']
    lab = re.search(r'^lab:.*\n((?:\t.*\n)+)', (ROOT / 'Makefile').read_text(), re.M)[1]
    assert lab.index('tools/fonts.py') < lab.index('jupyter lab')
