"""Exact event simulation of a schedule: when does each operation start and end, given what each costs.

Times are in any one unit; activations in any one unit of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sennit.pipeline.schedule import COMPUTE, Item, Op, Schedule, ops_of


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds (or any unit) of each operation of each virtual stage: sequences by virtual stage.

    `send`: from the end of an operation until another rank has its result. `comm_forward`, `comm_backward`: the part of
    a forward or a backward for inputs that is communication, during which another operation could compute.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    send: float = 0.0
    comm_forward: tuple[float, ...] = ()
    comm_backward: tuple[float, ...] = ()

    @classmethod
    def uniform(
        cls, schedule: Schedule, forward: float = 1.0, input: float = 1.0, weight: float = 1.0, send: float = 0.0
    ) -> Costs:
        """Return equal costs for all parts, given for the layers of one rank (L / p): a part takes its share."""
        share, n = schedule.share, schedule.num_stages
        return cls((forward * share,) * n, (input * share,) * n, (weight * share,) * n, send)

    def of(self, op: Op) -> float:
        """Return how long `op` takes; actions take none."""
        if op.kind == "F":
            return self.forward[op.stage]
        if op.kind == "I":
            return self.input[op.stage]
        if op.kind == "W":
            return self.weight[op.stage]
        return self.input[op.stage] + self.weight[op.stage] if op.kind == "B" else 0.0

    def comm(self, op: Op) -> float:
        """Return how much of `op` is communication."""
        part = self.comm_forward if op.kind == "F" else self.comm_backward if op.kind in ("B", "I") else ()
        return part[op.stage] if part else 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """An item of the schedule with its start and end."""

    start: float
    end: float
    item: Item


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated (or measured) step: the events of each rank in order; `makespan` from 0 to the last end."""

    events: tuple[tuple[Event, ...], ...]
    makespan: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of the makespan that the busiest rank waits."""
        return 1.0 - max(self.busy) / self.makespan if self.makespan else 0.0


class Deadlock(Exception):
    """Ranks wait for each other: `waiting` is the item at which each stuck rank stands."""

    def __init__(self, waiting: dict[int, Item]) -> None:
        super().__init__(", ".join(f"rank {rank} at {item}" for rank, item in waiting.items()))
        self.waiting = waiting


def simulate(schedule: Schedule, costs: Costs | None = None, *, pair_time: Callable[[Op, Op], float] | None = None) -> Timeline:
    """Return the timeline of `schedule` under `costs` (default: F = I = W = 1 for the layers of one rank).

    A pair starts when both inputs are there, and both results leave when it ends. It takes `pair_time(forward,
    backward)`; the default hides the communication of each under the computation of the other.
    Raises Deadlock if the order cannot be executed.
    """
    costs = costs or Costs.uniform(schedule)
    pair_time = pair_time or overlapped(costs)
    ready: dict[tuple[str, int, int], float] = {}
    waiters: dict[tuple[str, int, int], list[int]] = {}
    order, n = schedule.order, schedule.num_ranks
    position, clock, busy = [0] * n, [0.0] * n, [0.0] * n
    events: list[list[Event]] = [[] for _ in range(n)]
    needs = _Needs(schedule)
    todo = list(range(n))
    while todo:
        rank = todo.pop()
        items = order[rank]
        now = clock[rank]
        while position[rank] < len(items):
            item = items[position[rank]]
            ops = ops_of(item)
            start, missing = now, None
            for op in ops:
                for key, away in needs(op, rank):
                    at = ready.get(key)
                    if at is None:
                        missing = key
                        break
                    start = max(start, at + costs.send if away else at)
                if missing is not None:
                    break
            if missing is not None:
                waiters.setdefault(missing, []).append(rank)
                break
            took = costs.of(ops[0]) if len(ops) == 1 else pair_time(*ops)
            now = start + took
            busy[rank] += took
            events[rank].append(Event(start, now, item))
            position[rank] += 1
            for op in ops:
                if op.kind in COMPUTE:
                    for key in _provides(op):
                        ready[key] = now
                        todo += waiters.pop(key, ())
        clock[rank] = now
    stuck = {rank: order[rank][position[rank]] for rank in range(n) if position[rank] < len(order[rank])}
    if stuck:
        raise Deadlock(stuck)
    return Timeline(tuple(map(tuple, events)), max(clock, default=0.0), tuple(busy))


def overlapped(costs: Costs) -> Callable[[Op, Op], float]:
    """Return the time of a pair in which communication of one side runs beside computation of the other.

    Neither resource can do two things at once, and each side's own operations follow one another.
    """

    def pair_time(forward: Op, backward: Op) -> float:
        f, b = costs.of(forward), costs.of(backward)
        comm_f, comm_b = costs.comm(forward), costs.comm(backward)
        return max(f - comm_f + b - comm_b, comm_f + comm_b, f, b)

    return pair_time


def scaled(costs: Costs, factor: float) -> Callable[[Op, Op], float]:
    """Return the time of a pair as `factor` times the sum of its two operations: 1 hides nothing."""
    return lambda forward, backward: factor * (costs.of(forward) + costs.of(backward))


class _Needs:
    """What an operation waits for: (key of a result, does it come from another rank)."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __call__(self, op: Op, rank: int) -> Sequence[tuple[tuple[str, int, int], bool]]:
        s, kind, stage, i = self._schedule, op.kind, op.stage, op.microbatch
        if kind == "F":
            before = s.prev[stage]
            return () if before is None else ((("F", before, i), s.rank_of[before] != rank),)
        if kind in ("B", "I"):
            own = (("F", stage, i), False)
            after = s.next[stage]
            return (own,) if after is None else (own, (("G", after, i), s.rank_of[after] != rank))
        if kind == "W":
            return ((("I", stage, i), False),)
        return ()


def _provides(op: Op) -> tuple[tuple[str, int, int], ...]:
    key = (op.kind, op.stage, op.microbatch)
    return (key, ("G", op.stage, op.microbatch)) if op.kind in ("B", "I") else (key,)


def activation_curve(schedule: Schedule, rank: int, *, whole: Sequence[float], after_input: Sequence[float]) -> list[float]:
    """Return the activations that `rank` holds after each of its items.

    `whole`, by virtual stage: kept from F to the backward. `after_input`: the part of it (inputs of linear layers and
    gradients of their outputs) that a backward for inputs leaves for W.
    """
    held, curve = 0.0, []
    for item in schedule.order[rank]:
        high = held
        for op in ops_of(item):
            if op.kind == "F":
                held += whole[op.stage]
            high = max(high, held)
            if op.kind == "B":
                held -= whole[op.stage]
            elif op.kind == "I":
                held -= whole[op.stage] - after_input[op.stage]
            elif op.kind == "W":
                held -= after_input[op.stage]
        curve.append(high)
    return curve


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """Return each rank's largest number of (layers of one rank) x microbatches held at once, counted until W."""
    share = (schedule.share,) * schedule.num_stages
    return tuple(
        max(activation_curve(schedule, rank, whole=share, after_input=share), default=0.0)
        for rank in range(schedule.num_ranks)
    )


__all__ = [
    "Costs",
    "Deadlock",
    "Event",
    "Timeline",
    "activation_curve",
    "overlapped",
    "peak_activations",
    "scaled",
    "simulate",
]
