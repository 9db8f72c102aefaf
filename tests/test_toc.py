"The reading order of nbs/course.yml: complete, in import order, and what the notebooks show"

import ast
import json
import os
import re
import sys
from pathlib import Path

import pytest

from course.stages import columns, stages
from tests.support import ROOT

sys.path.insert(0, str(ROOT / 'tools'))
import toc as tool  # noqa: E402

COURSE = tool.Course(ROOT)
LESSONS = [n for n, part in COURSE.order.items() if part.kind == 'lesson']


def cells(name, *kinds):  # sources of cells; without kinds of all
    found = json.loads((COURSE.nbs / COURSE.paths[name]).read_text())['cells']
    return [tool.source(c) for c in found if not kinds or c['cell_type'] in kinds]


def imported(name, code):
    "The notebooks whose modules these cells of a notebook import"
    found = set()
    for text in code:
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except SyntaxError:  # magics and shell lines
            continue
        for node in nodes:
            if isinstance(node, ast.Import):
                found |= {a.name for a in node.names}
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {node.module, *(f'{node.module}.{a.name}' for a in node.names)}
    names = {m.removeprefix('compassrl.').replace('.', '/') for m in found}
    return (names & set(COURSE.paths)) - {name}


def test_every_notebook_has_one_place():
    assert list(COURSE.problems()) == []


def above(name):
    "What a page may need: earlier steps, and if it hangs below one, that step and all before it"
    step, found = COURSE.step(name), set(COURSE.spine[: COURSE.step(name)])
    if name in COURSE.spine:
        return found
    found.add(COURSE.spine[step])
    deeper = [n for n in COURSE.order if n not in COURSE.spine and COURSE.step(n) is not None]
    return found | set(deeper[: deeper.index(name)])


def needed(name):
    "The notebooks that the line under the title names as prerequisites"
    m = re.search(r'prerequisites: (.*?)(?: · |$)', cells(name)[0], flags=re.M)
    here = COURSE.nbs / COURSE.paths[name]
    for to in re.findall(r'\]\(([^)#]+)', m[1] if m else ''):
        yield tool.name_of((here.parent / to).resolve().relative_to(COURSE.nbs))


def own_code(name):
    "Cells whose imports a reader meets: library code and folded cells may call what comes later"
    found = json.loads((COURSE.nbs / COURSE.paths[name]).read_text())['cells']
    code = [tool.source(c) for c in found if c['cell_type'] == 'code']
    return [c for c in code if not re.match(r'#\| (export|code-fold: true)', c)]


PLACED = [n for n in COURSE.order if COURSE.step(n) is not None and n in LESSONS]


def test_no_prerequisite_points_forward():
    wrong = [f'{n} needs {m}' for n in PLACED for m in sorted({*needed(n)} - above(n))]
    assert wrong == [], 'a lesson needs what stands above it; the engine room is never needed'


def test_no_import_points_forward():
    rooms = {n for n, part in COURSE.order.items() if part.kind == 'reference'}
    wrong = []
    for n in PLACED:
        step = COURSE.step(n)
        known = {m for m in COURSE.order if COURSE.step(m) is not None and COURSE.step(m) <= step}
        allowed = rooms | (known if n in COURSE.spine else above(n))
        wrong += [f'{n} imports {m}' for m in sorted(imported(n, own_code(n)) - allowed)]
    assert wrong == [], 'mend the order in nbs/course.yml'


def test_the_spine_has_twelve_steps_and_each_says_which_it_is():
    assert COURSE.num_steps == 12 and len(COURSE.spine) == 15
    for i, name in enumerate(COURSE.spine[1:13], 1):
        assert f'**Step {i} of 12**' in cells(name)[0]
        assert f'**Step {i} of 12.**' in cells(name)[-1]
    writes = [s for s in COURSE.data['spine'] if 'writes' in s]
    assert len(writes) >= 11  # the reader's own file grows


def next_of(name):
    "Where the last lines of a notebook lead; None at an end"
    last = cells(name, 'markdown')[-1]
    m = re.search(r'^Next: \[.*?\]\(([^)#]+)\)', last, flags=re.M)
    if not m:
        return None
    here = COURSE.nbs / COURSE.paths[name]
    return tool.name_of((here.parent / m[1]).resolve().relative_to(COURSE.nbs))


