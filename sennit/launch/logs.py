"""The log of a rank: logs/rank-N.log in the run directory."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from sennit.errors import ConfigError

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ERASE = ("\x1b[2K", "\x1b[K", "\r")


def log_path(run_dir: str | Path, rank: int) -> Path:
    """Return the log of `rank`."""
    return Path(run_dir) / "logs" / f"rank-{rank}.log"


class Tee:
    """A text stream that also writes finished lines to a log, as a terminal would leave them: no colours, no redraws.

    A log that cannot be written (a full disk) loses lines; it never stops the run.
    """

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream, self._log, self._line = stream, log, ""

    def write(self, text: str) -> int:
        """Write to both."""
        count = self._stream.write(text)
        *finished, rest = (self._line + text).split("\n")
        self._line = self._visible(rest, keep_escapes=True)
        if finished:
            with contextlib.suppress(OSError, ValueError):
                self._log.write("".join(self._visible(line) + "\n" for line in finished))
                self._log.flush()
        return count

    @staticmethod
    def _visible(line: str, keep_escapes: bool = False) -> str:
        start = max(line.rfind(mark) + len(mark) if mark in line else 0 for mark in _ERASE)
        return line[start:] if keep_escapes else _ESCAPE.sub("", line[start:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def rank_log(path: Path, *, visible: bool) -> Iterator[TextIO]:
    """Send this process's stderr to `path` as well (`visible`), or its stdout and stderr only there, inside the block.

    Yields the log, for what only belongs there. The file is appended to, with a line for the time of each start.
    """
    with path.open("a", encoding="utf-8", errors="replace", buffering=1) as log:
        log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}\n")
        if visible:
            with contextlib.redirect_stderr(Tee(sys.stderr, log)):  # type: ignore[type-var]
                yield log
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log.fileno(), 1)  # file descriptors, so that messages of libraries go there too
        os.dup2(log.fileno(), 2)
        yield log


@contextlib.contextmanager
def log_folder(run_dir: str | Path) -> Iterator[None]:
    """Make the folder for logs; if the block fails before the run has begun, take it away again.

    A run has begun when there is anything but logs in its directory. Raises ConfigError if the folder cannot be made.
    """
    run_dir = Path(run_dir)
    missing = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"The run directory {run_dir} cannot be written ({error.strerror}); choose another with --run.dir."
        ) from None
    try:
        yield
    except BaseException:
        if [entry.name for entry in run_dir.iterdir()] == ["logs"]:
            shutil.rmtree(run_dir, ignore_errors=True)
            for folder in missing[1:]:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        raise


__all__ = ["Tee", "log_folder", "log_path", "rank_log"]
