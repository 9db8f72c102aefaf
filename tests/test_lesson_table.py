"The lessons in numbers: counted by hand in a small notebook, and again in all of them"

import json
import re
import sys

import nbformat
import pytest

from tests.support import ROOT

sys.path.insert(0, str(ROOT / 'tools'))
from alt import titles_of  # noqa: E402
from lesson_table import LABELS, concludes, lesson_table, lessons, numbers, pictures  # noqa: E402
from toc import NUMBERS, Course, read, set_numbers  # noqa: E402

COURSE = Course(ROOT)
NBS = {n: read(COURSE.nbs / COURSE.paths[n]) for n in COURSE.order}
LESSONS = {n: row for part in lessons(COURSE, NBS).values() for n, row in part.items()}


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
        code("#| code-fold: true\nplt.xlabel('the radius in mm')", **{'image/png': 'AA=='}),
        code("#| code-fold: true\nplt.title('Area grows with r²')\narea(1)", **{'image/png': 'A'}),
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
    # late is used by the fifth cell after its own: too late
    assert found == dict(
        lines=lines,
        seconds=7,
        names=3,
        used=1,
        figures=2,
        said=1,  # the other has a label alone
        charts=2,
        concluded=1,
        alive=2,
        dead=0,
    )


def test_a_conclusion_has_four_words():
    assert concludes('Area grows with r') and concludes('… of the groups are silent')
    assert not concludes('loss against step') and not concludes('… of 12 × 3, …')
    assert not any(map(concludes, LABELS))


def test_each_bare_label_is_a_title_of_today():
    titles = set()
    for n in LESSONS:
        cells = nbformat.v4.reads(json.dumps(NBS[n])).cells
        titles |= {t for i in pictures(cells, 'image/png') for t in titles_of(cells, i)}
    assert titles >= LABELS


@pytest.mark.parametrize('name', LESSONS)
def test_a_lesson_keeps_its_limits(name):
    found = LESSONS[name]
    assert found['minutes'] <= 25 and found['lines'] <= 150 and found['seconds'] <= 60
    assert found['said'] == found['figures'] and found['dead'] == 0


@pytest.mark.parametrize('name', COURSE.spine[:13])
def test_a_step_is_about_a_quarter_of_an_hour(name):
    found = LESSONS[name]
    assert found['minutes'] <= 20 and found['lines'] <= 120 and found['seconds'] <= 45


@pytest.mark.parametrize('page', ['index', 'lesson'])
def test_the_front_page_promises_what_a_step_may_take(page):
    text = (COURSE.nbs / f'{page}.ipynb').read_text()
    assert re.search(r'[Tt]welve steps of up to 20 minutes', text)


def test_nearly_all_names_are_shown():
    used, names = (sum(r[k] for r in LESSONS.values()) for k in ('used', 'names'))
    assert used >= 0.95 * names


def test_the_table_counts_all_lessons():
    table = lesson_table(COURSE, NBS)
    last = next(line for line in table.splitlines() if line.startswith('| all lessons'))
    kinds = {'image/png', 'image/svg+xml'}
    outputs = [o for n in LESSONS for c in NBS[n]['cells'] for o in c.get('outputs', [])]
    num = sum(not kinds.isdisjoint(o.get('data', [])) for o in outputs)
    assert f'| all lessons | {len(LESSONS)} |' in last and f'| {num} of {num} |' in last
    page = (ROOT / 'CONTRIBUTING.md').read_text()
    assert page.endswith(f'{NUMBERS}\n{table}\n'), 'run `make sync`'


def test_the_numbers_of_today_take_the_place_of_the_old_ones(tmp_path):
    page = tmp_path / 'page.md'
    page.write_text(f'# A page\n\n{NUMBERS}\nold\n')
    set_numbers(COURSE, NBS, page)
    assert page.read_text() == f'# A page\n\n{NUMBERS}\n{lesson_table(COURSE, NBS)}\n'
    page.write_text('no mark\n')
    set_numbers(COURSE, NBS, page)
    assert page.read_text() == 'no mark\n'
