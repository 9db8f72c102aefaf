"""The lessons in numbers: what a reader of each part meets, counted in the notebooks themselves.

    python tools/lesson_table.py     # one row per lesson

`make sync` writes the table at the end of CONTRIBUTING.md.
"""

import ast
import json
import re
import statistics
import sys

import nbformat
from alt import directives, own, titles_of
from links import broken

WORDS_A_MINUTE, LINES_A_MINUTE = 200, 15  # words of prose, lines of code that is seen
COLUMNS = (
    'step',
    'lessons',
    'minutes to read, each (most)',
    'lines of code in sight, each (most)',
    'seconds to run, each (most)',
    'exported names shown within three cells',
    'figures, with words of their own',
    'charts, with a conclusion as title',
    'widgets alive on the page',
    'dead links',
)
# titles of four words and more that name what is drawn, and conclude nothing
LABELS = {
    'as they are median error',
    'divided by max/448 median error',
    'Hatched: idle. Dashed: the lower bound',
    'tokens… can be drawn, entropy',
    'Word … has log-prob …; the choice has … of at most … nats of uncertainty',
}


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


def concludes(title):
    "A title of four words or more that is no bare label: this can be tested, a verb cannot"
    return len(re.findall(r"[^\W\d_][\w'-]*", title)) > 3 and title not in LABELS


def pictures(cells, *kinds):
    "Numbers of the cells of all pictures"
    outputs = [(i, o) for i, c in enumerate(cells) for o in c.get('outputs', ())]
    return [i for i, o in outputs if set(kinds) & set(o.get('data', {}))]


def numbers(nb, seconds, dead=0):
    "What one lesson asks of its reader, and offers"
    cells = nbformat.v4.reads(json.dumps(nb)).cells
    prose = sum(len(c.source.split()) for c in cells if c['cell_type'] == 'markdown')
    lines = sum(len(seen(c)) for c in cells if c['cell_type'] == 'code')
    figures = pictures(cells, 'image/png', 'image/svg+xml')
    charts = pictures(cells, 'image/png')
    names, used = shown(cells)
    alive = sum('data-lab=' in str(c.get('outputs')) for c in cells)
    return dict(
        minutes=prose / WORDS_A_MINUTE + lines / LINES_A_MINUTE,
        lines=lines,
        seconds=seconds,
        names=len(names),
        used=len(used),
        figures=len(figures),
        said=sum(bool(own(cells, i)) for i in figures),
        charts=len(charts),
        concluded=sum(any(map(concludes, titles_of(cells, i))) for i in charts),
        alive=alive,
        dead=dead,
    )


def title(nb):
    text = next(''.join(c['source']) for c in nb['cells'] if c['cell_type'] == 'markdown')
    return text.splitlines()[0].removeprefix('# ')


def each(rows, key):
    "Median, and the most"
    values = [r[key] for r in rows]
    if len(values) == 1:
        return f'{values[0]:.0f}'
    return f'{statistics.median(values):.0f} ({max(values):.0f})'


def row(name, rows):
    def total(key):
        return sum(r[key] for r in rows)

    cells = name, len(rows), each(rows, 'minutes'), each(rows, 'lines'), each(rows, 'seconds')
    share = f'{total("used") / max(1, total("names")):.0%} of {total("names")}'
    said, told = (
        f'{total(a)} of {total(b)}' for a, b in (('said', 'figures'), ('concluded', 'charts'))
    )
    more = share, said, told, total('alive') or '', total('dead')
    return '| ' + ' | '.join(map(str, cells + more)) + ' |'


def lessons(course, nbs):
    "Part -> the numbers of each of its lessons, by name"
    seconds = course.data['seconds']

    def row(n):
        return numbers(nbs[n], seconds[n], len([*broken(course.nbs / course.paths[n])]))

    found = [p for p in course.parts if p.kind == 'lesson']
    return {p.name: {n: row(n) for n in p.notebooks} for p in found}


COUNTED = (
    'Counted in the notebooks. Reading is taken as 200 words a minute of prose and 15 lines a '
    'minute of code; folded cells and imports do not count. A name is shown if one of the next '
    'three code cells uses it. A figure has words of its own if its cell has a line `fig-alt`, if '
    "the drawing describes itself, or if its title says something. A chart's title counts as a "
    'conclusion if it has four words or more. A link is dead if it leads to no file or to no '
    'heading of this repository.'
)


def lesson_table(course, nbs):
    "Markdown, folded: a row for each step, one for what hangs below them, and one for all"
    spine, *below = lessons(course, nbs).values()
    deeper = {n: r for found in below for n, r in found.items()}
    lines = ['| ' + ' | '.join(COLUMNS) + ' |', '|' + ' --- |' * len(COLUMNS)]
    lines += [row(f'{course.number(n)} {title(nbs[n])}'.strip(), [r]) for n, r in spine.items()]
    groups = {'all steps': spine, 'deeper': deeper, 'all lessons': spine | deeper}
    lines += [row(name, [*found.values()]) for name, found in groups.items()]
    summary = '<summary>How it is counted, and the table</summary>'
    return '\n'.join([f'<details>{summary}\n', COUNTED, '', *lines, '\n</details>'])


def main():
    from toc import ROOT, Course, read

    course = Course(ROOT)
    nbs = {n: read(course.nbs / course.paths[n]) for n in course.order}
    for part in lessons(course, nbs).values():
        for name, found in part.items():
            print(f'{name:28}', *(f'{k} {v:.0f}' for k, v in found.items()))


if __name__ == '__main__':
    sys.exit(main())
