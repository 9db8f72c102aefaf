"A module with a planted fault: a test that passes with it proves nothing"

import ast
import io
import re
import sys
import tokenize
import types
from pathlib import Path
from unittest.mock import patch

LAYOUT = (
    tokenize.NEWLINE,
    tokenize.NL,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENDMARKER,
)


def spelled(token):
    "A token's text, the same for `.5` and `0.5`, and for both kinds of quotes"
    if token.type == tokenize.NUMBER and '.' in token.string:
        return repr(float(token.string))
    if token.type == tokenize.STRING and re.match('[\'"]', token.string):
        return repr(ast.literal_eval(token.string))
    return token.string.replace('"', "'") if token.type == tokenize.STRING else token.string


def tokens(source):
    "(text, begin, end) of every token that is not layout; of a fragment, up to where it breaks off"
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    out = []
    try:
        for t in tokenize.generate_tokens(io.StringIO(source).readline):
            if t.type in LAYOUT or t.string in (';', ''):
                continue
            out.append(
                (spelled(t), starts[t.start[0] - 1] + t.start[1], starts[t.end[0] - 1] + t.end[1])
            )
    except (tokenize.TokenError, IndentationError):
        pass
    closed = [i for i, t in enumerate(out[1:]) if out[i][0] == ',' and t[0] in (')', ']', '}')]
    return [t for i, t in enumerate(out) if i not in set(closed)]


def places(source, old):
    """Where the tokens of `old` stand in `source`, however its lines are broken and spaced:
    [(begin, end)]"""
    have, want = tokens(source), [t for t, _, _ in tokens(old.strip())]
    texts = [t for t, _, _ in have]
    found = [i for i in range(len(have) - len(want) + 1) if texts[i : i + len(want)] == want]
    return [(have[i][1], have[i + len(want) - 1][2]) for i in found]


def run(module, source, name):
    "A module of this source in the place of `module`"
    copy = types.ModuleType(f'{module.__package__}.mutant')
    copy.__package__ = module.__package__
    with patch.dict(sys.modules, {copy.__name__: copy}):  # where dataclasses look for it
        exec(compile(source, name, 'exec'), vars(copy))
    return copy


def planted(modules, old, new):
    "A copy of a module, or of several in the order of their imports: `old`, once, reads `new`"
    modules = modules if isinstance(modules, tuple) else (modules,)
    sources = [Path(m.__file__).read_text() for m in modules]
    found = [(i, at) for i, source in enumerate(sources) for at in places(source, old)]
    if len(found) != 1:  # no AssertionError, which a test might take for a law that noticed
        raise LookupError(f'{old!r} stands there {len(found)} times')
    i, (begin, end) = found[0]
    sources[i] = sources[i][:begin] + new.strip() + sources[i][end:]
    whole = types.ModuleType('mutant')
    for module, source in zip(modules, sources):
        copy = run(module, source, f'<{old} -> {new}>')
        for name in vars(copy).keys() & vars(whole).keys():  # what an earlier copy has defined
            if not name.startswith('__'):
                setattr(copy, name, getattr(whole, name))
        vars(whole).update({k: v for k, v in vars(copy).items() if not k.startswith('__')})
    return whole


def noticed(laws, what, *errors):
    "The first law that `what` breaks, or None"

    def broken(law):
        try:
            law(what)
        except (AssertionError, *errors):
            return True
        return False

    return next(filter(broken, laws), None)
