"Plays: the grid, the frames, and what a page shows of them when its sliders are moved"

import io
import json
import re
import sys
from base64 import b64decode
from html import unescape

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
from ipywidgets import Dropdown, FloatLogSlider, IntSlider, SelectionSlider
from PIL import Image

from course.play import frame, grid_sizes, playground, spread, still_play
from tests.support import ROOT
from tests.test_notebooks import notebooks

sys.path.insert(0, str(ROOT / 'tools'))
import build_docs  # noqa: E402

VIEW = 'application/vnd.jupyter.widget-view+json'
PANEL = 'launch/panel'  # it starts and stops runs: alive with a kernel alone


def bars(height, colour, power=1.0):
    "Draws and prints; `power` is of the third control"
    fig, ax = plt.subplots(figsize=(3, 1.5))
    ax.bar(['a', 'b'], [height, 5], color=colour)
    ax.set(title=f'height {height}', ylim=(0, 10))
    plt.show()
    print(f'<{height} {colour} {power:.4g}>')


CONTROLS = dict(
    height=IntSlider(2, min=0, max=8),
    colour=Dropdown(options=[('dark red', '#c2410c'), ('green', '#0f766e')]),
    power=FloatLogSlider(30.0, base=10, min=0, max=2, step=1),
)


@pytest.mark.parametrize('available', [[49], [49, 31], [9, 3, 2], [3] * 8, [1, 4], [2], [1, 1]])
def test_a_grid_is_small_and_fair(available):
    sizes = grid_sizes(available)
    assert np.prod(sizes) <= 64 and len(sizes) == len(available)
    assert all(1 <= s <= n for s, n in zip(sizes, available, strict=True))
    assert all(s >= min(4, n) for s, n in zip(sizes[:3], available[:3], strict=True))
    assert np.prod(available) > 40 or sizes == available  # all of it where that fits


@pytest.mark.parametrize('num', range(1, 12))
@pytest.mark.parametrize('start', [0, 1, 5, 9.5, 10])
def test_the_start_is_among_the_values_in_their_order(num, start):
    got = spread(range(11), start, num)
    assert start in got and got == sorted(set(got)) and len(got) == num
    assert num < 3 or (got[0], got[-1]) in ((0, 10), (0, start))


def picture(address):
    data = address.removeprefix('data:image/png;base64,')
    return np.asarray(Image.open(io.BytesIO(b64decode(data))).convert('RGB')).astype(int)


def opened(html):
    "The data of a box, and its pictures"
    data = json.loads(unescape(re.search(r"data-frames='([^']*)'", html)[1]))
    strip = re.search(r'data-strip="([^"]*)"', html)[1]
    return data, picture(strip) if strip else None


def drawn(**values):
    "What Python draws for these values"
    return np.asarray(frame(bars, **values)[0]).astype(int)


def alike(got, want):
    "The same but for a palette of few colours, which keeps those of whole surfaces"
    assert got.shape == want.shape
    return np.abs(got - want).mean() < 0.5


def test_powers_have_two_digits_and_other_numbers_four():
    controls = dict(lr=FloatLogSlider(1, min=-1, max=2, step=0.5), x=[0.12345])
    play = still_play(lambda lr, x: None, **controls)
    lr, x = opened(play.data)[0]['controls']
    assert (lr['labels'], x['labels']) == (
        ['0.1', '0.32', '1', '3.2', '10', '32', '100'],
        ['0.1235'],
    )


def test_a_box_holds_what_python_draws_for_each_choice():
    data, strip = opened(still_play(bars, **CONTROLS).data)
    heights, colours, powers = (c['labels'] for c in data['controls'])
    assert (heights, colours) == (['0', '2', '3', '5', '6', '8'], ['#c2410c', '#0f766e'])
    assert powers == ['1', '30', '100']
    assert [c['start'] for c in data['controls']] == [1, 0, 1]
    points = [(h, c, p) for h in heights for c in colours for p in powers]
    assert len(data['frames']) == len(points) == 36
    assert strip.shape[1] == 12 * data['width']  # the third control changes no picture
    for (h, c, p), found in zip(points, data['frames'], strict=True):
        assert found['says'] == f'height {h} (height {h}, colour {c}, power {p})'
        assert found['html'] == f'<pre>&lt;{h} {c} {p}&gt;</pre>'
        left = found['picture'] * data['width']
        assert alike(strip[:, left : left + data['width']], drawn(height=int(h), colour=c))
    assert not alike(drawn(height=0, colour='#0f766e'), drawn(height=8, colour='#0f766e'))


