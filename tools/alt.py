"""What a figure shows, in words, for whoever does not see it.

`#| fig-alt: ...` on top of a cell says it. Without that line it is said by the heading above and by
the titles and axes that the cell writes. Where these say little the text above is asked, too.
"""

import ast
import re
from html import unescape

TITLES = {'title', 'set_title', 'suptitle'}
X, Y = {'xlabel', 'set_xlabel', 'supxlabel'}, {'ylabel', 'set_ylabel', 'supylabel'}


def directives(source):
    "The `#| name: value` lines on top of a cell, and the code below them"
    opts, lines = {}, source.strip().splitlines()
    while lines and (m := re.match(r'#\|\s*([\w-]+)\s*:?\s*(.*)', lines[0])):
        opts[m[1]] = m[2].strip()
        lines.pop(0)
    return opts, '\n'.join(lines).strip()


def words(node):
    "A text that stands in the code; what is filled in is an ellipsis, or left out at an end"
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return ' '.join(node.value.split())
    if isinstance(node, ast.JoinedStr):
        said = ''.join(v.value if isinstance(v, ast.Constant) else '…' for v in node.values)
        return ' '.join(said.split()).strip('…:, ')
    return ''


def written(call):
    "Title, x and y that a call writes"
    name = getattr(call.func, 'attr', getattr(call.func, 'id', ''))
    said = {k.arg: words(k.value) for k in call.keywords}
    if call.args:
        said[name] = words(call.args[0])
    return [next((said[k] for k in said if k in kind and said[k]), '') for kind in (TITLES, X, Y)]


def labels(code):
    "What the titles and axes of a cell's figures say"
    try:
        calls = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Call)]
    except SyntaxError:  # magics and shell lines
        return ''
    found = []
    for call in sorted(calls, key=lambda c: (c.lineno, c.col_offset)):
        title, x, y = written(call)
        axes = f'{y} against {x}' if x and y else x or y
        found.append(': '.join(filter(None, (title, axes))))
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


def alt(cells, i):
    "For the figures of the i-th cell of a notebook"
    opts, code = directives(cells[i].source)
    if said := opts.get('fig-alt', '').strip('"\''):
        return said
    if re.search(r'^(?:\w+\.)?pipeline\(', code, flags=re.M):
        return series(cells[i].outputs)
    if said := drawn(cells[i].outputs):
        return said
    texts = [c.source for c in cells[:i] if c.cell_type == 'markdown']
    says = labels(code)
    if len(says.split()) < 4:
        says = prose(texts) + f' ({says})' * bool(says)
    return ': '.join(filter(None, (heading(texts), says)))
