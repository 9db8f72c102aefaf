"""The site: every notebook as a page, in reading order, readable with all outside requests blocked.

    python tools/build_docs.py [--out _site]

Pages show the stored outputs and the exported code; nothing is run. Parts and order come from
nbs/course.yml. Here the pages are laid out; Sphinx (docs/conf.py) renders them with myst-nb, and
the API with autodoc. Labs and Plays are alive; other widgets need a kernel, and a line says how to
get one. With Quarto installed `nbdev-docs` builds nbdev's own site.
"""

import argparse
import ast
import itertools
import json
import os
import re
import shutil
import sys
import tomllib
from html import escape, unescape
from pathlib import Path

import nbformat
import yaml
from alt import alt, directives
from lesson_table import defined
from search_index import search_index
from toc import SPINE, Course, name_of, read

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from course.lesson import lab_source  # noqa: E402

MAP = {  # label of a box -> its page
    stage['label']: stage['of'][0]
    for stage in yaml.safe_load((ROOT / 'nbs' / 'course.yml').read_text())['map'].values()
}

REPOSITORY = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['urls']['Repository']
VIEW = 'application/vnd.jupyter.widget-view+json'
NO_KERNEL = (
    '<div class="no-kernel">This form needs a running notebook: <code>make lab</code>.</div>'
)
TAGS = {
    ('code-fold', 'true'): 'hide-input',
    ('echo', 'false'): 'remove-input',
    ('output', 'false'): 'remove-output',
    ('output-fold', 'true'): 'hide-output',
}
PLAYER = {
    'minus': '−',
    'fast-backward': '⏮',
    'step-backward': '⏪',
    'play': '▶',
    'fa-flip-horizontal': '◀',
    'pause': '⏸',
    'step-forward': '⏩',
    'fast-forward': '⏭',
    'plus': '+',
}
# an option of a Predict, and whether it is right
ANSWER = r'<details>(<summary>(?:(?!</summary>).)*</summary><b>(Yes|No)\.</b>)'
TEXTS = ('CONTRIBUTING.md', 'CHANGELOG.md')  # files next to the notebooks that become pages


def title(nb):
    return next((m[1] for c in nb.cells if (m := re.match(r'#\s+(.+)', c.source))), 'CompassRL')


def exported(tree):
    "What `__all__` lists"
    for n in tree.body:
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == '__all__':
            return ast.literal_eval(n.value)
    return []


def symbols(package=ROOT / 'compassrl'):
    "Page of a module -> its public names, from the generated files"
    found = {}
    for path in sorted(package.rglob('*.py')):
        page = path.relative_to(package).with_suffix('').as_posix().removesuffix('/__init__')
        if names := exported(ast.parse(path.read_text())):
            found[page] = names
    return found


def home(name, here, names):
    "The page that defines a name; '' where none does or several might be meant"
    *above, last = name.removesuffix('()').split('.')
    pages = [page for page, own in names.items() if last in own]
    if above:
        said = [p for p in pages if p.endswith('/'.join(above))]
        pages = said or pages
    if here in pages:
        return here
    beside = [p for p in pages if p.rpartition('/')[0] == here.rpartition('/')[0]]
    pages = beside or pages
    return pages[0] if len(pages) == 1 else ''


def relative(to, here):
    "A page's address seen from another page"
    return os.path.relpath(f'{to}.html', Path(here).parent)


def page_link(target, here, folder):
    "The address on the site of a link in a notebook; None if it is no page"
    path, _, anchor = target.partition('#')
    anchor = f'#{anchor.lower()}' if anchor else ''
    if not path or re.match(r'\w+:', path) or path.endswith('.png'):  # a picture goes along
        return None
    to = Path(os.path.normpath(Path(folder) / path))
    if to.suffix == '.ipynb':
        return relative(name_of(to), here) + anchor
    if to.name in TEXTS and to.parts[0] == '..':
        return relative(to.stem.lower(), here) + anchor
    return f'{REPOSITORY}/blob/main/{to.as_posix().removeprefix("../")}'


def linked(text, folder):
    "The pages of the notebooks that a text links to"
    targets = re.findall(r'\]\(([^)\s:#]+\.ipynb)', text)
    return {name_of(Path(os.path.normpath(Path(folder) / t))) for t in targets}


