"""V-half and V-min: their bubble and activations are those that the module states, for every number of microbatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest

from sennit.pipeline.fixed import v_placement, zb_v
from sennit.pipeline.schedule import Op, Schedule, chain
from sennit.pipeline.simulate import Costs, peak_activations, simulate
from sennit.pipeline.verify import required_window, verify
from sennit.pipeline.vshape import Block, Lines, Work, in_one_line, v_half, v_min, weave

RANKS = range(1, 17)


def sizes(p: int) -> list[int]:
    """Numbers of microbatches from fewer than any pattern needs to many."""
    return sorted({1, 2, 3, p // 2, p // 2 + 1, p, 2 * p - 1, 2 * p, 3 * p + 1, 4 * p} - {0})


@pytest.mark.parametrize("p", RANKS)
def test_v_half_has_half_the_bubble_and_half_the_activations_of_1f1b(p: int) -> None:
    for m in sizes(p):
        schedule = v_half(p, m)
        excess = simulate(schedule).makespan - 3 * m
        if m > p // 2:
            assert 1.5 * (p - 1) - 0.5 <= excess <= 1.5 * (p - 1)
        else:
            assert excess <= 2 * (p - 1)
        assert max(verify(schedule).peak_activations) == min(m, p // 2 + 1)
        assert required_window(schedule) <= 2


@pytest.mark.parametrize("p", RANKS)
def test_v_min_has_two_thirds_of_the_bubble_and_a_third_of_the_activations_of_1f1b(p: int) -> None:
    for m in sizes(p):
        schedule = v_min(p, m)
        assert simulate(schedule).makespan - 3 * m == max(0, 2 * (p - 1) - 0.5)
        assert max(verify(schedule).peak_activations) == min(m, (p + 1) // 3 + 1)
        assert required_window(schedule) <= 2


@pytest.mark.parametrize("make", [v_half, v_min])
def test_each_virtual_stage_takes_its_microbatches_in_turn(make: Callable[[int, int], Schedule]) -> None:
    """Weight gradients are then summed in the same order as without a pipeline."""
    schedule = make(6, 13)
    for rank in range(6):
        for stage in schedule.stages_of(rank):
            for kind in "FIW":
                done = [op.microbatch for op in schedule.compute(rank) if (op.kind, op.stage) == (kind, stage)]
                assert done == list(range(13))


def work_of(p: int, m: int, *, limit: float = inf, send: float = 0.0) -> Work:
    n = 2 * p
    costs = Costs((1.0,) * n, (1.25,) * n, (0.75,) * n, send=send)
    return Work(tuple(v_placement(p)), m, costs, (0.5,) * n, (0.25,) * n, limit)


def lines_of(work: Work, hop: float) -> list[Lines]:
    """Return lines in which every operation follows `hop` after the one before."""
    n = len(work.rank_of)
    return Block(tuple(hop * s for s in range(n)), tuple(hop * (2 * n - 1 - s) for s in range(n)), 6.0).lines(work)


@pytest.mark.parametrize("overtake", [False, True])
@pytest.mark.parametrize("send", [0.0, 0.125])
def test_weave_reports_what_the_simulation_finds(overtake: bool, send: float) -> None:
    work = work_of(4, 9, limit=4.0, send=send)
    lines = lines_of(work, 1.5)
    woven = weave(work, lines if overtake else in_one_line(lines), reserve=(0.5,) * 4 + (0.0,) * 4 if overtake else ())
    assert woven.order is not None
    schedule = chain("woven", work.rank_of, 9, woven.order)
    proof = verify(schedule, activation=work.whole, after_input=work.after_input, memory_limit=4.0)
    assert woven.peak == max(proof.peak_activations)
    assert woven.makespan == pytest.approx(simulate(schedule, work.costs).makespan)
    assert woven.steps == 3 * 8 * 9


def test_weave_gives_up_beyond_the_bound_and_without_memory() -> None:
    work = work_of(4, 9)
    lines = in_one_line(lines_of(work, 1.5))
    best = weave(work, lines)
    assert weave(work, lines, bound=best.makespan) == best
    late = weave(work, lines, bound=best.makespan - 0.25)
    assert late.order is None and late.makespan == inf and late.steps < best.steps
    assert weave(work_of(4, 9, limit=0.75), lines).order is None


def test_weave_keeps_to_the_window() -> None:
    """Rank 0 wants a gradient before the forwards that rank 1 has sent earlier on the same channel."""
    m = 6
    rest = range(1, m)
    zero = [Op("F", 0, i) for i in range(m)] + [Op("F", 3, 0), Op("I", 3, 0), Op("I", 0, 0)]
    zero += [Op("F", 3, i) for i in rest] + [Op("I", stage, i) for i in rest for stage in (3, 0)]
    one = [Op("F", stage, i) for i in range(m) for stage in (1, 2)]
    one += [Op("I", stage, i) for i in range(m) for stage in (2, 1)]
    lines: list[Lines] = [[[(float(place), op) for place, op in enumerate(ops)]] for ops in (zero, one)]
    work = work_of(2, m)
    order = weave(replace(work, window=m), lines).order
    assert order is not None
    assert required_window(chain("woven", work.rank_of, m, order)) == m
    assert weave(replace(work, window=m - 1), lines).order is None


def test_weights_fill_waits_of_a_hand_made_order() -> None:
    """ZB-V with its weight gradients taken out and put back is as short as it was."""
    p, m = 4, 12
    made = zb_v(p, m)
    lines: list[Lines] = [
        [[(e.start, e.item) for e in events if isinstance(e.item, Op) and e.item.kind != "W"]]
        for events in simulate(made).events
    ]
    ones = (0.5,) * 2 * p
    woven = weave(Work(made.rank_of, m, Costs(ones, ones, ones), ones, ones, p), lines)
    assert woven.order is not None
    assert woven.makespan == simulate(made).makespan
    assert woven.peak <= max(peak_activations(made)) == p
    assert sum(op.kind == "W" for items in woven.order for op in items) == 2 * p * m