def walk(first):
    seen = [first]
    while (after := next_of(seen[-1])) and after not in seen:
        seen.append(after)
    return seen


def test_next_leads_through_the_spine_the_rest_and_the_engine_room_without_a_jump():
    assert walk('lesson') == COURSE.spine, 'run `make sync`'
    aside = [n for n in COURSE.order if COURSE.step(n) is None]
    for kind in True, False:
        rest = [n for n in aside if (COURSE.order[n].kind == 'reference') == kind]
        assert walk(rest[0]) == rest, 'run `make sync`'


def test_next_of_what_hangs_below_a_step_leads_to_the_next_step():
    below = [p.notebooks for p in COURSE.parts if p.name.startswith('Deeper')]
    assert len(below) > 5
    for names in below:
        step = COURSE.step(names[0])
        assert walk(names[0]) == [*names, *COURSE.spine[step + 1 :]], 'run `make sync`'


def test_every_page_leads_on_as_the_course_has_it():
    wrong = [n for n in COURSE.order if next_of(n) != COURSE.neighbours(n)[1]]
    assert wrong == [], 'run `make sync`'


@pytest.mark.parametrize('name', COURSE.paths)
def test_the_line_under_a_title(name):
    "Kind, place and measured seconds, once; the title is the first that a page shows"
    text = cells(name)[0]
    assert text.startswith('# ') and '\n' in text, 'the title is not the first cell'
    kinds = r'^\*\*(?:Study|How-to|Reference|Step|The end|After|Deeper)\b'
    assert len(re.findall(kinds, text, re.M)) == 1
    assert len(tool.BADGE.findall(text)) == 1 and not tool.OLD_BADGE.search(text), 'run `make sync`'
    assert f'**{COURSE.place(name)}**' in text
    assert isinstance(COURSE.data['seconds'][name], int)


def test_the_map_says_where_its_stages_are_taught():
    boxes = COURSE.data['map']
    want = {s: (COURSE.number(b['of'][0]), b['label']) for s, b in boxes.items()}
    assert stages == want, 'run `make sync`'
    assert sorted(s for c in columns for s in c) == sorted(stages) and len(columns) == 6
    steps = {COURSE.number(n) for n in COURSE.spine[1:13]}  # each step has a box
    assert steps <= {number for number, _ in stages.values()}
    folders = {p.name for p in (ROOT / 'compassrl').iterdir() if p.is_dir()}
    known = {*COURSE.paths, *folders}
    assert [of for b in boxes.values() for of in b['of'] if of not in known] == []


def test_the_tree_names_the_folders_that_are_there():
    package = ROOT / 'compassrl'
    files = {p.name for p in package.glob('[!_]*.py')}
    inits = package.glob('*/**/__init__.py')
    folders = {p.parent.relative_to(package).as_posix() for p in inits}
    assert set(COURSE.data['tree']) == files | folders, 'see `tree` in nbs/course.yml'
    readme = (ROOT / 'README.md').read_text()
    assert tool.tree(COURSE) in readme, 'run `make sync`'


def test_a_notebook_without_a_place_is_told_where_to_go(tmp_path):
    (tmp_path / 'nbs' / 'algo').mkdir(parents=True)
    (tmp_path / 'nbs' / 'course.yml').write_text(
        'parts:\n- {name: I Start, kind: lesson, about: "", notebooks: [algo/losses, algo/gone]}\n'
    )
    for name in ('index', 'algo/losses', 'algo/new'):
        (tmp_path / 'nbs' / f'{name}.ipynb').write_text('{}')
    new, gone = tool.Course(tmp_path).problems()
    assert 'add `- algo/new` to a part of nbs/course.yml' in new
    assert 'names algo/gone' in gone


OLD = '# T\n\n> promise\n\nCPU time: {} · prerequisites: [a](b.ipynb) · paper: section 3'


