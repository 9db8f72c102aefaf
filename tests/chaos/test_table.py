"The table of results is complete, and every row has tests"

import re

import pytest

from tests.support import ROOT, chaos
from tests.support.chaos import HEAD, KINDS, Row, page, table, trials


def cells(text):
    lines = [line.strip('|\n').split('|') for line in text.splitlines() if line.startswith('|')]
    return [[c.strip() for c in line] for line in lines]


def test_the_stored_table():
    "Of one seed; what it counts are numbers"
    text = chaos.TABLE.read_text()
    assert re.search(r'`make chaos SEED=\d+ CHAOS=[\d.]+`', text)
    head, line, *rows = cells(text)
    assert tuple(head) == HEAD and set(line) == {'---'}
    assert [r[0] for r in rows] == list(KINDS)
    for _, *numbers, seconds in rows:
        tests, failed, trials_made, lost, differ = (int(n or 0) for n in numbers)
        assert tests >= failed >= 0 and tests > 0 and min(trials_made, lost, differ) >= 0
        assert not seconds or float(seconds) >= 0


def test_a_table_adds_up():
    row = Row()
    row.add(False, {'trials': 3, 'lost or doubled': 0, 'slowest (s)': 2.0})
    row.add(True, {'trials': 2, 'lost or doubled': 1, 'slowest (s)': 1.0})
    plain = Row()
    plain.add(False, {})
    kinds = dict(zip(KINDS, (row, plain)))
    assert cells(table(kinds))[2:] == [
        [KINDS[0], '2', '1', '5', '1', '', '2.0'],
        [KINDS[1], '1', '0', '1', '', '', ''],
    ]
    assert table(kinds) in page(kinds)


def test_every_row_has_tests():
    "By the words in the sources; those of kills are put together there"
    text = ''.join(p.read_text() for p in (ROOT / 'tests').rglob('test_*.py'))
    for kind in KINDS:
        first, _, more = kind.partition(', ')
        cases, part = f"cases('{first}'", f'{more.replace(" ", "_")}='
        assert f"chaos.kind('{kind}')" in text or cases in text and part in text, kind


def test_a_kind_that_is_no_row_is_refused():
    with pytest.raises(AssertionError):
        chaos.kind('floods')


@pytest.mark.parametrize('share, many', [(0, 2), (0.5, 10), (1, 20)])
def test_how_much_is_tried(share, many, monkeypatch):
    monkeypatch.setattr(chaos, 'SHARE', share)
    assert trials(2, 20) == many


def test_the_same_seed_draws_the_same(monkeypatch):
    first = chaos.draw('a', 1).random()
    assert first == chaos.draw('a', 1).random() != chaos.draw('a', 2).random()
    monkeypatch.setattr(chaos, 'SEED', chaos.SEED + 1)
    assert first != chaos.draw('a', 1).random()
