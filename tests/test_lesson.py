"The map of the series: one highlighted box, text inside its box, a place for every module"

from xml.etree import ElementTree

import pytest

from compassrl.lesson import pipeline, predict, stages
from tests.support import ROOT

HOT = '#c2410c'
PACKAGE = ROOT / 'compassrl'
MODULES = [
    '.'.join(path.relative_to(PACKAGE).with_suffix('').parts)
    for path in sorted(PACKAGE.glob('*/**/[!_]*.py'))
    if path.parts[len(PACKAGE.parts)] != 'drawings'  # it is of the notebooks, no stage
]


def parts(stage):
    return list(ElementTree.fromstring(pipeline(stage).data).iter())


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


def test_boxes_do_not_touch_and_the_picture_holds_them():
    elements = parts(None)
    found = boxes(elements)
    for i, (x, y, w, h) in enumerate(found):
        assert all(x + w < u or u + v < x or y + h < s or s + t < y for u, s, v, t in found[:i])
    width, height = map(float, elements[0].get('viewBox').split()[2:])
    assert all(x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in found)


def test_number_and_label_stand_side_by_side_in_their_box():
    "Seven pixels a letter of a label and five and a half of a number are more than they need"
    elements = parts(None)
    texts = [e for e in elements if e.tag.endswith('text') and e.text != 'new weights']
    for box, number, label in zip(boxes(elements), texts[::2], texts[1::2], strict=True):
        half = 7 * len(label.text) / 2
        left, right = float(label.get('x')) - half, float(label.get('x')) + half
        ends = float(number.get('x')) + 5.5 * len(number.text or '')
        assert box[0] < float(number.get('x')) and ends < left, label.text
        assert right < box[0] + box[2], label.text


@pytest.mark.parametrize('module', ['loop', 'experience', 'config', *MODULES])
def test_every_module_has_a_place(module):
    assert HOT in pipeline(module).data


@pytest.mark.parametrize('name', ['rolout', 'rolout.torch_engine', ''])
def test_unknown_stage(name):
    with pytest.raises(ValueError, match=f"stage='{name}'"):
        pipeline(name)


def test_predict():
    html = predict('a < b?', ['yes', '<no>'], 1, 'because 1 > 0').data
    assert '<details>' in html and 'a &lt; b?' in html
    assert '<b>b</b> &lt;no&gt;' in html and '1 &gt; 0' in html
    with pytest.raises(ValueError, match='answer=2'):
        predict('?', ['x', 'y'], 2)
