"""Reading runs that are damaged or unfinished, and thinning that keeps the peaks."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.errors import DataError
from sennit.report import words
from sennit.report.run_data import load_run
from sennit.report.series import group_means, minutes_of_training, smooth, thin


def test_truncated_and_foreign_lines_are_left_out_and_counted(tmp_path):
    lines = [
        '{"kind": "step", "step": 1, "loss": 2.0}',
        '{"kind": "step", "step": 2, "loss": NaN, "grad_norm": Infinity, "lr": 1e999, "tokens": "many"}',
        '{"kind": "step", "step": 1e400, "loss": 2.0}',
        "[1, 2]",
        "\x00\x00",
        '{"kind": "step", "step": 3, "loss": 1.5, "seconds": {"forward": 0.1, "novel": 0.2}}',
        '{"kind": "step", "step": 3, "loss": 1.4}',
        '{"kind": "step", "step": 4, "lo',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    run = load_run(tmp_path)
    assert run.steps["step"].tolist() == [1, 2, 3]
    assert run.steps["loss"][0] == 2.0 and math.isnan(run.steps["loss"][1]) and run.steps["loss"][2] == 1.4
    assert np.isnan(run.steps["grad_norm"]).all() and np.isnan(run.steps["lr"]).all()
    assert run.unreadable_lines == 4 and "4 unreadable lines" in run.notes[0]


def test_damaged_side_files_leave_a_note(tmp_path):
    (tmp_path / "summary.json").write_text('{"steps": ')
    (tmp_path / "environment.json").write_text("[]")
    (tmp_path / "recipe.toml").write_text("[run\nname = <b>")
    run = load_run(tmp_path)
    assert run.num_steps == 0 and run.summary == {} and run.recipe == {}
    assert len(run.notes) == 3


@pytest.mark.parametrize("kind", ["missing", "file", "empty folder"])
def test_no_run_at_all_is_one_error_that_names_the_path_and_the_runs_beside_it(tmp_path, kind):
    neighbour = tmp_path / "tiny-7"
    neighbour.mkdir()
    (neighbour / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 1}) + "\n")
    path = tmp_path / "tiny-8"
    if kind == "file":
        path.write_text("")
    elif kind == "empty folder":
        path.mkdir()
    with pytest.raises(DataError, match="tiny-8.*Runs nearby.*tiny-7"):
        load_run(path)


@given(
    st.lists(st.floats(-1e30, 1e30) | st.just(math.nan), min_size=1, max_size=400),
    st.integers(4, 60),
)
def test_thinning_keeps_extremes_ends_and_order(values, limit):
    y = np.array(values)
    x = np.arange(len(y), dtype=np.float64)
    thin_x, thin_y = thin(x, y, limit)
    assert len(thin_x) <= max(limit, 2) and (np.diff(thin_x) > 0).all()
    assert thin_x[0] == x[0] and thin_x[-1] == x[-1]
    if np.isfinite(y).any():
        assert np.nanmax(thin_y) == np.nanmax(y) and np.nanmin(thin_y) == np.nanmin(y)


def test_means_of_groups_keep_the_total():
    y = np.random.default_rng(0).random(1000)
    x, means = group_means(np.arange(1000.0), {"a": y}, 100)
    assert len(x) == 100 and means["a"].sum() * 10 == pytest.approx(y.sum())


def test_smoothing_neither_lags_nor_spreads_gaps():
    line = np.linspace(8.0, 2.0, 100)
    line[50] = np.nan
    smoothed = smooth(line, 9)
    assert math.isnan(smoothed[50]) and np.isfinite(np.delete(smoothed, 50)).all()
    np.testing.assert_allclose(smoothed[:45], line[:45])


def test_pauses_before_a_resume_are_left_out_of_the_training_time():
    time = np.array([0.0, 60.0, 120.0, 4000.0, 4060.0])
    assert minutes_of_training(time, np.array([1.0, 2, 3, 4, 5]), {3}).tolist() == [0, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (words.count(9999), "9,999"),
        (words.count(12_345_678), "12.3 M"),
        (words.count(math.nan), "-"),
        (words.duration(252.4), "4 min 12 s"),
        (words.duration(59.97), "60.0 s"),
        (words.duration(90061), "1 d 1 h"),
        (words.gibibytes(1.5 * 2**30), "1.50 GiB"),
        (words.gibibytes(700 * 2**20), "700 MiB"),
        (words.rate_flops(2.4e12), "2.40 TFLOP/s"),
        (words.significant(0.0001234), "0.000123"),
        (words.percent(0.004), "< 0.1 %"),
    ],
)
def test_numbers_in_words(text, expected):
    assert text == expected
