"""One step of a pipeline as it was measured, next to what the simulator predicts from the same operations."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median

import torch.distributed as dist

from sennit.pipeline.schedule import COMPUTE, Schedule, ops_of
from sennit.pipeline.simulate import Costs, Event, Timeline, simulate
from sennit.train.engine import Pipeline
from sennit.train.run_log import RunLog
from sennit.train.trainer import Trainer

MEASURED_STEP = 3
"""The step whose timeline is kept: the first ones make groups, buffers and caches."""


class StepTimeline:
    """Records one step and writes pipeline.json (for Perfetto) and pipeline.png into the run directory.

    In a job without pipeline stages it does nothing. Collective: every rank calls `after_step`.
    """

    def __init__(self, trainer: Trainer, run_dir: Path, log: RunLog) -> None:
        self._engine = trainer.engine if isinstance(trainer.engine, Pipeline) else None
        self._run_dir, self._log, self._rank = run_dir, log, trainer.mesh.world.rank
        left = trainer.recipe.train.steps - trainer.step
        self._wanted = trainer.step + min(MEASURED_STEP, left)
        self._record(trainer.step)

    def _record(self, done: int) -> None:
        if self._engine is not None:
            self._engine.record = done + 1 == self._wanted

    def after_step(self, done: int) -> None:
        """Take note of step `done` (from 1) if it is the one."""
        if self._engine is None:
            return
        if done == self._wanted:
            measured = gather(self._engine)
            if self._rank == 0:
                write(self._run_dir, self._engine.plan.schedule, measured, self._log, done)
        self._record(done)


def gather(engine: Pipeline) -> Timeline:
    """Return the timeline of this rank's pipeline in its last step, each rank on its own clock from the step's start."""
    events: list[tuple[Event, ...]] = [()] * engine.mesh.pp.size
    mine = tuple(event for event in engine.events if ops_of(event.item)[0].kind in COMPUTE)
    dist.all_gather_object(events, mine, group=engine.mesh.pp.group)
    busy = tuple(sum(event.end - event.start for event in items) for items in events)
    return Timeline(tuple(events), max(items[-1].end for items in events), busy)


def predicted(schedule: Schedule, measured: Timeline) -> Timeline:
    """Return the simulation with each stage's operations as long as their measured medians."""
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for items in measured.events:
        for event in items:
            ops = ops_of(event.item)
            for op in ops:
                times[op.kind, op.stage].append((event.end - event.start) / len(ops))
    halves = [times.get(("B", stage)) for stage in range(schedule.num_stages)]

    def typical(kind: str, stage: int) -> float:
        found = times.get((kind, stage))
        if found:
            return median(found)
        whole = halves[stage]
        return median(whole) / 2 if whole else 0.0

    stages = range(schedule.num_stages)
    forward, input_, weight = (tuple(typical(kind, stage) for stage in stages) for kind in ("F", "I", "W"))
    return simulate(schedule, Costs(forward, input_, weight))


def write(run_dir: Path, schedule: Schedule, measured: Timeline, log: RunLog, step: int) -> None:
    """Write the trace, the picture and a line in the log."""
    from sennit.pipeline.draw import draw_png
    from sennit.pipeline.trace import save_trace

    expected = predicted(schedule, measured)
    timelines = {"measured": measured, "predicted": expected}
    save_trace(run_dir / "pipeline.json", timelines)
    draw_png(run_dir / "pipeline.png", schedule, timelines)
    log.write(
        "pipeline",
        step=step,
        schedule=schedule.name,
        measured_seconds=measured.makespan,
        predicted_seconds=expected.makespan,
        bubble=measured.bubble,
    )
    log.message(
        f"pipeline {schedule.name}: step {step} took {measured.makespan:.3g} s, {expected.makespan:.3g} s predicted from its "
        f"operations; bubble {100 * measured.bubble:.0f} % (pipeline.png, pipeline.json)"
    )


__all__ = ["MEASURED_STEP", "StepTimeline", "gather", "predicted", "write"]
