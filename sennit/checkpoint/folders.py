"""The folders below a run's checkpoints/ and how they change, so that a crash at any moment loses nothing.

step-N                the checkpoint of step N, complete since the rename that made it appear
.step-N.tmp-X         a save under way, or what a crashed one left
.step-N.old-X         the former step-N while a new one takes its place; counts as a checkpoint until that is there
.step-N.trash-X       a checkpoint that is being removed

Only rank 0 changes folders, and only while it holds the lock on checkpoints/: whatever is left over then belongs to
nobody.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from sennit.checkpoint.manifest import FILE_NAME, Manifest, check_sizes, read_manifest, sync_folder
from sennit.errors import CheckpointError

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d+)")
_HIDDEN = re.compile(r"\.step-(\d+)\.(tmp|old|trash)-[0-9a-f]+")
ABANDONED_SECONDS = 3600.0
"""Where folders cannot be locked (NFS): how long a leftover must not have changed before it counts as abandoned."""


def step_folder(root: Path, step: int) -> Path:
    """Return where the checkpoint of `step` belongs."""
    return root / f"step-{step}"


def hidden_folder(root: Path, step: int, kind: str) -> Path:
    """Return a fresh name for a folder that is not (or no longer) the checkpoint of `step`."""
    return root / f".step-{step}.{kind}-{uuid.uuid4().hex[:12]}"


def step_of(folder: Path) -> int:
    """Return the step in a folder's name, or -1."""
    match = _STEP.fullmatch(folder.name) or _HIDDEN.fullmatch(folder.name)
    return int(match[1]) if match else -1


def candidates(root: Path) -> list[Path]:
    """Return the folders that should be complete checkpoints, the newest first.

    Newest is the one saved last, by the number in its manifest, not the one of the highest step: after a return to
    step 10, step 12 is newer than the old step 20. A folder with an unreadable manifest sorts by its step.
    """
    found: list[Path] = []
    for entry in _entries(root):
        hidden = _HIDDEN.fullmatch(entry.name)
        if _STEP.fullmatch(entry.name) or (
            hidden and hidden[2] == "old" and not step_folder(root, int(hidden[1])).exists()
        ):
            found.append(entry)
    sequences = {path: manifest.sequence if (manifest := _manifest(path)) else 0 for path in found}
    by_step = sorted(found, key=step_of)
    for index, path in enumerate(by_step):
        if not sequences[path]:
            sequences[path] = sequences[by_step[index - 1]] if index else 0
    return sorted(found, key=lambda path: (sequences[path], step_of(path)), reverse=True)


def _entries(root: Path) -> list[Path]:
    try:
        return [root / entry.name for entry in os.scandir(root) if entry.is_dir()]
    except FileNotFoundError:
        return []


def _manifest(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except CheckpointError:
        return None


def next_sequence(root: Path) -> int:
    """Return a number above that of every checkpoint in `root`."""
    return 1 + max((m.sequence for path in candidates(root) if (m := _manifest(path))), default=0)


@contextmanager
def locked(root: Path) -> Generator[bool, None, None]:
    """Hold the lock on `root`; yields whether locks work on this file system.

    Raises CheckpointError if another process is saving there. The lock ends with the process, however it ends.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    works = True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise CheckpointError(
                    f"Another process is saving a checkpoint into {root}. Two runs must not share a run directory: "
                    f"give one of them another run.dir."
                ) from None
            works = False
        yield works
    finally:
        if works:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # children forked meanwhile share the descriptor
        os.close(descriptor)


def clean(root: Path, *, lock_works: bool) -> None:
    """Remove what crashed saves have left in `root` and finish what they were doing. Needs the lock."""
    for entry in _entries(root):
        hidden = _HIDDEN.fullmatch(entry.name)
        if hidden is None:
            continue
        if not lock_works and time.time() - entry.stat().st_mtime < ABANDONED_SECONDS:
            continue
        target = step_folder(root, int(hidden[1]))
        if hidden[2] == "old" and not target.exists():
            entry.rename(target)  # the crash came between the two renames of `put_in_place`
        else:
            shutil.rmtree(entry, ignore_errors=True)


def put_in_place(temporary: Path, root: Path, step: int) -> Path:
    """Rename a complete folder to step-N; a former step-N is removed only afterwards. Needs the lock."""
    target = step_folder(root, step)
    former = None
    if target.exists():
        former = hidden_folder(root, step, "old")
        target.rename(former)
    try:
        temporary.rename(target)
    except OSError:
        if former is not None:
            former.rename(target)
        raise
    sync_folder(root)
    if former is not None:
        shutil.rmtree(former, ignore_errors=True)
    return target


def keep_newest(root: Path, keep: int, newest: Path) -> None:
    """Remove checkpoints beyond the `keep` newest complete ones (0 keeps all); never `newest`. Needs the lock.

    Completeness is judged by manifest and sizes here. One that is damaged does not count as kept, so it never pushes
    out a good one.
    """
    kept = 1
    for path in candidates(root):
        if path == newest or keep == 0:
            continue
        if kept >= keep:
            _remove(root, path)
            continue
        manifest = _manifest(path)
        kept += manifest is not None and check_sizes(path, manifest.files) is None


def _remove(root: Path, path: Path) -> None:
    """Remove a checkpoint so that a crash meanwhile leaves no half of it under its name."""
    try:
        trash = hidden_folder(root, step_of(path), "trash")
        path.rename(trash)
        shutil.rmtree(trash)
    except OSError as error:
        logger.warning("the old checkpoint %s could not be removed: %s", path, error)


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder has a manifest; says nothing about damage."""
    return (path / FILE_NAME).is_file()


__all__ = [
    "candidates",
    "clean",
    "hidden_folder",
    "is_checkpoint",
    "keep_newest",
    "locked",
    "next_sequence",
    "put_in_place",
    "step_folder",
    "step_of",
]
