"""A KV cache, continuous batching, FP8 blocks, and who waits for whom: drawn from the library's own
queue and codes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from compassrl.records import Request
from compassrl.rollout.fp8 import dequantise, quantise
from course.simulator import simulate

from .canvas import Role, box, drawing, line, text

if TYPE_CHECKING:
    from IPython.display import SVG

__all__ = [
    'Plan',
    'kv_cache',
    'Bar',
    'queue_bars',
    'batching',
    'plan_bars',
    'timelines',
    'fp8_blocks',
]


def kv_cache(
    # tokens of the prompt, and of the response so far, of one to eight rows
    lengths: Sequence[tuple[int, int]] = ((4, 5), (4, 2), (3, 4)),
) -> SVG:
    "What is kept of each response when the next token is drawn. Raises ValueError"
    longest = max((p + r for p, r in lengths), default=0)
    if not 1 <= len(lengths) <= 8 or longest > 24 or min(map(min, lengths)) < 1:
        raise ValueError(f'lengths={lengths}: draw one to eight rows of 2 to 24 tokens')
    step, parts = min(26, 380 / longest), [text(10, 22, 'a row per response', bold=True)]
    for i, (prompt, response) in enumerate(lengths):
        for t in range(prompt + response):
            new, own = t == prompt + response - 1, t >= prompt
            look = dict(role='good') if new else dict(dashed=not own)
            parts.append(box(10 + step * t, 34 + 32 * i, step - 3, 24, **look))
    total, y = sum(p + r for p, r in lengths), 34 + 32 * len(lengths) + 14
    parts += [
        *(box(10, y, 20, 18, dashed=True), text(38, y + 14, 'of the prompt')),
        *(box(160, y, 20, 18), text(188, y + 14, 'drawn before')),
        *(box(300, y, 20, 18, role='good'), text(328, y + 14, 'new', 'good')),
        text(
            10,
            y + 44,
            f'a step computes {len(lengths)} entries; the cache has {total - len(lengths)}',
        ),
        text(10, y + 64, f'without a cache it computes {total}', 'hot'),
    ]
    says = (
        f'{len(lengths)} responses with {total} tokens. With a cache a step computes '
        f'{len(lengths)} new entries and reads {total - len(lengths)}; without it computes {total}.'
    )
    return drawing('The KV cache', says, y + 80, *parts)


class Bar(NamedTuple):
    "What one request does"

    lane: int
    start: float  # seconds, or steps
    end: float
    number: int  # number of its request


def _lanes(spans):  # (start, end, request) -> bars, each in a lane that is free
    free, bars = [], []
    for start, end, number in sorted(spans):
        lane = next((i for i, until in enumerate(free) if until <= start + 1e-9), len(free))
        free[lane : lane + 1] = [end]
        bars.append(Bar(lane, start, end, number))
    return bars


def queue_bars(
    lengths: Sequence[float],  # seconds or steps of each request, by number
    slots: int,
    longest_first: bool = False,
    begin: float = 0.0,
) -> list[Bar]:
    "Start and end of each request, by the library's queue"
    requests = [Request(str(i), (i,)) for i in range(len(lengths))]
    order = (lambda r: -lengths[int(r.prompt_id)]) if longest_first else (lambda r: 0)
    done = simulate(requests, lambda r, _: lengths[int(r.prompt_id)], ['a'], slots, order=order)
    return _lanes((begin + s.start, begin + s.end, s.index) for s in done)


def _chart(y, bars, lanes, end, scale, role: Role = 'plain', idle=True):
    "Lanes of bars, and what is empty in them until `end`"
    parts = []
    for lane in range(lanes):
        at, own = 0.0, [b for b in bars if b.lane == lane]
        for b in [*own, Bar(lane, end, end, 0)]:
            if idle and b.start > at + 1e-9:
                parts.append(
                    box(10 + scale * at, y + 26 * lane, scale * (b.start - at), 22, '', 'hot', True)
                )
            at = b.end
        for b in own:
            x, wide = 10 + scale * b.start, scale * (b.end - b.start)
            parts.append(
                box(x, y + 26 * lane, wide, 22, chr(ord('A') + b.number) if wide > 22 else '', role)
            )
    return parts


def batching(
    lengths: Sequence[int] = (7, 2, 3, 1, 5, 2),  # response tokens of one to twelve requests
    slots: int = 3,  # one to six
) -> SVG:
    "The same requests in batches and continuously. Raises ValueError for more than fits"
    if not 1 <= len(lengths) <= 12 or not 1 <= slots <= 6:
        raise ValueError(f'{len(lengths)} requests, {slots=}: draw one to twelve in one to six')
    waves, end = [], 0
    for i in range(0, len(lengths), slots):
        wave = queue_bars(lengths[i : i + slots], slots, begin=end)
        waves += [b._replace(number=b.number + i) for b in wave]
        end += max(lengths[i : i + slots])
    free = queue_bars(lengths, slots)
    scale, y, parts, said = 380 / end, 8, [], []
    for name, bars in {'in batches': waves, 'continuous': free}.items():
        steps = max(b.end for b in bars)
        idle = 1 - sum(lengths) / (slots * steps)
        said.append(f'{name}: {steps:g} steps, {idle:.0%} idle')
        parts.append(text(10, y + 14, said[-1], bold=True))
        parts += _chart(y + 24, bars, slots, steps, scale, 'good')
        y += 42 + 26 * slots
    return drawing('Continuous batching', '; '.join(said) + '.', y, *parts)


Plan = Literal['serial', 'overlap', 'longest first']


def plan_bars(
    plan: Plan,
    lengths: Sequence[float],  # seconds of each response
    slots: int,
    judge_s: float,  # seconds of a verdict
    judges: int,
) -> tuple[list[Bar], list[Bar]]:  # bars of the rollout, bars of the judges
    "The whole step: a verdict waits for its response and for a judge that is free"
    if plan not in get_args(Plan):
        raise ValueError(f'plan={plan!r}: use one of {get_args(Plan)}')
    rollout = queue_bars(lengths, slots, plan == 'longest first')
    last, free, spans = max(b.end for b in rollout), [0.0] * judges, []
    for b in sorted(rollout, key=lambda b: b.end):
        start = max(free[0], last if plan == 'serial' else b.end)
        heapq.heapreplace(free, start + judge_s)
        spans.append((start, start + judge_s, b.number))
    return rollout, _lanes(spans)


def timelines(
    lengths: Sequence[float] = (1, 1, 2, 4),  # seconds of one to twelve responses
    slots: int = 2,  # slots of the rollout, one to six
    judge_s: float = 0.5,  # seconds of a verdict
    judges: int = 1,
    plans: Sequence[Plan] = get_args(Plan),
) -> SVG:
    "Rollout and judges on one clock, plan by plan. Raises ValueError for more than fits"
    if not 1 <= len(lengths) <= 12 or not 1 <= slots <= 6 or not 1 <= judges <= 4:
        raise ValueError(
            f'{len(lengths)} responses, {slots=}, {judges=}: draw one to twelve, 1 to 6, 1 to 4'
        )
    found = {p: plan_bars(p, lengths, slots, judge_s, judges) for p in plans}
    ends = {p: max(b.end for bars in both for b in bars) for p, both in found.items()}
    scale, y, parts = 380 / max(ends.values()), 8, []
    for plan, (rollout, verdicts) in found.items():
        parts.append(text(10, y + 14, f'{plan}: {ends[plan]:g} seconds', bold=True))
        parts += _chart(y + 24, rollout, slots, ends[plan], scale, 'good')
        parts += _chart(y + 24 + 26 * slots, verdicts, judges, ends[plan], scale, idle=False)
        y += 40 + 26 * (slots + judges)
    parts += [
        *(box(10, y, 20, 18, role='good'), text(36, y + 14, 'response', 'good')),
        *(box(124, y, 20, 18), text(150, y + 14, 'its verdict')),
        *(box(250, y, 20, 18, role='hot', dashed=True), text(276, y + 14, 'slot waits', 'hot')),
    ]
    says = '; '.join(f'{p} takes {s:g} seconds' for p, s in ends.items()) + '.'
    return drawing('Rollout and judges on one clock', says, y + 30, *parts)


_small_matrix = (
    (0.12, -0.05, 0.31, 20_000.0),
    (0.02, -0.14, 0.25, -0.09),
    (-0.2, 0.07, 0.03, 0.18),
    (0.15, -0.01, -0.22, 0.06),
)


def _cells(y, w, roles):
    step = 380 / w.shape[1]
    for i, row in enumerate(w.tolist()):
        for j, v in enumerate(row):
            words = f'{v + 0.0:.2g}' if abs(v) < 1e3 else f'{v:.0f}'  # + 0.0: there is no -0
            yield box(10 + step * j + 2, y + 26 * i, step - 4, 23, words, roles[i][j])


def _frames(y, shape, block):  # around each block
    rows, columns = shape
    step = 380 / columns
    for i in range(0, rows, block[0]):
        for j in range(0, columns, block[1]):
            (x, a), (u, b) = (
                (10 + step * q, y + 26 * p - 2)
                for p, q in ((i, j), (min(i + block[0], rows), min(j + block[1], columns)))
            )
            yield line((x, a), (u, a), (u, b), (x, b), (x, a), thick=2)


def fp8_blocks(
    weights: Tensor | None = None,  # [O, I] at most 6 by 6; None = a small example
    block: tuple[int, int] = (2, 2),  # rows and columns that share a scale
) -> SVG:
    "Weights as FP8 keeps them, with one scale and with one per block. Raises ValueError"
    w = torch.tensor(_small_matrix) if weights is None else weights
    if w.dim() != 2 or max(w.shape) > 6:
        raise ValueError(f'weights {list(w.shape)}: draw a matrix of at most 6 by 6')
    high, y, parts, said = 26 * len(w), 8, [], []
    whole = tuple(w.shape)
    parts += [
        text(10, y + 14, 'the weights', bold=True),
        *_cells(y + 26, w, [['plain'] * w.shape[1]] * len(w)),
    ]
    for name, cut in (('one scale', whole), ('a scale per block', block)):
        y += high + 42
        codes, scales = quantise(w, cut)
        kept = dequantise(codes, scales, cut)
        bad = (kept - w).abs() > w.abs() / 16  # more than half a step of e4m3
        roles: list[list[Role]] = [['hot' if b else 'good' for b in row] for row in bad.tolist()]
        said.append(f'{name}: {int(bad.sum())} of {w.numel()} off by more than 1/16')
        parts += [
            text(10, y + 14, f'{name}: {int(bad.sum())} of {w.numel()} are far off', bold=True),
            *_cells(y + 26, kept, roles),
            *_frames(y + 26, whole, cut),
        ]
    spread = ', '.join(f'{s:.2g}' for s in scales.flatten().tolist())
    y += high + 48
    words = f'scales: {spread}' if scales.numel() <= 4 else f'{scales.numel()} scales'
    parts += [text(10, y, words), text(10, y + 18, 'orange: off by more than 1/16', 'hot')]
    return drawing(
        'Block scales of FP8',
        f'{"; ".join(said)}. The scales of the blocks: {spread}.',
        y + 32,
        *parts,
    )
