"""Writing files so that no reader ever sees half of one, and so that two processes may do it at once."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sennit.errors import DataError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers that mean that a file cannot grow."""


def sync(file: BinaryIO) -> None:
    """Push what was written to `file` to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Push the names in `folder` to the disk, where the file system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def write_atomic(path: Path, content: bytes) -> None:
    """Write `path` in one piece: readers see the old content, all of the new, or no file. Makes its folder.

    The content goes to a new file with a name of its own first, so that writers do not disturb each other.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            file.write(content)
            sync(file)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock file `path`, which is gone afterwards. The system frees the lock of a process that dies.

    Raises DataError if another process holds it and `wait` is false. A file system without locks is not locked.
    """
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise DataError(
                f"Another process is building this already (it holds {path}). Wait for it to end, or name another "
                "--out."
            ) from None
        except OSError:  # no locks here, as on some network file systems
            break
        try:
            if os.stat(path).st_ino == os.fstat(file.fileno()).st_ino:
                break
        except FileNotFoundError:
            pass
        file.close()  # its last holder removed the file: take the new one
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


__all__ = ["FULL", "locked", "sync", "sync_folder", "write_atomic"]
