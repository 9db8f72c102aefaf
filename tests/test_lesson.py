"The map of the series: one highlighted box, text inside its box, a place for every module"

import math
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import torch

from compassrl.algo.algo_settings import EspoConfig
from course.lesson import answers, brief, check, expect, pipeline, predict, show_settings, stages
from course.stages import columns
from tests.support import ROOT
from tests.test_toc import COURSE, tool

HOT = '#c2410c'
LABELS = {label for _, label in stages.values()}
PACKAGE = ROOT / 'compassrl'
MODULES = [
    '.'.join(path.relative_to(PACKAGE).with_suffix('').parts)
    for path in sorted(PACKAGE.glob('*/**/[!_]*.py'))
]


def parts(stage, whole=True):
    return list(ElementTree.fromstring(pipeline(stage, whole).data).iter())


def boxes(elements):
    found = [e for e in elements if e.tag.endswith('rect')]
    return [tuple(float(e.get(k)) for k in ('x', 'y', 'width', 'height')) for e in found]


@pytest.mark.parametrize('stage', [None, 'records', *stages])
def test_one_box_is_highlighted(stage):
    rects = [e for e in parts(stage) if e.tag.endswith('rect')]
    assert len(rects) == len(stages)
    assert sum(e.get('fill') == HOT for e in rects) == (stage in stages)
    arrows = [e for e in parts(stage) if e.tag.endswith('}g')]
    assert any(e.get('stroke') == HOT for e in arrows) == (stage == 'records')


@pytest.mark.parametrize('stage', stages)
def test_a_page_shows_the_stations_and_itself(stage):
    elements, first = parts(stage, whole=False), [c[0] for c in columns]
    texts = [e.text for e in elements if e.tag.endswith('text')]
    assert {stages[s][1] for s in [*first, stage]} == {t for t in texts if t in LABELS}
    assert ('the whole run' in texts) == (stage in columns[0][1:])
    height = float(elements[0].get('viewBox').split()[3])
    assert max(y + h for _, y, _, h in boxes(elements)) + 8 <= height
    assert height < float(parts(stage)[0].get('viewBox').split()[3])


def test_boxes_do_not_touch_and_the_picture_holds_them():
    elements = parts(None)
    found = boxes(elements)
    for i, (x, y, w, h) in enumerate(found):
        assert all(x + w < u or u + v < x or y + h < s or s + t < y for u, s, v, t in found[:i])
    width, height = map(float, elements[0].get('viewBox').split()[2:])
    assert all(x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in found)


def test_number_and_label_stand_side_by_side_in_their_box():
    "Seven pixels a letter of a label and six and a half of a number are more than they need"
    elements = parts(None)
    said = 'new weights', 'the whole run'
    texts = [e for e in elements if e.tag.endswith('text') and e.text not in said]
    for box, number, label in zip(boxes(elements), texts[::2], texts[1::2], strict=True):
        half = 7 * len(label.text) / 2
        left, right = float(label.get('x')) - half, float(label.get('x')) + half
        ends = float(number.get('x')) + 6.5 * len(number.text or '')
        assert box[0] < float(number.get('x')) and ends < left, label.text
        assert right < box[0] + box[2], label.text


@pytest.mark.parametrize('module', ['loop', 'experience', 'config', *MODULES])
def test_every_module_has_a_place(module):
    assert HOT in pipeline(module).data


@pytest.mark.parametrize('name', ['rolout', 'rolout.torch_engine', ''])
def test_unknown_stage(name):
    with pytest.raises(ValueError, match=f"stage='{name}'"):
        pipeline(name)


def test_answers_are_folded_and_show_what_they_say_as_it_is():
    html = answers('1 < 2', 'and <b>').data
    assert html.startswith('<details><summary>') and html.count('<p>') == 2
    assert '<p>1 &lt; 2</p><p>and &lt;b&gt;</p></details>' in html


