"""Sphinx's settings. `make docs` lays out the pages and calls Sphinx: tools/build_docs.py.

SITE_URL, an address that ends in a slash, makes the cards of shared links absolute.
"""

import functools
import gc
import html
import inspect
import json
import os
import re
import sys
import tomllib
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

from fastcore.docments import docments
from sphinx.domains.python import PythonDomain

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
sys.path.insert(0, str(ROOT))
# jsonschema would build a grammar, for a second, to check addresses that no schema here has
sys.modules.setdefault('rfc3987_syntax', None)

project = 'CompassRL'
html_title = 'CompassRL: learn GRPO and build the trainer'
author = copyright = PROJECT['authors'][0]['name']
extensions = [
    'myst_nb',
    'sphinx.ext.autodoc',
    'sphinx.ext.autosummary',
    'sphinx_copybutton',
    'sphinxext.opengraph',
]
templates_path = [str(ROOT / 'docs' / '_templates')]  # the pages are laid out elsewhere

# notebooks as they are stored: nothing is run
nb_render_markdown_format = 'myst'  # tables too, not CommonMark alone
nb_execution_mode, nb_merge_streams, nb_ipywidgets_js = 'off', True, {}
myst_enable_extensions, myst_heading_anchors = ['dollarmath', 'amsmath'], 3
myst_all_links_external = True  # addresses are made by tools/build_docs.py, and a test follows them
# the last one: two classes of one name in an annotation are two links, or none
suppress_warnings = ['myst.header', 'mystnb.unknown_mime_type', 'ref.python']

# looks; nothing is fetched from elsewhere
mathjax = 'sphinx-mathjax-offline/static/mathjax/tex-svg.js'
mathjax = Path(distribution('sphinx-mathjax-offline').locate_file(mathjax))
mathjax_path = mathjax.name
mathjax3_config = {'svg': {'scale': 0.9}}  # as large as the letters around it
html_theme = 'pydata_sphinx_theme'
html_static_path = ['_static', '../nbs/styles.css', str(mathjax)]
html_additional_pages = {'search': 'search.html'}  # its index: tools/search_index.py
html_css_files, html_favicon = ['fonts.css', 'styles.css'], '_static/favicon.svg'
html_sidebars = {'**': ['notebooks.html']}
html_show_sourcelink = html_copy_source = html_domain_indices = False
html_context = dict(default_mode='auto')
html_theme_options = dict(
    navbar_center=[],
    navbar_align='left',
    logo=dict(
        text='CompassRL', image_light='_static/favicon.svg', image_dark='_static/favicon.svg'
    ),
    secondary_sidebar_items=['page-toc'],
    show_toc_level=1,  # the section that one reads opens its own list
    search_bar_text='Search the course',
    footer_start=['copyright'],
    footer_end=[],
    article_footer_items=[],
    show_prev_next=False,
    pygments_light_style='a11y-high-contrast-light',
    pygments_dark_style='github-dark',
    icon_links=[dict(name='GitHub', url=PROJECT['urls']['Repository'], icon='fa-brands fa-github')],
)
copybutton_exclude = '.linenos, .gp, .go'

# cards of shared links
ogp_site_url = os.environ.get('SITE_URL', '')
ogp_site_name, ogp_image = 'CompassRL', '_static/card.png'
ogp_image_alt = 'CompassRL: reinforcement learning for mixture-of-experts language models'
ogp_social_cards, ogp_enable_meta_description = dict(enable=False), True

# the API, from the code
default_role = 'code'  # docstrings are plain text with `names`
autosummary_ignore_module_all = False
autodoc_default_options = {'members': True, 'undoc-members': True, 'no-value': True}
autodoc_member_order, autodoc_preserve_defaults = 'bysource', True
autodoc_typehints_format, python_maximum_signature_line_length = 'short', 80
toc_object_entries_show_parents = 'hide'
autodoc_use_type_comments = False  # there are none, and each object would be parsed for them
autodoc_mock_imports = [m for m in ('vllm', 'megatron', 'transformers') if not find_spec(m)]


