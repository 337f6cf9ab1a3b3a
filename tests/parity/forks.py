"""All cases of one world size run in one set of forked ranks; their references are computed once, before the fork."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch

from tests.parity.runs import Case, Errors, Trace, compare, trace, worst_over_ranks
from tests.ranks import run_ranks


@cache
def reference(case: Case) -> Trace:
    """Return the trace of `case` in one process; `case` must be an `alone()`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return trace(case)
    finally:
        torch.set_num_threads(threads)


def run_cases(cases: list[Case], references: dict[Case, Trace]) -> dict[Case, Errors]:
    """Run every case on this rank and return its errors, the largest over all ranks. Collective."""
    return {case: worst_over_ranks(compare(trace(case), references[case.alone()])) for case in cases}


def errors_by_world(cases: Iterable[Case]) -> Callable[[Case], Errors]:
    """Return a function that gives the errors of one of `cases`; the first use forks all cases of its world size."""
    every = list(cases)

    @cache
    def of_world(world: int) -> dict[Case, Errors]:
        wanted = [case for case in every if case.world == world]
        references = {case.alone(): reference(case.alone()) for case in wanted}
        return run_ranks(run_cases, world, wanted, references, timeout=120)[0]

    return lambda case: of_world(case.world)[case]