def test_predict():
    html = predict('a < b?', ['yes', '<no>'], 1, 'because 1 > 0').data
    assert html.count('<details>') == 2 and 'a &lt; b?' in html
    assert html.count('<b>No.</b>') == html.count('<b>Yes.</b>') == 1
    assert '<summary>&lt;no&gt;</summary><b>Yes.</b> because 1 &gt; 0' in html
    with pytest.raises(ValueError, match='answer=2'):
        predict('?', ['x', 'y'], 2)
    html = predict('?', ['x', 'y', 'z'], 1, wrong=['`x` is <0.', 'never shown', '']).data
    assert '<summary>x</summary><b>No.</b> <code>x</code> is &lt;0.</details>' in html
    assert 'never' not in html and '<summary>z</summary><b>No.</b> Try another.</details>' in html
    with pytest.raises(ValueError, match='1 texts for 2 options'):
        predict('?', ['x', 'y'], 0, wrong=['no'])


@pytest.mark.parametrize('step', COURSE.spine)
def test_a_wrong_answer_of_a_step_says_why(step):
    cells = tool.read(COURSE.nbs / COURSE.paths[step])['cells']
    outputs = [o.get('data', {}) for c in cells for o in c.get('outputs', [])]
    shown = [''.join(data.get('text/html', '')) for data in outputs]
    questions = [html for html in shown if '<b>Predict.</b>' in html]
    assert questions and not [html for html in questions if 'Try another.' in html]


def law_square(fn):
    "3 times 3 is 9"
    expect(torch.tensor(fn(3.0)), torch.tensor(9.0))


def law_sign(fn):
    "a square is not negative"
    assert fn(-1) >= 0, f'{fn(-1)} of -1'


def your_turn(x):
    raise NotImplementedError('square is your turn')


@pytest.mark.parametrize(
    'fn, says',
    [
        (lambda x: x * x, 'correct'),
        (your_turn, 'not yet: square is your turn'),
        (lambda x: x + 5, 'not yet: 3 times 3 is 9: 8 instead of 9'),
        (lambda x: abs(x) * x, 'not yet: a square is not negative: -1 of -1'),
        (lambda x: x / 0, 'not yet: 3 times 3 is 9: it raised ZeroDivisionError'),
    ],
)
def test_a_check_names_the_first_law_that_is_broken(fn, says):
    assert check([law_square, law_sign], fn).startswith(says)


@pytest.mark.parametrize(
    'got, says',
    [
        (None, 'None instead of a tensor [2]'),
        (torch.zeros(3), 'a tensor [3] instead of a tensor [2]'),
        (torch.tensor([1.0, torch.nan]), 'nan at [1] instead of 2'),
        (torch.tensor([1.1, 5.0]), '1.1 at [0] instead of 1'),
    ],
)
def test_where_two_tensors_part(got, says):
    want = torch.tensor([1.0, 2.0])
    expect(want + 1e-7, want)
    with pytest.raises(AssertionError) as e:
        expect(got, want)
    assert str(e.value) == says


class Pair(NamedTuple):
    right: float
    tied: torch.Tensor


def test_numbers_are_made_brief():
    "Nested ones too; what is no number stays"
    found = {'a': 1 / 3, 'b': (0.15000000000000002, -0.0), 'n': 10**9, 'on': True, 's': '0.1234'}
    assert (
        str(brief(found))
        == "{'a': 0.333, 'b': (0.15, 0.0), 'n': 1000000000, 'on': True, 's': '0.1234'}"
    )
    pair = brief(Pair(2 / 3, torch.tensor([0.1, 1e-7])))
    assert type(pair) is Pair and pair == (0.667, [0.1, 1e-7]) and brief(math.inf) == math.inf


def test_a_table_of_settings_holds_those_that_were_asked_for():
    def flags(*names):
        return [row.split('`')[1] for row in show_settings(EspoConfig, *names).data.split('\n')[2:]]

    assert flags('top_frac', 'alpha') == ['--espo.alpha', '--espo.top-frac']  # in their own order
    assert len(flags()) == 7
    with pytest.raises(ValueError, match='beta.*EspoConfig has no such settings'):
        show_settings(EspoConfig, 'alpha', 'beta')


def test_what_stands_in_backticks_of_a_question_is_code():
    html = predict('Is `a < b`?', ['`yes`', 'no'], 0, 'As `b` is 2.').data
    assert 'Is <code>a &lt; b</code>?' in html and '`' not in html
    assert '<summary><code>yes</code></summary>' in html and 'As <code>b</code> is 2.' in html