def plain(text):
    "Text with `names` and [links](to) as reStructuredText"
    text = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', text)
    parts = text.split('`')
    parts[::2] = [re.sub(r'([\\*|]|_(?=\W|$))', r'\\\1', p) for p in parts[::2]]
    return '`'.join(parts)


def described(what, obj):
    "What the comments beside parameters and results say"
    if what not in ('function', 'method', 'class'):
        return
    try:
        found = docments(obj, full=True, returns=what != 'class')
    except (TypeError, ValueError, OSError, SyntaxError):
        return
    for name, p in found.items():
        if p.docment and name != 'self':
            field = 'returns' if name == 'return' else f'param {name}'
            yield f':{field}: {plain(" ".join(p.docment.split()))}'


def docstring(app, what, name, obj, options, lines):
    "Docstrings with the comments beside parameters, modules with the notebook that explains them"
    of_type = what == 'data' and '\n'.join(lines).split() == (inspect.getdoc(obj) or '').split()
    if of_type or what == 'class' and lines and lines[0].startswith(f'{obj.__name__}('):
        lines.clear()  # what Python says of the type, of a dataclass its signature
    lines[:] = [plain(line) for line in lines]
    more = list(described(what, obj))
    page = name.removeprefix('compassrl.').replace('.', '/')
    if what == 'module' and page in app.env.found_docs:
        more = [f'Explained in :doc:`/{page}`.']
    if more:
        lines += ['', *more, '']


def signature(app, what, name, obj, options, args, result):
    "Settings carry their ranges in their types, as an object of tyro: the type is enough"
    found = r'Annotated\[([\w .|]+(?:\[[^\]]*\])?(?: \| \w+)*), .*?NONPROP\)\]'
    return args and re.sub(found, r'\1', args), result


def skip(app, what, name, obj, skip, options):
    "Fields of a class are parameters of its signature already"
    return what == 'class' and not (inspect.isroutine(obj) or isinstance(obj, property)) or None


class Python(PythonDomain):
    "Of a type in a signature that is none of ours, the list of all names is not searched"

    @functools.cached_property
    def ends(self):
        return {name.rpartition('.')[2] for name in self.objects}

    def find_obj(self, env, modname, classname, name, type, searchmode=0):
        if name.removesuffix('()').rpartition('.')[2] not in self.ends:
            return []
        return super().find_obj(env, modname, classname, name, type, searchmode)


def list_of_pages(app, pagename, templatename, context, doctree):
    "The list of pages: the spine with what hangs below this step, all else folded"
    groups = json.loads((Path(app.srcdir) / 'pages.json').read_text())

    def item(entry):
        name, text = entry['name'], html.escape(entry['text'])
        here = name == pagename
        below = entry.get('below', [])
        inside = here or any(e['name'] == pagename for e in below)
        more = f'<ul>{"".join(map(item, below))}</ul>' if inside and below else ''
        to = '#' if here else app.builder.get_relative_uri(pagename, name)
        mark = ' class="current"' * here
        return f'<li{mark}><a href="{to}"{mark}>{text}</a>{more}</li>'

    def group(name, entries, folded):
        inner = f'<ul>{"".join(map(item, entries))}</ul>'
        if not folded:
            return f'<p class="caption">{name}</p>{inner}'
        is_open = ' open' * any(e['name'] == pagename for e in entries)
        return f'<details{is_open}><summary>{name}</summary>{inner}</details>'

    context['notebooks'] = lambda: ''.join(group(**g) for g in groups)


def no_index(app):
    "Sphinx's own index of all words is not made"
    app.builder.search = False


def setup(app):
    app.connect('builder-inited', no_index)
    gc.disable()  # most of what is made, nodes of pages, stays
    inspect.getsourcelines = functools.cache(
        inspect.getsourcelines
    )  # asked six times of a function
    app.add_domain(Python, override=True)
    app.connect('html-page-context', list_of_pages, priority=1)
    app.connect('autodoc-process-docstring', docstring)
    app.connect('autodoc-process-signature', signature)
    app.connect('autodoc-skip-member', skip)
