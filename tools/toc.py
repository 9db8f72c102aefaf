"""What follows from nbs/course.yml: numbers, neighbours, sidebar, badges, tables, the map.

    python tools/toc.py     # says what course.yml lacks, or nothing

`make sync` calls `sync`, which writes it into the notebooks; nothing of it is typed twice.
"""

import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import front
import yaml
from lesson_table import lesson_table, numbers

ROOT = Path(__file__).resolve().parent.parent
FRONT = 'index', 'readme'  # the front page of the site, and that of the repository
KINDS = {'lesson': 'Lessons', 'study': 'Studies', 'how-to': 'How-tos', 'reference': 'Reference'}
MARK = '<!-- from nbs/course.yml, written by `make sync` -->'


def notebooks(nbs):
    "Every notebook of a folder but checkpoints and hidden ones"

    def hidden(path):
        return any(p.startswith(('.', '_')) for p in path.relative_to(nbs).parts)

    return sorted(p for p in nbs.rglob('*.ipynb') if not hidden(p))


def name_of(path):
    "rollout/torch_rollout.ipynb -> rollout/torch_rollout"
    return path.with_name(re.sub(r'^\d+_', '', path.stem)).as_posix()


@dataclass(frozen=True)
class Part:
    name: str
    kind: str
    about: str
    notebooks: list = field(default_factory=list)
    step: int | None = None  # what hangs below this step of the spine


SPINE = 'The path'
BOARD = 'studies/scoreboard'  # The end of the path leads to it.


@dataclass(frozen=True)
class Course:
    "course.yml, with the notebooks that it speaks of"

    root: Path

    @property
    def nbs(self):
        return self.root / 'nbs'

    @cached_property
    def data(self):
        return yaml.safe_load((self.nbs / 'course.yml').read_text())

    @cached_property
    def listed(self):
        "The parts of course.yml; `folder/*` stands for its notebooks that are named nowhere else"
        steps = self.data.get('spine', [])
        pages, last = [s['page'] for s in steps], self.num_steps
        about = 'from a reward to a run of your own, about 15 minutes each'
        parts = [Part(SPINE, 'lesson', about, pages[: last + 1])]
        parts += [
            Part(f'Deeper {i}', 'lesson' if i <= last else 'how-to', '', s['deeper'], i)
            for i, s in enumerate(steps)
            if 'deeper' in s
        ]
        parts += [Part('The end', 'how-to', 'a run of your own', pages[last + 1 :])]
        parts += [Part(**p) for p in self.data['parts']]
        named = {n for p in parts for n in p.notebooks}
        return [replace(p, notebooks=[*self.spelled_out(p.notebooks, named)]) for p in parts]

    def spelled_out(self, names, named):
        for n in names:
            folder = n.removesuffix('*')
            found = (p for p in self.paths if p.rpartition('/')[0] + '/' == folder)
            yield from sorted({*found} - named) if n.endswith('/*') else [n]

    @cached_property
    def parts(self):
        "The parts with the notebooks that exist"
        return [
            replace(p, notebooks=[n for n in p.notebooks if n in self.paths]) for p in self.listed
        ]

    @cached_property
    def paths(self):
        "Name -> file relative to nbs, the index left out"
        found = [p.relative_to(self.nbs) for p in notebooks(self.nbs)]
        return {name_of(p): p for p in found if p.stem not in FRONT}

    @cached_property
    def order(self):
        "Every notebook of the course that exists: name -> its part"
        return {n: part for part in self.parts for n in part.notebooks}

    @cached_property
    def spine(self):
        "The start, the steps, the end, and what comes after it"
        pages = [s['page'] for s in self.data.get('spine', [])]
        return [n for n in pages if n in self.paths]

    @property
    def num_steps(self):
        return len(self.data.get('spine', [])) - 3

    def step(self, name):
        "The step that a notebook is, or hangs below; None elsewhere"
        return self.spine.index(name) if name in self.spine else self.order[name].step

    def number(self, name):
        "4 for a step, 4.1 for what hangs below it; '' elsewhere"
        part, step = self.order[name], self.step(name)
        if step is None or step > self.num_steps:
            return ''
        return str(step) if name in self.spine else f'{step}.{part.notebooks.index(name) + 1}'

    def place(self, name):
        "Where a notebook stands, in words"
        step, last = self.step(name), self.num_steps
        if step is None:
            return self.order[name].kind.capitalize()
        ends = {0: 'Step 0', last + 1: f'After step {last}', last + 2: 'After Launch'}
        at = ends.get(step, f'Step {step} of {last}')
        return at if name in self.spine else f'Deeper: {at[0].lower()}{at[1:]}'

    def chain(self, name):
        """The sequence that Previous and Next walk: the spine; what hangs below a step, from its
        step to the next one; the other parts; the engine room"""
        step = self.step(name)
        if name in self.spine:
            return self.spine
        if step is not None:
            return [self.spine[step], *self.order[name].notebooks, *self.spine[step + 1 :][:1]]
        kind = self.order[name].kind == 'reference'
        rest = (n for n in self.order if self.step(n) is None)
        return [n for n in rest if (self.order[n].kind == 'reference') == kind]

    def neighbours(self, name):
        chain = [None, *self.chain(name), None]
        i = chain.index(name)
        before = self.spine[-1] if name == BOARD else chain[i - 1]
        return before, chain[i + 1]

    def problems(self):
        "What is wrong with course.yml, one line each"
        named = [n for part in self.listed for n in part.notebooks]
        yield from (
            f'nbs/course.yml, part {p.name}: kind {p.kind!r}, use one of {[*KINDS]}'
            for p in self.listed
            if p.kind not in KINDS
        )
        for n in sorted(set(self.paths) - set(named)):
            yield f'nbs/{self.paths[n]} has no place: add `- {n}` to a part of nbs/course.yml'
        for n in sorted(set(named) - set(self.paths)):
            folder, _, stem = n.rpartition('/')
            file = Path('nbs', folder, f'{stem}.ipynb')
            yield f'nbs/course.yml names {n}, but there is no {file}'
        for n in sorted({n for n in named if named.count(n) > 1}):
            yield f'nbs/course.yml names {n} more than once: it has one place'


