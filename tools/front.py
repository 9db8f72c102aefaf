"""The front door of the index: the paper's ideas; and the board's claims for README.

nbs/course.yml names the ideas; verdicts are those of the board's stored page.
"""

import re

BOARD = 'studies/scoreboard'


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


def table(lines):
    return '\n'.join(f'| {" | ".join(map(str, cells))} |' for cells in lines)


# The paper's ideas


def idea_table(course, titles):
    "Markdown: a row for each idea"
    lines = [['idea of the paper', 'lesson', 'code'], ['---'] * 3]
    for i in course.data['ideas']:
        module, _, name = i['code'].rpartition('.')
        lines.append(
            [
                f'**{i["idea"]}.** {i["says"]}',
                linked(course, i['lesson'], titles),
                f'[`{name}`](../compassrl/{module.replace(".", "/")}.py)',
            ]
        )
    return table(lines)


def linked(course, name, titles):
    return f'[{titles[name][0]}]({course.paths[name]})'


# Sections


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
