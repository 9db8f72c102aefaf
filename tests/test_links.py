"Every internal link and anchor resolves in notebooks, README and CONTRIBUTING"

import sys

import pytest

from tests.support import ROOT
from tests.test_notebooks import notebooks

sys.path.insert(0, str(ROOT / 'tools'))
from links import broken  # noqa: E402

PAGES = 'README.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'SECURITY.md'
TEXTS = [*(ROOT / p for p in PAGES), *notebooks()]


@pytest.mark.parametrize('path', TEXTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    assert list(broken(path)) == []


def test_a_broken_link_is_noticed(tmp_path):
    (tmp_path / 'b.md').write_text('# A title: `code`, here\n')
    (tmp_path / 'a.md').write_text('[x](b.md#a-title-code-here) [y](c.md) [z](b.md#gone) [w](#own)')
    assert [b.split(':')[0] for b in broken(tmp_path / 'a.md')] == ['c.md', 'b.md#gone', '#own']