def link_text(text, here, folder, names, pages):
    """Links to notebooks lead to their pages, `names` in backticks to the code that defines them

    A bare lower-case word may be anything, an option or a folder: it is a name only where the text
    also links to the page that defines it."""
    said = linked(text, folder)

    def moved(m):
        to = page_link(m[1], here, folder)
        return m[0] if to is None else f']({to})'

    def code(m):
        to = home(m[1], here, names)
        if to not in pages or to == here:
            return m[0]
        if not re.search(r'[._A-Z]|\(\)$', m[1]) and to not in said:
            return m[0]
        last = m[1].removesuffix('()').split('.')[-1]
        return f'[{m[0]}]({relative(to, here)}#{last})'

    parts = re.split(r'(```.*?```)', text, flags=re.S)
    moved_parts = [
        p if i % 2 else re.sub(r'\]\(([^)\s]+)\)', moved, p) for i, p in enumerate(parts)
    ]
    kept = r'(```.*?```|\[[^\]]*\]\([^)]*\)|^#.*$)'
    parts = re.split(kept, ''.join(moved_parts), flags=re.S | re.M)
    return ''.join(
        p if i % 2 else re.sub(r'(?<!`)`(\w[\w.]*(?:\(\))?)`(?!`)', code, p)
        for i, p in enumerate(parts)
    )


def html_links(html, here, folder, names):
    "HTML that a cell wrote: links to notebooks lead to their pages, dotted names to their code"

    def moved(m):
        return f'href="{page_link(m[1], here, folder)}"'

    def code(m):
        to = home(m[1], here, names)
        return f'<a href="{relative(to, here)}#{m[1].split(".")[-1]}">{m[0]}</a>' if to else m[0]

    html = re.sub(r'href="([^"#:]+\.ipynb(?:#[^"]*)?)"', moved, html)
    return re.sub(r'<code>(\w+(?:\.\w+)+)</code>', code, html)


def offline(html, shows):
    "matplotlib's animation player without its icon font; pictures say what they show"
    html = re.sub(r'<img(?![^>]*\balt=)', f'<img alt="{escape(shows)}"', html)
    html = re.sub(r'<link[^>]*font-awesome[^>]*>', '', html)

    def symbol(m):
        return PLAYER.get((m[2] or '').strip() or m[1], m[1])

    return re.sub(r'<i class="fa fa-([\w-]+)( fa-flip-horizontal)?"></i>', symbol, html)


def alive(html):
    "The code of a lab or a Play next to its box. It imports nothing: a page also works from a disk"
    found = re.search(r'<div class="lab" data-lab="(\w+)"', html)
    if not found:
        return html
    boxes = f'document.querySelectorAll(\'[data-lab="{found[1]}"]\')'
    start = f'for (const el of {boxes}) render({{ el }})'
    return f'{html}<script type="module">\n{lab_source(found[1])}\n{start}\n</script>'


def anchors(source, here, names):
    "Link targets for what an exported cell defines"
    own = names.get(here, ())
    return [f'<a id="{n}"></a>' for n in dict.fromkeys(defined(source)) if n in own]


def pictured(cell):
    "Whether a cell's outputs may hold a picture"
    kinds = {kind for o in cell.get('outputs', ()) for kind in o.get('data', {})}
    return any(kind == 'text/html' or kind.startswith('image/') for kind in kinds)


VERDICTS = {
    'good': 'holds here',
    'bad': 'the reverse here|not reached here',
    'open': 'not seen here|cannot tell',
    'none': 'by construction|not measured yet|not testable on a CPU',
}


SIGNS = {'not seen here': '≈', 'cannot tell': '?'}  # `open` has two looks: nbs/styles.css


def coloured(text):
    "The verdicts of the scoreboard in their colours, with their signs"

    def chip(look, word):
        sign = f' data-sign="{SIGNS[word]}"' if word in SIGNS else ''
        return f'<b class="verdict {look}"{sign}>{word}</b>'

    for look, words in VERDICTS.items():
        text = re.sub(rf'\*\*({words})\*\*', lambda m, look=look: chip(look, m[1]), text)
    return text


QUESTION = 'The code of the question'  # no fold: it holds the answer


