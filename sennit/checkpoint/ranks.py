"""The ranks that save or load together: either all of them go on, or all of them raise the same CheckpointError."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from sennit.errors import CheckpointError

logger = logging.getLogger(__name__)

T = TypeVar("T")

GROUP_TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for each other: the slowest disk of a run decides."""


def new_checkpoint_group() -> Any:
    """Return a gloo group of all ranks for checkpoints alone, or None in a single process. Collective.

    Training and checkpoints must not share a group: their collectives could interleave and block each other.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)


class Ranks:
    """The members of a checkpoint group; `group` None is this process alone."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def gather(self, value: T, doing: str) -> list[T]:
        """Return every rank's `value` on every rank. `doing` says for an error what the ranks were at."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            raise CheckpointError(
                f"A rank ended or lost its connection while {doing} ({_first_line(error)}). Nothing further was "
                f"committed; start the run again, it goes on from its newest complete checkpoint."
            ) from error
        return values

    def on_first(self, fn: Callable[[], T], doing: str) -> T:
        """Run `fn` on rank 0 and return its value on every rank. Its OSError or CheckpointError is raised on all."""
        value, error = None, None
        if self.rank == 0:
            value, error = _attempt(fn, doing)
        value, error = self.gather((value, error), doing)[0]
        if error is not None:
            raise CheckpointError(error)
        return value  # type: ignore[return-value]

    def on_each(self, fn: Callable[[], T], doing: str) -> list[T]:
        """Run `fn` on every rank and return all values; an OSError or CheckpointError of any is raised on all."""
        results = self.gather(_attempt(fn, doing), doing)
        for _, error in results:
            if error is not None:
                raise CheckpointError(error)
        return [value for value, _ in results]  # type: ignore[misc]


def _attempt(fn: Callable[[], T], doing: str) -> tuple[T | None, str | None]:
    try:
        return fn(), None
    except CheckpointError as error:
        return None, str(error)
    except Exception as error:  # any error must reach the other ranks, which wait for this one
        if not isinstance(error, OSError):
            logger.exception("unexpected error while %s", doing)
        return None, f"{type(error).__name__} while {doing}: {error}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


__all__ = ["GROUP_TIMEOUT", "Ranks", "new_checkpoint_group"]
