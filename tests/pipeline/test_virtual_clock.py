"""The executor over real gloo processes takes exactly as long as the simulator says, on a virtual clock."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
import torch.distributed as dist

from sennit.pipeline.catalog import make
from sennit.pipeline.channels import Channels
from sennit.pipeline.executor import Executor
from sennit.pipeline.schedule import Schedule, unfuse
from sennit.pipeline.search import adaptive
from sennit.pipeline.simulate import Costs, simulate
from sennit.recipe.schedules import schedule_problems
from tests.pipeline.runs import SCHEDULES
from tests.pipeline.virtual import Clock, VirtualStage
from tests.ranks import run_ranks

Job = tuple[Schedule, Costs]


def makespans(jobs: dict[str, Job]) -> dict[str, float]:
    """Return the makespan of each job on the virtual clocks of the ranks. Collective."""
    rank, found = dist.get_rank(), {}
    wires = {wire for schedule, _ in jobs.values() for wire in schedule.wires}
    channels = Channels(wires, [list(range(dist.get_world_size()))])
    for name, (schedule, costs) in jobs.items():
        Clock.now = 0.0
        stages = {stage: VirtualStage(schedule, costs, stage) for stage in schedule.stages_of(rank)}
        executor = Executor(schedule, rank, stages, channels)
        executor.step()
        for stage, virtual in stages.items():
            assert float(virtual.weight.grad or 0) == len(schedule.visits[stage])
        end = torch.tensor(Clock.now, dtype=torch.float64)
        dist.all_reduce(end, op=dist.ReduceOp.MAX)
        found[name] = float(end)
    return found


def jobs_of(p: int) -> dict[str, Job]:
    """Every schedule with m = 8, 16, 32 where it takes them: unit costs, and costs drawn for each stage."""
    jobs = {}
    for name in SCHEDULES:
        for m in (8, 16, 32):
            if schedule_problems(name, p, m):
                continue
            schedule = unfuse(make(name, p, m))
            draw = random.Random(f"{name}{p}{m}")
            forward, input_, weight = (
                tuple(draw.randint(1, 16) / 8 for _ in range(schedule.num_stages)) for _ in range(3)
            )
            jobs[f"{name}-m{m}"] = (schedule, Costs.uniform(schedule))
            jobs[f"{name}-m{m}-drawn"] = (schedule, Costs(forward, input_, weight))
    uneven = Costs((1.0,) * (2 * p), (1.25,) * (2 * p), (0.75,) * (2 * p - 1) + (1.5,))
    jobs["adaptive"] = (adaptive(p, 8, uneven, effort=0.1), uneven)
    return jobs


@cache
def measured(p: int) -> tuple[dict[str, Job], dict[str, float]]:
    jobs = jobs_of(p)
    return jobs, run_ranks(makespans, p, jobs, timeout=120)[0]


@pytest.mark.parametrize("name", sorted(jobs_of(4)))
def test_four_ranks_take_what_was_simulated(name: str) -> None:
    jobs, found = measured(4)
    assert found[name] == pytest.approx(simulate(*jobs[name]).makespan, rel=1e-12)


@pytest.mark.parametrize("name", sorted(jobs_of(8)))
def test_eight_ranks_take_what_was_simulated(name: str) -> None:
    jobs, found = measured(8)
    assert found[name] == pytest.approx(simulate(*jobs[name]).makespan, rel=1e-12)


BUBBLES = {"1f1b": 30.4, "interleaved": 17.9, "zb-h1": 12.7, "zb-v": 6.8, "dualpipe": 5.9, "dualpipev": 6.8}


@pytest.mark.parametrize("name", BUBBLES)
def test_bubble_of_eight_ranks_and_sixteen_microbatches(name: str) -> None:
    """Published: pipeline schedules, section 3.1; the executor's own makespan, against 3 m units of work."""
    _, found = measured(8)
    assert 100 * (1 - 48 / found[f"{name}-m16"]) <= BUBBLES[name] + 0.05