def title_of(cell):
    "What stands on the fold of a cell that does not say it itself"
    source = cell.source
    if source.startswith('# Solution'):
        return 'Solution'
    if re.search(r'^predict\(', source, re.M):
        return QUESTION
    if any(k.startswith('image/') for o in cell.outputs for k in o.get('data', {})):
        return 'The code of the figure'
    names = list(dict.fromkeys(re.findall(r'^(?:def|class) (?!_)(\w+)', source, re.M)))
    laws = [n.removeprefix('law_').replace('_', ' ') for n in names if n.startswith('law_')]
    if laws:
        return f'Laws: {", ".join(laws)}'
    if names and not all(n.startswith('check_') for n in names):
        return f'Code: {", ".join(names[:4])}{", …" * (len(names) > 4)}'
    if cell.outputs:
        return 'The code of this output'
    return 'The check' if re.search(r'^ *(assert|test_\w+\()', source, re.M) else 'Show the code'


def others(source):
    "The lines of a cell that import nothing"
    imports = re.compile(r'(import|from) |sys\.path|if TYPE_CHECKING:|\s|$|\)')
    return [line for line in source.splitlines() if not imports.match(line)]


def sets_up(source):
    "Whether a cell imports, and does little more"
    return len(others(source)) <= 3 and len(re.findall(r'^(?:import|from) ', source, re.M)) > 4


DRAWS = re.compile(r'(pipeline|playground|lab|verdicts|show_settings|drawings\.\w+|machines\.\w+)$')


