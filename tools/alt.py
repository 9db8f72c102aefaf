"""What a figure shows, in words, for whoever does not see it.

`#| fig-alt: ...` on top of a cell says it. Without that line it is said by the heading above and by
the titles and axes that the cell writes. Where these say little the text above is also asked.
"""

import ast
import re
from functools import cache
from html import unescape

from spoken import bindings, called, texts

TITLES = {'title', 'set_title', 'suptitle'}
X, Y = {'xlabel', 'set_xlabel', 'supxlabel'}, {'ylabel', 'set_ylabel', 'supylabel'}


def directives(source):
    "The `#| name: value` lines on top of a cell, and the code below them"
    opts, lines = {}, source.strip().splitlines()
    while lines and (m := re.match(r'#\|\s*([\w-]+)\s*:?\s*(.*)', lines[0])):
        opts[m[1]] = m[2].strip()
        lines.pop(0)
    return opts, '\n'.join(lines).strip()


@cache
def helpers(*codes):
    "Functions of a notebook that draw and are handed the `title`: name -> its place"
    found = {}
    trees = (parsed(code) for code in codes if 'title' in code)
    for node in (n for tree in filter(None, trees) for n in ast.walk(tree)):
        names = [a.arg for a in node.args.args] if isinstance(node, ast.FunctionDef) else []
        if 'title' in names:
            found[node.name] = names.index('title')
    return found


def parsed(code):
    "None for magics and shell lines"
    try:
        return ast.parse(code)
    except SyntaxError:
        return None


def words(node, names):
    "The texts that a node may be; what is filled in is an ellipsis, or left out at an end"
    said = [re.sub(r'\{:[^{}]*\}|…+', '…', ' '.join(t.split())) for t in texts(node, names)]
    return [t.strip('…:, ') for t in said]


def written(call, names, places):
    "Titles, x and y that a call writes"
    name, at = called(call), 0
    said = {k.arg: k.value for k in call.keywords}
    if name in places:
        name, at = 'title', places[name]
    if len(call.args) > at:
        said[name] = call.args[at]
    kinds = TITLES, X, Y
    return [next((words(said[k], names) for k in said if k in kind), []) for kind in kinds]


def calls_of(code, places=()):
    "Titles, x and y of each call of some code, in order"
    tree = parsed(code) if any(word in code for word in ('title', 'label', *places)) else None
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)] if tree else []
    names = bindings(tree) if calls else {}
    for call in sorted(calls, key=lambda c: (c.lineno, c.col_offset)):
        yield written(call, names, places)


def titles(code, places=()):
    "What the titles of a cell's figures say"
    return [t for found, _, _ in calls_of(code, places) for t in found if t]


def labels(code, places=()):
    "What the titles and axes of a cell's figures say"
    found = []
    for title, x, y in calls_of(code, places):
        x, y = (next(filter(None, z), '') for z in (x, y))
        axes = f'{y} against {x}' if x and y else x or y
        titled = '; '.join(filter(None, dict.fromkeys(title)))
        found.append(': '.join(filter(None, (titled, axes))))
    said = [f for f in found if re.search(r'[^\W\d_]{2}', f)]  # more than a symbol
    return '; '.join(dict.fromkeys(said))


def plain(markdown):
    text = re.sub(r'<!--.*?-->|```.*?```', '', markdown, flags=re.S)
    text = re.sub(r'!?\[([^\]]*)\]\([^)]*\)', r'\1', text)
    return re.sub(r'[`*$\\]|^[>#\s-]+', '', text, flags=re.M)


def heading(texts):
    "The last heading of some markdown cells"
    found = [m[1] for t in texts for m in re.finditer(r'^#+\s+(.+)$', t, flags=re.M)]
    return plain(found[-1]).strip() if found else ''


def prose(texts):
    "The first sentence of the last paragraph that is no heading"
    lines = re.sub(r'^#.*$', '', texts[-1] if texts else '', flags=re.M)
    paragraphs = [' '.join(plain(p).split()) for p in re.split(r'\n\s*\n', lines)]
    last = next(filter(None, reversed(paragraphs)), '')
    return re.split(r'(?<=[.?!:])\s', last)[0].rstrip('.:')


def series(outputs):
    "The map of the series, from its stored picture: its boxes, and which of them is marked"
    svg = ''.join(''.join(o.get('data', {}).get('image/svg+xml', '')) for o in outputs)
    boxes = re.findall(r'text-anchor="middle" fill="([^"]+)">([^<]+)</text>', svg)
    marked = [text for ink, text in boxes if ink == '#ffffff']
    here = f'; {", ".join(marked)} is marked' if marked else ''
    return f'Map of the series: {", ".join(text for _, text in boxes)}{here}'


def drawn(outputs):
    "What a drawing says of itself: its title and its description"
    svg = ''.join(''.join(o.get('data', {}).get('image/svg+xml', '')) for o in outputs)
    return unescape(': '.join(re.findall(r'<(?:title|desc)>([^<]+)</', svg)))


def places_of(cells):
    return helpers(*(directives(c.source)[1] for c in cells if c.cell_type == 'code'))


def titles_of(cells, i):
    "What the titles of the figures of the i-th cell say"
    return titles(directives(cells[i].source)[1], places_of(cells))


def said_by_itself(cells, i):
    "The cell's own line, or what a drawing says; '' for a chart without such a line"
    opts, code = directives(cells[i].source)
    if said := opts.get('fig-alt', '').strip('"\''):
        return said
    if re.search(r'^(?:\w+\.)?pipeline\(', code, flags=re.M):
        return series(cells[i].outputs)
    return drawn(cells[i].outputs)


def own(cells, i):
    "Words of its own for the figures of the i-th cell: its line, its drawing's, or its titles"
    letters = [t for t in titles_of(cells, i) if re.search(r'[^\W\d_]{2}', t)]
    return said_by_itself(cells, i) or '; '.join(letters)


def alt(cells, i):
    "For the figures of the i-th cell of a notebook"
    if said := said_by_itself(cells, i):
        return said
    texts = [c.source for c in cells[:i] if c.cell_type == 'markdown']
    says = labels(directives(cells[i].source)[1], places_of(cells))
    if len(says.split()) < 4:
        says = prose(texts) + f' ({says})' * bool(says)
    return ': '.join(filter(None, (heading(texts), says)))
