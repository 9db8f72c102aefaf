"""Where a run would be resumed: a look at its checkpoints without an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from compassrl.train.checkpoint import FORMAT
from compassrl.train.checkpoint_files import first_usable, none_usable, read_manifest, verify_files


def _verify(path: Path) -> None:
    verify_files(path, read_manifest(path, FORMAT)['files'])


def latest_checkpoint(
    root: str | Path,  # folder of a run's checkpoints
    required: bool = False,  # raise CheckpointError instead of returning None?
    verify: Callable[[Path], object] = _verify,  # raises TornCheckpoint
) -> Path | None:  # the newest checkpoint that is whole
    "A torn one is named in a printed line, and the one before is tried"
    path = first_usable(Path(root), verify)[0]
    if path is None and required:
        raise none_usable(Path(root))
    return path


def latest_sharded(root: str | Path, required: bool = False) -> Path | None:
    "The same for checkpoints of many ranks"
    from compassrl.train.megatron.shards import verify_sharded

    return latest_checkpoint(root, required, verify_sharded)
