"""What a rank says about its end, and which of several failing ranks is to blame."""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from sennit.errors import SennitError

_PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "socket closed",
    "gloo",
    "nccl",
    "mccl",
    "timed out after",
)
"""Parts of the messages that a collective ends with when another rank has died."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank ended: the error's kind, its message, its trace (empty for a user's mistake) and when, unix seconds.

    `collateral`: the rank only noticed that another one was gone.
    """

    rank: int
    kind: str
    message: str
    exit_code: int
    time: float
    trace: str = ""
    collateral: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Return the failure of `rank` by `error`."""
        if isinstance(error, RankError):
            return error.failure
        if isinstance(error, SennitError):
            return cls(rank, type(error).__name__, str(error), error.exit_code, time.time())
        text = str(error)
        message = f"{type(error).__name__}: {text}" if text else type(error).__name__
        frames = traceback.extract_tb(error.__traceback__)
        if frames:
            message += f" (in {frames[-1].name}, {Path(frames[-1].filename).name} line {frames[-1].lineno})"
        trace = "".join(traceback.format_exception(error))
        return cls(rank, type(error).__name__, message, 1, time.time(), trace, collateral=lost_a_peer(error))

    @classmethod
    def of_signal(cls, rank: int, exit_code: int) -> Failure:
        """Return the failure of a rank that ended without a word: by signal -exit_code, or with that exit code."""
        if exit_code >= 0:
            return cls(rank, "ProcessExited", f"ended with exit code {exit_code} and no message", 1, time.time())
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = "unknown signal"
        hint = "; the system does this when memory runs out" if name == "SIGKILL" else ""
        return cls(rank, "ProcessKilled", f"was ended by signal {-exit_code} ({name}){hint}", 1, time.time())

    def save(self, folder: Path) -> None:
        """Write this into `folder`, where the launcher looks for it."""
        temporary = folder / f"rank-{self.rank}.tmp"
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.replace(folder / f"rank-{self.rank}.json")


class RankError(SennitError):
    """A rank failed. The message is one paragraph; `failure` has the details."""

    def __init__(self, failure: Failure, world_size: int) -> None:
        who = f"rank {failure.rank} of {world_size}: " if world_size > 1 else ""
        super().__init__(who + " ".join(failure.message.split()))
        self.failure = failure
        self.exit_code = failure.exit_code


def lost_a_peer(error: BaseException) -> bool:
    """Whether `error` only says that another rank is gone."""
    text = f"{type(error).__module__} {error}".lower()
    return isinstance(error, RuntimeError) and any(part in text for part in _PEER_LOST)


def load_failures(folder: Path) -> list[Failure]:
    """Return what the ranks wrote into `folder`, the first to fail first."""
    found = [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank-*.json")]
    return sorted(found, key=lambda failure: failure.time)


def first_cause(written: Iterable[Failure], detected: Iterable[tuple[int, int]]) -> Failure:
    """Return the failure that made the others.

    written: what ranks said, the first to fail first. detected: (rank, exit code) of the ranks that the launcher saw
    end first. A rank that raised an error of its own comes before one that died silently, and both come before those
    that only lost a peer.
    """
    written = list(written)
    own = [failure for failure in written if not failure.collateral]
    spoke = {failure.rank for failure in written}
    silent = [Failure.of_signal(rank, code) for rank, code in detected if rank not in spoke]
    return [*own, *silent, *written][0]


__all__ = ["Failure", "RankError", "first_cause", "load_failures", "lost_a_peer"]
