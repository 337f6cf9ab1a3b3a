"""One dimension of the device mesh as a single rank sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh dimension: its name, its size, this rank's coordinate on it and the group that spans it.

    `group` is None exactly when `size` is 1: such an axis needs no communication, and every collective over it
    returns its input.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"axis {self.name}: rank {self.rank} is outside 0..{self.size - 1}")


__all__ = ["Axis"]
