"""The texts that a cell's code may hand to a call: literal ones, and those that names lead to.

`title = 'A rises'` and `for ax, name in zip(axs, ('A rises', 'B falls'))` are followed; what is
known only when the cell runs is an ellipsis.
"""

import ast
from collections import defaultdict

ANY = ast.Constant(None)  # nothing is known of it


def called(node):
    "The function or method that a call names"
    func = getattr(node, 'func', None)
    return getattr(func, 'attr', getattr(func, 'id', ''))


def pairs(node, names):
    "Keys and values of a dict"
    if isinstance(node, ast.Name):
        return [p for n in names.get(node.id, ()) for p in pairs(n, {**names, node.id: ()})]
    if isinstance(node, ast.Dict):
        return list(zip(node.keys, node.values, strict=True))
    if called(node) == 'dict':
        return [(ast.Constant(k.arg), k.value) for k in node.keywords]
    return []


def elements(node, names):
    "What a loop over `node` runs through"
    if isinstance(node, ast.Tuple | ast.List):
        return node.elts
    if called(node) in ('items', 'values') and isinstance(node.func, ast.Attribute):
        found = pairs(node.func.value, names)
        both = called(node) == 'items'
        return [ast.Tuple([*p]) if both else p[1] for p in found]
    if called(node) == 'enumerate':
        return [ast.Tuple([ANY, e]) for e in elements(node.args[0], names)]
    if called(node) == 'zip':
        columns = [elements(a, names) for a in node.args]
        length = max(map(len, columns), default=0)
        columns = [[*c, *[ANY] * (length - len(c))] for c in columns]
        return [ast.Tuple([*row]) for row in zip(*columns, strict=True)]
    if isinstance(node, ast.Name):
        return [e for n in names.get(node.id, ()) for e in elements(n, {**names, node.id: ()})] or [
            k for k, _ in pairs(node, names)
        ]
    return []


def bind(target, value, names):
    if isinstance(target, ast.Name):
        names[target.id].append(value)
    elif isinstance(target, ast.Tuple):
        parts = elements(value, names) if isinstance(value, ast.Tuple) else []
        if len(parts) != len(target.elts):
            parts = [ANY] * len(target.elts)
        for t, part in zip(target.elts, parts, strict=True):
            bind(t, part, names)


def bindings(tree):
    "Name -> what the assignments and the loops of some code give it, in order"
    names = defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                bind(target, node.value, names)
    for node in ast.walk(tree):
        if isinstance(node, ast.For):
            for e in elements(node.iter, names):
                bind(node.target, e, names)
    return names


def joined(parts):
    "Texts from the texts of their parts; parts of one loop go together"
    length = max(map(len, parts), default=0)
    same = [p if len(p) == length else p * length if len(p) == 1 else ['…'] * length for p in parts]
    return [''.join(p) for p in zip(*same, strict=True)]


def texts(node, names):
    "Every text that `node` may be"
    if isinstance(node, ast.Constant):
        return [node.value if isinstance(node.value, str) else '…']
    if isinstance(node, ast.JoinedStr):
        values = [getattr(v, 'value', v) if hasattr(v, 'conversion') else v for v in node.values]
        return joined([texts(v, names) for v in values])
    if isinstance(node, ast.BinOp):
        return joined([texts(node.left, names), texts(node.right, names)])
    if isinstance(node, ast.IfExp):
        return [*texts(node.body, names), *texts(node.orelse, names)]
    if isinstance(node, ast.Name) and names.get(node.id):
        return [t for n in names.get(node.id, ()) for t in texts(n, {**names, node.id: ()})]
    if isinstance(node, ast.Subscript):
        return [t for _, v in pairs(node.value, names) for t in texts(v, names)] or ['…']
    return ['…']
