"""Sliders over a function: alive in JupyterLab, and on a page that has no kernel."""

__all__ = ['grid_sizes', 'spread', 'frame', 'still_play', 'playground']

import json
import os
from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import wraps
from html import escape
from io import BytesIO, StringIO
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.display import HTML
    from PIL.Image import Image


def grid_sizes(
    available: Sequence[int],  # how many values each control has
    most: int = 64,  # points of the grid, at four values of a control
    more_until: int = 40,  # points beyond which no control gets a fifth value
) -> list[int]:  # how many values of each control the grid has
    "How many values of each control a page shows: four, and more where controls are few"
    sizes = [1] * len(available)
    for i, n in enumerate(available):
        sizes[i] = max(1, min(4, n, most // prod(sizes)))
    while more := [
        i
        for i, n in enumerate(available)
        if 1 < sizes[i] < n and prod(sizes) // sizes[i] * (sizes[i] + 1) <= more_until
    ]:
        sizes[min(more, key=lambda i: sizes[i])] += 1
    return sizes


def spread(
    values: Sequence[Any],  # values of a control, in order
    start: Any,  # one of them, or a number between two of them
    num: int,
) -> list[Any]:  # `num` of them
    "Evenly chosen values of a control: its ends, its start, and some between"
    places = [round(i * (len(values) - 1) / max(1, num - 1)) for i in range(num)]
    if start in values:
        at = values.index(start)
    else:
        at = min(range(len(values)), key=lambda i: abs(values[i] - start))
    inner = range(1, num - 1) if num > 2 and 0 < at < len(values) - 1 else range(num)
    near = min(inner, key=lambda i: abs(places[i] - at))
    return [start if i == near else values[p] for i, p in enumerate(places)]


def _joined(pictures, across):  # side by side or below each other, on white
    from PIL import Image

    w, h = max(p.width for p in pictures), max(p.height for p in pictures)
    right, down = (w, 0) if across else (0, h)
    last = len(pictures) - 1
    whole = Image.new('RGB', (w + last * right, h + last * down), 'white')
    for i, picture in enumerate(pictures):
        whole.paste(picture, (i * right, i * down))
    return whole


def _says(figure):  # titles and axes
    parts = [figure.get_suptitle()]
    for ax in figure.axes:
        x, y = ax.get_xlabel(), ax.get_ylabel()
        parts += [ax.get_title(), f'{y} against {x}' if x and y else x or y]
    return '; '.join(dict.fromkeys(' '.join(p.split()) for p in parts if p))


_dpi = 105  # a usual figure is as wide as a line of text


def _fit(figure):  # a title that is wider than its figure is drawn smaller
    figure.set_dpi(_dpi)  # pictures are saved so
    for _ in range(4):  # the axes move when a title shrinks
        figure.canvas.draw()
        fits = True
        for title in filter(None, [figure._suptitle, *(ax.title for ax in figure.axes)]):
            box = title.get_window_extent()
            room = box.x0 + box.x1  # twice what is left of its middle, or right of it
            room = min(room, 2 * figure.bbox.width - room)
            if box.width > 0.98 * room:
                title.set_fontsize(title.get_fontsize() * 0.97 * room / box.width)
                fits = False
        if fits:
            return


def frame(
    fn: Callable[..., Any],  # draws with matplotlib, prints, or returns what Jupyter shows
    **values: Any,
) -> 'tuple[Image | None, str, str]':  # picture, words for it, HTML of the rest
    "What a call shows"
    import matplotlib.pyplot as plt
    from PIL import Image

    show, text, pictures, says = plt.show, StringIO(), [], []
    plt.close('all')
    plt.show = lambda *args, **kwargs: None  # the figures stay open
    try:
        with redirect_stdout(text):
            result = fn(**values)
        for figure in map(plt.figure, plt.get_fignums()):
            _fit(figure)
            figure.savefig(file := BytesIO(), dpi=_dpi)
            pictures.append(Image.open(file).convert('RGB'))
            says.append(_says(figure))
    finally:
        plt.show = show
        plt.close('all')
    rest = f'<pre>{escape(text.getvalue().strip())}</pre>' if text.getvalue().strip() else ''
    if result is not None:
        rest += result._repr_html_() if hasattr(result, '_repr_html_') else f'<pre>{result}</pre>'
    words = '; '.join(filter(None, says))
    if len(words.split()) < 2:  # a figure without a title
        words += f' What is drawn for {", ".join(f"{k} {v}" for k, v in values.items())}'
    return _joined(pictures, across=False) if pictures else None, words.strip(), rest


def _values(control):  # all values of a widget: a list, a box to tick, a slider
    if hasattr(control, 'options'):
        return [o[1] if isinstance(o, tuple) else o for o in control.options]
    if isinstance(control.value, bool):
        return [False, True]
    steps = round((control.max - control.min) / control.step)
    values = [control.min + i * control.step for i in range(steps + 1)]
    return [control.base**v for v in values] if hasattr(control, 'base') else values


def _address(picture):  # data address of an image in few colours, rare ones among them
    few = picture.quantize(64, method=1, kmeans=1, dither=0)  # 1: MAXCOVERAGE, a dot keeps its own
    few.save(file := BytesIO(), 'PNG', optimize=True)
    return f'data:image/png;base64,{b64encode(file.getvalue()).decode()}'


def _label(value, digits=4):
    rounded = isinstance(value, float) and float(f'{value:.{digits}g}')
    return f'{rounded:.4g}' if isinstance(value, float) else str(value)


def _told_apart(says, controls):  # a text of several frames: with the values of its controls
    moves = [c for c in controls if len(c['labels']) > 1]
    points = product(*(c['labels'] for c in moves))
    values = [', '.join(f'{c["name"]} {x}' for c, x in zip(moves, p, strict=True)) for p in points]
    return [f'{s} ({v})' if says.count(s) > 1 else s for s, v in zip(says, values, strict=True)]


def _box(controls, frames, start):  # frames: as `frame` gives them, the last control moves first
    pictures = list({p.tobytes(): p for p, _, _ in frames if p}.values())
    places = {p.tobytes(): i for i, p in enumerate(pictures)}
    words = _told_apart([says for _, says, _ in frames], controls)
    told = [
        dict(picture=places[p.tobytes()] if p else -1, says=says, html=rest)
        for (p, _, rest), says in zip(frames, words, strict=True)
    ]
    strip = _joined(pictures, across=True) if pictures else None
    size = (strip.width // len(pictures), strip.height) if strip else (0, 0)
    data = dict(controls=controls, frames=told, width=size[0], height=size[1])
    text = escape(json.dumps(data, separators=(',', ':')), quote=False).replace("'", '&#39;')
    picture, _, rest = frames[start]
    still = f'<img alt="{escape(words[start])}" src="{_address(picture)}">' if picture else ''
    return (
        f'<div class="lab" data-lab="play" '
        f"data-frames='{text}' "
        f'data-strip="{_address(strip) if strip else ""}">{still}{rest}</div>'
    )


def still_play(
    fn: Callable[..., Any],  # draws with matplotlib, prints, or returns what Jupyter shows
    **controls: Any,  # controls, written like those of `interact` of ipywidgets
) -> 'HTML':  # a box with all frames, for the page
    "What a function shows on a grid of its controls"
    from IPython.display import HTML
    from ipywidgets import interactive

    own = wraps(fn)(lambda **values: None)  # its controls alone
    widgets = interactive(own, **controls).kwargs_widgets
    starts = [w.value for w in widgets]
    every = [_values(w) for w in widgets]
    sizes = grid_sizes([len(v) for v in every])
    some = [spread(*args) for args in zip(every, starts, sizes, strict=True)]
    points, names = list(product(*some)), [w._kwarg for w in widgets]
    frames = [frame(fn, **dict(zip(names, p, strict=True))) for p in points]
    told = [
        dict(
            name=w.description,
            labels=[_label(x, 2 if hasattr(w, 'base') else 4) for x in v],  # a power: 0.32
            start=v.index(w.value),
            slides=hasattr(w, 'step') or type(w).__name__ == 'SelectionSlider',
        )
        for w, v in zip(widgets, some, strict=True)
    ]
    return HTML(_box(told, frames, points.index(tuple(starts))))


def playground(
    fn: Callable[..., Any],  # draws with matplotlib, prints, or returns what Jupyter shows
    **controls: Any,  # controls, written like those of `interact` of ipywidgets
) -> None:
    "Sliders over a function: alive with a kernel, stored as frames for a page"
    from IPython.display import display
    from ipywidgets import interact

    if os.environ.get('COMPASSRL_STILL'):
        display(still_play(fn, **controls))
    else:
        interact(fn, **controls)
