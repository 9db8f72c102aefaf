"""The lessons in numbers: what a reader of each part meets, counted in the notebooks themselves.

    python tools/lesson_table.py     # one row per lesson

`make sync` writes the table by parts into the index.
"""

import ast
import json
import re
import statistics
import sys

import nbformat
from alt import alt, directives

WORDS_A_MINUTE, LINES_A_MINUTE = 200, 15  # of prose, of code that is seen
COLUMNS = (
    'part',
    'lessons',
    'minutes to read, each (most)',
    'lines of code in sight, each (most)',
    'seconds to run, each (most)',
    'exported names shown within three cells',
    'figures, with words for them',
    'widgets alive on the page',
)


def defined(code):
    "The names that a cell defines at its top level"
    try:
        body = ast.parse(code).body
    except SyntaxError:  # magics and shell lines
        return
    for node in body:
        targets = getattr(node, 'targets', [getattr(node, 'target', None)])
        if hasattr(node, 'name'):
            yield node.name
        for target in filter(None, targets):
            yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))


def seen(cell):
    "The lines of a code cell that a page shows unfolded"
    opts, code = directives(cell.source)
    if 'hide' in opts or opts.get('code-fold') == 'true' or opts.get('echo') == 'false':
        return []
    lines = [line for line in code.splitlines() if line.strip()]
    if all(re.match(r'(import|from) |\s|\)', line) for line in lines):
        return []  # a cell of imports is folded
    return lines


def shown(cells):
    "Exported names, and those of them that one of the next three cells with code uses"
    code = [directives(c.source) for c in cells if c['cell_type'] == 'code']
    names, used = [], []
    for i, (opts, text) in enumerate(code):
        if 'export' not in opts:
            continue
        after = '\n'.join(t for _, t in code[i + 1 : i + 4])
        own = [n for n in dict.fromkeys(defined(text)) if not n.startswith('_')]
        names += own
        used += [n for n in own if re.search(rf'\b{n}\b', after)]
    return names, used


def numbers(nb, seconds):
    "What one lesson asks of its reader"
    cells = nbformat.v4.reads(json.dumps(nb)).cells
    prose = sum(len(c.source.split()) for c in cells if c['cell_type'] == 'markdown')
    lines = sum(len(seen(c)) for c in cells if c['cell_type'] == 'code')
    pictures = [
        bool(alt(cells, i))
        for i, c in enumerate(cells)
        for o in c.get('outputs', ())
        if {'image/png', 'image/svg+xml'} & set(o.get('data', {}))
    ]
    names, used = shown(cells)
    alive = sum('data-lab=' in str(c.get('outputs')) for c in cells)
    return dict(
        minutes=prose / WORDS_A_MINUTE + lines / LINES_A_MINUTE,
        lines=lines,
        seconds=seconds,
        names=len(names),
        used=len(used),
        figures=len(pictures),
        said=sum(pictures),
        alive=alive,
    )


def each(rows, key):
    "Median, and the most"
    values = [r[key] for r in rows]
    return f'{statistics.median(values):.0f} ({max(values):.0f})'


def row(name, rows):
    def total(key):
        return sum(r[key] for r in rows)

    cells = name, len(rows), each(rows, 'minutes'), each(rows, 'lines'), each(rows, 'seconds')
    share = f'{total("used") / max(1, total("names")):.0%} of {total("names")}'
    more = share, f'{total("said")} of {total("figures")}', total('alive') or ''
    return '| ' + ' | '.join(map(str, cells + more)) + ' |'


def lesson_table(course, nbs):
    "Markdown: a row for each part of lessons, and one for all"
    seconds, every = course.data['seconds'], []
    lines = ['| ' + ' | '.join(COLUMNS) + ' |', '|' + ' --- |' * len(COLUMNS)]
    for part in course.parts:
        if part.kind == 'lesson':
            rows = [numbers(nbs[n], seconds[n]) for n in part.notebooks]
            lines.append(row(part.name, rows))
            every += rows
    return '\n'.join([*lines, row('all', every)])


def main():
    from course import ROOT, Course, read

    course = Course(ROOT)
    for name, part in course.order.items():
        if part.kind == 'lesson':
            nb = read(course.nbs / course.paths[name])
            found = numbers(nb, course.data['seconds'][name])
            print(f'{name:28}', *(f'{k} {v:.0f}' for k, v in found.items()))


if __name__ == '__main__':
    sys.exit(main())
