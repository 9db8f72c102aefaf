"""A trace becomes steps with their samples again, and every line of it is checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compassrl.runs.trace import TRACE_VERSION

_needed = dict(
    step={'step', 'num_samples', 'num_mini_batches', 'metrics'},
    sample={'step', 'group', 'reward', 'prompt_ids', 'response_ids'},
)


def _row(where: str, line: bytes) -> dict[str, Any]:  # one checked line
    try:
        row = json.loads(line)
    except ValueError as e:
        raise ValueError(f'{where} is not JSON ({e}): the file is damaged') from e
    if not isinstance(row, dict) or 'version' not in row:
        raise ValueError(f'{where} is no row of a trace')
    if row['version'] != TRACE_VERSION:
        raise ValueError(
            f'{where} has version {row["version"]!r}, this program reads {TRACE_VERSION}'
        )
    if row.get('kind') not in ('step', 'sample'):
        raise ValueError(f'{where} is of kind {row.get("kind")!r}')
    if missing := _needed[row['kind']] - row.keys():
        raise ValueError(f'{where} has no {sorted(missing)}')
    return row


def read_trace(
    path: str | Path,  # trace.jsonl
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:  # each traced step with its samples
    "What a kill cut short at the end is left out. Raises ValueError that names a damaged line"
    head: dict[str, Any] | None = None
    rows: list[dict[str, Any]] = []
    with open(path, 'rb') as f:
        for n, line in enumerate(f, 1):
            if not line.endswith(b'\n'):
                break
            where = f'{path} line {n}'
            row = _row(where, line)
            whole = head is None or len(rows) == head['num_samples']
            if row['kind'] == 'step':
                if head is not None and not whole:
                    have = f'{len(rows)} of {head["num_samples"]} samples'
                    raise ValueError(f'{where}: step {head["step"]} has {have}')
                if head:
                    yield head, rows
                head, rows = row, []
            elif head is None or whole or row['step'] != head['step']:
                raise ValueError(f'{where}: a sample of step {row["step"]} that no step announced')
            else:
                rows.append(row)
    if head and len(rows) == head['num_samples']:
        yield head, rows
