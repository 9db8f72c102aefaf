"Every internal link and anchor resolves: in notebooks, README, CONTRIBUTING and the built site"

import ast
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.support import ROOT
from tests.test_notebooks import notebooks

TEXTS = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', ROOT / 'CHANGELOG.md', *notebooks()]


def prose(path):
    "The markdown of a file without its code"
    text = path.read_text()
    if path.suffix == '.ipynb':
        cells = [c for c in json.loads(text)['cells'] if c['cell_type'] == 'markdown']
        text = '\n\n'.join(''.join(c['source']) for c in cells)
    return re.sub(r'^```.*?^```', '', text, flags=re.S | re.M)


def slug(heading):
    "The anchor that GitHub, JupyterLab and the site give a heading"
    plain = re.sub(r'`|\*\*|\]\([^)]*\)|\[', '', heading).strip().lower()
    return re.sub(r'[^\w\- ]', '', plain).replace(' ', '-')


def anchors(path):
    return {slug(h) for h in re.findall(r'^#+\s+(.+)$', prose(path), flags=re.M)}


def broken(path):
    for target in re.findall(r'(?<!\\)\]\(<?([^)\s>]+)>?\)', prose(path)):
        if re.match(r'\w+:', target):
            continue
        file, _, anchor = unquote(target).partition('#')
        to = path.parent / file if file else path
        if not to.exists():
            yield f'{target}: no such file'
        elif anchor and anchor.lower() not in anchors(to):
            yield f'{target}: no such heading'


@pytest.mark.parametrize('path', TEXTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    assert list(broken(path)) == []


def test_a_broken_link_is_noticed(tmp_path):
    (tmp_path / 'b.md').write_text('# A title: `code`, here\n')
    (tmp_path / 'a.md').write_text('[x](b.md#a-title-code-here) [y](c.md) [z](b.md#gone) [w](#own)')
    assert [b.split(':')[0] for b in broken(tmp_path / 'a.md')] == ['c.md', 'b.md#gone', '#own']


class Page(HTMLParser):
    "The addresses and the targets of a page"

    def __init__(self, path):
        super().__init__()
        self.links, self.targets = [], {''}
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.targets |= {attrs[k] for k in ('id', 'name') if attrs.get(k)}
        self.links += [attrs[k] for k in ('href', 'src') if attrs.get(k)]


def broken_pages(site):
    found = [p for p in site.rglob('*.html') if '_static' not in p.parts]
    pages = {p.resolve(): Page(p) for p in found}
    for path, page in pages.items():
        for link in page.links:
            if re.match(r'\w+:|//', link):
                continue
            file, _, anchor = unquote(link).partition('#')
            to = (path.parent / file.partition('?')[0]).resolve() if file else path
            if not to.exists():
                yield f'{path.relative_to(site)}: {link}: no such page'
            elif to in pages and anchor not in pages[to].targets:
                yield f'{path.relative_to(site)}: {link}: no such anchor'


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    pytest.importorskip('sphinx', reason='make .venv/.docs')
    out = tmp_path_factory.mktemp('site').resolve() / 'site'
    command = [sys.executable, 'tools/build_docs.py', '--out', str(out)]
    r = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr[-3000:]
    assert 'WARNING' not in r.stderr, r.stderr[-3000:]
    return out


def test_links_of_the_site_lead_somewhere(site):
    assert sorted(set(broken_pages(site))) == []


def public(path):
    "What a module's `__all__` lists"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '__all__':
            return ast.literal_eval(node.value)
    return []


def test_the_site_lists_everything_public_and_links_to_it(site):
    package = ROOT / 'compassrl'
    links = set(Page(site / 'api.html').links)
    want = {
        f'{path.relative_to(package).with_suffix("").as_posix()}.html#{name}'
        for path in package.rglob('[!_]*.py')
        for name in public(path)
    }
    assert sorted(want - links) == []


def test_the_site_has_every_notebook_under_its_folder_and_name(site):
    names = (p.relative_to(ROOT / 'nbs') for p in notebooks())
    pages = [Path(p.parent, re.sub(r'^\d+_', '', p.stem)).with_suffix('.html') for p in names]
    assert [str(p) for p in pages if not (site / p).exists()] == []
