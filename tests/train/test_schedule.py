"""The learning rate is a pure function of the step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.train.schedule import learning_rate

SCHEDULES = ("constant", "linear", "cosine", "wsd")


def rates(schedule: str, *, warmup: int = 4, total: int = 20, steps: int = 24, decay: float = 0.25) -> list[float]:
    return [
        learning_rate(
            step,
            peak=1.0,
            schedule=schedule,
            warmup_steps=warmup,
            total_steps=total,
            min_ratio=0.1,
            decay_fraction=decay,
        )
        for step in range(steps)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_rises_to_the_peak(schedule: str) -> None:
    assert rates(schedule)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_and_cosine_end_at_the_floor_on_the_last_step_and_stay_there() -> None:
    for schedule in ("linear", "cosine"):
        values = rates(schedule)
        assert values[19:] == pytest.approx([0.1] * 5)
        assert values[18] > 0.1
    middle = (4 + 19) / 2
    assert rates("cosine")[11] > 0.55 > rates("cosine")[12]
    assert rates("linear")[11] == pytest.approx(1.0 - 0.9 * (11 - 4) / 15)
    assert math.isclose(rates("cosine")[11] - 0.55, 0.55 - rates("cosine")[12]), f"symmetric around {middle}"


def test_wsd_is_constant_then_falls_over_the_last_fraction() -> None:
    values = rates("wsd")
    assert values[4:16] == [1.0] * 12
    assert values[15:] == pytest.approx([1.0, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1, 0.1, 0.1])


def test_constant_never_falls() -> None:
    assert set(rates("constant")[4:]) == {1.0}


@given(
    step=st.integers(0, 200),
    schedule=st.sampled_from(SCHEDULES),
    warmup=st.integers(0, 50),
    total=st.integers(1, 100),
    decay=st.floats(0.0, 1.0),
)
def test_rates_stay_between_nothing_and_the_peak(step: int, schedule: str, warmup: int, total: int, decay: float) -> None:
    rate = learning_rate(
        step,
        peak=3e-4,
        schedule=schedule,
        warmup_steps=warmup,
        total_steps=total,
        min_ratio=0.1,
        decay_fraction=decay,
    )
    assert 0 < rate <= 3e-4 * (1 + 1e-12)
    if step >= warmup:
        assert rate >= 3e-5 * (1 - 1e-12)
