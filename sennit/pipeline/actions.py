"""Passes that add to a schedule what happens to parameters between computations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sennit.pipeline.schedule import COMPUTE, Item, Op, Schedule, ops_of

RESIDENT = 2
"""Virtual stages whose parameters a rank holds gathered at a time when it frees them in between."""


def with_reductions(schedule: Schedule) -> Schedule:
    """Return the schedule with a REDUCE_GRAD of each virtual stage right after its last backward: the sum of its
    gradients over data ranks then runs beside what is left of the cool-down."""
    order: list[list[Item]] = []
    for items in schedule.order:
        last: dict[int, int] = {}
        for place, item in enumerate(items):
            for op in ops_of(item):
                if op.kind in ("B", "W"):
                    last[op.stage] = place
        finished: dict[int, list[int]] = {}
        for stage, place in last.items():
            finished.setdefault(place, []).append(stage)
        result: list[Item] = []
        for place, item in enumerate(items):
            result.append(item)
            result += [Op("REDUCE_GRAD", stage) for stage in finished.get(place, ())]
        order.append(result)
    return schedule.with_order(order)


def with_sharding(schedule: Schedule, *, keep: bool) -> Schedule:
    """Return the schedule with UNSHARD before and RESHARD after the use of each virtual stage's parameters.

    `keep`: from a stage's first use in the step to its last. Otherwise only the next RESIDENT stages that a rank works
    on are gathered; gathering again costs communication, holding costs memory.
    """
    order = [_sharded(items, keep=keep) for items in schedule.order]
    return schedule.with_order(order)


def _sharded(items: Sequence[Item], *, keep: bool) -> list[Item]:
    used = [{op.stage for op in ops_of(item) if op.kind in COMPUTE} for item in items]
    held: set[int] = set()
    result: list[Item] = []
    for place, item in enumerate(items):
        wanted = _upcoming(used, place, len(set().union(*used)) if keep else RESIDENT)
        needed = used[place] if keep else wanted
        result += [Op("RESHARD", stage) for stage in sorted(held - wanted)]
        held &= wanted
        result += [Op("UNSHARD", stage) for stage in sorted(needed - held)]
        held |= needed
        result.append(item)
    return result + [Op("RESHARD", stage) for stage in sorted(held)]


def _upcoming(used: Sequence[set[int]], place: int, count: int) -> set[int]:
    """Return the stages of the items from `place` on: those of this item, and on until there are `count`."""
    found: set[int] = set()
    for stages in used[place:]:
        if found and len(found | stages) > count:
            break
        found |= stages
    return found


def forward_only(schedule: Schedule, microbatches: int) -> Schedule:
    """Return the forwards of `microbatches` over the same placement, for evaluation: chunk after chunk.

    Of a bidirectional pipeline only the first direction is used.
    """
    starts = [stage for stage in range(schedule.num_stages) if schedule.prev[stage] is None]
    chain: set[int] = set()
    stage: int | None = starts[0]
    while stage is not None:
        chain.add(stage)
        stage = schedule.next[stage]
    order = [
        [Op("F", stage, i) for stage in schedule.stages_of(rank) if stage in chain for i in range(microbatches)]
        for rank in range(schedule.num_ranks)
    ]
    visits = tuple(tuple(range(microbatches)) if stage in chain else () for stage in range(schedule.num_stages))
    return replace(schedule, name=f"{schedule.name} (forward only)", visits=visits, order=tuple(map(tuple, order)))


__all__ = ["RESIDENT", "forward_only", "with_reductions", "with_sharding"]
