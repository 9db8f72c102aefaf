"Every internal link and anchor resolves in notebooks, README and CONTRIBUTING"

import sys

import pytest

from tests.support import ROOT
from tests.test_notebooks import notebooks

sys.path.insert(0, str(ROOT / 'tools'))
import build_docs  # noqa: E402
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


# The exported names of two pages. `choice` is a verifier here, and also an ordinary word.
NAMES = {'judges/oracle': ['choice', 'pick_one', 'Oracle', 'vote'], 'loop': ['train']}


@pytest.mark.parametrize(
    'text, joined',
    [
        ('the option `choice`', ''),
        ('the folder `train`', ''),
        ('the verifier `choice` of [oracle](judges/oracle.ipynb#a-heading)', 'choice'),
        ('`choice` of [the loop](loop.ipynb)', ''),
        ('`choice()`', 'choice'),
        ('`pick_one`', 'pick_one'),
        ('`Oracle`', 'Oracle'),
        ('`oracle.choice`', 'choice'),
        ('`nothing_of_this_name`', ''),
        ('```\n`pick_one`\n```', ''),
    ],
)
def test_a_word_in_backticks_leads_to_a_name_only_where_it_is_meant(text, joined):
    made = build_docs.link_text(text, 'config', '', NAMES, {*NAMES, 'config'})
    assert ('judges/oracle.html#' + joined in made) == bool(joined)
    assert ('.html#' in made.replace('oracle.html#a-heading', '')) == bool(joined)
