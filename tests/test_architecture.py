"How the package is built: arrows run down, no circles, few rooms, small pieces, one thought a line"

import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = ROOT / 'compassrl'
FLOORS = [  # a module imports from its own room and from the floors below
    {'', '__main__'},  # '' is the package: names for users, imported when they are used
    {'launch'},
    {'runs'},
    {'plan'},
    {'loop'},
    {'experience'},
    {'config'},
    {'train', 'judges'},
    {'sandbox'},
    {'rollout', 'algo', 'data'},
    {'model'},
    {'records'},
    {'own_code'},
]
APART = {('train', 'rollout')}  # they do not know each other
DOORS = {'sandbox': 'sandbox.isolated'}  # the one module of a room that other rooms import
FREE = {'settings', 'files', 'phases', 'procs'}  # they import nothing of the package
SHARED = FREE | {'own_code'}  # and every room may import these
MODULE, FUNCTION, COLUMNS, ROOMS = 400, 40, 100, 18


def files():
    return sorted(p for p in PACKAGE.rglob('*.py') if p.name != '_modidx.py')


def module_of(path, package=PACKAGE):
    "compassrl/train/megatron/engine.py -> train.megatron.engine; '' is the package itself"
    parts = path.relative_to(package).with_suffix('').parts
    return '.'.join(p for p in parts if p != '__init__')


def room(module):
    return module.split('.')[0]


def targets(node, inside):
    "Absolute dotted names that an import statement may mean; `inside` is the importing package"
    if isinstance(node, ast.Import):
        return [a.name for a in node.names]
    base = node.module or ''
    if node.level:
        above = inside[: len(inside) - node.level + 1]
        base = '.'.join([*above, *base.split('.')]).strip('.')
    return [f'{base}.{a.name}' for a in node.names]


