"""Curves for a picture: smoothing, and thinning that keeps every peak."""

from __future__ import annotations

import numpy as np

from sennit.report.run_data import Array

MAX_POINTS = 1500
"""Points a curve keeps: more than the pixels of a wide panel, so that thinning does not show."""


def thin(x: Array, y: Array, max_points: int = MAX_POINTS) -> tuple[Array, Array]:
    """Return at most `max_points` points of the curve x, y [n] that draw the same picture.

    Neighbouring points are grouped; of each group the smallest and the largest y stay, in their order, so spikes
    survive. A group without a finite y keeps one point, so gaps survive. First and last point stay.
    """
    if len(x) <= max_points:
        return x, y
    edges = np.linspace(1, len(x) - 1, (max_points - 2) // 2 + 1).astype(np.int64)
    keep = [0, len(x) - 1]
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        part = y[begin:end]
        finite = np.flatnonzero(np.isfinite(part))
        if finite.size:
            keep += [begin + finite[part[finite].argmin()], begin + finite[part[finite].argmax()]]
        elif len(part):
            keep.append(begin)
    index = np.unique(np.array(keep, dtype=np.int64))
    return x[index], y[index]


def group_means(x: Array, ys: dict[str, Array], max_points: int = MAX_POINTS) -> tuple[Array, dict[str, Array]]:
    """Return x and every y averaged over the same groups of neighbours, at most `max_points` groups; NaN counts as 0.

    For stacked curves, which need a common x and whose sum has to stay right.
    """
    filled = {name: np.nan_to_num(y, nan=0.0) for name, y in ys.items()}
    if len(x) <= max_points:
        return x, filled
    starts = np.linspace(0, len(x), max_points + 1).astype(np.int64)[:-1]
    sizes = np.diff(np.append(starts, len(x)))
    means = {name: np.add.reduceat(y, starts) / sizes for name, y in filled.items()}
    return x[starts + sizes - 1], means


def smooth(y: Array, window: int) -> Array:
    """Return the mean of y [n] over `window` neighbours, centred, so that it does not lag behind a falling curve.

    Near the start the window shrinks on both sides alike, near the end on the right only. Non-finite points do not
    count, and are NaN in the result.
    """
    n, index = len(y), np.arange(len(y))
    finite = np.isfinite(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    half = np.minimum(window // 2, index)
    begin, end = index - half, np.minimum(index + half + 1, n)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (sums[end] - sums[begin]) / (counts[end] - counts[begin])
    return np.where(finite, mean, np.nan)


def smoothing_window(num_points: int) -> int:
    """Return the window for a curve of `num_points`: a fortieth of it, between 3 and 500 points."""
    return min(max(num_points // 40, 3), 500)


def minutes_of_training(time: Array, step: Array, resumed_at: set[int]) -> Array:
    """Return minutes [n] since the first record, without the pauses between a stop and its resume.

    `time` [n]: unix seconds; `step` [n]: finished steps; `resumed_at`: numbers of finished steps at a resume.
    """
    if not len(time):
        return time
    passed = np.diff(time, prepend=time[0])
    passed[~np.isfinite(passed)] = 0.0
    for at in resumed_at:
        index = int(np.searchsorted(step, at, side="right"))
        if index < len(passed):
            passed[index] = 0.0
    return np.cumsum(np.maximum(passed, 0.0)) / 60.0


__all__ = ["MAX_POINTS", "group_means", "minutes_of_training", "smooth", "smoothing_window", "thin"]
