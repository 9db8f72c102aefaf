"Every internal link and anchor resolves in notebooks, README and CONTRIBUTING"

import json
import re
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