def imports(path, known, package=PACKAGE):
    "Modules of the package that a file imports, in functions too: (module, line)"
    module = module_of(path, package)
    inside = ['compassrl', *module.split('.')]
    inside = inside if path.name == '__init__.py' else inside[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        for name in targets(node, inside):
            parts = name.split('.')
            if parts[0] != 'compassrl':
                continue
            found = ['.'.join(parts[1:i]) for i in range(len(parts), 0, -1)]
            hit = next((f for f in found if f in known), '')
            if hit and hit != module:
                yield hit, node.lineno


def graph(package=PACKAGE):
    "Module -> {imported module: line}"
    paths = [p for p in sorted(package.rglob('*.py')) if p.name != '_modidx.py']
    known = {module_of(p, package) for p in paths}
    return {module_of(p, package): dict(imports(p, known, package)) for p in paths}


@pytest.fixture(scope='module')
def arrows():
    return graph()


def where(module, line):
    return f'{module} (line {line})'


def floor_of(name):
    return next((i for i, rooms in enumerate(FLOORS) if name in rooms), None)


def climbs(arrows):
    "Arrows that do not run down"
    for module, imported in arrows.items():
        for other, line in imported.items():
            a, b = room(module), room(other)
            if a == b or b in SHARED and a not in FREE:
                continue
            if a in FREE or b in FREE or floor_of(a) is None or floor_of(b) is None:
                yield f'{where(module, line)} imports {other}'
            elif floor_of(a) >= floor_of(b) or (a, b) in APART:
                yield f'{where(module, line)} imports {other}: not below {a}'


def test_arrows_run_down(arrows):
    assert sorted(climbs(arrows)) == []


def past_doors(arrows):
    "Imports of an inner module of a room that has one door"
    for module, imported in arrows.items():
        for other, line in imported.items():
            door = DOORS.get(room(other), other)
            if room(module) != room(other) and other not in (door, room(other)):
                yield f'{where(module, line)} imports {other}: use {door}'


def test_a_room_with_a_door_is_entered_by_it(arrows):
    assert sorted(past_doors(arrows)) == []
    assert set(DOORS.values()) <= set(arrows)


def circles(arrows):
    "Strongly connected sets of more than one module (Tarjan)"
    index, low, stack, found = {}, {}, [], []

    def visit(v):
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in arrows.get(v, ()):
            if w not in index:
                visit(w)
            if w in stack:
                low[v] = min(low[v], low[w])
        if low[v] == index[v]:
            at = stack.index(v)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for v in arrows:
        if v not in index:
            visit(v)
    return found


def test_no_circles_between_modules_nor_between_rooms(arrows):
    assert circles(arrows) == []
    rooms = defaultdict(set)
    for module, imported in arrows.items():
        rooms[room(module)] |= {room(other) for other in imported} - {room(module)}
    assert circles(rooms) == []


def test_few_rooms(arrows):
    rooms = {room(module) for module in arrows} - {''}
    # a file that starts the command is no room
    assert len(rooms - {'__main__'}) <= ROOMS, sorted(rooms)
    assert rooms <= {r for floor in FLOORS for r in floor} | FREE, 'give the new room a floor'


def functions(path):
    return (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


def name(path):
    return path.relative_to(ROOT).as_posix()


def long_modules():
    lengths = {name(p): len(p.read_text().splitlines()) for p in files()}
    return [f'{n}: {lines} lines' for n, lines in lengths.items() if lines > MODULE]


def long_functions():
    for path in files():
        for f in functions(path):
            if (lines := f.end_lineno - f.lineno + 1) > FUNCTION:
                yield f'{name(path)}:{f.lineno}: {f.name} has {lines} lines'


def long_lines():
    for path in files():
        for i, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) > COLUMNS:
                yield f'{name(path)}:{i}: {len(line)} columns'


def several_statements_a_line():
    for path in files():
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.OP and token.string == ';':
                yield f'{name(path)}:{token.start[0]}: `;`'


def is_class(expression, classes):
    return isinstance(expression, ast.Name) and expression.id in classes


def bound_methods(body, classes):
    "`Class.method = function` at the top of a module"
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for t in targets:
            for part in t.elts if isinstance(t, ast.Tuple) else [t]:
                if isinstance(part, ast.Attribute) and is_class(part.value, classes):
                    yield node.lineno, ast.unparse(part)


def methods_in_disguise(body):
    "Functions with a `self` that are not marked as methods"
    for node in body:
        if not isinstance(node, ast.FunctionDef) or not node.args.args:
            continue
        marks = {ast.unparse(d).split('(')[0] for d in node.decorator_list}
        if node.args.args[0].arg == 'self' and not marks & {'patch', 'patch_to'}:
            yield node.lineno, node.name


def other_ways_to_write_a_method():
    for path in files():
        body = ast.parse(path.read_text()).body
        imported = (n for n in body if isinstance(n, ast.ImportFrom))
        classes = {n.name for n in body if isinstance(n, ast.ClassDef)}
        classes |= {a.asname or a.name for n in imported for a in n.names}
        for line, what in bound_methods(body, classes):
            yield f'{name(path)}:{line}: {what} is bound after the fact; use @patch'
        for line, what in methods_in_disguise(body):
            yield f'{name(path)}:{line}: {what}(self, ...) outside a class; use @patch'


def test_small_pieces_and_one_way_to_write_a_method():
    "All offenders at once"
    found = [
        *long_modules(),
        *long_functions(),
        *long_lines(),
        *several_statements_a_line(),
        *other_ways_to_write_a_method(),
    ]
    assert not found, '\n' + '\n'.join(found)


def write(folder, **modules):
    for dotted, text in modules.items():
        path = Path(folder, *dotted.split('__')).with_suffix('.py')
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


PLANTED = {
    'a call up, in a function': ('model__policy', 'def f():\n    from compassrl.runs import run'),
    'a neighbour': ('train__engine', 'from ..rollout.engine import Engine'),
    'an upper room by a relative import': ('algo__losses', 'from ..config import TrainConfig'),
    'settings know nobody': ('settings', 'import compassrl.records'),
}


@pytest.mark.parametrize('what', PLANTED)
def test_a_planted_arrow_is_noticed(tmp_path, what):
    rooms = (
        'records',
        'config',
        'loop',
        'settings',
        'model__policy',
        'rollout__engine',
        'runs__run',
    )
    write(tmp_path, **dict.fromkeys(rooms, ''))
    assert list(climbs(graph(tmp_path))) == []
    module, text = PLANTED[what]
    write(tmp_path, **{module: text})
    assert len(list(climbs(graph(tmp_path)))) == 1


def test_a_planted_way_past_a_door_is_noticed(tmp_path):
    door = 'from compassrl.sandbox.fork_client import f'
    write(tmp_path, sandbox__fork_client='', sandbox__isolated=door, judges__verifiers='')
    write(tmp_path, judges__verifiers='from compassrl.sandbox.isolated import f')
    assert list(past_doors(graph(tmp_path))) == []
    for inner in (
        'from compassrl.sandbox.fork_client import f',
        'from compassrl.sandbox import fork_client',
    ):
        write(tmp_path, judges__verifiers=inner)
        assert len(list(past_doors(graph(tmp_path)))) == 1


def test_a_planted_circle_is_noticed(tmp_path):
    write(tmp_path, algo__a='from .b import f', algo__b='def f():\n    from . import c', algo__c='')
    assert circles(graph(tmp_path)) == []
    write(tmp_path, algo__c='from compassrl.algo.a import g')
    assert circles(graph(tmp_path)) == [['algo.a', 'algo.b', 'algo.c']]


def test_planted_methods_are_noticed():
    text = 'class A: pass\ndef f(self): pass\n@patch\ndef g(self: A): pass\nA.h = f\nA.i, x = f, 1'
    body = ast.parse(text).body
    assert list(methods_in_disguise(body)) == [(2, 'f')]
    assert list(bound_methods(body, {'A'})) == [(5, 'A.h'), (6, 'A.i')]
