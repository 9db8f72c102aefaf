"The map of the series: numbers that agree with the notebooks, one highlighted box, text inside its box"

from xml.etree import ElementTree

import pytest

from compassrl.lesson import pipeline, predict, stages

HOT = '#c2410c'


def parts(stage):
    return list(ElementTree.fromstring(pipeline(stage).data).iter())


@pytest.mark.parametrize('stage', [None, 'records', *stages])
def test_one_box_is_highlighted(stage):
    boxes = [e for e in parts(stage) if e.tag.endswith('rect')]
    assert len(boxes) == len(stages)
    assert sum(e.get('fill') == HOT for e in boxes) == (stage in stages)
    assert any(e.get('stroke') == HOT for e in parts(stage) if e.tag.endswith('}g')) == (
        stage == 'records'
    )


def test_boxes_do_not_touch_and_hold_their_text():
    es = parts(None)
    boxes = [
        tuple(float(e.get(k)) for k in ('x', 'y', 'width', 'height'))
        for e in es
        if e.tag.endswith('rect')
    ]
    for i, (x, y, w, h) in enumerate(boxes):
        assert all(x + w < u or u + v < x or y + h < s or s + t < y for u, s, v, t in boxes[:i])
    width, height = map(float, es[0].get('viewBox').split()[2:])
    assert all(x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in boxes)
    for number, label in stages.values():
        assert 7 * len(label) + 30 < boxes[0][2] + 8, f'{label} is too long for its box'


@pytest.mark.parametrize(
    'name', ['problems', 'pretrained', 'curves', 'report', 'trace', 'run', 'train']
)
def test_modules_beside_a_stage_have_a_place(name):
    assert HOT in pipeline(name).data


def test_unknown_stage():
    with pytest.raises(ValueError, match="stage='rolout'"):
        pipeline('rolout')


def test_predict():
    html = predict('a < b?', ['yes', '<no>'], 1, 'because 1 > 0').data
    assert (
        '<details>' in html
        and '<b>b</b> &lt;no&gt;' in html
        and 'a &lt; b?' in html
        and '1 &gt; 0' in html
    )
    with pytest.raises(ValueError, match='answer=2'):
        predict('?', ['x', 'y'], 2)
