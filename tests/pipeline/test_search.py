"""The search for schedules: whatever the costs and the memory, its result runs, fits and is not beaten by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.errors import ConfigError
from sennit.pipeline import search
from sennit.pipeline.catalog import make
from sennit.pipeline.executor import WINDOW
from sennit.pipeline.schedule import Pair, Schedule
from sennit.pipeline.search import HAND_MADE, Placement, adaptive
from sennit.pipeline.simulate import Costs, activation_curve, simulate
from sennit.pipeline.verify import verify
from sennit.recipe.schedules import schedule_problems


def uniform(n: int, share: float, *, send: float = 0.05, head: float = 0.0) -> Costs:
    """F = 1, I = 1.2, W = 0.8 for the layers of a rank; `head`: what the last virtual stage has more, in F."""
    times = [[cost * share] * (n - 1) + [cost * (share + head)] for cost in (1.0, 1.2, 0.8)]
    return Costs(tuple(times[0]), tuple(times[1]), tuple(times[2]), send=send)


def by_hand(placement: str, p: int, m: int, v: int) -> list[Schedule]:
    """Return the hand-made schedules of a placement that take these numbers."""
    asked = v if placement == "loop" else 0
    names = HAND_MADE[Placement(placement)]
    return [make(name, p, m, asked, pairs=False) for name in names if not schedule_problems(name, p, m, asked)]


def peak(schedule: Schedule, whole: tuple[float, ...], late: tuple[float, ...]) -> float:
    ranks = range(schedule.num_ranks)
    return max(max(activation_curve(schedule, rank, whole=whole, after_input=late)) for rank in ranks)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Draw sizes, costs, activations and a limit between the least and plenty."""
    placement = draw(st.sampled_from(["v", "line", "loop"]))
    p, m = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    v = {"v": 2, "line": 1}.get(placement) or draw(st.integers(2, 3))
    n = p * v

    def each(values: st.SearchStrategy[float]) -> tuple[float, ...]:
        return tuple(draw(st.lists(values, min_size=n, max_size=n)))

    time = st.sampled_from([0.0, 0.5, 0.9, 1.0, 1.1, 2.0, 3.7])
    whole = each(st.sampled_from([0.1, 0.5, 1.0, 1.7]))
    late = tuple(value * draw(st.sampled_from([0.0, 0.3, 1.0])) for value in whole)
    stages = search.v_placement(p) if placement == "v" else search.loop_placement(p, v)
    least = max(sum(value for value, at in zip(whole, stages, strict=True) if at == rank) for rank in range(p))
    return {
        "p": p,
        "m": m,
        "costs": Costs(each(time), each(time), each(time), send=draw(st.sampled_from([0.0, 0.05, 1.5]))),
        "placement": placement,
        "virtual_stages": v,
        "activation": whole,
        "after_input": late,
        "memory_limit": draw(st.none() | st.sampled_from([1.0, 1.3, 2.0, 4.0]).map(lambda factor: least * factor)),
    }


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_results_run_fit_and_are_not_beaten_by_hand(case: dict[str, Any]) -> None:
    found = adaptive(**case, effort=0.02)
    whole, late, limit = case["activation"], case["after_input"], case["memory_limit"]
    verify(found, activation=whole, after_input=late, memory_limit=limit)
    assert not any(isinstance(item, Pair) for items in found.order for item in items)
    makespan = simulate(found, case["costs"]).makespan
    for made in by_hand(case["placement"], case["p"], case["m"], case["virtual_stages"]):
        if limit is None or peak(made, whole, late) <= limit:
            assert makespan <= simulate(made, case["costs"]).makespan * (1 + 1e-9), made.name


def excess(schedule: Schedule, costs: Costs) -> float:
    """Return the makespan beyond the work of the busiest rank."""
    timeline = simulate(schedule, costs)
    return timeline.makespan - max(timeline.busy)


def test_unequal_phases_and_slow_messages() -> None:
    """p = 8, m = 32: the search reaches the bound, time until the last rank's first input; ZB-V loses 5.85."""
    costs = uniform(16, 0.5)
    assert excess(make("zb-v", 8, 32), costs) == pytest.approx(5.85)
    found = adaptive(8, 32, costs)
    verify(found)
    assert excess(found, costs) == pytest.approx(7 * 0.5 + 7 * 0.05)
    within = adaptive(8, 32, costs, memory_limit=12.0)
    verify(within, memory_limit=12.0)
    assert excess(within, costs) < 5.0


def test_a_head_on_the_last_stage() -> None:
    """Half a rank's layers more at the end: ZB-V loses 3.05, with the same memory the search at most half of it."""
    costs = uniform(16, 0.5, head=0.5)
    assert excess(make("zb-v", 8, 32), costs) == pytest.approx(3.05)
    found = adaptive(8, 32, costs, memory_limit=8.0)
    verify(found, memory_limit=8.0)
    assert excess(found, costs) < 1.5


