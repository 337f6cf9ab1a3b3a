"""Closed forms against the exact simulation."""

from __future__ import annotations

import pytest

from sennit.pipeline.formulas import Expected, expected
from sennit.pipeline.simulate import Costs, peak_activations, simulate
from tests.pipeline.test_schedules import CASES, NAMES, RANKS, build, counts

COSTS = [(f, i, w) for f in (1.0, 2.0, 3.0) for i in (1.0, 2.0, 3.0) for w in (0.5, 1.0, 2.0, 3.0)]
"""F, I, W that are exact in binary."""

ANY, SHORT_W, EVEN = COSTS, [c for c in COSTS if c[2] <= min(c[:2])], [c for c in COSTS if c[0] == c[1] >= c[2]]
HOLDS = {
    "gpipe": ANY,
    "1f1b": ANY,
    "interleaved": ANY,
    "zb-h1": SHORT_W,
    "zb-h2": [c for c in COSTS if c[1] <= 2 * min(c[0], c[2])],
    "zb-v": [c for c in EVEN if c[1] <= 2 * c[2]],
    "dualpipe": EVEN,
    "dualpipev": EVEN,
}
"""For which costs the docstring says that a formula holds (zb-h2: from m = 2p - 1 on)."""


@pytest.mark.parametrize(("name", "fused"), CASES)
def test_formulas_equal_the_simulation(name: str, fused: bool) -> None:
    for p in RANKS:
        for m in counts(name, p, fused=fused):
            schedule = build(name, p, m, fused=fused)
            want = expected(name, p, m, 2, fused=fused)
            assert want is not None
            assert simulate(schedule).makespan - 3 * m == want.excess, (p, m)
            assert max(peak_activations(schedule)) == want.peak_activations, (p, m)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("v", [3, 4])
def test_interleaved_formula_for_more_chunks(v: int, fused: bool) -> None:
    for p in (1, 3, 4):
        for m in counts("interleaved", p, fused=fused):
            schedule = build("interleaved", p, m, v, fused=fused)
            want = expected("interleaved", p, m, v, fused=fused)
            assert want is not None
            assert simulate(schedule).makespan - 3 * m == pytest.approx(want.excess)
            assert max(peak_activations(schedule)) == pytest.approx(want.peak_activations)


@pytest.mark.parametrize(("name", "fused"), CASES)
def test_formulas_hold_for_the_costs_they_say(name: str, fused: bool) -> None:
    for p in (2, 3, 4, 6):
        sizes = list(counts(name, p, fused=fused))
        for m in sizes[:: max(len(sizes) // 4, 1)]:
            schedule = build(name, p, m, fused=fused)
            for costs in COSTS:
                want = expected(name, p, m, 2, *costs, fused=fused)
                assert want is not None
                if want.excess is not None:
                    found = simulate(schedule, Costs.uniform(schedule, *costs)).makespan - m * sum(costs)
                    assert found == want.excess, (p, m, costs)
                else:
                    assert costs not in HOLDS[name] or (name == "zb-h2" and m < 2 * p - 1), (p, m, costs)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipev"])
def test_no_formula_where_it_would_be_wrong(name: str) -> None:
    """Long weight gradients do not fit into the gaps, short ones do not fill them."""
    costs = (1.0, 3.0, 0.5) if name == "zb-h2" else (1.0, 1.0, 3.0)
    want = expected(name, 4, 8, 1, *costs)
    assert want is not None and want.excess is None and want.peak_activations >= 4


def test_no_fused_formula_without_a_steady_phase() -> None:
    assert expected("interleaved", 4, 4, 2, fused=True) == Expected(None, 4.0, 1.0)


def test_unknown_schedules_have_no_formula() -> None:
    assert expected("v-half", 4, 8) is None


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_never_waits(name: str) -> None:
    if name != "dualpipe":  # its two directions need two ranks
        want = expected(name, 1, 4, 2)
        assert want is not None and want.excess == 0.0


def test_the_textbook_values() -> None:
    """p = 8, F = I = W = 1, per the papers' tables."""
    assert expected("1f1b", 8, 32) == Expected(21.0, 8, 1.0)
    assert expected("interleaved", 8, 32, 2) == Expected(10.5, 11.5, 1.0)
    assert expected("zb-h1", 8, 32) == Expected(7.0, 8, 1.0)
    assert expected("zb-h2", 8, 32) == Expected(7.0, 15, 1.0)
    assert expected("zb-v", 8, 32) == Expected(3.5, 8, 1.0)
    assert expected("dualpipe", 8, 32, fused=True) == Expected(6.0, 9, 2.0)
    assert expected("dualpipe", 8, 32) == Expected(3.0, 9, 2.0)
    assert expected("dualpipev", 8, 32, fused=True) == Expected(7.0, 8.5, 1.0)
    assert expected("dualpipev", 8, 32) == Expected(3.5, 8.5, 1.0)
