"Every internal link and anchor resolves in notebooks, README and CONTRIBUTING"

import sys

import nbformat
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


@pytest.mark.parametrize(
    'source, kind, title',
    [
        ('# Solution\ndef mean(x):\n    return 1', '', 'Solution'),
        ("predict('Which?', ['a'], 0, 'a')", 'text/html', 'The code of the question'),
        ('def draw():\n    pass\n\ndraw()', 'image/png', 'The code of the figure'),
        ('class Log(list):\n    pass\n\n\ndef same(a):\n    def no(): ...', '', 'Code: Log, same'),
        (
            'def a(): ...\ndef b(): ...\ndef c(): ...\ndef d(): ...\ndef e(): ...',
            '',
            'Code: a, b, c, d, …',
        ),
        (
            'def law_first_step(m): ...\ndef law_clip(m): ...\nlaw_clip(1)',
            '',
            'Laws: first step, clip',
        ),
        ('def go(a): ...\n\n\ndef go(a, b): ...', '', 'Code: go'),
        ('def check_it(fn):\n    assert fn', '', 'The check'),
        ('x = 1\npredict(\n    "?", [], 0)', 'text/html', 'The code of the question'),
        ('x = p.predict(1)\nprint(x)', 'text/plain', 'The code of this output'),
        ('x = 1\ntest_eq(x, 1)', '', 'The check'),
        ('x = 1\nassert x\nprint(x)', 'text/plain', 'The code of this output'),
        ('def _hidden(): ...', '', 'Show the code'),
    ],
)
def test_a_fold_says_what_it_holds(source, kind, title):
    outputs = [nbformat.v4.new_output('display_data', {kind: ''})] if kind else []
    assert build_docs.title_of(nbformat.v4.new_code_cell(source, outputs=outputs)) == title


@pytest.mark.parametrize(
    'last, play, dropped',
    [
        ('play()', 'playground(play, k=3)', True),
        ('assert play()[-1] > 0.5', 'playground(\n    lambda k: play(k) and None, k=3)', True),
        ('play(slow=4.0)', 'playground(play, slow=1.0)', False),
        ('other()', 'playground(play, k=3)', False),
        ('display()', 'playground(play, k=3)', False),
    ],
)
def test_a_page_shows_a_figure_once(last, play, dropped):
    picture = nbformat.v4.new_output('display_data', {'image/png': ''})
    printed = nbformat.v4.new_output('stream', text='3')
    drawn = nbformat.v4.new_code_cell(f'k = 3\n{last}', outputs=[picture, printed])
    cells = [nbformat.v4.new_markdown_cell('# A'), drawn, nbformat.v4.new_code_cell(play)]
    shown = build_docs.prepare(nbformat.v4.new_notebook(cells=cells), 'a', '', {}, set()).cells[1]
    assert shown.outputs == ([printed] if dropped else [picture, printed])
    assert shown.metadata.mystnb.code_prompt_show == 'The code of the figure'


def test_the_code_of_a_play_stands_below_it():
    picture = nbformat.v4.new_output('display_data', {'image/png': ''})
    drawn = nbformat.v4.new_code_cell('def play(): ...\n\nplay()', outputs=[picture])
    cells = [nbformat.v4.new_markdown_cell('# A'), drawn]
    cells += [
        nbformat.v4.new_code_cell('playground(play, k=3)'),
        nbformat.v4.new_markdown_cell('b'),
    ]
    shown = build_docs.prepare(nbformat.v4.new_notebook(cells=cells), 'a', '', {}, set()).cells
    assert [c.source[:8] for c in shown] == ['# A', 'playgrou', 'def play', 'b']


@pytest.mark.parametrize('more, folded', [('home = 1', True), ('a = 1\n' * 4, False)])
def test_a_cell_that_imports_and_does_little_more_is_folded(more, folded):
    source = '\n'.join(f'import a{i}' for i in range(5)) + '\n\n' + more.strip()
    cells = [nbformat.v4.new_markdown_cell('# A'), nbformat.v4.new_code_cell(source)]
    shown = build_docs.prepare(nbformat.v4.new_notebook(cells=cells), 'a', '', {}, set()).cells[1]
    assert (shown.metadata.tags == ['hide-input']) == folded
    assert (shown.metadata.mystnb.code_prompt_show == 'Imports') == folded


@pytest.mark.parametrize(
    'source, removed',
    [
        ("pipeline('espo')", True),
        ("#| code-fold: true\nx = 1\npredict('?', ['a'], 0)", True),
        ('#| code-fold: true\ndrawings.loop_shapes(batch)', True),
        ('playground(\n    play,\n    k=3,\n)', True),
        ('#| code-fold: true\nk = 3\nplayground(play, k=k)', False),
        ('pipeline_of(3)', False),
        ('print(3)', False),
        ("%time pipeline('espo')", False),
    ],
)
def test_a_cell_that_only_shows_stands_without_its_code(source, removed):
    cells = [nbformat.v4.new_markdown_cell('# A'), nbformat.v4.new_code_cell(source)]
    shown = build_docs.prepare(nbformat.v4.new_notebook(cells=cells), 'a', '', {}, set()).cells[1]
    assert ('remove-input' in shown.metadata.tags) == removed
    assert not removed or 'hide-input' not in shown.metadata.tags


def test_a_folded_output_says_that_it_is_one():
    cell = nbformat.v4.new_code_cell('#| slow\n#| output-fold: true\ngo(1)')
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell('# A'), cell])
    shown = build_docs.prepare(nb, 'a', '', {}, set()).cells[-1].metadata
    assert shown.tags == ['hide-output'] and shown.mystnb.code_prompt_show == 'Show the output'


def test_a_solution_hides_what_it_prints_and_a_check_says_a_sentence():
    new = nbformat.v4
    said = [new.new_output('execute_result', data={'text/plain': '\'not yet: "x" is 0\''})]
    check = new.new_code_cell('#| code-fold: true\nx = 1\ncheck_it(fn)', outputs=said)
    cells = [
        new.new_markdown_cell('# A'),
        check,
        new.new_code_cell('#| code-fold: true\n# Solution\nprint(3)'),
    ]
    shown = build_docs.prepare(new.new_notebook(cells=cells), 'a', '', {}, set()).cells
    assert shown[1].outputs[0].data['text/plain'] == 'not yet: "x" is 0'
    assert shown[2].metadata.tags == ['hide-cell']
    assert shown[2].metadata.mystnb.code_prompt_show == 'Solution'


def test_each_verdict_has_a_look_of_its_own_on_every_page():
    words = [w for words in build_docs.VERDICTS.values() for w in words.split('|')][:5]
    assert words[3:] == ['not seen here', 'cannot tell']
    chips = [build_docs.coloured(f'**{w}** (x)') for w in words]
    assert all(chip.endswith(f'>{w}</b> (x)') for chip, w in zip(chips, words))
    looks = {chip.split('>')[0] for chip in chips}
    assert looks >= {
        '<b class="verdict open" data-sign="≈"',
        '<b class="verdict open" data-sign="?"',
    }
    assert len(looks) == 4  # the reverse and not reached are both against the claim