def link(to, here, text):
    "A link from one notebook to another, relative as Jupyter wants it"
    return f'[{text}]({os.path.relpath(to, here.parent)})'


def first_cell(nb):
    "The cell that holds the title, its promise and the badge"
    return next(c for c in nb['cells'] if c['cell_type'] == 'markdown' and source(c)[:2] == '# ')


def source(cell):
    return ''.join(cell['source'])


def title(nb):
    return source(first_cell(nb)).splitlines()[0][2:].strip()


def promise(nb):
    "The quoted line below the title, its links as plain words"
    lines = source(first_cell(nb)).splitlines()
    line = next((line[1:].strip() for line in lines if line.startswith('>')), '')
    return re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', line)


# The line under a title

OLD_BADGE = re.compile(r'^CPU time: (?P<seconds>[\d.]+) seconds?(?P<rest>.*)$', re.M)
PLACES = r'\*\*(?:Lesson|Study|How-to|Reference|Step|The end|After|Deeper)\b'
BADGE = re.compile(
    rf'^{PLACES}.*? · (?:its notebook )?runs in [\d.]+ (?:seconds?|minutes?)'
    r'(?P<rest>.*)$',
    re.M,
)


# without seconds, or one more: typed by hand
TYPED_BADGE = re.compile(
    rf'\n*^{PLACES}(?:(?! (?:· |notebook )runs in ).)*?'
    r'(?P<rest> · (?:prerequisites|paper)\b[^\n]*)?$',
    re.M,
)


def spoken(seconds):
    if seconds < 90:
        return f'{seconds} second' + 's' * (seconds != 1)
    return f'{seconds / 60:.2g} minutes'


def badge(course, name, rest, minutes=None):
    "Place, minutes to read and seconds to run; `rest` (prerequisites, paper) is the notebook's own"
    part = course.order[name]
    what = f'**{course.place(name)}**'
    if course.step(name) is None and part.name not in (course.place(name), KINDS[part.kind]):
        what += f' · {part.name}'
    if part.kind == 'reference':
        what += ', not needed to understand the paper'
    if minutes:
        what += f' · {minutes:.0f} minutes to read'
    return f'{what} · its notebook runs in {spoken(course.data["seconds"][name])}{rest}'


def set_badge(course, name, cell, minutes=None):
    "The title's cell with its badge, below the promise if there was none"
    text, rest = source(cell), ''
    for typed in TYPED_BADGE.finditer(text):
        rest = typed['rest'] or rest
    text = TYPED_BADGE.sub('', text)
    m = BADGE.search(text) or OLD_BADGE.search(text)
    if m:
        rest = m['rest'] or rest
        return text[: m.start()] + badge(course, name, rest, minutes) + text[m.end() :]
    lines = text.splitlines()
    last = max(i for i, line in enumerate(lines) if i == 0 or line.startswith('>'))
    return '\n'.join(
        [*lines[: last + 1], '', badge(course, name, rest, minutes), *lines[last + 1 :]]
    )


