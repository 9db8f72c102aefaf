"""The site: every notebook as a page, in reading order, readable with all outside requests blocked.

    python tools/build_docs.py [--out _site]

Pages show the stored outputs and the exported code; nothing is run. Sphinx and myst-nb render them; MathJax is copied
into the site; widgets, which need a kernel, become a line that says how to get one. With Quarto installed `nbdev-docs`
builds nbdev's own site from the same notebooks.
"""

import argparse
import ast
import re
import shutil
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import nbformat
from readme import directives
from sphinx.cmd.build import build_main

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / 'nbs'
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
REPOSITORY, AUTHORS = PROJECT['urls']['Repository'], PROJECT['authors'][0]['name']
VIEW = 'application/vnd.jupyter.widget-view+json'
NO_KERNEL = (
    '<div class="no-kernel">A widget stands here. It recomputes the real function, so it needs a kernel: '
    '<code>make lab</code> opens this notebook in JupyterLab.</div>'
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
SIDEBAR = '<nav class="bd-links" aria-label="Notebooks">{{ toctree(maxdepth=1, includehidden=True) }}</nav>'


def page(path):
    return re.sub(r'^\d+_', '', path.stem)


def title(nb):
    return next((m[1] for c in nb.cells if (m := re.match(r'#\s+(.+)', c.source))), 'CompassRL')


def symbols():
    "Exported name -> (page, first line of its docstring), from the generated modules"
    found = {}
    for path in sorted((ROOT / 'compassrl').glob('[!_]*.py')):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith('_'):
                found[node.name] = path.stem, (ast.get_docstring(node) or '').split('\n')[0]
    return found


def link_text(text, here, names, pages):
    "Links to notebooks lead to their pages; `names` in backticks lead to the code that defines them"
    text = re.sub(r'\]\(\.\./([^)\s]+)\)', lambda m: f']({REPOSITORY}/blob/main/{m[1]})', text)
    text = re.sub(
        r'\]\((\d\d_\w+|index)\.ipynb(#[^)]*)?\)',
        lambda m: f']({page(Path(m[1]))}.html{m[2] or ""})',
        text,
    )

    def code(m):
        name = m[1].removesuffix('()').split('.')[-1]
        home = names.get(name, ('',))[0]
        return f'[{m[0]}]({home}.html#{name})' if home in pages and home != here else m[0]

    parts = re.split(r'(```.*?```|\[[^\]]*\]\([^)]*\)|^#.*$)', text, flags=re.S | re.M)
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


def prepare(nb, here, names, pages):
    "A notebook as myst-nb shows it: directives become tags, exported definitions become link targets"
    nb.metadata.pop('widgets', None)
    cells = []
    for c in nb.cells:
        if c.cell_type == 'markdown':
            c.source = link_text(c.source, here, names, pages)
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
            found = (
                re.findall(r'^(?:def|class) (\w+)', c.source, flags=re.M)
                if 'export' in opts
                else []
            )
            defined = [n for n in found if names.get(n, ('',))[0] == here]
            if defined:
                cells.append(
                    nbformat.v4.new_markdown_cell(''.join(f'<a id="{n}"></a>' for n in defined))
                )
        cells.append(c)
    nb.cells = cells
    return nb


def api(names):
    "A page that lists every exported name"
    rows, last = ['# All functions and classes', ''], ''
    for name, (home, doc) in sorted(names.items(), key=lambda kv: (kv[1][0], kv[0].lower())):
        if home != last:
            rows += ['', f'## `compassrl.{home}`', '']
        last = home
        rows.append(f'- [`{name}`]({home}.html#{name}): {doc}')
    return '\n'.join(rows) + '\n'


def config():
    "Sphinx's conf.py"
    return f"""
project, author, copyright = 'CompassRL', {AUTHORS!r}, {AUTHORS!r}
extensions = ['myst_nb']
html_theme, html_title, pygments_style = 'pydata_sphinx_theme', 'CompassRL', 'tango'
html_static_path, html_css_files, templates_path = ['_static'], ['styles.css'], ['_templates']
html_sidebars, html_show_sourcelink, html_copy_source = {{'**': ['notebooks.html']}}, False, False
html_theme_options = dict(navbar_center=[], navbar_align='left', secondary_sidebar_items=['page-toc'], show_toc_level=1,
    footer_start=['copyright'], footer_end=[],
    icon_links=[dict(name='GitHub', url={REPOSITORY!r}, icon='fa-brands fa-github')])
nb_execution_mode, nb_ipywidgets_js, nb_merge_streams = 'off', {{}}, True
myst_enable_extensions, myst_heading_anchors = ['dollarmath', 'amsmath'], 3
mathjax_path, html_context = 'mathjax.js', dict(default_mode='auto')
suppress_warnings = ['myst.header', 'myst.xref_missing', 'mystnb.unknown_mime_type']
"""


def build(out):
    work = ROOT / '_proc' / 'sphinx'
    shutil.rmtree(work, ignore_errors=True)
    for d in ('_static', '_templates'):
        (work / d).mkdir(parents=True)
    paths = sorted(p for p in NBS.glob('*.ipynb') if not p.name.startswith(('.', '_')))
    names, pages, entries = symbols(), {page(p) for p in paths}, []
    for path in paths:
        nb = nbformat.read(path, 4)
        if path.stem != 'index':
            entries.append(f'{path.stem[:2]} · {title(nb).replace("<", "")} <{page(path)}>')
        nbformat.write(prepare(nb, page(path), names, pages), work / f'{page(path)}.ipynb')
    tree = '\n'.join(
        ['```{toctree}', ':hidden:', '', *entries, 'All functions and classes <api>', '```']
    )
    front = nbformat.read(work / 'index.ipynb', 4)
    front.cells.append(nbformat.v4.new_markdown_cell(tree))
    nbformat.write(front, work / 'index.ipynb')
    (work / 'api.md').write_text(api({k: v for k, v in names.items() if v[0] in pages}))
    (work / '_templates' / 'notebooks.html').write_text(SIDEBAR)
    shutil.copy2(NBS / 'styles.css', work / '_static')
    mathjax = distribution('sphinx-mathjax-offline').locate_file(
        'sphinx-mathjax-offline/static/mathjax/tex-svg.js'
    )
    shutil.copy2(mathjax, work / '_static' / 'mathjax.js')
    (work / 'conf.py').write_text(config())
    shutil.rmtree(out, ignore_errors=True)
    code = build_main(['-q', '-b', 'html', str(work), str(out)])
    print(f'{len(paths) + 1} pages in {out}: open {out}/index.html')
    return code


if __name__ == '__main__':
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--out', type=Path, default=ROOT / '_site')
    sys.exit(build(p.parse_args().out))