def test_a_function_that_only_prints_has_no_picture():
    html = still_play(lambda n: print(n), n=(1, 3)).data
    data, _ = opened(html)
    assert [f['html'] for f in data['frames']] == [f'<pre>{n}</pre>' for n in (1, 2, 3)]
    assert {f['picture'] for f in data['frames']} == {-1} and '<img' not in html


def test_chosen_stops_are_a_slider_and_a_list_of_names_is_none():
    data, _ = opened(
        still_play(
            lambda n, who: print(n, who),
            n=SelectionSlider(options=[0.2, 0.36, 1], value=0.36),
            who=Dropdown(options=['a', 'b']),
        ).data
    )
    assert [c['slides'] for c in data['controls']] == [True, False]
    assert data['controls'][0]['labels'] == ['0.2', '0.36', '1']


def test_only_a_text_that_repeats_is_told_apart():
    def steps(at, colour):
        bars(at // 2, colour)

    data, _ = opened(still_play(steps, at=(0, 2), colour=['red']).data)
    says = [f['says'] for f in data['frames']]
    assert says == ['height 0 (at 0)', 'height 0 (at 1)', 'height 1']


def test_a_figure_without_a_title_is_described_by_its_values():
    def bare(height, colour):
        plt.figure(figsize=(1, 1)).gca().bar([0], [height], color=colour)

    _, words, _ = frame(bare, height=2, colour='red')
    assert words == 'What is drawn for height 2, colour red'


def edges(picture):
    "The four sides of a picture, less the white"
    sides = picture[0], picture[-1], picture[:, 0], picture[:, -1]
    return [side for side in sides if (side < 200).any()]


def test_a_title_that_is_too_long_is_drawn_smaller():
    def named(words):  # a wide name of the axis moves its middle when the title shrinks
        fig, ax = plt.subplots(figsize=(3, 2), layout='constrained')
        ax.set(title='word ' * words, yticks=[0], yticklabels=['a wide label'])

    assert [edges(np.asarray(frame(named, words=n)[0]).astype(int)) for n in (2, 12)] == [[], []]


def test_with_a_kernel_it_is_interact(monkeypatch):
    calls = []
    monkeypatch.setattr('ipywidgets.interact', lambda *a, **k: calls.append((a, k)))
    monkeypatch.delenv('COMPASSRL_STILL', raising=False)
    assert playground(bars, height=3) is None and calls == [((bars,), dict(height=3))]


# ---- in a browser


def page_with(browser, folder, html, **settings):
    "A page from a disk with a box as the site has it, and its faults"
    path, faults = folder / 'page.html', []
    path.write_text(f'<!doctype html><meta charset="utf-8"><body>{build_docs.alive(html)}')
    page = browser.new_page(viewport=dict(width=360, height=800), **settings)
    page.on('pageerror', lambda e: faults.append(str(e)))
    page.on(
        'request', lambda r: r.url.startswith(('file:', 'data:', 'blob:')) or faults.append(r.url)
    )
    page.goto(f'file://{path}')
    return page, faults


def on_canvas(page):
    return picture(page.locator('canvas').evaluate('e => e.toDataURL()'))


def test_a_play_is_moved_by_keyboard_and_shows_what_python_draws(browser, tmp_path):
    html = still_play(bars, **CONTROLS).data
    page, faults = page_with(browser, tmp_path, html, reduced_motion='reduce')
    page.locator('canvas').wait_for()
    slider, colour = (
        page.get_by_label('height', exact=True),
        page.get_by_label('colour', exact=True),
    )
    red, green = '#c2410c', '#0f766e'
    assert alike(on_canvas(page), drawn(height=2, colour=red))
    slider.press('ArrowRight')
    assert alike(on_canvas(page), drawn(height=3, colour=red))
    assert slider.get_attribute('aria-valuetext') == '3'
    colour.press('ArrowDown')
    assert colour.input_value() == '1' and alike(on_canvas(page), drawn(height=3, colour=green))
    slider.press('Home')
    page.get_by_label('power', exact=True).press('End')
    assert alike(on_canvas(page), drawn(height=0, colour=green))
    said = page.locator('canvas').get_attribute('aria-label')
    assert said == f'height 0 (height 0, colour {green}, power 100)'
    assert page.locator('.said').inner_text() == f'<0 {green} 100>'
    assert faults == [] and page.evaluate('document.documentElement.scrollWidth') <= 360
    contrast = (ROOT / 'tests' / 'support' / 'contrast.js').read_text()
    for theme in 'light', 'dark':
        page.evaluate('theme => document.documentElement.dataset.theme = theme', theme)
        seen = page.evaluate(f'() => ({contrast})(document.body)')
        assert seen['texts'] > 5 and seen['faint'] == [], theme


def test_on_a_phone_the_title_of_a_wide_picture_stands_above_it(browser, tmp_path):
    def wide(height):
        fig, ax = plt.subplots(figsize=(7, 1.5))
        ax.bar(['a'], [height])
        ax.set(title=f'height {height}', xlabel='place', ylabel='size')
        plt.show()

    html = still_play(wide, height=IntSlider(2, min=0, max=8)).data
    page, faults = page_with(browser, tmp_path, html)
    title = page.locator('.title')
    title.wait_for()
    assert title.inner_text() == 'height 2'
    page.get_by_label('height', exact=True).press('End')
    assert title.inner_text() == 'height 8' and faults == []
    page.set_viewport_size(dict(width=1280, height=800))
    assert not title.is_visible()  # the picture has it


MOVE = """el => {
    const canvas = el.querySelector('canvas'), before = canvas.toDataURL()
    const slider = el.querySelector('input')
    slider.value = slider.max
    slider.dispatchEvent(new Event('input'))
    return canvas.toDataURL() === before
}"""


@pytest.mark.parametrize('motion', ['no-preference', 'reduce'])
def test_a_play_fades_from_one_picture_to_the_next(browser, tmp_path, motion):
    "At once where motion is unwanted"
    html = still_play(bars, **CONTROLS).data
    page, _ = page_with(browser, tmp_path, html, reduced_motion=motion)
    page.locator('canvas').wait_for()
    assert page.locator('.lab').evaluate(MOVE) == (motion == 'no-preference')
    page.wait_for_timeout(600)
    assert alike(on_canvas(page), drawn(height=8, colour='#c2410c'))


def test_a_play_that_only_prints_is_moved_too(browser, tmp_path):
    html = still_play(lambda n: print('n is', n), n=(1, 3)).data
    page, faults = page_with(browser, tmp_path, html)
    page.get_by_label('n', exact=True).press('End')
    assert page.locator('.said').inner_text() == 'n is 3' and faults == []


def test_without_scripts_the_start_stands_there(browser, tmp_path):
    html = still_play(bars, **CONTROLS).data
    page, _ = page_with(browser, tmp_path, html, java_script_enabled=False)
    still = page.locator('img')
    assert still.count() == 1 and still.get_attribute('alt').startswith('height 2 (')
    assert alike(picture(still.get_attribute('src')), drawn(height=2, colour='#c2410c'))
    assert page.locator('pre').inner_text() == '<2 #c2410c 30>'


# ---- what the notebooks store


def outputs(path):
    cells = nbformat.read(path, 4).cells
    return [o.get('data', {}) for c in cells for o in c.get('outputs', [])]


@pytest.mark.parametrize(
    'path', notebooks(), ids=lambda p: p.relative_to(ROOT / 'nbs').with_suffix('').as_posix()
)
def test_a_stored_play_is_alive_and_small(path):
    name = path.relative_to(ROOT / 'nbs').with_suffix('').as_posix()
    if name == PANEL:
        return
    assert not [o for o in outputs(path) if VIEW in o], 'run tools/execute_nbs.py'
    text = path.read_text()
    boxes = [h for o in outputs(path) if 'data-lab="play"' in (h := o.get('text/html', ''))]
    assert bool(boxes) == ('playground(' in text)
    for html in boxes:
        data, strip = opened(html)
        across = [] if strip is None else range(0, strip.shape[1], data['width'])
        shown = [strip[:, at : at + data['width']] for at in across]
        assert [i for i, p in enumerate(shown) if edges(p)] == [], 'something is cut'
        assert 1 < len(data['frames']) <= 64 and len(html) < 400_000
        assert len({json.dumps(f) for f in data['frames']}) > 1  # it does move
        said = [f['says'] for f in data['frames'] if f['picture'] >= 0]
        assert len(set(said)) == len(said)  # each picture has words of its own
