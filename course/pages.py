"""Pages that are made from the code: settings and metrics as tables, and what a trace holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from compassrl.config import TrainConfig
from compassrl.loop import loss_of
from compassrl.records import Batch, mini_batches
from compassrl.runs.presets import about_setting, flag, range_of, typed
from compassrl.runs.trace import PER_TOKEN
from compassrl.runs.trackers import FileKind, glossary

__all__ = [
    'settings_table',
    'settings_markdown',
    'glossary_markdown',
    'microscope',
    'recompute_loss',
]


def _rows(part: Any, at: str, only: tuple[str, ...]) -> Iterator[str]:
    for f in fields(part):
        value = getattr(part, f.name)
        if not is_dataclass(value) and (not only or f.name in only):
            allowed = range_of(part, f.name) or ''
            about = about_setting(part, f.name)
            cells = f'`{flag(at + f.name)}`', typed(value), str(allowed), about
            yield '| ' + ' | '.join(c.replace('|', '\\|') for c in cells) + ' |'


def settings_table(
    part: Any,  # a dataclass of settings; its values are shown as defaults
    at: str = '',  # place in a larger config: 'optim.'
    only: tuple[str, ...] = (),  # names of fields; () = all
) -> str:
    "The settings of one part as a Markdown table. Raises ValueError for a name it does not have"
    if unknown := {*only} - {f.name for f in fields(part)}:
        raise ValueError(f'{sorted(unknown)}: {type(part).__name__} has no such settings')
    head = ['| flag | default | allowed | meaning |', '| - | - | - | - |']
    return '\n'.join([*head, *_rows(part, at, only)])


def settings_markdown(
    cfg: Any,  # a config; its values are shown as defaults
    at: str = '',  # place in a larger config: 'optim.'
    name: str = 'The run itself',
) -> str:
    "Every setting of a config: a table for each of its parts"
    about = '' if not at else (type(cfg).__doc__ or '').partition('. ')[0].rstrip('.') + '.'
    parts = [f.name for f in fields(cfg) if is_dataclass(getattr(cfg, f.name))]
    more = [settings_markdown(getattr(cfg, p), f'{at}{p}.', f'`{at}{p}`') for p in parts]
    return '\n'.join([f'## {name}', about, '', settings_table(cfg, at), '', *more])


def glossary_markdown() -> str:
    "All entries as tables, one for each kind of file"
    head = 'in the file', 'in a tracker', 'unit', 'range', 'what it is', 'healthy', 'module'
    titles: dict[FileKind, str] = {
        'metrics': 'metrics.jsonl, a row per RL step',
        'evaluation': 'eval_before.json and eval_after.json',
        'cold_start': 'cold_start.jsonl, a row per step of the cold start',
    }
    parts = []
    for kind, title in titles.items():
        rows = [head, ['---'] * len(head)]
        for m in glossary()[kind]:
            about = m.about + (f' (only with {m.when})' if m.when else '')
            name = m.name and f'`{m.name}`'
            rows.append([f'`{m.key}`', name, m.unit, m.range, about, m.healthy, f'`{m.where}`'])
        parts.append('\n'.join([f'**{title}**', '', *(f'| {" | ".join(r)} |' for r in rows)]))
    return '\n\n'.join(parts)


def microscope(
    rows: list[dict[str, Any]],  # samples of `read_trace`
    tokenizer: Tokenizer,
    color: str = 'entropy',  # or 'advantages', or any other list of the rows
) -> str:  # HTML, no scripts
    "Responses with coloured tokens, log-probs on hovering. Raises ValueError for an unknown colour"
    if color not in rows[0]:
        raise ValueError(f'color={color!r}: use one of {[k for k in PER_TOKEN if k in rows[0]]}')
    top = max((abs(x) for r in rows for x in r[color]), default=0.0) or 1.0

    def token(r: dict[str, Any], t: int) -> str:
        x, text = r[color][t], tokenizer.decode([r['response_ids'][t]], skip_special_tokens=False)
        text = escape(text) if text.strip() else repr(text)[1:-1] or '∅'
        rgb = '15,118,110' if color == 'advantages' and x > 0 else '194,65,12'
        title = '\n'.join(f'{k} {r[k][t]:+.4f}' for k in PER_TOKEN[:-1] if k in r)
        style = f'background:rgba({rgb},{0.75 * abs(x) / top:.3f});color:#1c1917;'
        style += 'border:1px solid #e7e5e4;padding:0 2px'
        return f'<span title="{escape(title)}" style="{style}">{text}</span>'

    def line(r: dict[str, Any]) -> str:
        prompt = escape(tokenizer.decode(r['prompt_ids'], skip_special_tokens=False))
        tokens = ''.join(token(r, t) for t in range(len(r['response_ids'])))
        return f'<div><span style="color:#78716c">{r["reward"]:.0f} {prompt}</span> {tokens}</div>'

    style = 'font-family:ui-monospace,monospace;line-height:1.7;background:#fff;padding:.3em .6em'
    return f'<div style="{style}">{"".join(map(line, rows))}</div>'


def recompute_loss(
    head: dict[str, Any],  # a step of `read_trace`
    rows: list[dict[str, Any]],  # its samples
    cfg: TrainConfig,  # settings of the run
) -> float:  # mean over the step's mini-batches, as logged
    "From the trace alone. Raises ValueError where the step was skipped or a tensor is missing"
    if 'log_probs' not in rows[0]:
        raise ValueError(f'step {head["step"]} has no log_probs: no update was made of it')
    # entry t speaks of token t; column 0 stands for the prompt
    T = max(len(r['response_ids']) for r in rows) + 1

    def table(key: str) -> Tensor:
        padded = [[0.0] + r[key] + [0.0] * (T - 1 - len(r[key])) for r in rows]
        return torch.tensor(padded, dtype=torch.float64)

    lengths = torch.tensor([len(r['response_ids']) for r in rows])
    mask = (torch.arange(T) > 0) & (torch.arange(T) <= lengths[:, None])
    for row, r in zip(mask, rows):
        if 'policy_mask' in r:  # a tool spoke
            row[1 : len(r['policy_mask']) + 1] = torch.tensor(r['policy_mask'])
    batch = Batch(
        token_ids=torch.zeros(len(rows), T, dtype=torch.long),
        token_mask=mask,
        response_mask=mask,
        group=torch.tensor([r['group'] for r in rows]),
        rewards=torch.tensor([r['reward'] for r in rows]),
        **{k: table(k) for k in PER_TOKEN if k in rows[0] and k != 'log_probs'},
    )
    log_probs, loss, total = table('log_probs'), loss_of(cfg, batch), 0.0
    parts = mini_batches(len(rows), head['num_mini_batches'])
    parts = [p for p in parts if mask[p].any()]  # the others are no step of an engine either
    for p in parts:
        part = batch.map(lambda t: t[p])
        value, _ = loss(log_probs[p], part, int(part.response_mask.sum()), len(p))
        total += float(value) / len(parts)
    return total
