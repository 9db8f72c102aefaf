"The table of planted faults fits the code; `make faults` plants them"

import ast

import pytest

from tools.plant import ROOT, read, with_fault

FAULTS = read()


@pytest.mark.parametrize('fault', FAULTS, ids=[f['what'] for f in FAULTS])
def test_a_fault_has_its_place_and_its_test(fault):
    good = (ROOT / fault['file']).read_text()
    bad = with_fault(good, fault)
    assert ast.dump(ast.parse(bad)) != ast.dump(ast.parse(good))
    file, _, name = fault['test'].partition('::')
    names = [n.name for n in ast.parse((ROOT / file).read_text()).body if hasattr(n, 'name')]
    assert name.partition('[')[0] in names


def test_a_fault_without_a_place_is_an_error():
    fault = dict(file='a.py', old='x', new='y')
    for source in ('z = 1', 'x = x'):
        with pytest.raises(ValueError, match='stands there [02] times'):
            with_fault(source, fault)