def typed_seconds(nb):
    "Seconds that a new notebook states itself, till they are measured"
    m = OLD_BADGE.search(source(first_cell(nb)))
    return round(float(m['seconds'])) if m else None


# Previous and Next

HAND_NEXT = re.compile(r'(?:\n\s*\n|\A)(?:Next: |This was the last notebook\.)[^\n]*\s*\Z')


def set_neighbours(course, name, nb, titles):
    "The last cell leads on; a line typed by hand makes way"
    here = course.paths[name]
    cells = [c for c in nb['cells'] if MARK not in source(c)]
    for c in cells:
        if c['cell_type'] == 'markdown' and HAND_NEXT.search(source(c)):
            set_source(c, HAND_NEXT.sub('', source(c)))
    cells = [c for c in cells if c['cell_type'] != 'markdown' or source(c).strip()]
    before, after = course.neighbours(name)
    lines = [MARK, *hanging(course, name, here, titles)]
    if after:
        text, what = titles[after]
        text = f'{course.number(after)} {text}'.strip()
        end = '' if text.endswith('?') else '.'
        lines += [f'Next: {link(course.paths[after], here, text)}{end} {what}', '']
    ends = [link(course.paths[before], here, titles[before][0])] if before else []
    ends += [link(Path('index.ipynb'), here, 'front page')]
    lines += [('Previous: ' if before else 'Back to ') + ' · '.join(ends)]
    nb['cells'] = [*cells, markdown('\n'.join(lines), name)]


MANY = 5  # links in one line


def heading(course, page, anchor):
    "The words of the heading with this anchor"
    texts = (source(c) for c in read(course.nbs / course.paths[page])['cells'])
    found = (h for text in texts for h in re.findall(r'^#+ (.+)$', text, flags=re.M))
    return next(re.sub(r'^\d+\. ', '', h) for h in found if front.slug(h) == anchor)


def hanging(course, name, here, titles):
    "At the end of a step: what the reader writes, and what goes deeper; or the way back to it"

    def to(n):
        return link(course.paths[n], here, titles[n][0])

    step = course.step(name)
    if step is None:
        return []
    if name not in course.spine:
        return [
            f'Back to {course.place(course.spine[step]).lower()}: {to(course.spine[step])}.',
            '',
        ]
    own = course.data['spine'][step]
    lines = [f'**{course.place(name)}.**']
    if at := own.get('writes'):
        page, anchor = at.split('#')
        file = '' if page == name else os.path.relpath(course.paths[page], here.parent)
        what = heading(course, page, anchor)
        what = re.sub(r'^Exercise \d+: ', '', what)  # this page has numbers of its own
        there = f', in {titles[page][0]}' if file else ''
        lines += [f'For your own file: [{what}]({file}#{anchor}){there}.']
    deeper = own.get('deeper', [])
    if len(deeper) > MANY:
        rows = [f'- {to(n)}: {titles[n][1]}' for n in deeper]
        return [' '.join(lines), '', folded(f'Deeper: {len(deeper)} pages', '\n'.join(rows)), '']
    if deeper:
        lines += [f'Deeper: {", ".join(map(to, deeper))}.']
    return [' '.join(lines), '']


def hashed(seed):
    return hashlib.sha256(seed.encode()).hexdigest()[:8]


def markdown(text, seed):
    "A markdown cell whose id follows from `seed`"
    cell = dict(cell_type='markdown', id=hashed(seed))
    return dict(**cell, metadata={}, source=text.splitlines(keepends=True))


def set_ids(nb):
    "No two cells share an id: jupytext hands ids on by place, the foot's as well. Later ones stay"
    taken = set()
    for c in reversed(nb['cells']):
        while c['id'] in taken:
            c['id'] = hashed(c['id'] + source(c))
        taken.add(c['id'])


def set_source(cell, text):
    cell['source'] = text.splitlines(keepends=True)


# Links


def followed(course, here, target):
    "A link to a notebook that has left its folder leads to where the notebook is today"
    file, mark, anchor = target.partition('#')
    to = Path(os.path.normpath(here.parent / file))
    moved = [p for p in course.paths.values() if p.name == to.name]
    if to.suffix != '.ipynb' or (course.nbs / to).exists() or len(moved) != 1:
        return target
    return os.path.relpath(moved[0], here.parent) + mark + anchor


