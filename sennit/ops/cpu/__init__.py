"""Own C++ operators for the CPU: provider `cpu` in the table of operators. Optional; nothing depends on them."""

from __future__ import annotations

from typing import Any

from sennit.ops.cpu.library import missing


def register_all() -> None:
    """Enter the C++ operators into the table. Whether they can be used is found out when they are first asked for."""
    from sennit.ops.cpu import operators, passes
    from sennit.ops.cpu.native import DTYPES
    from sennit.ops.table import register

    common: dict[str, Any] = dict(devices=("cpu",), dtypes=DTYPES, priority=30, available=missing)
    for op in ("rms_norm", "add_rms_norm", "swiglu"):
        register(op, "cpu", getattr(operators, op), **common)
    register("adamw_", "cpu", operators.adamw_, accepts=operators.updates_here, **common)
    register("sum_of_squares", "cpu", operators.sum_of_squares, accepts=operators.sums_here, **common)
    register("passes", "cpu", passes, **common)  # type: ignore[arg-type]


__all__ = ["missing", "register_all"]
