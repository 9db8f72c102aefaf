"Sections of a notebook: their words, and what stands below them"

import sys

import nbformat
import pytest

from tests.support import ROOT

sys.path.insert(0, str(ROOT / 'tools'))
import front  # noqa: E402
from lesson_table import numbers  # noqa: E402
from links import slug  # noqa: E402


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
