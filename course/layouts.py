"""A layout as a picture: machines, ranks and what they hold, servers."""

from __future__ import annotations

from itertools import chain
from math import ceil
from typing import TYPE_CHECKING, Any

from compassrl.plan.layout import Layout, Place, ServerPlace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Rectangle

__all__ = ['rank_groups', 'span', 'plot_layout']

_stages = '#c2410c', '#0f766e', '#6d28d9', '#a16207', '#1d4ed8', '#be185d', '#4d7c0f', '#334155'


def rank_groups(
    layout: Layout,
    *axes: str,  # some of tp, cp, dp, pp, or of etp, ep, edp, pp
) -> list[list[int]]:  # the ranks that differ in these axes alone
    "Ranks that talk to each other. Raises ValueError for axes of both kinds"
    for kind in (('tp', 'cp', 'dp', 'pp'), ('etp', 'ep', 'edp', 'pp')):
        if set(axes) <= set(kind):
            break
    else:
        raise ValueError(f'axes={axes}: use some of tp, cp, dp, pp, or of etp, ep, edp, pp')
    found: dict[tuple[Any, ...], list[int]] = {}
    for p in layout.places:
        others = tuple(getattr(p, k) for k in kind if k not in axes)
        found.setdefault(others, []).append(p.rank)
    return list(found.values())


def span(r: range) -> str:
    "A range as people write it"
    if not r:
        return '-'
    return f'{r[0]}' if len(r) == 1 else f'{r[0]}-{r[-1]}'


def _tint(stage: int, white: float) -> list[float]:  # the colour of a stage, mixed with white
    code = _stages[stage % len(_stages)]
    return [white + (1 - white) * int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def _label(p: Place, layout: Layout, detail: bool) -> str:  # what stands in a rank's cell
    axes = [f'{k}{getattr(p, k)}' for k in ('tp', 'cp', 'ep') if getattr(layout.parallel, k) > 1]
    if not detail:
        return '\n'.join([f'{p.rank}', ' '.join(axes).replace('p', '')])
    held = [f'layers {", ".join(map(span, p.layers))}', f'heads {span(p.heads)}']
    if any(map(layout.policy.is_sparse, chain(*p.layers))):
        held.append(f'experts {span(p.experts)}')
    return '\n'.join([f'rank {p.rank}: ' + ' '.join([f'dp{p.dp}', *axes]), *held])


def _box(x: float, y: float, width: float, height: float, **look: Any) -> Rectangle:
    from matplotlib.patches import Rectangle  # takes a second: not before something is drawn

    return Rectangle((x, y), width, height, **look)


class _Grid:  # where each GPU is drawn: a row of cells per node, in one to four columns
    def __init__(self, layout: Layout) -> None:
        nodes, self.per_node = layout.num_nodes, layout.ranks_per_node
        last = max([len(layout.places), *(s.gpus[-1] + 1 for s in layout.servers)])
        self.detail = last <= 16  # is there room for words?
        self.w, self.h = (1.55, 0.8) if self.detail else (0.62, 0.42)  # size of a cell
        self.cols = 1 if nodes <= 8 else 2 if nodes <= 16 else 4
        self.rows = ceil(nodes / self.cols)
        self.node_width = min(self.per_node, last) * self.w

    def size(self) -> tuple[float, float]:  # inches
        width, height = self.cols * (self.node_width + 0.5), self.rows * (self.h + 0.42) + 0.5
        scale = min(1, 13 / width)
        return scale * width, scale * height

    def corner(self, i: int) -> tuple[float, float]:  # lower left of the i-th cell
        col, row = divmod(i // self.per_node, self.rows)
        return col * (self.node_width + 0.5) + i % self.per_node * self.w, -row * (self.h + 0.42)

    def frame(self, ax: Axes, node: int) -> None:
        x, y = self.corner(node * self.per_node)
        size = self.node_width + 0.12, self.h + 0.12
        look = dict(fc='none', ec='#78716c', lw=1)
        ax.add_patch(_box(x - 0.06, y - 0.06, *size, **look))
        ax.text(x, y + self.h + 0.1, f'node {node}', fontsize=7, color='#44403c')

    def cell(
        self, ax: Axes, i: int, text: str, fill: Any, num: int = 1, ink: str = 'black'
    ) -> None:
        (x, y), width = self.corner(i), num * self.w
        size = width - 0.06, self.h - 0.06
        ax.add_patch(_box(x + 0.03, y + 0.03, *size, fc=fill, ec='white'))
        x, y = x + width / 2, y + self.h / 2
        ax.text(x, y, text, color=ink, ha='center', va='center', fontsize=6.5)


def _plot_server(ax: Axes, grid: _Grid, server: ServerPlace) -> None:
    R, end = grid.per_node, server.gpus[-1] + 1
    for i in {max(server.gpus[0], g // R * R) for g in server.gpus}:  # its first GPU on each node
        grid.cell(ax, i, f'vLLM {server.index}', '#57534e', min(end - i, R - i % R), 'white')


def _stage_legend(ax: Axes, layout: Layout) -> None:
    handles = {}
    for p in layout.places:
        label = f'stage {p.pp}: layers {", ".join(map(span, p.layers))}'
        handles[p.pp] = _box(0, 0, 1, 1, fc=_tint(p.pp, 0.45), label=label)
    look = dict(ncol=4, fontsize=7, frameon=False)
    boxes = [*handles.values()]
    ax.legend(handles=boxes, loc='upper center', bbox_to_anchor=(0.5, 0), **look)


def plot_layout(
    layout: Layout,
    ax: Axes | None = None,  # matplotlib axes; None = a new figure
) -> Axes:  # the axes
    "Nodes framed, ranks coloured by pipeline stage (every other replica paler), servers in grey"
    grid = _Grid(layout)
    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.subplots(figsize=grid.size(), layout='constrained')[1]
    for node in range(layout.num_nodes):
        grid.frame(ax, node)
    for p in layout.places:
        tint = _tint(p.pp, 0.75 if p.dp % 2 else 0.45)
        grid.cell(ax, p.rank, _label(p, layout, grid.detail), tint)
    for server in layout.servers:
        _plot_server(ax, grid, server)
    if not grid.detail:
        _stage_legend(ax, layout)
    ax.autoscale_view()
    ax.set_aspect('equal')
    ax.axis('off')
    return ax
