"""Loading: every file is verified and every name, shape and dtype compared before the first tensor changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from sennit.checkpoint import folders
from sennit.checkpoint.manifest import FileRecord, Manifest, check_hash, check_sizes, read_manifest
from sennit.checkpoint.ranks import Ranks
from sennit.checkpoint.state import compare, flatten
from sennit.checkpoint.storage import StateReader, read_state
from sennit.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a checkpoint says of itself: its folder, step, the bytes of its files, and its meta data."""

    path: Path
    step: int
    bytes: int
    meta: dict[str, Any]


def describe(path: str | os.PathLike) -> CheckpointInfo:
    """Return what is in a checkpoint, from its manifest alone: its files are not verified. Raises CheckpointError."""
    manifest = read_manifest(Path(path))
    return CheckpointInfo(Path(path), manifest.step, manifest.total_bytes, manifest.meta)


def read_meta(path: str | os.PathLike) -> dict[str, Any]:
    """Return the meta data that was given to `save`. Raises CheckpointError if the manifest is missing or damaged."""
    return read_manifest(Path(path)).meta


def verify(path: str | os.PathLike, *, group: Any = None) -> CheckpointInfo:
    """Read every file of a checkpoint and return its description. Collective over `group`, which shares the reading.

    Raises CheckpointError on all ranks that names the first file that is missing, cut or changed.
    """
    path = Path(path)
    manifest, problem = _inspect(path, Ranks(group))
    if problem is not None or manifest is None:
        raise CheckpointError(str(problem))
    return CheckpointInfo(path, manifest.step, manifest.total_bytes, manifest.meta)


def open_latest(root: str | os.PathLike, *, group: Any = None) -> CheckpointInfo | None:
    """Return the newest checkpoint below `root` whose files are all intact, or None. Collective over `group`.

    Damaged ones are passed over with a warning that names the file. Verification reads every byte once, shared by
    the ranks.
    """
    ranks = Ranks(group)
    paths = ranks.on_first(lambda: folders.candidates(Path(root)), "looking for checkpoints")
    for path in paths:
        manifest, problem = _inspect(path, ranks)
        if manifest is not None and problem is None:
            return CheckpointInfo(path, manifest.step, manifest.total_bytes, manifest.meta)
        if ranks.rank == 0:
            logger.warning("the checkpoint %s is passed over: %s", path, problem)
    return None


def load(path: str | os.PathLike, state: Mapping[str, Any], *, group: Any = None) -> None:
    """Load the checkpoint at `path` into the tensors of `state`, in place. Collective over `group`.

    `state`: as for `save`, with the same names, global shapes and dtypes; its layout over ranks may differ from the
    one it was saved in. Raises CheckpointError on all ranks, with no tensor changed, if a file is missing, cut or
    changed (and names the newest older checkpoint that is intact), or if names, shapes or dtypes differ.
    """
    path, ranks = Path(path), Ranks(group)
    flat = flatten(state)
    _require_intact(path, ranks)
    names = set().union(*ranks.gather(set(flat), "comparing a checkpoint"))
    differences = ranks.on_each(
        lambda: compare(flat, names, StateReader(path).read_metadata()), "comparing a checkpoint"
    )
    different = next((text for text in differences if text is not None), None)
    if different is not None:
        raise CheckpointError(
            f"The checkpoint {path} is of another model or optimizer: {different}. Nothing was loaded. Use the recipe "
            f"it was trained with, or another run.dir for a new run."
        )
    read_state(flat, path, group)


def load_full(path: str | os.PathLike, *, part: str = "model") -> dict[str, Tensor]:
    """Return the full tensors of one part of a checkpoint by name, on the CPU, in this process alone.

    `part`: the first key of the saved state; names are those below it. Verifies all files first. Raises
    CheckpointError if one is damaged or the part does not exist.
    """
    path = Path(path)
    _require_intact(path, Ranks())
    prefix = f"{part}."
    flat: dict[str, Tensor] = {}
    for name, entry in StateReader(path).read_metadata().state_dict_metadata.items():
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata):
            flat[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    if not flat:
        raise CheckpointError(f"The checkpoint {path} has no part {part!r}.")
    read_state(flat, path, None)
    return {name.removeprefix(prefix): tensor for name, tensor in flat.items()}


def _require_intact(path: Path, ranks: Ranks) -> None:
    """Raise CheckpointError on all ranks unless every file is intact; the message offers another checkpoint."""
    _, problem = _inspect(path, ranks)
    if problem is None:
        return
    offer = _other_good(path, ranks)
    advice = (
        f"The newest older checkpoint that is intact is {offer}; load that one instead."
        if offer is not None
        else f"There is no other intact checkpoint in {path.parent}."
    )
    raise CheckpointError(f"{problem} Nothing was loaded. {advice}")


def _other_good(path: Path, ranks: Ranks) -> Path | None:
    """Return the newest intact checkpoint beside `path`, older ones first."""

    def others() -> list[Path]:
        step = folders.step_of(path)
        found = [other for other in folders.candidates(path.parent) if other.resolve() != path.resolve()]
        return sorted(found, key=lambda other: folders.step_of(other) > step)

    for other in ranks.on_first(others, "looking for another checkpoint"):
        if _inspect(other, ranks)[1] is None:
            return other
    return None


def _inspect(path: Path, ranks: Ranks) -> tuple[Manifest | None, str | None]:
    """Return (manifest, None) for an intact checkpoint, else (manifest or None, what is wrong). Collective."""

    def look() -> tuple[Manifest | None, str | None]:
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            return None, str(error)
        return manifest, _damaged(path, check_sizes(path, manifest.files))

    manifest, problem = ranks.on_first(look, "verifying a checkpoint")
    if manifest is None or problem is not None:
        return manifest, problem

    def hash_share() -> str | None:
        for record in _share(manifest.files, ranks.rank, ranks.size):
            if (wrong := check_hash(path, record)) is not None:
                return wrong
        return None

    found = ranks.on_each(hash_share, "verifying a checkpoint")
    return manifest, _damaged(path, next((wrong for wrong in found if wrong is not None), None))


def _damaged(path: Path, problem: str | None) -> str | None:
    return None if problem is None else f"The checkpoint {path} is damaged: {problem}."


def _share(files: tuple[FileRecord, ...], rank: int, size: int) -> list[FileRecord]:
    """Return the files that `rank` of `size` hashes: the largest first, each to the rank with the least so far."""
    loads = [0] * size
    mine = []
    for record in sorted(files, key=lambda record: (-record.size, record.name)):
        target = loads.index(min(loads))
        loads[target] += record.size
        if target == rank:
            mine.append(record)
    return mine


__all__ = ["CheckpointInfo", "describe", "load", "load_full", "open_latest", "read_meta", "verify"]
