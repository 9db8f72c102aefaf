"""The site: every notebook as a page, in reading order, readable with all outside requests blocked.

    python tools/build_docs.py [--out _site]

Pages show the stored outputs and the exported code; nothing is run. Sphinx and myst-nb render them,
parts and order come from nbs/course.yml, MathJax is copied into the site. Widgets need a kernel: a
line says how to get one. With Quarto installed `nbdev-docs` builds nbdev's own site.
"""

import argparse
import ast
import os
import re
import shutil
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import nbformat
from course import Course, name_of
from readme import directives

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
REPOSITORY, AUTHORS = PROJECT['urls']['Repository'], PROJECT['authors'][0]['name']
VIEW = 'application/vnd.jupyter.widget-view+json'
NO_KERNEL = (
    '<div class="no-kernel">A widget stands here. It recomputes the real function, so it needs a '
    'kernel: <code>make lab</code> opens this notebook in JupyterLab.</div>'
)
TAGS = {
    ('code-fold', 'true'): 'hide-input',
    ('echo', 'false'): 'remove-input',
    ('output', 'false'): 'remove-output',
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
SIDEBAR = (
    '<nav class="bd-links" aria-label="Notebooks">'
    '{{ toctree(maxdepth=1, includehidden=True) }}</nav>'
)
TEXTS = ('CONTRIBUTING.md', 'CHANGELOG.md')  # files beside the notebooks that become pages


def title(nb):
    return next((m[1] for c in nb.cells if (m := re.match(r'#\s+(.+)', c.source))), 'CompassRL')


@dataclass(frozen=True)
class Symbol:
    "A public name of a module, and what is below it"

    module: str  # rollout.torch_engine
    name: str
    doc: str = ''  # first line of its docstring
    methods: tuple = ()  # public ones, patched ones too

    @property
    def page(self):
        return self.module.replace('.', '/')


def first_line(node):
    "Of a docstring, its links as plain words"
    line = (ast.get_docstring(node) or '').split('\n')[0]
    return re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', line)


def public_methods(body):
    return [n.name for n in body if isinstance(n, ast.FunctionDef) and not n.name.startswith('_')]


def patched(body):
    "Class -> methods that `@patch` adds to it"
    found = {}
    for n in body:
        if isinstance(n, ast.FunctionDef) and any(
            'patch' in ast.unparse(d) for d in n.decorator_list
        ):
            of = n.args.args[0].annotation
            found.setdefault(ast.unparse(of) if of else '', []).append(n)
    return found


def exported(tree):
    "What `__all__` lists"
    for n in tree.body:
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == '__all__':
            return ast.literal_eval(n.value)
    return []


def symbols(package=ROOT / 'compassrl'):
    "Every public name of every module, sub-packages too, from the generated files"
    found = []
    for path in sorted(package.rglob('[!_]*.py')):
        tree = ast.parse(path.read_text())
        module = '.'.join(path.relative_to(package).with_suffix('').parts)
        defined = {n.name: n for n in tree.body if hasattr(n, 'name')}
        more = patched(tree.body)
        for name in exported(tree):
            node = defined.get(name)
            doc = first_line(node) if node else ''
            own = public_methods(node.body) if isinstance(node, ast.ClassDef) else []
            own += public_methods(more.get(name, []))
            found.append(Symbol(module, name, doc, tuple(own)))
    return found


def home(name, here, names):
    "The page that defines a name; '' where none does or several might be meant"
    *above, last = name.removesuffix('()').split('.')
    pages = [s.page for s in names if s.name == last]
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
    if not path or re.match(r'\w+:', path):
        return None
    to = Path(os.path.normpath(Path(folder) / path))
    if to.suffix == '.ipynb':
        return relative(name_of(to), here) + anchor
    if to.name in TEXTS and to.parts[0] == '..':
        return relative(to.stem.lower(), here) + anchor
    return f'{REPOSITORY}/blob/main/{to.as_posix().removeprefix("../")}'


def link_text(text, here, folder, names, pages):
    "Links to notebooks lead to their pages, `names` in backticks to the code that defines them"

    def moved(m):
        to = page_link(m[1], here, folder)
        return m[0] if to is None else f']({to})'

    def code(m):
        to = home(m[1], here, names)
        if to not in pages or to == here:
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


def offline(html):
    "matplotlib's animation player without its icon font"
    html = re.sub(r'<link[^>]*font-awesome[^>]*>', '', html)

    def symbol(m):
        return PLAYER.get((m[2] or '').strip() or m[1], m[1])

    return re.sub(r'<i class="fa fa-([\w-]+)( fa-flip-horizontal)?"></i>', symbol, html)


def defined(source):
    "The names that a cell defines at its top level"
    try:
        body = ast.parse(source).body
    except SyntaxError:  # magics and shell lines
        return
    for node in body:
        targets = getattr(node, 'targets', [getattr(node, 'target', None)])
        if hasattr(node, 'name'):
            yield node.name
        for target in filter(None, targets):
            yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))


def anchors(source, here, names):
    "Link targets for what an exported cell defines"
    own = {s.name for s in names if s.page == here}
    return [f'<a id="{n}"></a>' for n in dict.fromkeys(defined(source)) if n in own]


