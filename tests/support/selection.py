"""`-k WORDS` imports only the test files that spell the words, and `-m chaos` those that say so.

Importing a test file may import vLLM and Megatron-Core, tens of seconds that a part of the suite
need not pay. A file is left out when none of its names can make the expression true: its path, its
functions and classes, and the texts that stand outside its functions, which become ids of tests.
"""

import ast
import itertools
import re

from _pytest.mark.expression import Expression

IDS_FROM_FILES = ('test_notebooks', 'test_repository', 'test_benchmarks', 'test_toc')
IDS_FROM_FILES += ('test_links', 'test_lesson')


def spelled(path, root):
    "All that may become a name of a test, in lower case"
    tree = ast.parse(path.read_text())
    words = [path.relative_to(root).as_posix()]
    said = (ast.Import, ast.ImportFrom, ast.Expr)  # names that are used also stand elsewhere
    for node in (n for n in tree.body if not isinstance(n, said)):
        inside = [*node.decorator_list, *node.args.defaults] if is_function(node) else [node]
        words += [getattr(node, 'name', '')]
        for n in (n for top in inside for n in ast.walk(top)):
            words += [getattr(n, 'name', None), getattr(n, 'id', None), getattr(n, 'value', None)]
    return '\n'.join(w for w in words if isinstance(w, str)).lower()


def is_function(node):
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def may_match(expression, text):
    "Can a test whose names are in `text` make the expression true?"
    words = set(re.findall(r'[\w:+\-.\[\]\\/]+', expression)) - {'and', 'or', 'not'}
    here = sorted(w for w in words if w.lower() in text)
    compiled = Expression.compile(expression)
    choices = itertools.product((True, False), repeat=len(here))
    said = (dict(zip(here, c, strict=True)) for c in choices)
    return any(compiled.evaluate(lambda w, s=s, **_: s.get(w, False)) for s in said)


def ignore(path, config):
    "True for a test file that `-k` cannot select from"
    expression = config.option.keyword
    name = path.name
    if config.option.markexpr == 'chaos' and name.startswith('test_'):
        return True if 'chaos' not in path.read_text() else None
    if not expression or not name.startswith('test_') or path.suffix != '.py':
        return None
    if path.stem in IDS_FROM_FILES or may_match(expression, spelled(path, config.rootpath)):
        return None
    return True
