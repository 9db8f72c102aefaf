"The lessons in numbers: counted by hand in a small notebook, and again in all of them"

import json
import sys

import nbformat

from tests.support import ROOT

sys.path.insert(0, str(ROOT / 'tools'))
from course import Course, read  # noqa: E402
from lesson_table import lesson_table, numbers  # noqa: E402


def code(source, **data):
    outputs = [nbformat.v4.new_output('display_data', data)] if data else []
    return nbformat.v4.new_code_cell(source, outputs=outputs)


def small():
    cells = [
        nbformat.v4.new_markdown_cell('# A title of six words'),  # 6 with its mark
        code('#| export\nimport math\nfrom pathlib import (\n    Path,\n)'),
        code(
            '#| export\ndef area(r):\n\n    return math.pi * r**2\n\n\ndef late(x):\n    return x'
        ),
        code('#| code-fold: true\nplt.plot([area(1)])', **{'image/png': 'AA=='}),
        code('#| hide\nassert area(1) > 3'),
        code('print(2)'),
        code('late(_hidden)\nx = 1'),
        code('#| export\n_hidden = 1\nradius = 2'),
        code('box', **{'text/html': '<div class="lab" data-lab="group"></div>'}),
        code('play', **{'text/html': '<div class="lab" data-lab="play" data-frames=""></div>'}),
    ]
    return nbformat.v4.new_notebook(cells=cells)


def test_a_small_notebook_by_hand():
    found = numbers(json.loads(nbformat.writes(small())), 7)
    lines = 4 + 1 + 2 + 2 + 2  # area and late, print, late and x, _hidden and radius, two boxes
    assert found.pop('minutes') == 6 / 200 + lines / 15
    # late is used by the fourth cell after its own: too late
    assert found == dict(lines=lines, seconds=7, names=3, used=1, figures=1, said=1, alive=2)


def test_the_table_counts_all_lessons():
    course = Course(ROOT)
    nbs = {n: read(course.nbs / course.paths[n]) for n in course.order}
    *_, last = lesson_table(course, nbs).splitlines()
    lessons = [n for n, part in course.order.items() if part.kind == 'lesson']
    kinds = {'image/png', 'image/svg+xml'}
    outputs = [o for n in lessons for c in nbs[n]['cells'] for o in c.get('outputs', [])]
    pictures = sum(not kinds.isdisjoint(o.get('data', [])) for o in outputs)
    assert f'| all | {len(lessons)} |' in last and f'| {pictures} of {pictures} |' in last
    assert last in (ROOT / 'README.md').read_text()