def prepare(nb, here, folder, names, pages):
    "A notebook as myst-nb shows it: directives become tags, exported names become link targets"
    nb.metadata.pop('widgets', None)
    cells = []
    for c in nb.cells:
        if c.cell_type == 'markdown':
            c.source = link_text(c.source, here, folder, names, pages)
        if c.cell_type == 'code':
            opts, c.source = directives(c.source)
            if not c.source or 'hide' in opts or opts.get('include') == 'false':
                continue
            tags = {tag for key, tag in TAGS.items() if opts.get(key[0]) == key[1]}
            prompt = opts.get('code-summary', '').strip('"\'') or 'Show the code'
            if all(re.match(r'(import|from) |\s|$|\)', line) for line in c.source.splitlines()):
                tags.add('hide-input')
                prompt = 'Imports'
            c.metadata.update(
                tags=sorted(tags), mystnb=dict(code_prompt_show=prompt, code_prompt_hide=prompt)
            )
            for o in c.outputs:
                if VIEW in o.get('data', {}):
                    o.data = {'text/html': NO_KERNEL}
                if 'text/html' in o.get('data', {}):
                    o.data['text/html'] = offline(o.data['text/html'])
            if 'export' in opts and (targets := anchors(c.source, here, names)):
                cells.append(nbformat.v4.new_markdown_cell(''.join(targets)))
        cells.append(c)
    nb.cells = cells
    return nb


def api(names, pages):
    "A page that lists every public name of every module"
    rows, module = ['# All functions and classes', ''], ''
    for s in sorted(names, key=lambda s: (s.module.count('.') > 0, s.module, s.name.lower())):
        if s.module != module:
            rows += ['', f'## compassrl.{s.module}', '']
        module = s.module
        name = f'[`{s.name}`]({s.page}.html#{s.name})' if s.page in pages else f'`{s.name}`'
        methods = ', '.join(f'`{m}`' for m in s.methods)
        rows.append(f'- {name}: {s.doc}' + f' Methods: {methods}.' * bool(methods))
    return '\n'.join(rows) + '\n'


def config():
    "Sphinx's conf.py"
    return f"""
project, author, copyright = 'CompassRL', {AUTHORS!r}, {AUTHORS!r}
extensions = ['myst_nb']
html_theme, html_title, pygments_style = 'pydata_sphinx_theme', 'CompassRL', 'tango'
html_static_path, html_css_files, templates_path = ['_static'], ['styles.css'], ['_templates']
html_sidebars, html_show_sourcelink, html_copy_source = {{'**': ['notebooks.html']}}, False, False
html_theme_options = dict(
    navbar_center=[], navbar_align='left', secondary_sidebar_items=['page-toc'], show_toc_level=1,
    footer_start=['copyright'], footer_end=[], article_footer_items=[], show_prev_next=False,
    icon_links=[dict(name='GitHub', url={REPOSITORY!r}, icon='fa-brands fa-github')])
nb_execution_mode, nb_ipywidgets_js, nb_merge_streams = 'off', {{}}, True
myst_all_links_external = True  # addresses are made here, and a test follows them
myst_enable_extensions, myst_heading_anchors = ['dollarmath', 'amsmath'], 3
mathjax_path, html_context = 'mathjax.js', dict(default_mode='auto')
suppress_warnings = ['myst.header', 'myst.xref_missing', 'mystnb.unknown_mime_type']
"""


def toctrees(course, titles):
    "One list of pages per part, for the sidebar"

    def tree(caption, entries):
        lines = ['```{toctree}', ':hidden:', f':caption: {caption}', '', *entries, '```']
        return '\n'.join(lines)

    def entry(name):
        text = f'{course.number(name)} {titles[name]}'.strip().replace('<', '')
        return f'{text} <{name}>'

    trees = [tree(p.name, map(entry, p.notebooks)) for p in course.parts]
    rest = [
        'All functions and classes <api>',
        *(f'{Path(f).stem.title()} <{Path(f).stem.lower()}>' for f in TEXTS),
    ]
    return '\n\n'.join([*trees, tree('More', rest)])


def write_pages(course, names, work):
    "Notebooks and texts as Sphinx reads them"
    paths = {**course.paths, 'index': Path('index.ipynb')}
    pages, titles = set(paths), {}
    for name, path in paths.items():
        nb = nbformat.read(course.nbs / path, 4)
        titles[name] = title(nb)
        nb = prepare(nb, name, path.parent, names, pages)
        if name == 'index':
            front = nb
            continue
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nb, work / f'{name}.ipynb')
    front.cells.append(nbformat.v4.new_markdown_cell(toctrees(course, titles)))
    nbformat.write(front, work / 'index.ipynb')
    for file in TEXTS:
        text = link_text((ROOT / file).read_text(), Path(file).stem.lower(), '..', names, pages)
        (work / file.lower()).write_text(text)
    (work / 'api.md').write_text(api(names, pages))
    return len(paths) + len(TEXTS) + 1


def build(out):
    from sphinx.cmd.build import build_main

    course = Course(ROOT)
    if faults := list(course.problems()):
        sys.exit('\n'.join(faults))
    work = ROOT / '_proc' / f'sphinx-{os.getpid()}'  # two may be built at a time
    for d in ('_static', '_templates'):
        (work / d).mkdir(parents=True)
    pages = write_pages(course, symbols(), work)
    (work / '_templates' / 'notebooks.html').write_text(SIDEBAR)
    shutil.copy2(course.nbs / 'styles.css', work / '_static')
    mathjax = distribution('sphinx-mathjax-offline').locate_file(
        'sphinx-mathjax-offline/static/mathjax/tex-svg.js'
    )
    shutil.copy2(mathjax, work / '_static' / 'mathjax.js')
    (work / 'conf.py').write_text(config())
    shutil.rmtree(out, ignore_errors=True)
    code = build_main(['-q', '-b', 'html', str(work), str(out)])
    shutil.rmtree(work)
    print(f'{pages} pages in {out}: open {out}/index.html')
    return code


if __name__ == '__main__':
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--out', type=Path, default=ROOT / '_site')
    sys.exit(build(p.parse_args().out))
