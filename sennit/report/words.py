"""Numbers in words: the units of a report."""

from __future__ import annotations

import math

ABSENT = "-"


def count(value: float | None) -> str:
    """Return a count in full below 10,000, else with three digits and k, M, B or T: `12.3 M`."""
    if value is None or not math.isfinite(value):
        return ABSENT
    for limit, scale, letter in ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{significant(value / scale)} {letter}"
    return f"{value:,.0f}"


def significant(value: float, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits, without an exponent where that reads well."""
    if not math.isfinite(value):
        return ABSENT
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -4 or exponent > 6:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(digits - 1 - exponent, 0)}f}"


def percent(value: float) -> str:
    """Return a percentage with two digits."""
    return f"{significant(value, 2)} %" if value >= 0.1 or value <= 0 else "< 0.1 %"


def gibibytes(value: float | None) -> str:
    """Return bytes as MiB or GiB."""
    if value is None or not math.isfinite(value):
        return ABSENT
    if abs(value) < 0.95 * 2**30:
        return f"{significant(value / 2**20)} MiB"
    return f"{significant(value / 2**30)} GiB"


def duration(seconds: float | None) -> str:
    """Return a duration in its two largest units: `4 min 12 s`."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return ABSENT
    if seconds < 1:
        return f"{significant(1000 * seconds)} ms"
    if seconds < 60:
        return f"{significant(seconds)} s"
    total = round(seconds)
    days, rest = divmod(total, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s"


def rate_flops(value: float | None) -> str:
    """Return FLOP/s as GFLOP/s, TFLOP/s or PFLOP/s."""
    if value is None or not math.isfinite(value) or value <= 0:
        return ABSENT
    for limit, unit in ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s")):
        if value >= limit:
            return f"{significant(value / limit)} {unit}"
    return f"{significant(value)} FLOP/s"


__all__ = ["ABSENT", "count", "duration", "gibibytes", "percent", "rate_flops", "significant"]
