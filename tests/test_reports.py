"Every bug report of the table has its test, or says why not"

import ast
import re
from collections import Counter
from functools import cache

import pytest

from compassrl.files import from_yaml, read_text
from tests import test_reports_more as more
from tests.support import ROOT

FOUND = from_yaml(read_text(ROOT / 'tests/reports.yml'))
REPORTS = FOUND['reports']
LINK = re.compile(r'[\w.-]+/[\w.-]+(#\d+)?')
OPEN: set[str] = set()


def _tests(report):
    found = report.get('test', [])
    return [found] if isinstance(found, str) else found


@cache
def functions(file):
    body = ast.parse((ROOT / file).read_text()).body
    return {n.name for n in body if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize('name', REPORTS)
def test_a_report_is_whole(name):
    report = REPORTS[name]
    assert report['symptom'] and set(report) <= {
        *('links', 'symptom', 'input', 'right', 'test', 'also', 'open')
    }
    if 'also' not in report or 'input' in report:
        assert report['input'] and report['right'] and bool(_tests(report)) != ('open' in report)
    assert all(REPORTS[other].get('test') for other in report.get('also', []))
    assert all(LINK.fullmatch(link) for link in report.get('links', []))
    assert name[0] == 'u' or report['links']
    for test in _tests(report):
        file, _, function = test.partition('::')
        assert function.partition('[')[0] in functions(file), test


def test_none_is_left_out_and_none_comes_twice():
    assert {*REPORTS} >= {*(f'r{i}' for i in range(1, 37)), *(f'u{i}' for i in range(1, 19))}
    named = Counter(t for r in REPORTS.values() for t in _tests(r))
    assert {t for t, n in named.items() if n > 1} == {*FOUND['tables']}


def test_what_is_still_open():
    assert {name for name, report in REPORTS.items() if 'open' in report} == OPEN


def test_further_inputs_name_their_reports():
    lines = [line for table in more.TABLES for line in table]
    assert len(lines) >= 60 and all(LINK.fullmatch(line[0]) and '#' in line[0] for line in lines)
    assert len({line[0] for line in lines}) >= 45
