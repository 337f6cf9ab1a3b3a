"""Schedules that nobody wrote by hand, found for random costs and limits, compute what one process computes, bit for bit."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from sennit.models import Part
from sennit.pipeline.balance import layer_ranges
from sennit.pipeline.plan import PipelinePlan
from sennit.pipeline.schedule import Schedule
from sennit.pipeline.search import adaptive
from sennit.pipeline.simulate import Costs
from sennit.pipeline.verify import verify
from sennit.recipe.schedules import even_layers
from sennit.train import trainer
from tests.pipeline.runs import Run, differences, legal_counts, reference
from tests.ranks import run_ranks


@dataclass(frozen=True)
class Drawn:
    """A random question to the search. The recipe of `run` names a schedule that takes the same numbers."""

    run: Run
    seed: int

    def schedule(self) -> Schedule:
        """Return what the search finds: any placement, costs from 0 to 4, little or much memory."""
        dice = random.Random(self.seed)
        p, m = self.run.p, self.run.m
        placement = dice.choice(["line", "loop", "v"])
        v = {"line": 1, "v": 2}.get(placement) or dice.choice([2, 3])
        times = [tuple(dice.choice([0.0, 0.5, 1.0, 1.3, 4.0]) for _ in range(p * v)) for _ in range(3)]
        limit = dice.choice([None, 1.0, 1.5, float(p)])
        costs = Costs(*times, send=dice.choice([0.0, 0.1, 1.0]))
        found = adaptive(p, m, costs, placement=placement, virtual_stages=v, memory_limit=limit, effort=0.02)
        return found.with_order(found.order, f"drawn-{self.seed}")


def draw(p: int, count: int) -> list[Drawn]:
    """Return `count` questions for p ranks, no two of the same number."""
    dice = random.Random(p)
    cases = []
    for number in range(count):
        m = dice.choice(legal_counts("gpipe", p))
        options = dice.choice([(), (), (("recompute.mode", "full"),)])
        run = Run("gpipe", p, m, tied=dice.random() < 0.5, varying=dice.random() < 0.3, options=options)
        cases.append(Drawn(run, 1000 * p + number))
    return cases


DRAWN = {p: draw(p, count) for p, count in ((2, 14), (3, 8), (4, 8))}


def compare(cases: list[Drawn], references: list[Any]) -> list[list[str]]:
    """Return what is not bitwise equal, by case. Collective."""
    found = []
    for case, expected in zip(cases, references, strict=True):
        schedule = case.schedule()

        def plan(recipe: Any, config: Any, microbatches: int, schedule: Schedule = schedule) -> PipelinePlan:
            assert microbatches == schedule.num_microbatches
            sizes = even_layers(config.num_layers, schedule.num_parts)
            last = len(sizes) - 1
            ranges = enumerate(layer_ranges(sizes))
            return PipelinePlan(schedule, tuple(Part(a, b, embeds=n == 0, ends=n == last) for n, (a, b) in ranges))

        trainer.plan_pipeline = plan  # type: ignore[assignment]
        found.append(differences([case.run], {case.run: expected})[case.run])
    return found


@cache
def results(p: int) -> list[list[str]]:
    cases = DRAWN[p]
    return run_ranks(compare, p, cases, [reference(case.run) for case in cases], timeout=280)[0]


@pytest.mark.parametrize("p", sorted(DRAWN))
def test_the_draw_is_varied(p: int) -> None:
    """Several placements, and hardly the same schedule twice."""
    schedules = [case.schedule() for case in DRAWN[p]]
    for schedule in schedules:
        verify(schedule)
    assert len({schedule.num_stages for schedule in schedules}) > 1
    assert len({schedule.digest for schedule in schedules}) > len(schedules) * 3 // 4


@pytest.mark.parametrize(("p", "index"), [(p, index) for p in DRAWN for index in range(len(DRAWN[p]))])
def test_a_searched_schedule_equals_one_process_bit_for_bit(p: int, index: int) -> None:
    assert results(p)[index] == []