def only_draws(source):
    "Whether a cell does nothing but show: a map, a drawing, a Play, settings, verdicts"
    try:
        body = ast.parse(source).body
    except SyntaxError:  # a magic of IPython
        return False
    calls = [n.value for n in body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    return len(calls) == len(body) > 0 and all(DRAWS.match(ast.unparse(c.func)) for c in calls)


def shown_again(cell, below):
    "Whether the Play below begins with what the last line of a cell shows: a page needs it once"
    if not cell.cell_type == below.cell_type == 'code':
        return False
    drawn = re.search(r'^playground\(\s*(?:lambda[^:]*: *)?(\w+)', below.source, re.M)
    last = (cell.source.strip().splitlines() or [''])[-1]
    return bool(drawn and re.search(rf'\b{drawn[1]}\(\)', last))


def the_map(svg, says, here):
    """The map in the page itself, each box a link to its page

    It knows where its orange box is, from 0 at the left to 1 at the right."""
    marked = re.search(r'<rect x="([\d.]+)"[^>]*fill="#c2410c"', svg)
    width = re.search(r'viewBox="0 0 ([\d.]+)', svg)
    at = f' data-at="{float(marked[1]) / float(width[1]):.2f}"' if marked and width else ''

    def linked_box(m):
        to = MAP[unescape(m[2])]
        return m[1] if to == here else f'<a href="{relative(to, here)}">{m[1]}</a>'

    svg = re.sub(
        r'(<rect [^>]*/>(?:<text [^>]*/>|<text [^>]*>[^<]*</text>)<text [^>]*>([^<]+)</text>)',
        linked_box,
        svg,
    )
    return svg.replace(
        '<svg ', f'<svg class="map" role="group" aria-label="{escape(says)}"{at} ', 1
    )


def no_pictures(outputs):
    return [o for o in outputs if not any(k.startswith('image/') for k in o.get('data', ()))]


def prepare(nb, here, folder, names, pages):
    "A notebook as myst-nb shows it: directives become tags, exported names become link targets"
    nb.metadata.pop('widgets', None)
    pairs = enumerate(itertools.pairwise(nb.cells))
    twins = {i for i, (c, below) in pairs if shown_again(c, below)}
    cells, imports, later = [], [], []  # later: the code of a Play, which stands below it
    shows = [alt(nb.cells, i) if pictured(c) else '' for i, c in enumerate(nb.cells)]
    for i, c in enumerate(nb.cells):
        if c.cell_type == 'markdown':
            c.source = coloured(link_text(c.source, here, folder, names, pages))
        if c.cell_type == 'code':
            opts, c.source = directives(c.source)
            if not c.source or 'hide' in opts or opts.get('include') == 'false':
                continue
            tags = {tag for key, tag in TAGS.items() if opts.get(key[0]) == key[1]}
            if tags >= (both := {'hide-input', 'hide-output'}):
                tags = tags - both | {'hide-cell'}  # one fold, not two of one name
            if tags == {'hide-input'} and c.source.startswith('# Solution'):
                tags = {'hide-cell'}  # what it prints would tell
            if only_draws(c.source) or title_of(c) == QUESTION:
                tags = tags - {'hide-input'} | {'remove-input'}
            if not tags and not c.outputs and sets_up(c.source):
                tags, opts = {'hide-input'}, {'code-summary': 'Imports'} | opts
            title = 'Show the output' if tags == {'hide-output'} else title_of(c)
            prompt = opts.get('code-summary', '').strip('"\'') or title
            if not others(c.source):
                if opts.get('echo') != 'false':
                    imports.append(c.source)
                continue
            if i in twins:
                c.outputs = no_pictures(c.outputs)
            look = dict(code_prompt_show=prompt, code_prompt_hide=prompt, image=dict(alt=shows[i]))
            c.metadata.update(tags=sorted(tags), mystnb=look)
            for o in c.outputs:
                if VIEW in o.get('data', {}):
                    o.data = {'text/html': NO_KERNEL}
                svg = o.get('data', {}).get('image/svg+xml', '')
                if shows[i].startswith('Map of the series') and svg:
                    o.data = {'text/html': the_map(svg, shows[i], here)}
                if 'class="drawing"' in svg:  # in the page itself its style sheet reaches it
                    o.data = {'text/html': svg}
                if 'text/markdown' in o.get('data', {}):
                    text = o.data['text/markdown']
                    text = link_text(text, here, folder, names, pages)
                    o.data['text/markdown'] = coloured(text)
                said = o.get('data', {}).get('text/plain', '')
                if re.match(r'^check_', c.source.splitlines()[-1]) and said[:1] in ('"', "'"):
                    o.data['text/plain'] = ast.literal_eval(said)  # a sentence, not its repr
                if 'text/html' in o.get('data', {}):
                    html = html_links(o.data['text/html'], here, folder, names)
                    html = re.sub(ANSWER, lambda m: f'<details class="{m[2].lower()}">{m[1]}', html)
                    o.data['text/html'] = alive(offline(html, shows[i]))
            if 'export' in opts and (targets := anchors(c.source, here, names)):
                cells.append(nbformat.v4.new_markdown_cell(''.join(targets)))
        if i in twins and not c.outputs:
            later.append(c)
            continue
        cells += [c, *later]
        later.clear()
    if imports:
        look = dict(code_prompt_show='Imports', code_prompt_hide='Imports')
        last = nbformat.v4.new_code_cell('\n\n'.join(imports))
        last.metadata.update(tags=['hide-input'], mystnb=look)
        cells.insert(len(cells) - 1, last)
    nb.cells = cells
    return nb


def copies(path):
    "A line with links to the notebook of a page, and to where it can be run without installing"
    owner = REPOSITORY.removeprefix('https://github.com/')
    file = f'blob/main/nbs/{path.as_posix()}'
    return (
        f'[Notebook]({REPOSITORY}/{file}) · '
        f'[Colab](https://colab.research.google.com/github/{owner}/{file}) ([not tried yet](%s))'
    )


def with_words(text, here, words):
    "A term in italics says what it means, and leads to its row of the page of words"

    def moved(m):
        to, means = words.get(m[1].lower(), ('', ''))
        return f'[*{m[1]}*]({relative("words", here)}#{to} "{means}")' if to else m[0]

    return re.sub(r'(?<![*\w\[])\*([A-Za-z][\w -]+)\*(?![*\w\]])', moved, text)


def next_card(text):
    "The line that leads on, as a card"
    return re.sub(
        r'^(?:Next:|\*\*Next:\*\*) .*$', r'<div class="next">\n\n\g<0>\n\n</div>', text, flags=re.M
    )


def hero(nb):
    "The lab of the front page plays once by itself"
    for o in (o for c in nb.cells for o in c.get('outputs', ())):
        html = o.get('data', {}).get('text/html', '')
        if 'data-lab="grpo"' in html:
            o.data['text/html'] = html.replace('"grpo"><', '"grpo" data-plays="once"><', 1)


def known_words(course):
    "Each word of the page of words, and its plural: its anchor, and what it means"
    page = (course.nbs / 'words.ipynb').read_text()
    row = r'id=\\"(word-[^"\\]+)\\"><td><b>([^<]+)</b>.*?</td><td>(.*?)</td>'
    found = {}
    for anchor, word, means in re.findall(row, page):
        plain = unescape(re.sub(r'<[^>]*>', '', means)).replace('"', "'").replace('\\', '')
        found |= {form: (anchor, plain) for form in (word.lower(), f'{word.lower()}s')}
    return found


def list_of_pages(course, titles):
    "The sidebar: groups of pages; docs/conf.py marks the page that one is on"

    def entry(name):  # a step by the first words of its title
        title = titles[name].split(':')[0] if name in course.spine else titles[name]
        return dict(name=name, text=f'{course.number(name)} {title}'.strip())

    def hanging(name):
        found = (p.notebooks for p in course.parts if p.step == course.step(name))
        return [entry(n) for n in next(found, [])]

    rest = dict(api='API', genindex='Index of names', contributing='Contributing')
    more = [dict(name=n, text=t) for n, t in dict(rest, changelog='Changelog').items()]
    spine = [entry(n) | dict(below=hanging(n)) for n in course.spine]
    parts = [p for p in course.parts if p.step is None and not {*p.notebooks} & {*course.spine}]
    return [
        dict(name=SPINE, entries=spine, folded=False),
        *(dict(name=p.name, entries=[*map(entry, p.notebooks)], folded=True) for p in parts),
        dict(name='More', entries=more, folded=True),
    ]


def write_pages(course, names, work):
    "Notebooks and texts as Sphinx reads them"
    paths = {**course.paths, 'index': Path('index.ipynb')}
    pages, titles, words = set(paths), {}, known_words(course)
    for name, path in paths.items():
        nb = nbformat.read(course.nbs / path, 4)
        titles[name] = title(nb)
        nb = prepare(nb, name, path.parent, names, pages)
        for c in nb.cells[1:]:
            if c.cell_type == 'markdown' and name != 'words':
                c.source = next_card(with_words(c.source, name, words))
        if name == 'index':
            hero(nb)
        else:
            start = relative('lesson', name) + '#in-a-browser-without-installing'
            # Title, what it is about, what it needs, and then the links
            *head, text = [*nb.cells[0].source.split('\n\n', 3), ''][:4]
            nb.cells[0].source = '\n\n'.join([*head, copies(path) % start, text])
        if name == 'index':
            front = nb
            continue
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nb, work / f'{name}.ipynb')
    nbs = {n: read(course.nbs / p) for n, p in paths.items()}
    (work / 'search_data.js').write_text(search_index(course, nbs, titles, names))
    (work / 'pages.json').write_text(json.dumps(list_of_pages(course, titles)))
    every = [n for n in titles if n != 'index']
    every += ['api', 'genindex', *(Path(f).stem.lower() for f in TEXTS)]
    tree = ['```{toctree}', ':hidden:', '', *every, '```']
    front.cells.append(nbformat.v4.new_markdown_cell('\n'.join(tree)))
    nbformat.write(front, work / 'index.ipynb')
    for picture in course.nbs.rglob('*.png'):
        shutil.copy2(picture, work / picture.relative_to(course.nbs))
    for file in TEXTS:
        text = link_text((ROOT / file).read_text(), Path(file).stem.lower(), '..', names, pages)
        (work / file.lower()).write_text(text)
    shutil.copy2(ROOT / 'docs' / 'api.md', work)


def build(out):
    from sphinx.cmd.build import build_main

    course = Course(ROOT)
    if faults := list(course.problems()):
        sys.exit('\n'.join(faults))
    work = ROOT / '_proc' / f'sphinx-{os.getpid()}'  # two may be built at a time
    work.mkdir(parents=True)
    write_pages(course, symbols(), work)
    shutil.rmtree(out, ignore_errors=True)
    strict = '-q', '-W', '--keep-going'
    code = build_main([*strict, '-b', 'html', '-c', str(ROOT / 'docs'), str(work), str(out)])
    shutil.move(work / 'search_data.js', out / '_static')
    shutil.rmtree(work)
    shutil.rmtree(out / '.doctrees')
    print(f'{len(list(out.rglob("*.html")))} pages in {out}: open {out}/index.html')
    return code


if __name__ == '__main__':
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--out', type=Path, default=ROOT / '_site')
    sys.exit(build(p.parse_args().out))