@pytest.mark.parametrize(
    'stated, rest', [('3 seconds', ''), ('20 seconds, and no vLLM', ', and no vLLM')]
)
def test_a_badge_keeps_what_the_notebook_says_itself(stated, rest):
    "Twice is as once; prerequisites and remarks stay"
    name = next(n for n in LESSONS if COURSE.number(n))
    cell = dict(source=[OLD.format(stated)])
    once = tool.set_badge(COURSE, name, cell)
    assert f'**{COURSE.place(name)}**' in once
    assert once.endswith(f'{rest} · prerequisites: [a](b.ipynb) · paper: section 3')
    assert tool.set_badge(COURSE, name, dict(source=[once])) == once
    bare = tool.set_badge(COURSE, name, dict(source=['# T\n\n> promise\n\nMore.']))
    assert bare.startswith(f'# T\n\n> promise\n\n**{COURSE.place(name)}**') and bare.endswith(
        '\n\nMore.'
    )


@pytest.mark.parametrize(
    'before', ['', '**Lesson II.3** · II The algorithm · runs in 3 seconds\n\n']
)
def test_a_line_that_was_typed_by_hand_becomes_the_only_one(before):
    name = next(n for n in LESSONS if COURSE.number(n))
    typed = f'# T\n\n> promise\n\n{before}**Lesson** · prerequisites: [a](b.ipynb)\n\nMore.'
    once = tool.set_badge(COURSE, name, dict(source=[typed]))
    title, promise, line, more = once.split('\n\n')
    assert line == tool.badge(COURSE, name, ' · prerequisites: [a](b.ipynb)')


@pytest.mark.parametrize(
    'target, today',
    [
        ('../train/espo.ipynb#break-it', 'algo/losses/espo'),
        ('../judges/pull_queue.ipynb', 'rollout/pull_queue'),
    ],
)
def test_links_follow_a_notebook_that_moves_to_another_folder(target, today):
    here = Path('rollout/torch_rollout.ipynb')
    now = tool.followed(COURSE, here, target)
    file, _, anchor = now.partition('#')
    assert (COURSE.nbs / here.parent / file).resolve() == COURSE.nbs / COURSE.paths[today]
    assert anchor == target.partition('#')[2]
    assert tool.followed(COURSE, here, now) == now
    assert tool.followed(COURSE, here, 'gone.ipynb') == 'gone.ipynb'


def test_every_cell_has_an_id_of_its_own():
    for path in tool.notebooks(COURSE.nbs):
        ids = [c['id'] for c in tool.read(path)['cells']]
        assert len(set(ids)) == len(ids), f'{path.name}: {[i for i in ids if ids.count(i) > 1]}'


def test_a_cell_that_took_the_id_of_the_foot_gets_another_one_for_good():
    foot = tool.markdown('the foot', 'a/b')
    cells = [dict(tool.markdown(text, ''), id=foot['id']) for text in ('one', 'two', 'two')] + [
        foot
    ]
    nb = dict(cells=[dict(c) for c in cells])
    tool.set_ids(nb)
    ids = [c['id'] for c in nb['cells']]
    assert len(set(ids)) == 4 and ids[-1] == foot['id']
    tool.set_ids(nb)
    assert [c['id'] for c in nb['cells']] == ids


def test_the_foot_of_a_step_leads_to_each_page_below_it():
    "In one line, or, where they are many, in a fold with a line each"
    for step, own in enumerate(COURSE.data['spine']):
        foot, deeper = cells(own['page'])[-1], own.get('deeper', [])
        links = re.findall(r'\]\((?:\.\./)*([\w/]+)\.ipynb\)', foot.split('Deeper: ')[-1])
        here = Path(own['page']).parent
        wanted = [os.path.relpath(COURSE.paths[n], here).removeprefix('../') for n in deeper]
        assert links[: len(deeper)] == [w.replace('../', '').removesuffix('.ipynb') for w in wanted]
        assert (f'<summary>Deeper: {len(deeper)} pages' in foot) == (len(deeper) > tool.MANY), step


def test_the_path_says_how_long_it_takes():
    text = '\n'.join(tool.source(c) for c in tool.read(COURSE.nbs / 'index.ipynb')['cells'])
    minutes = list(map(int, re.findall(r'\((\d+)\xa0min\)', text)))
    assert len(minutes) == len(COURSE.spine)
    lessons = minutes[: COURSE.num_steps + 1]
    hours, rest = re.search(r'takes about (\d) hours(?: and (\d+) minutes)?;', text).groups()
    assert abs(60 * int(hours) + int(rest or 0) - sum(lessons)) <= 5 + len(lessons) / 2
