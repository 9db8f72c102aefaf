"The front door: paths whose minutes are counted, by hand in a small notebook and again in all"

import re
import sys

import nbformat
import pytest

from tests.support import ROOT, front_page
from tests.test_toc import COURSE

sys.path.insert(0, str(ROOT / 'tools'))
import front  # noqa: E402
from lesson_table import numbers  # noqa: E402
from links import slug  # noqa: E402
from toc import read  # noqa: E402

NBS = {n: read(COURSE.nbs / COURSE.paths[n]) for n in COURSE.order}
PATHS = {p['name']: p for p in COURSE.data['paths']}


def small():
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    cells = [
        text('# A title\n\nand words\n\n## Hook'),
        code('x = 1\ny = 2'),
        text('More.\n\n### A `part`, inside\ntwo words\n\n## Play\nnot counted'),
        code('z = 3'),
    ]
    return nbformat.v4.new_notebook(cells=cells)


def test_a_section_ends_at_the_next_heading_of_its_level():
    words, nb = front.section(small(), 'hook')
    assert words == 'Hook'
    # '## Hook', 'More.', '### A `part`, inside', 'two words'; x and y
    assert numbers(nb, 0)['minutes'] == pytest.approx((2 + 1 + 4 + 2) / 200 + 2 / 15)
    words, nb = front.section(small(), slug('A `part`, inside'))
    assert words == 'A `part`, inside' and numbers(nb, 0)['minutes'] == 6 / 200
    assert len(front.section(small(), 'play')[1]['cells']) == 2
    with pytest.raises(ValueError, match='no heading #plai'):
        front.section(small(), 'plai')


def test_anchors_are_those_of_the_links():
    for heading in 'By hand', 'Why does my reward not rise?', '`a.b`, c', '1. From -1 to a mask':
        assert front.slug(heading) == slug(heading)


def minutes(step):
    name, anchors = next(iter(step.items())) if isinstance(step, dict) else (step, None)
    parts = [front.section(NBS[name], a)[1] for a in anchors] if anchors else [NBS[name]]
    return sum(numbers(nb, 0)['minutes'] for nb in parts)


@pytest.mark.parametrize('name', PATHS)
def test_a_path_says_its_minutes_on_the_front_page(name):
    path = PATHS[name]
    each = [minutes(s) for s in path['steps']]
    told = front_page().split(f'<summary><b>{name}</b>: {path["about"]} ')[1]
    told = told.split('</details>')[0]
    number, unit = re.match(r'\(([\d.]+) (minutes|hours) to read\)', told).groups()
    half = 0.5 if unit == 'minutes' else 3  # half of the unit it is rounded to
    assert float(number) * (60 if unit == 'hours' else 1) == pytest.approx(sum(each), abs=half)
    lines = re.findall(r'^\d+\. \[.* \((\d+)\)$', told, flags=re.M)
    assert list(map(int, lines)) == [max(1, round(m)) for m in each], 'run `make sync`'


def test_an_hour_is_an_hour_and_a_day_a_day():
    total = {name: sum(map(minutes, p['steps'])) for name, p in PATHS.items()}
    assert set(total) == {'One hour', 'One day', 'For engineers', 'For researchers'}
    assert 40 < total['One hour'] <= 65
    assert 5 * 60 < total['One day'] <= 8 * 60
    assert max(total['For engineers'], total['For researchers']) <= 2.5 * 60
