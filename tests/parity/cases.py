"""Many cases in one set of forked ranks; their references are computed once, before the fork."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from tests.parity.runs import TOLERANCE, Case, Errors, Trace, compare, trace, worst_over_ranks
from tests.ranks import run_ranks


@cache
def reference(case: Case) -> Trace:
    """Return the trace of `case` in one process; `case` must be an `alone()`."""
    return trace(case)


def run_cases(cases: list[Case], references: dict[Case, Trace]) -> dict[Case, Errors]:
    """Run every case on this rank and return its errors, the largest over all ranks. Collective."""
    return {case: worst_over_ranks(compare(trace(case), references[case.alone()])) for case in cases}


def errors_of(cases: Iterable[Case]) -> dict[Case, Errors]:
    """Run `cases`, all of one world size, in one set of ranks and return their errors against one process."""
    wanted = list(cases)
    (world,) = {case.world for case in wanted}
    references = {case.alone(): reference(case.alone()) for case in wanted}
    return run_ranks(run_cases, world, wanted, references, timeout=240)[0]


def errors_by(key: Callable[[Case], object], cases: Iterable[Case]) -> Callable[[Case], Errors]:
    """Return a function that gives the errors of one of `cases`; the first use runs all cases that share its `key`."""
    every = list(cases)

    @cache
    def of(value: object) -> dict[Case, Errors]:
        return errors_of(case for case in every if key(case) == value)

    return lambda case: of(key(case))[case]


def errors_by_world(cases: Iterable[Case]) -> Callable[[Case], Errors]:
    """As `errors_by` the world size: the fewest forks."""
    return errors_by(lambda case: case.world, cases)


def check(case: Case, errors: Errors) -> None:
    """Raise AssertionError unless `case` was the same run as one process, with bit-equal copies of whole weights."""
    assert errors.worst <= TOLERANCE, f"{case.id}: {errors}"
    assert errors.disagreement == 0.0, f"{case.id}: copies of a weight differ by {errors.disagreement}"


__all__ = ["check", "errors_by", "errors_by_world", "errors_of", "reference", "run_cases"]