def test_more_memory_than_v_half_less_than_zb_v() -> None:
    """Hand-made schedules exist for a third, half and all of the memory of 1F1B; the search uses what there is."""
    costs = uniform(16, 0.5)
    half, full = excess(make("v-half", 8, 32), costs), excess(make("zb-v", 8, 32), costs)
    found = adaptive(8, 32, costs, memory_limit=6.0, effort=0.3)
    verify(found, memory_limit=6.0)
    assert full < excess(found, costs) < 0.8 * half


@pytest.mark.parametrize(("placement", "limit"), [("v", 2.0), ("loop", 3.0)])
def test_little_memory_does_not_mean_one_microbatch_at_a_time(placement: str, limit: float) -> None:
    """Room that later virtual stages need is kept free, so that ranks with full memory do not wait for each other."""
    costs = uniform(16, 0.5)
    alone, found = (
        adaptive(8, 16, costs, placement=placement, memory_limit=most, effort=0.1) for most in (1.0, limit)
    )
    verify(found, memory_limit=limit)
    assert simulate(found, costs).makespan < 0.6 * simulate(alone, costs).makespan


def test_same_question_same_answer() -> None:
    costs = uniform(8, 0.5, head=0.3)
    first, second = (adaptive(4, 6, costs, memory_limit=3.0, effort=0.1) for _ in range(2))
    assert first.digest == second.digest and first.name == second.name


def test_hand_made_schedules_keep_their_name_when_nothing_is_shorter() -> None:
    """1F1B at F = I = W leaves gaps, ZB-H1 has the least makespan possible and less memory than ZB-H2."""
    costs = Costs((1.0,) * 4, (1.0,) * 4, (1.0,) * 4)
    found = adaptive(4, 8, costs, placement="line", effort=0.1)
    assert found.name == "zb-h1" and found.order == make("zb-h1", 4, 8).order


def test_equally_short_schedules_need_little_memory() -> None:
    """Without a limit, the ranks do not run ahead for nothing."""
    costs = uniform(8, 0.5)
    found = adaptive(4, 32, costs)
    share = (0.5,) * 8
    assert excess(found, costs) == pytest.approx(3 * 0.55)
    assert peak(found, share, share) <= 16


@pytest.mark.parametrize("placement", ["v", "line", "loop"])
def test_one_microbatch_at_a_time_is_the_last_resort(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_grid", lambda: iter(()))
    monkeypatch.setattr(search, "HAND_MADE", dict.fromkeys(Placement, ()))
    n = 4 if placement == "line" else 8
    found = adaptive(4, 5, uniform(n, 4 / n), placement=placement, memory_limit=1.0)
    assert max(verify(found, memory_limit=1.0, window=1).peak_activations) == 1.0


def test_the_window_is_that_of_the_executor() -> None:
    assert search.Work((0,), 1, uniform(1, 1.0), (1.0,), (1.0,)).window == WINDOW


LINE = uniform(4, 1.0)
BAD = {
    r"0 ranks and 4 microbatches.*at least 1": lambda: adaptive(0, 4, LINE),
    r"no placement 'w'; use one of line, loop, v": lambda: adaptive(4, 4, LINE, placement="w"),
    r"virtual_stages=3 with placement v.*placement loop": lambda: adaptive(4, 4, LINE, virtual_stages=3),
    r"virtual_stages=1 with placement loop.*placement line": lambda: adaptive(
        4, 4, LINE, placement="loop", virtual_stages=1
    ),
    r"costs.forward has 4 entries for 8": lambda: adaptive(4, 4, LINE),
    r"after_input has 2 entries for 4": lambda: adaptive(4, 4, LINE, placement="line", after_input=(0.1, 0.1)),
    r"costs.input is .*finite and not negative": lambda: adaptive(
        1, 1, Costs((1.0,), (-1.0,), (1.0,)), placement="line"
    ),
    r"costs.send=-1": lambda: adaptive(1, 1, uniform(1, 1.0, send=-1), placement="line"),
    r"after_input=2 of virtual stage 0.*activation=1": lambda: adaptive(
        1, 1, uniform(1, 1.0), placement="line", after_input=(2.0,)
    ),
    r"memory_limit=0.9.*use memory_limit=1 or more": lambda: adaptive(4, 4, uniform(8, 0.5), memory_limit=0.9),
    r"memory_limit=nan": lambda: adaptive(4, 4, uniform(8, 0.5), memory_limit=float("nan")),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_is_refused(message: str) -> None:
    call: Callable[[], Schedule] = BAD[message]
    with pytest.raises(ConfigError, match=message):
        call()
