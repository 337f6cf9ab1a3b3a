"""Learning-rate schedules: pure functions of the step, so that a resumed run has the same rates."""

from __future__ import annotations

import math


def learning_rate(
    step: int,
    *,
    peak: float,
    schedule: str,
    warmup_steps: int,
    total_steps: int,
    min_ratio: float,
    decay_fraction: float = 0.2,
) -> float:
    """Return the rate of step `step` (0-based).

    Linear warm-up over `warmup_steps` (the first step already has peak / warmup_steps), then `schedule`: constant;
    linear or cosine down to peak * min_ratio at the last step; wsd: constant, then linear down over the last
    `decay_fraction` of all steps (arXiv 2404.06395). Past `total_steps` the last value holds.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    floor = peak * min_ratio
    if schedule == "constant":
        return peak
    start = warmup_steps
    if schedule == "wsd":
        start = max(warmup_steps, total_steps - round(total_steps * decay_fraction))
    last = total_steps - 1
    progress = 1.0 if last <= start else min(max((step - start) / (last - start), 0.0), 1.0)
    if last <= start and step <= start and schedule != "wsd":
        progress = 0.0
    if schedule == "cosine":
        return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak + (floor - peak) * progress


__all__ = ["learning_rate"]
