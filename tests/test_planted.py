"The table of planted faults fits the code; `make faults` plants them"

import ast

import pytest

from tools.plant import NEEDED, ROOT, read, with_fault

FAULTS = read()


@pytest.mark.parametrize('fault', FAULTS, ids=[f['what'] for f in FAULTS])
def test_a_fault_has_its_place_and_its_test(fault):
    good = (ROOT / fault['file']).read_text()
    bad = with_fault(good, fault)
    assert ast.dump(ast.parse(bad)) != ast.dump(ast.parse(good))
    file, _, name = fault['test'].partition('::')
    names = [n.name for n in ast.parse((ROOT / file).read_text()).body if hasattr(n, 'name')]
    assert name.partition('[')[0] in names


def imported(path):
    "Files of the repository that a file imports when it is imported itself"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            names = [node.module, *(f'{node.module}.{a.name}' for a in node.names)]
        else:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            place = ROOT / name.replace('.', '/')
            yield from (p for p in (place.with_suffix('.py'), place / '__init__.py') if p.exists())


def test_the_copy_has_all_that_its_tests_import():
    todo, seen = {ROOT / f['test'].partition('::')[0] for f in FAULTS}, set()
    while todo:
        seen.add(path := todo.pop())
        todo |= set(imported(path)) - seen
    assert len(seen) > 100
    assert {p.relative_to(ROOT).parts[0] for p in seen} <= set(NEEDED)


def test_a_fault_without_a_place_is_an_error():
    fault = dict(file='a.py', old='x', new='y')
    for source in ('z = 1', 'x = x'):
        with pytest.raises(ValueError, match='stands there [02] times'):
            with_fault(source, fault)
