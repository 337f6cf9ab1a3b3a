"""Saving: all ranks write into a fresh folder, then rank 0 lists its files, syncs them and renames it into place.

Before the rename there is no checkpoint of that name (or still the former one); after it there is a complete one.
Older checkpoints are removed last.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sennit.checkpoint import folders
from sennit.checkpoint.manifest import (
    FILE_NAME,
    FileRecord,
    Manifest,
    check_sizes,
    encode_manifest,
    sync_folder,
    write_durably,
)
from sennit.checkpoint.ranks import Ranks
from sennit.checkpoint.state import estimate_bytes, flatten
from sennit.checkpoint.storage import StateWriter, describe_error, write_state
from sennit.errors import CheckpointError

logger = logging.getLogger(__name__)

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A committed checkpoint: its folder, the bytes of its files over all ranks, the seconds the save took."""

    path: Path
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Staged:
    """What a save writes: a flat state and its meta data, frozen at the moment of `stage`."""

    step: int
    state: dict[str, Tensor]
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Written:
    """How one rank's writing went. `error` is empty on success; `code` is its errno, or 0."""

    files: tuple[FileRecord, ...]
    bytes: int
    error: str = ""
    code: int = 0


class Writer:
    """A save in two halves, so that they can happen at different times.

    `stage` must run between two steps, on the training thread; `write` may run later, on any one thread, as long as
    the staged tensors do not change: this class stages references, so it must run before the next step. A writer that
    overlaps the two stages copies.
    """

    def __init__(self, root: Path, *, keep: int, group: Any = None) -> None:
        self.root, self.keep, self.ranks = Path(root), keep, Ranks(group)

    def stage(self, step: int, state: Mapping[str, Any], meta: dict[str, Any]) -> Staged:
        """Return what `write` needs of a nested `state` of tensors."""
        return Staged(step, flatten(state), meta)

    def write(self, staged: Staged) -> SavedCheckpoint:
        """Write and commit. Collective. Raises CheckpointError on all ranks; then nothing has changed."""
        begin = time.perf_counter()
        parts = self.ranks.gather(estimate_bytes(staged.state), "starting to save a checkpoint")
        needed = sum({name: size for part in parts for name, size in part.items()}.values())
        with ExitStack() as held:
            temporary = self.ranks.on_first(lambda: self._begin(staged, needed, held), "starting to save a checkpoint")
            committed = False
            try:
                written = self.ranks.gather(self._write_part(staged, temporary), "saving a checkpoint")
                self._check(staged.step, written, needed)
                path = self.ranks.on_first(lambda: self._commit(staged, temporary, written), "committing a checkpoint")
                committed = True
            finally:
                if not committed and self.ranks.rank == 0:
                    shutil.rmtree(temporary, ignore_errors=True)
        return SavedCheckpoint(path, sum(w.bytes for w in written), time.perf_counter() - begin)

    def _begin(self, staged: Staged, needed: int, held: ExitStack) -> Path:
        """On rank 0: take the lock, remove leftovers, check the space and make the folder to write into."""
        encode_manifest(Manifest(staged.step, 0, (), staged.meta))  # fails early if the meta data is not JSON
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock_works = held.enter_context(folders.locked(self.root))
            folders.clean(self.root, lock_works=lock_works)
            free = shutil.disk_usage(self.root).free
            if free < needed:
                raise CheckpointError(self._no_space(staged.step, needed, needed - free))
            temporary = folders.hidden_folder(self.root, staged.step, "tmp")
            temporary.mkdir()
            return temporary
        except OSError as error:
            raise CheckpointError(
                f"No checkpoint can be saved into {self.root}: {error.strerror or error}. Nothing was saved."
            ) from error

    def _write_part(self, staged: Staged, temporary: Path) -> _Written:
        """On every rank: write, hash and sync this rank's files. Returns the error instead of raising it, so that no
        rank is left waiting for another."""
        writer = StateWriter(temporary)
        error, code = "", 0
        try:
            write_state(staged.state, temporary, self.ranks.group, writer)
        except OSError as problem:
            error, code = f"{problem.filename or temporary}: {problem.strerror or problem}", problem.errno or 0
        except Exception as problem:
            error = describe_error(problem)
        return _Written(tuple(writer.fs.records.values()), writer.fs.written_bytes, error, code)

    def _check(self, step: int, written: list[_Written], needed: int) -> None:
        """On every rank: raise if any rank could not write."""
        done = sum(w.bytes for w in written)
        if any(w.code in _NO_SPACE for w in written):
            raise CheckpointError(self._no_space(step, needed, max(needed - done, 1)))
        # an errno belongs to the rank where the trouble began; the others only heard of it
        failed = sorted((not w.code, rank, w.error) for rank, w in enumerate(written) if w.error)
        if failed:
            _, rank, error = failed[0]
            raise CheckpointError(
                f"The checkpoint of step {step} could not be saved into {self.root}: rank {rank}: {error}. Nothing "
                f"was saved; older checkpoints are intact."
            )

    def _commit(self, staged: Staged, temporary: Path, written: list[_Written]) -> Path:
        """On rank 0: write the manifest, sync, rename, and remove what is too old."""
        listing = b""
        files = tuple(sorted((record for w in written for record in w.files), key=lambda record: record.name))
        try:
            problem = check_sizes(temporary, files)
            if problem is not None:
                raise CheckpointError(
                    f"The checkpoint of step {staged.step} was not saved: {problem}, as rank 0 sees it. All ranks must "
                    f"write to one shared file system; put run.dir on it."
                )
            manifest = Manifest(staged.step, folders.next_sequence(self.root), files, staged.meta)
            listing = encode_manifest(manifest)
            write_durably(temporary / FILE_NAME, listing)
            sync_folder(temporary)
            path = folders.put_in_place(temporary, self.root, staged.step)
        except OSError as error:
            if error.errno in _NO_SPACE:
                size = sum(record.size for record in files) + len(listing)
                raise CheckpointError(self._no_space(staged.step, size, len(listing))) from error
            raise CheckpointError(
                f"The checkpoint of step {staged.step} could not be committed in {self.root}: "
                f"{error.strerror or error}. Older checkpoints are intact."
            ) from error
        try:
            folders.keep_newest(self.root, self.keep, path)
        except OSError as error:
            logger.warning("old checkpoints in %s could not be removed: %s", self.root, error)
        return path

    def _no_space(self, step: int, needed: int, missing: int) -> str:
        return (
            f"There is no space left for the checkpoint of step {step} in {self.root}: it needs about {needed} bytes "
            f"and at least {missing} bytes are missing. Nothing was saved; older checkpoints are intact. Free that "
            f"much (disk, quota or file size limit), lower checkpoint.keep, or put run.dir on a larger disk."
        )


def save(
    root: str | os.PathLike,
    step: int,
    state: Mapping[str, Any],
    *,
    meta: dict[str, Any],
    keep: int = 2,
    group: Any = None,
) -> SavedCheckpoint:
    """Save `state` as `root`/step-`step` and return it once it is complete and on the disk. Collective over `group`.

    `state`: nested dicts of str to Tensor or DTensor; a plain tensor must be the same on all ranks. `meta`: JSON data.
    A checkpoint of the same step is replaced, and lost only after the new one is in place. `keep`: how many complete
    checkpoints stay, this one included; 0 keeps all. `group`: from `new_checkpoint_group()`; None saves this process
    alone. Raises CheckpointError on all ranks if any fails; then nothing counts as saved and older checkpoints are as
    they were.
    """
    writer = Writer(Path(root), keep=keep, group=group)
    return writer.write(writer.stage(step, state, meta))


__all__ = ["SavedCheckpoint", "Staged", "Writer", "save"]
