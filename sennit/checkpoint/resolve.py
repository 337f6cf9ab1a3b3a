"""From what a user names to a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sennit.checkpoint.load import open_latest
from sennit.errors import CheckpointError


def resolve(path: Path, group: Any = None) -> Path:
    """Return the checkpoint that `path` names: itself, or the newest verified one of a run. Collective over `group`.

    Raises CheckpointError if there is none.
    """
    if (path / "manifest.json").exists():
        return path
    for root in (path / "checkpoints", path):
        found = open_latest(root, group=group) if root.is_dir() else None
        if found is not None:
            return found.path
    raise CheckpointError(f"There is no complete checkpoint at {path}: give a run directory or a folder checkpoints/step-N.")


__all__ = ["resolve"]
