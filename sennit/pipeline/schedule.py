"""A pipeline schedule as data: which rank computes what, in which order.

A *virtual stage* is a chunk of layers at a place in the pipeline. Its neighbours, its rank and its parameters are named
explicitly, so that V-shaped placements and bidirectional pipelines, where two virtual stages share one set of
parameters, are ordinary data. Generators write only each rank's compute order; sends and receives follow from it.

Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

COMPUTE = ("F", "B", "I", "W")
"""Forward; full backward; backward for inputs; backward for weights. B = I + W."""

ACTIONS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
"""What a rank does with the parameters of a virtual stage between computations: gather them, free the gathered copy,
sum their gradients over data ranks. These have no microbatch (-1)."""


class Op(NamedTuple):
    """One operation of a virtual stage: `kind` is one of COMPUTE or ACTIONS."""

    kind: str
    stage: int
    microbatch: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch if self.microbatch >= 0 else ''}"


class Pair(NamedTuple):
    """The forward of one microbatch and the backward of another, run together so that each hides the other's
    communication."""

    forward: Op
    backward: Op

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Item = Op | Pair


def ops_of(item: Item) -> tuple[Op, ...]:
    """Return the operations of an item: itself, or the two of a pair."""
    return (item,) if isinstance(item, Op) else (item.forward, item.backward)


class Message(NamedTuple):
    """What one rank sends another: `what` is F (an activation for virtual stage `stage`) or B (the gradient of the
    output of `stage`), of one microbatch."""

    what: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule. Indices: ranks 0..p-1, virtual stages 0..n-1, microbatches 0..m-1.

    `rank_of`, `prev`, `next`, `param_of`: by virtual stage; None where the chain begins or ends. Virtual stages with
    equal `param_of` hold copies of the same parameters, numbered along the model: 0 is the first part of the layers.
    `visits`: the microbatches that pass through each virtual stage. `order`: what each rank does, in program order.
    """

    name: str
    rank_of: tuple[int, ...]
    prev: tuple[int | None, ...]
    next: tuple[int | None, ...]
    param_of: tuple[int, ...]
    visits: tuple[tuple[int, ...], ...]
    order: tuple[tuple[Item, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Ranks, p."""
        return len(self.order)

    @property
    def num_stages(self) -> int:
        """Virtual stages, n."""
        return len(self.rank_of)

    @property
    def num_parts(self) -> int:
        """Parts that the model's layers are cut into."""
        return max(self.param_of) + 1

    @cached_property
    def num_microbatches(self) -> int:
        """Microbatches, m."""
        return len({microbatch for visits in self.visits for microbatch in visits})

    @property
    def share(self) -> float:
        """Size of a part in units of the layers of one rank if they were dealt out evenly once: L / p."""
        return self.num_ranks / self.num_parts

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the virtual stages of `rank`, in the order of their numbers."""
        return tuple(stage for stage, at in enumerate(self.rank_of) if at == rank)

    def compute(self, rank: int) -> Iterator[Op]:
        """Yield the compute operations of `rank` in order, those of a pair one after the other."""
        return (op for item in self.order[rank] for op in ops_of(item) if op.kind in COMPUTE)

    @cached_property
    def channels(self) -> dict[tuple[int, int], tuple[Message, ...]]:
        """What each rank sends each other rank, (from, to) -> messages in the order in which they are sent."""
        found: dict[tuple[int, int], list[Message]] = {}
        for rank in range(self.num_ranks):
            for op in self.compute(rank):
                message = self.message_of(op)
                if message is not None and (to := self.rank_of[message.stage]) != rank:
                    found.setdefault((rank, to), []).append(message)
        return {pair: tuple(messages) for pair, messages in sorted(found.items())}

    @property
    def wires(self) -> set[tuple[int, int]]:
        """(from, to) ranks that exchange anything, in training or evaluation: the ranks of neighbouring stages."""
        near = [
            (self.rank_of[stage], self.rank_of[after]) for stage, after in enumerate(self.next) if after is not None
        ]
        return {pair for a, b in near if a != b for pair in ((a, b), (b, a))}

    def message_of(self, op: Op) -> Message | None:
        """Return what `op` produces for another virtual stage, or None."""
        if op.kind == "F":
            following = self.next[op.stage]
            return None if following is None else Message("F", following, op.microbatch)
        if op.kind in ("B", "I"):
            before = self.prev[op.stage]
            return None if before is None else Message("B", before, op.microbatch)
        return None

    @cached_property
    def digest(self) -> str:
        """Hex digest of everything but the name: equal on all ranks of a job, or they would wait for each other."""
        parts = (self.rank_of, self.prev, self.next, self.param_of, self.visits, self.order)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def with_order(self, order: Sequence[Sequence[Item]], name: str = "") -> Schedule:
        """Return a copy with other compute orders."""
        return replace(self, order=tuple(tuple(items) for items in order), name=name or self.name)


def chain(
    name: str, rank_of: Sequence[int], num_microbatches: int, order: Sequence[Sequence[Item]]
) -> Schedule:
    """Return a schedule whose virtual stages 0, 1, .. n-1 follow each other, each with its own parameters."""
    n = len(rank_of)
    return Schedule(
        name,
        tuple(rank_of),
        tuple(stage - 1 if stage else None for stage in range(n)),
        tuple(stage + 1 if stage < n - 1 else None for stage in range(n)),
        tuple(range(n)),
        (tuple(range(num_microbatches)),) * n,
        tuple(tuple(items) for items in order),
    )


def unfuse(schedule: Schedule) -> Schedule:
    """Return the schedule with every pair replaced by its forward, then its backward.

    For models without overlap: a pair sends both results when it ends, so pairing what runs one after the other only
    makes others wait.
    """
    return schedule.with_order([[op for item in items for op in ops_of(item)] for items in schedule.order])


def fuse(schedule: Schedule) -> Schedule:
    """Return the schedule with every forward that is followed by a full backward of another microbatch paired with it."""
    order = []
    for items in schedule.order:
        fused: list[Item] = []
        for item in items:
            last = fused[-1] if fused else None
            if isinstance(last, Op) and isinstance(item, Op) and _can_pair(last, item):
                fused[-1] = Pair(last, item)
            else:
                fused.append(item)
        order.append(fused)
    return schedule.with_order(order)


def _can_pair(first: Op, second: Op) -> bool:
    return first.kind == "F" and second.kind == "B" and first.microbatch != second.microbatch


__all__ = ["ACTIONS", "COMPUTE", "Item", "Message", "Op", "Pair", "Schedule", "chain", "fuse", "ops_of", "unfuse"]