def set_links(course, here, nb):
    for c in nb['cells']:
        if c['cell_type'] == 'markdown':
            text = source(c)

            def moved(m):
                return f']({followed(course, here, m[1])})'

            set_source(c, re.sub(r'\]\(([^)\s:]+\.ipynb(?:#[^)\s]*)?)\)', moved, text))


# The index

HEAD = '| | notebook | what it is about |\n| --- | --- | --- |\n'


def rows(course, names, titles):
    return HEAD + '\n'.join(
        f'| {course.number(n)} | [{titles[n][0]}]({course.paths[n]}) | {titles[n][1]} |'
        for n in names
    )


def folded(summary, inner):
    return f'<details><summary>{summary}</summary>\n\n{inner}\n\n</details>'


def long(minutes):
    "198 -> about 3 hours and 20 minutes"
    hours, rest = divmod(int(round(minutes, -1)), 60)
    return f'about {hours} hours' + (f' and {rest} minutes' if rest else '')


def steps(course, titles):
    "The spine at a glance, three steps a row: what each is about, with its minutes"
    names, last = course.spine, course.num_steps
    lessons = names[: last + 1]
    takes = {n: numbers(read(course.nbs / course.paths[n]), 0)['minutes'] for n in names}
    short = {n: titles[n][0].split(':')[0] for n in names}
    cards = {s['page']: s['card'] for s in course.data['spine']}
    cells = [
        f'{course.number(n)} [{short[n]}]({course.paths[n]}) {cards[n]} '
        f'({takes[n]:.0f}\u00a0min)'.strip()
        for n in names
    ]
    lines = [
        f'Reading steps 0 to {last} takes {long(sum(takes[n] for n in lessons))}; labs and '
        'exercises come on top. Each step needs only the steps before it.',
        '',
        '| | | |',
        '| --- | --- | --- |',
    ]
    lines += [f'| {" | ".join(cells[i : i + 3])} |' for i in range(0, len(cells), 3)]
    return '\n'.join(lines)


def table(course, part, titles):
    "One row per notebook, or for the engine room one line per folder"
    if part.kind != 'reference':
        return rows(course, part.notebooks, titles)
    folders = {}
    for n in part.notebooks:
        folder = n.rpartition('/')[0] or 'top'
        folders.setdefault(folder, []).append(f'[{titles[n][0]}]({course.paths[n]})')
    return '\n'.join(f'- **{f}**: {", ".join(names)}' for f, names in folders.items())


def tables(course, titles):
    "All that is not on the spine, folded"
    deeper = [n for p in course.parts if p.step is not None for n in p.notebooks]
    below = Part('Deeper', 'lesson', 'what hangs below each step', deeper)
    return '\n\n'.join(
        folded(f'<b>{p.name}</b>: {p.about} ({len(p.notebooks)} pages)', table(course, p, titles))
        for p in [below, *(p for p in course.parts if p.step is None)]
        if p.notebooks and p.notebooks[0] not in course.spine
    )


def tree(course):
    "What is where, one line per folder"
    rows = [('compassrl/', '')]
    for name, about in course.data['tree'].items():
        *above, last = name.split('/')
        rows.append(('  ' * (1 + len(above)) + last + '/' * ('.' not in name), about))
    width = max(len(left) for left, _ in rows) + 2
    return '```\n' + '\n'.join(f'{a:{width}}{b}'.rstrip() for a, b in rows) + '\n```'


def set_index(course, nb, titles):
    "Cells of the index that name a block hold it"
    blocks = dict(
        tables=lambda: tables(course, titles),
        tree=lambda: tree(course),
        ideas=lambda: folded('All ten, with lesson and code', front.idea_table(course, titles)),
        spine=lambda: steps(course, titles),
    )
    for c in nb['cells']:
        m = re.match(r'<!-- (\w+) from nbs/course\.yml[^>]*-->', source(c))
        if c['cell_type'] == 'markdown' and m:
            set_source(c, f'{m[0]}\n{blocks[m[1]]()}')


# The lessons in numbers, for whoever writes them

NUMBERS = '<!-- counted in the notebooks, written by `make sync` -->'


def set_numbers(course, nbs, page):
    "The table ends the page, below its mark"
    head, mark, _ = page.read_text().partition(NUMBERS)
    if mark:
        page.write_text(f'{head}{mark}\n{lesson_table(course, nbs)}\n')


# The map


