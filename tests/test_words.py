"nbs/words.yml against the notebooks: where words are explained, what lessons define; its page"

import json
import re
import sys
from functools import cache
from html import unescape

import pytest
import yaml

from tests.support import ROOT
from tests.test_toc import COURSE, LESSONS

sys.path.insert(0, str(ROOT / 'tools'))
import front  # noqa: E402
from links import anchors, prose  # noqa: E402
from toc import read, title  # noqa: E402

WORDS = yaml.safe_load((ROOT / 'nbs' / 'words.yml').read_text())
ROWS = [w for g in WORDS['groups'] for w in g['words']]
SYSTEMS = {'verl', 'TRL', 'slime', 'NeMo-RL'}
PAGE = COURSE.nbs / COURSE.paths['words']


def forms(row):
    "A word and what else it is called"
    return [row['word'], *row.get('also', [])]


def names(entry):
    return entry if isinstance(entry, list) else [entry]


# ---- where a word is explained


def text_of(cells):
    "Prose without code, and without the addresses of links"
    found = '\n\n'.join(''.join(c['source']) for c in cells if c['cell_type'] == 'markdown')
    found = re.sub(r'^```.*?^```', '', found, flags=re.S | re.M)
    return re.sub(r'\]\([^)]*\)', ']', found)


@cache
def section(place):
    "The prose of data/tasks#which-questions-teach. Raises ValueError without such a heading"
    name, _, anchor = place.partition('#')
    _, nb = front.section(read(COURSE.nbs / COURSE.paths[name]), anchor)
    return text_of(nb['cells'])


def says(text, word):
    "Whether a text has a word, or its plural, as a word"
    pattern = re.escape(word).replace(r'\ ', '[ _\n]')
    return bool(re.search(rf'(?<![A-Za-z0-9-]){pattern}s?(?![A-Za-z0-9-])', text, flags=re.I))


def test_every_word_is_explained_where_its_links_lead():
    lost = [
        f'{row["word"]}: {place}'
        for row in ROWS
        for place in row['in']
        if not any(says(section(place), form) for form in forms(row))
    ]
    assert lost == []


def test_a_lesson_of_the_path_comes_before_deeper_ones():
    "Unless a deeper page is about the word alone"
    late = []
    for row in ROWS:
        pages = [place.partition('#')[0] for place in row['in']]
        if pages[0] not in COURSE.spine and any(p in COURSE.spine for p in pages):
            late.append((row['word'], title(read(COURSE.nbs / COURSE.paths[pages[0]]))))
    assert [word for word, page in late if word != page] == []


def test_what_else_a_word_is_called_is_on_its_pages():
    for row in ROWS:
        pages = {place.partition('#')[0] for place in row['in']}
        text = '\n'.join((COURSE.nbs / COURSE.paths[n]).read_text() for n in pages)
        assert [f for f in forms(row) if not says(text.replace('_frac', ''), f)] == [], row['word']


def test_no_word_stands_twice():
    said = [form.lower() for row in ROWS for form in forms(row)]
    assert sorted({s for s in said if said.count(s) > 1}) == [] and len(said) >= 120


def test_a_row_says_what_it_must():
    for row in ROWS:
        assert set(row) <= {'word', 'also', 'means', 'in', 'elsewhere'} and row['in']
        assert row['means'].endswith('.') and len(row['means'].split()) <= 30, row['word']
        assert set(row.get('elsewhere', {})) <= SYSTEMS, row['word']


def test_a_word_that_is_not_there_is_noticed():
    with pytest.raises(ValueError, match='no heading #gone'):
        section('data/tasks#gone')
    assert says('two *slots*', 'slot') and not says('a slotted spoon, a pull-slot', 'slot')
    assert says(section('data/tasks#which-questions-teach'), 'verifier')
    assert not says(section('data/tasks#which-questions-teach'), 'ticket')


# ---- which words lessons define


def italics(path):
    "What a page sets in italics, its own headings left out"
    text = prose(path)
    text = re.sub(r'\$\$.*?\$\$|\$[^$\n]*\$|`[^`\n]*`', '~', text, flags=re.S)
    found = re.findall(r'(?<![*\w])\*(?![*\s])([^*\n]+?)(?<!\s)\*(?![*\w])', text)
    headings = {h.strip().lower() for h in re.findall(r'^#+ (.+)$', text, flags=re.M)}
    return {f.lower().rstrip('.') for f in found} - headings


ITALICS = {n: italics(COURSE.nbs / COURSE.paths[n]) for n in LESSONS}


KNOWN = {s for row in ROWS for f in forms(row) for s in (f.lower(), f'{f.lower()}s')}


def test_a_word_that_a_lesson_defines_has_a_row():
    "In italics stands a word of the table, or what is listed as no such word"
    missing = {n: sorted(found - KNOWN - set(WORDS['aside'])) for n, found in ITALICS.items()}
    assert {n: m for n, m in missing.items() if m} == {}, 'give it a place in nbs/words.yml'


def test_what_is_listed_as_no_word_is_used():
    used = set().union(*ITALICS.values())
    assert [a for a in WORDS['aside'] if a not in used] == []
    assert sorted(KNOWN & set(WORDS['aside'])) == []


def test_a_definition_is_told_from_other_marks(tmp_path):
    text = (
        '# A title\n\n## Hook\n**bold**, a *Slot*, a*b*c, `*x*`, $a*b*c$, see *Hook*\n\n* item*\n'
    )
    (tmp_path / 'a.md').write_text(text)
    assert italics(tmp_path / 'a.md') == {'slot'}


# ---- the page


def page():
    "The stored HTML of the page, and its text"
    outputs = [o for c in read(PAGE)['cells'] for o in c.get('outputs', [])]
    html = '\n'.join(''.join(o.get('data', {}).get('text/html', '')) for o in outputs)
    return html, plain(unescape(re.sub(r'<[^>]+>', ' ', re.sub('</?code>', '', html))))


def plain(text):
    return ' '.join(text.split())


def test_the_page_shows_every_word():
    html, text = page()
    said = [s for row in ROWS for s in (*forms(row), row['means'].replace('`', ''))]
    said += [n for row in ROWS for e in row.get('elsewhere', {}).values() for n in names(e)]
    assert [s for s in said if plain(s) not in text] == [], (
        f'run `python tools/execute_nbs.py nbs/{PAGE.name}`'
    )
    assert html.count('<tr id="') == len(ROWS)


def test_links_of_the_page_lead_to_headings():
    html, _ = page()
    links = re.findall(r'href="([^"]+)"', html)
    assert len(links) == sum(len(row['in']) for row in ROWS)
    for link in links:
        file, _, heading = link.partition('#')
        assert heading in anchors(COURSE.nbs / file), link


def test_no_row_has_two_links_of_one_name():
    html, _ = page()
    for row in re.findall('<tr id=.*?</tr>', html, flags=re.S):
        names = re.findall('<a href=[^>]*>(.*?)</a>', row)
        assert len(set(names)) == len(names), row


def test_who_begins_finds_the_page():
    for first in 'lesson', 'index':
        path = COURSE.nbs / COURSE.paths.get(first, 'index.ipynb')
        cells = json.loads(path.read_text())['cells']
        own = [c for c in cells if 'nbs/course.yml' not in ''.join(c['source'])]
        linked = re.findall(r'\]\(([^)#]+)', '\n'.join(''.join(c['source']) for c in own))
        assert PAGE.name in linked, first
