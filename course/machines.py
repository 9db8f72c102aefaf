"""What each rank holds, how new weights travel, what a run leaves on the disk: drawn from a layout,
from weights, and from a folder."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import hf_weights
from compassrl.plan.layout import layout
from compassrl.train.megatron.parallel import ParallelConfig

from .canvas import arrow, box, drawing, text, width
from .layouts import rank_groups, span

if TYPE_CHECKING:
    from IPython.display import SVG

__all__ = ['run_files', 'ranks', 'weight_sync', 'run_folder']


def _rank(x, y, p, policy, same):
    words = f'rank {p.rank}: heads {span(p.heads)}'
    if any(policy.is_sparse(i) for piece in p.layers for i in piece):
        words += f'\nexperts {span(p.experts)}'
    return box(x, y, 170, 44, words, 'good' if p.rank in same else 'plain')


def ranks(
    parallel: ParallelConfig = ParallelConfig(tp=2, pp=2, ep=2, etp=1),
    world_size: int = 8,  # ranks that train, at most 16
    policy: PolicyConfig | None = None,  # None = the default one
    rank: int = 0,  # the rank with marked copies
) -> SVG:
    "Stages, replicas and ranks as nested boxes. Raises ValueError for a layout that cannot be"
    policy = policy or PolicyConfig()
    found = layout(parallel, policy, world_size)
    if world_size > 16 or not 0 <= rank < world_size:
        raise ValueError(f'{world_size=}, {rank=}: draw at most 16 ranks, and mark one of them')
    same = next(g for g in rank_groups(found, 'dp') if rank in g)
    stages: dict[int, dict[int, list]] = {}
    for p in found.places:
        stages.setdefault(p.pp, {}).setdefault(p.dp, []).append(p)
    y, parts = 8, []
    for number, replicas in stages.items():
        tall = 28 + 48 * max(map(len, replicas.values()))
        layers = ', '.join(map(span, next(iter(replicas.values()))[0].layers))
        parts += [
            box(4, y, 392, 30 + (tall + 6) * ceil(len(replicas) / 2)),
            text(14, y + 20, f'stage {number}: layers {layers}', bold=True),
        ]
        for i, (dp, members) in enumerate(replicas.items()):
            x, top = 12 + 191 * (i % 2), y + 28 + (tall + 6) * (i // 2)
            parts += [box(x, top, 184, tall), text(x + 8, top + 18, f'replica {dp}')]
            parts += [
                _rank(x + 7, top + 25 + 48 * k, p, policy, same) for k, p in enumerate(members)
            ]
        y += 38 + (tall + 6) * ceil(len(replicas) / 2)
    mark = f'teal: the heads and layers of rank {rank}'
    says = (
        f'{world_size} ranks in {len(stages)} pipeline stages. Ranks {same} hold the same heads '
        f'of the same layers.'
    )
    return drawing('Ranks as nested boxes', says, y + 26, *parts, text(10, y + 14, mark, 'good'))


def weight_sync(
    weights: Iterable[tuple[str, Tensor]] | None = None,  # None = of the default policy
    version: int = 1,  # the number that they get
    num_shown: int = 4,  # tensors that are drawn, of the first ones
) -> SVG:
    "What travels from the train engine to the rollout. Raises ValueError if nothing does"
    known = list(hf_weights(Policy(PolicyConfig())) if weights is None else weights)
    if not known or not 1 <= num_shown <= 8:
        raise ValueError(f'{len(known)} weights, {num_shown=}: draw one to eight of some')
    shown, y, middle = known[:num_shown], 66, width / 2
    parts = [box(100, 10, 200, 34, 'train engine'), arrow((middle, 47), (middle, 72))]
    for name, t in shown:
        y += 12
        parts.append(box(10, y, 380, 44, f'{name}\n{list(t.shape)}', 'good'))
        y += 36
    y += 28
    numbers = sum(t.numel() for _, t in known)
    if more := len(known) - len(shown):
        parts.append(text(middle, y, f'and {more} more', anchor='middle'))
        y += 18
    total = f'{len(known)} tensors, {numbers:,} numbers'
    parts += [
        text(middle, y, total, anchor='middle', bold=True),
        arrow((middle, y + 9), (middle, y + 34)),
        box(100, y + 37, 200, 34, f'rollout, version {version}'),
        text(middle, y + 92, f"version {version - 1}'s cached values are dropped", 'hot', 'middle'),
    ]
    says = (
        f'The train engine hands {total} to the rollout by their Hugging Face names, first '
        f'{shown[0][0]}. They are version {version}; caches of the version before are dropped.'
    )
    return drawing('New weights for the rollout', says, y + 106, *parts)


run_files: dict[str, tuple[str, bool]] = {  # name -> what it is, is it needed to go on?
    'config.json': ('every setting', True),
    'origin.json': ('what it is made of', False),
    'written.json': ('hashes of what it wrote', False),
    'machine.json': ('where it ran', False),
    'start': ('the model before RL', True),
    'cold_start.jsonl': ('a row per step of the cold start', False),
    'screen.json': ('prompts that are asked', False),
    'metrics.jsonl': ('a row per step', False),
    'trace.jsonl': ('steps written in full, by token', False),
    'checkpoints': ('the newest steps', True),
    'eval_before.json': ('held-out answers before RL', False),
    'eval_after.json': ('the same after it', False),
    'model': ('the model, for Hugging Face', False),
    'tensorboard': ('curves for TensorBoard', False),
    'timings.json': ('who did what, when', False),
    'gantt.png': ('the same as a picture', False),
    'curves.png': ('reward, length, entropy ...', False),
    'report.json': ('the numbers of the report', False),
    'report.md': ('read this first', False),
}


def run_folder(
    folder: str | Path,  # folder of a run
) -> SVG:
    "What is in it and what for, in the order in which it is written. Raises ValueError if empty"
    found = {p.name: p for p in Path(folder).iterdir() if not p.name.startswith('.')}
    if not found:
        raise ValueError(f'{folder} is empty: name the folder of a run')
    order = [*run_files, *sorted(found.keys() - run_files.keys())]
    names = [n for n in order if n in found]
    parts = [text(10, 22, f'{Path(folder).name}/', bold=True)]
    for i, name in enumerate(names):
        what, needed = run_files.get(name, ('unknown', False))
        role = 'good' if needed else 'plain' if name in run_files else 'hot'
        y = 32 + 28 * i
        parts.append(box(10, y, 150, 24, name + '/' * found[name].is_dir(), role))
        parts.append(text(168, y + 17, what, role))
    says = '; '.join(f'{n}: {run_files.get(n, ("unknown",))[0]}' for n in names)
    y = 32 + 28 * len(names) + 18
    parts.append(text(10, y, 'teal: what the run needs to go on', 'good'))
    return drawing('The folder of a run', says + '.', y + 14, *parts)
