"""Schedules by name."""

from __future__ import annotations

from sennit.errors import ConfigError
from sennit.pipeline.fixed import FIXED, interleaved
from sennit.pipeline.schedule import Schedule, fuse, unfuse
from sennit.recipe.schedules import PipelineSchedule, default_virtual_stages, nearest_schedule, schedule_problems

NAMES = tuple(str(name) for name in PipelineSchedule)


def make(name: str, ranks: int, microbatches: int, virtual_stages: int = 0, *, pairs: bool = True) -> Schedule:
    """Return the schedule `name` for `ranks` and `microbatches`; `virtual_stages` a rank, 0 = the schedule's own.

    `pairs`: keep (interleaved: make) pairs of a forward and a backward that run together; without, they are split.
    Raises ConfigError for unknown names and for numbers that the schedule does not take.
    """
    if name not in NAMES:
        raise ConfigError(f"There is no schedule {name!r}. {nearest_schedule(name)}")
    if ranks < 1 or microbatches < 1:
        raise ConfigError(f"{ranks} ranks and {microbatches} microbatches: both must be at least 1.")
    if problems := schedule_problems(name, ranks, microbatches, virtual_stages):
        raise ConfigError(" ".join(problems))
    if name == PipelineSchedule.INTERLEAVED:
        chunks = default_virtual_stages(name, virtual_stages)
        if pairs and microbatches > ranks:
            return fuse(interleaved(ranks, microbatches, chunks, extra_warmup=1))
        return interleaved(ranks, microbatches, chunks)  # with m = p, a warm-up that is all forwards has no pairs
    if name in FIXED:
        schedule = FIXED[name](ranks, microbatches)
    else:
        from sennit.pipeline.vshape import v_half, v_min

        schedule = {"v-half": v_half, "v-min": v_min}[name](ranks, microbatches)
    return schedule if pairs else unfuse(schedule)


__all__ = ["NAMES", "make"]
