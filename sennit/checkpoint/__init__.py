"""Checkpoints: written whole or not at all, verified before they are loaded, readable in any layout of ranks."""

from sennit.checkpoint.load import CheckpointInfo, describe, load, load_full, open_latest, read_meta, verify
from sennit.checkpoint.ranks import new_checkpoint_group
from sennit.checkpoint.resolve import resolve
from sennit.checkpoint.save import SavedCheckpoint, Staged, Writer, save

__all__ = [
    "CheckpointInfo",
    "SavedCheckpoint",
    "Staged",
    "Writer",
    "describe",
    "load",
    "load_full",
    "new_checkpoint_group",
    "open_latest",
    "read_meta",
    "resolve",
    "save",
    "verify",
]
