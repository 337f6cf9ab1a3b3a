"""Pipelines: schedules as data, their proof, their simulation and their execution.

The data side (schedule, fixed, vshape, search, catalog, verify, simulate, formulas, text, draw, trace) imports no
torch. The running side is `executor`, `channels`, `overlap` and `stage`.
"""

__all__: list[str] = []
