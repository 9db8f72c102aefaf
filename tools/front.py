"""The front door of the index: the paper's ideas, paths through the notebooks, the board in short.

nbs/course.yml names ideas and paths; verdicts and numbers are those of the board's stored page,
minutes are counted in the notebooks. `make sync` writes all of it into the index.
"""

import re
from collections import Counter

from lesson_table import numbers

BOARD = 'studies/scoreboard'
HELD = 'holds here'


def source(cell):
    return ''.join(cell['source'])


def slug(heading):
    "The anchor that GitHub, JupyterLab and the site give a heading"
    return re.sub(r'[^\w\- ]', '', heading.strip().lower()).replace(' ', '-')


# The board


def board(nbs):
    "Group -> (claim, measured, verdict) of each row, as the stored page shows them"
    groups = {}
    outputs = [o for c in nbs[BOARD]['cells'] for o in c.get('outputs', [])]
    text = '\n'.join(''.join(o.get('data', {}).get('text/markdown', '')) for o in outputs)
    for line in text.splitlines():
        cells = [x.strip() for x in line.strip('|').split(' | ')]
        if re.fullmatch(r'\*\*.+\*\*', cells[0]) and not any(x.strip('| ') for x in cells[1:]):
            rows = groups[cells[0].strip('*')] = []
        elif len(cells) >= 4 and cells[3].startswith('**'):
            rows.append((cells[0], cells[2], cells[3].split('**')[1]))
    return groups


def board_table(nbs):
    "Markdown: how many claims of each group have which verdict"
    groups = board(nbs)
    every = [row for rows in groups.values() for row in rows]
    verdicts = list(dict.fromkeys(v for *_, v in every))
    verdicts.sort(key=lambda v: -sum(v == x for *_, x in every))
    lines = [['claims about', 'claims', *verdicts], ['---', *['---:'] * (1 + len(verdicts))]]
    for name, rows in [*groups.items(), ('all groups', every)]:
        found = Counter(v for *_, v in rows)
        lines.append([name, len(rows), *(found[v] or '' for v in verdicts)])
    return table(lines)


def table(lines):
    return '\n'.join(f'| {" | ".join(map(str, cells))} |' for cells in lines)


# The paper's ideas


def works(idea, rows):
    "The first claim's verdict and number; how many of all hold"
    found = [next(r for r in rows if r[0].startswith(c)) for c in idea['claims']]
    _, measured, verdict = found[0]
    number = re.sub(r' [(][^()]*[)]$', '', measured).rstrip('.')
    said = f'**{verdict}**: {idea.get("number", "")} {number}'.replace('  ', ' ')
    if len(found) > 1:
        held = sum(v == HELD for *_, v in found)
        said += f'. {held} of {len(found)} claims hold{"s" * (held == 1)} here'
    return said


def idea_table(course, nbs, titles):
    "Markdown: a row for each idea"
    rows = [row for group in board(nbs).values() for row in group]
    lines = [['idea of the paper', 'lesson', 'code', 'does it work here?'], ['---'] * 4]
    for i in course.data['ideas']:
        module, _, name = i['code'].rpartition('.')
        lines.append(
            [
                f'**{i["idea"]}.** {i["says"]}',
                linked(course, i['lesson'], titles),
                f'[`{name}`](../compassrl/{module.replace(".", "/")}.py)',
                works(i, rows),
            ]
        )
    return table(lines)


def linked(course, name, titles):
    return f'[{titles[name][0]}]({course.paths[name]})'


# Paths


def pieces(nb):
    "Its cells; a cell of text is cut before each of its headings"
    for c in nb['cells']:
        if c['cell_type'] != 'markdown':
            yield c
            continue
        for part in re.split(r'^(?=#{1,6} )', source(c), flags=re.M):
            if part.strip():
                yield {**c, 'source': part}


def section(nb, anchor):
    "The heading's words, and a notebook of what stands below it. Raises ValueError"
    inside, level, words = [], 0, ''
    for c in pieces(nb):
        m = re.match(r'(#+) (.+)', source(c)) if c['cell_type'] == 'markdown' else None
        if m and level and len(m[1]) <= level:
            break
        if m and not level and slug(m[2]) == anchor:
            level, words = len(m[1]), m[2]
        if level:
            inside.append(c)
    if not level:
        raise ValueError(f'nbs/course.yml, paths: no heading #{anchor}')
    return words, {**nb, 'cells': inside}


def step_of(course, nbs, titles, step):
    "Markdown of one step, and its minutes"
    name, anchors = next(iter(step.items())) if isinstance(step, dict) else (step, [])
    parts = [section(nbs[name], a) for a in anchors]
    minutes = sum(numbers(nb, 0)['minutes'] for _, nb in parts or [('', nbs[name])])
    file, text = course.paths[name], linked(course, name, titles)
    if parts:
        text += ': ' + ', '.join(f'[{w}]({file}#{a})' for a, (w, _) in zip(anchors, parts))
    return f'{text} ({max(1, round(minutes))})', minutes


def path_list(course, nbs, titles):
    "Markdown: each path folded, its minutes in sight"
    found = []
    for p in course.data['paths']:
        steps, minutes = zip(*(step_of(course, nbs, titles, s) for s in p['steps']))
        total = sum(minutes)
        spent = f'{total:.0f} minutes' if total < 120 else f'{total / 60:.1f} hours'
        summary = f'<summary><b>{p["name"]}</b>: {p["about"]} ({spent} to read)</summary>'
        lines = '\n'.join(f'{i}. {s}' for i, s in enumerate(steps, 1))
        found.append(f'<details{" open" * (not found)}>{summary}\n\n{lines}\n\n</details>')
    return '\n\n'.join(found)