def stages(course):
    "Source of course/stages.py, which holds the map"
    boxes, homes, columns = [], [], {}
    for stage, box in course.data['map'].items():
        number = course.number(box['of'][0])
        boxes.append(f'    {stage!r}: ({number!r}, {box["label"]!r}),')
        homes += [f'    {of.replace("/", ".")!r}: {stage!r},' for of in box['of']]
        columns.setdefault(box.get('under', stage), []).append(stage)
    rows = [f'    {tuple(c)},' for c in columns.values()]
    return '\n'.join(
        [
            '"The map of the series: the number and the label of each box"',
            '',
            '# From nbs/course.yml, written by `make sync`',
            '# stage -> its place in the course, what its box says',
            'stages: dict[str, tuple[str, str]] = {',
            *boxes,
            '}',
            'columns: list[tuple[str, ...]] = [  # a station, and what stands below it',
            *rows,
            ']',
            'homes = {  # module or folder -> its stage',
            *homes,
            '}',
            '',
        ]
    )


def set_maps(nb, pipeline):
    "Stored pictures of the map follow the course"
    for c in nb['cells']:
        m = re.search(r"^pipeline\((?:'([\w.]+)')?\)\s*\Z", source(c), flags=re.M)
        if c['cell_type'] != 'code' or not m:
            continue
        for o in c['outputs']:
            if 'image/svg+xml' in o.get('data', {}):
                o['data']['image/svg+xml'] = pipeline(m[1]).data.splitlines(keepends=True)


# The sidebar


def sidebar(course):
    sections = [
        dict(section=p.name, contents=[str(course.paths[n]) for n in p.notebooks])
        for p in course.parts
        if p.notebooks
    ]
    site = dict(website=dict(sidebar=dict(contents=['index.ipynb', *sections])))
    return '# From nbs/course.yml by `make sync`\n' + yaml.safe_dump(site, sort_keys=False)


# All together


def read(path):
    return json.loads(path.read_text())


def write(path, nb, before):
    if json.dumps(nb) != before:
        path.write_text(json.dumps(nb, indent=1, ensure_ascii=False) + '\n')


def write_seconds(course, new):
    "Put measured seconds into course.yml, in its order; all else stays as it is, comments too"
    path = course.nbs / 'course.yml'
    known = {**course.data['seconds'], **new}
    rows = [f'  {n}: {known[n]}' for n in course.order if n in known]
    head = re.split(r'^seconds:.*\n', path.read_text(), flags=re.M)[0]
    text = head + 'seconds:\n' + '\n'.join(rows) + '\n'
    if text != path.read_text():
        path.write_text(text)


def sync_text(root=ROOT):
    "Everything but the stored maps, which need the exported module; returns what course.yml lacks"
    course = Course(root)
    nbs = {n: read(course.nbs / course.paths[n]) for n in course.order}
    stated = {n: typed_seconds(nb) for n, nb in nbs.items() if n not in course.data['seconds']}
    write_seconds(course, {n: s or 1 for n, s in stated.items()})
    course = Course(root)
    titles = {n: (title(nb), promise(nb)) for n, nb in nbs.items()}
    for n, nb in nbs.items():
        before = json.dumps(nb)
        cell = first_cell(nb)
        minutes = numbers(nb, 0)['minutes'] if n in course.spine else None
        set_source(cell, set_badge(course, n, cell, minutes))
        set_links(course, course.paths[n], nb)
        set_neighbours(course, n, nb, titles)
        set_ids(nb)
        write(course.nbs / course.paths[n], nb, before)
    for name in FRONT:
        path = Path(f'{name}.ipynb')
        nb = read(course.nbs / path)
        before = json.dumps(nb)
        set_index(course, nb, titles)
        set_links(course, path, nb)
        set_ids(nb)
        write(course.nbs / path, nb, before)
    if (page := root / 'CONTRIBUTING.md').exists():
        set_numbers(course, nbs, page)
    (course.nbs / 'sidebar.yml').write_text(sidebar(course))
    (root / 'course' / 'stages.py').write_text(stages(course))
    return list(course.problems())


def sync_maps(root=ROOT):
    "Stored pictures of the map, drawn from the stages that were just written"
    sys.path.insert(0, str(root))
    from course.lesson import pipeline

    for path in notebooks(root / 'nbs'):
        nb = read(path)
        before = json.dumps(nb)
        try:
            set_maps(nb, pipeline)
        except ValueError as e:
            raise ValueError(f'{path}: {e}') from e
        write(path, nb, before)


if __name__ == '__main__':
    sys.exit('\n'.join(Course(ROOT).problems()) or 0)
