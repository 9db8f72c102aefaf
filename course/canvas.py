"""Boxes, words and arrows of the schematics, as SVG text; one palette, in which a colour means one
thing."""

from __future__ import annotations

from html import escape
from math import hypot
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from IPython.display import SVG

__all__ = [
    'Role',
    'width',
    'size',
    'leading',
    'paper',
    'colors',
    'text',
    'box',
    'line',
    'arrow',
    'dot',
    'drawing',
]

Role = Literal['plain', 'good', 'hot']
width: int = 400  # width of every drawing; at 360 pixels a letter is still 11 pixels high
size: int = 14  # size of letters
leading: int = 18  # from line to line
paper: str = '#ffffff'
colors: dict[str, tuple[str, str, str]] = {  # role -> area, line, words
    'plain': ('#f5f5f4', '#78716c', '#292524'),
    'good': ('#ccfbf1', '#0f766e', '#115e59'),
    'hot': ('#ffedd5', '#c2410c', '#9a3412'),
}


def _colors(role):
    if role not in colors:
        raise ValueError(f'role={role!r}: use one of {get_args(Role)}')
    return colors[role]


def text(
    x: float,
    y: float,  # baseline of the first line
    words: str,  # may have several lines
    role: Role = 'plain',
    anchor: Literal['start', 'middle', 'end'] = 'start',
    bold: bool = False,
) -> str:
    "Words. Raises ValueError for an unknown role"
    look = f'class="ink {role}" fill="{_colors(role)[2]}" text-anchor="{anchor}"'
    look += ' font-weight="600"' * bold
    lines = enumerate(words.split('\n'))
    return ''.join(
        f'<text x="{x:g}" y="{y + i * leading:g}" {look}>{escape(w)}</text>' for i, w in lines
    )


def box(
    x: float,
    y: float,
    w: float,
    h: float,
    words: str = '',  # in its middle; may have several lines
    role: Role = 'plain',
    dashed: bool = False,  # for what is empty
) -> str:
    "A box with words. Raises ValueError for an unknown role"
    area, line, _ = _colors(role)
    look = f'class="box {role}" fill="{area}" stroke="{line}"' + ' stroke-dasharray="3 3"' * dashed
    middle = y + h / 2 - words.count('\n') * leading / 2 + 5
    shape = f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4" {look}/>'
    return shape + (text(x + w / 2, middle, words, role, 'middle') if words else '')


def line(
    *points: tuple[float, float], role: Role = 'plain', thick: float = 1.5, dashed: bool = False
) -> str:
    "A line through points. Raises ValueError for an unknown role"
    path = 'M' + 'L'.join(f'{x:g} {y:g}' for x, y in points)
    look = f'class="line {role}" stroke="{_colors(role)[1]}" stroke-width="{thick:g}"'
    return f'<path d="{path}" fill="none" {look}' + ' stroke-dasharray="4 4"' * dashed + '/>'


def arrow(
    *points: tuple[float, float],  # at least two; the head is at the last
    role: Role = 'plain',
    thick: float = 1.5,
) -> str:
    "A line with a head, drawn as a shape: markers have ids, which clash on a page"
    (a, b), (x, y) = points[-2:]
    long = hypot(x - a, y - b)
    u, v = (x - a) / long, (y - b) / long
    s = 4 + 2 * thick
    corners = [(x, y), *((x - s * u - k * v, y - s * v + k * u) for k in (s / 2, -s / 2))]
    path = 'M' + 'L'.join(f'{p:.1f} {q:.1f}' for p, q in corners) + 'z'
    end = x - s * u / 2, y - s * v / 2
    head = f'<path d="{path}" class="head {role}" fill="{_colors(role)[1]}"/>'
    return line(*points[:-1], end, role=role, thick=thick) + head


def dot(x: float, y: float, role: Role = 'plain', radius: float = 4.5) -> str:
    "A point of a curve. Raises ValueError for an unknown role"
    return f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" class="head {role}" ' + (
        f'fill="{_colors(role)[1]}"/>'
    )


def drawing(
    title: str,
    says: str,  # what it shows, for whoever does not see it
    height: float,
    *parts: str,
) -> SVG:  # an SVG that Jupyter and the site both show
    "Parts on paper, with a text alternative"
    from IPython.display import SVG

    return SVG(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" role="img" '
        f'viewBox="0 0 {width} {height:g}" width="{width * 6 // 5}" '
        'style="max-width:100%;height:auto" '
        f'font-family="Inter,system-ui,sans-serif" font-size="{size}">'
        f'<title>{escape(title)}</title><desc>{escape(says)}</desc>'
        f'<rect class="paper" width="{width}" height="{height:g}" rx="8" fill="{paper}"/>'
        f'{"".join(parts)}</svg>'
    )
