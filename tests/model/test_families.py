"Every family and every column of the table in README, executed; the stored table says the same"

import json

import pytest

from tests.support import ROOT, families
from tests.support import vllm_fork_server as nursed
from tests.support.families import COLUMNS, FAMILIES

TABLE = json.loads((ROOT / 'benchmarks' / 'results' / 'families.json').read_text())


@pytest.fixture(scope='module', params=FAMILIES)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp('family')
    model = families.original(request.param, folder / 'in')
    return request.param, model, families.there_and_back(folder / 'in', folder / 'out'), folder


@pytest.mark.parametrize('column', COLUMNS)
def test_the_table_says_what_is_so(family, column):
    name, model, policy, folder = family
    found = families.claim(name, column, model, policy, folder / 'out', nursed.run)
    assert TABLE[name][column] == found


def test_the_table_is_whole():
    assert list(TABLE) == list(FAMILIES)
    assert all(list(row) == list(COLUMNS) for row in TABLE.values())
