"""Edit notebooks as text, safely, from a terminal.

    python tools/nb.py open rollout/torch_rollout   # -> nbs_py/rollout/torch_rollout.py
    python tools/nb.py save rollout/torch_rollout   # text -> notebook, cleaned and exported
    python tools/nb.py new judges/oracle           # an empty notebook, opened as text
    python tools/nb.py sync                           # all that is generated

`save` keeps the outputs of unchanged cells, and refuses when the notebook changed since it was
opened. The text stays open for the next edit; git ignores it. Fresh outputs are stored by
tools/execute_nbs.py. `sync` writes modules, what follows from nbs/course.yml, and README.
"""

import hashlib
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import nbdev.maker
import nbformat
import readme
import toc
from nbdev.clean import nbdev_clean
from nbdev.config import get_config
from nbdev.doclinks import nbdev_export
from nbdev.quarto import refresh_quarto_yml

cfg = get_config()
# a module has the imports of its notebook, absolute and sorted
nbdev.maker._import2relative = lambda cells, lib_path=None: None
NBS, TEXT = cfg.nbs_path, cfg.config_path / 'nbs_py'


def paths(name):
    "Notebook, its text, and the file that remembers the notebook's hash"
    name = Path(name).with_suffix('')
    return NBS / f'{name}.ipynb', TEXT / f'{name}.py', TEXT / name.parent / f'.{name.name}.sha'


def module(nb):
    "The module of a notebook: its folder and its name"
    return '.'.join(nb.relative_to(NBS).with_suffix('').parts)


def cells_hash(nb):
    "Hash of the sources alone, so that storing outputs does not count as a change"
    src = '\0'.join(f'{c.cell_type}:{c.source}' for c in nbformat.read(nb, 4).cells)
    return hashlib.sha256(src.encode()).hexdigest()


def jupytext(*args):
    subprocess.run([sys.executable, '-m', 'jupytext', '--quiet', *map(str, args)], check=True)


def ruff(*args):
    subprocess.run([sys.executable, '-m', 'ruff', '--quiet', *map(str, args)], check=True)


def wrap_docstring(module):
    "A notebook's promise is its module's docstring: in lines that are not too long"
    first, *rest = module.read_text().splitlines(keepends=True)
    if first.startswith('"""') and len(first.rstrip()) > 100:
        module.write_text('\n'.join(textwrap.wrap(first, 100)) + '\n' + ''.join(rest))


def wrap_all(module):
    "`__all__` as a paragraph: one name a line, as ruff writes it, makes a page of some modules"
    text = module.read_text()
    if found := re.search(r'^__all__ = \[(\n.*?),\n\]$', text, re.DOTALL | re.MULTILINE):
        names = textwrap.fill(' '.join(found[1].split()), 95).replace('\n', '\n    ')
        names = f'__all__ = [\n    {names},\n]  # fmt: skip'
        module.write_text(text[: found.start()] + names + text[found.end() :])


def export():
    "Modules, their index, and nbdev's settings of the site"
    nbdev_export.__wrapped__()
    for module in cfg.lib_path.rglob('[!_]*.py'):
        wrap_docstring(module)
    ruff('format', cfg.lib_path)
    for module in cfg.lib_path.rglob('*.py'):
        wrap_all(module)
    refresh_quarto_yml()
    site = NBS / 'nbdev.yml'  # the site has no address
    site.write_text(''.join(x for x in site.open() if 'site-url' not in x))


def sync():
    "All that is generated; a second time changes nothing"
    faults = toc.sync_text(cfg.config_path)
    export()
    toc.sync_maps(cfg.config_path)
    nbdev_clean.__wrapped__()
    readme.main([])
    if faults:
        sys.exit('\n'.join(faults))


def open_(name):
    nb, py, sha = paths(name)
    if py.exists() and sha.exists() and '--force' not in sys.argv:
        sys.exit(f'{py} is open already: save it, or --force to rewrite it')
    py.parent.mkdir(parents=True, exist_ok=True)
    jupytext('--to', 'py:percent', '--output', py, nb)
    sha.write_text(cells_hash(nb))
    print(py)


def save(name):
    nb, py, sha = paths(name)
    if not py.exists():
        sys.exit(f'{py} does not exist: open the notebook first')
    if not sha.exists() or sha.read_text() != cells_hash(nb):
        sys.exit(f'{nb} changed since {py} was opened: merge by hand, then open --force')
    jupytext('--update', '--to', 'ipynb', '--output', nb, py)
    nbdev_clean.__wrapped__(fname=str(nb))
    export()
    sha.write_text(cells_hash(nb))
    print(nb)


def new(name):
    nb, _, _ = paths(name)
    if nb.exists():
        sys.exit(f'{nb} exists')
    first = [
        nbformat.v4.new_markdown_cell(f'# {nb.stem}\n\n> One line about it.'),
        nbformat.v4.new_code_cell(f'#| default_exp {module(nb)}'),
    ]
    kernel = dict(name='python3', display_name='python3', language='python')
    nbformat.write(nbformat.v4.new_notebook(metadata=dict(kernelspec=kernel), cells=first), nb)
    nbdev_clean.__wrapped__(fname=str(nb))
    open_(name)


if __name__ == '__main__':
    if sys.argv[1:] == ['sync']:
        sys.exit(sync())
    if len(sys.argv) < 3 or sys.argv[1] not in ('open', 'save', 'new'):
        sys.exit(__doc__)
    {'open': open_, 'save': save, 'new': new}[sys.argv[1]](sys.argv[2])
