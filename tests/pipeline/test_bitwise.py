"""Every schedule computes exactly what one process computes: equal loss and equal gradients, bit for bit, in float32.

One process adds up the gradients of the microbatches in their order, and so does every virtual stage. DualPipe's two
directions each add up half of the microbatches; there the reference is the sum of the two halves.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.pipeline.runs import SCHEDULES, Run, differences, legal_counts, reference
from tests.ranks import run_ranks

RECOMPUTE = (("recompute.mode", "full"),)
SELECTIVE = (("recompute.mode", "selective"), ("recompute.segments", "attention,mlp"))


def counts(schedule: str, p: int) -> list[int]:
    """Return the fewest, a few and the most microbatches."""
    legal = legal_counts(schedule, p)
    return sorted({legal[0], legal[len(legal) // 2], legal[-1]})


FAST = [
    *(Run(schedule, p, m) for schedule in SCHEDULES for p in (2, 4) for m in counts(schedule, p)),
    *(Run(schedule, p, legal_counts(schedule, p)[-1], tied=True) for schedule in SCHEDULES for p in (2, 4)),
    *(Run(schedule, 4, legal_counts(schedule, 4)[-2], varying=True) for schedule in SCHEDULES),
    *(Run(schedule, 2, legal_counts(schedule, 2)[-1], options=RECOMPUTE) for schedule in SCHEDULES),
    *(Run(schedule, 2, legal_counts(schedule, 2)[-1], options=SELECTIVE) for schedule in ("1f1b", "zb-v", "dualpipe")),
    Run("1f1b", 2, 4, options=(("parallel.layers_per_stage", "5,0"),)),
    Run("zb-h1", 2, 4, options=(("parallel.layers_per_stage", "0,5"),), tied=True),
    Run("interleaved", 2, 4, options=(("parallel.virtual_stages", "2"), ("parallel.layers_per_stage", "1,2,1,1"))),
    Run("zb-v", 2, 5, options=(("parallel.layers_per_stage", "2,1,1,1"),), tied=True),
    *(
        Run(schedule, 2, legal_counts(schedule, 2)[-1], options=(("parallel.overlap", "true"), *more))
        for schedule in ("dualpipe", "dualpipev", "interleaved", "1f1b")
        for more in ((), RECOMPUTE)
    ),
]
SLOW = [
    Run(schedule, p, m, tied, varying, options)
    for schedule in SCHEDULES
    for p in (2, 4)
    for m in legal_counts(schedule, p)
    for tied in (False, True)
    for varying in (False, True)
    for options in ((), RECOMPUTE)
]
SLOW = [run for run in SLOW if run not in FAST]


@cache
def results(slow: bool, p: int) -> dict[Run, list[str]]:
    runs = [run for run in (SLOW if slow else FAST) if run.p == p]
    references = {run: reference(run) for run in runs}
    return run_ranks(differences, p, runs, references, timeout=3000 if slow else 280)[0]


@pytest.mark.parametrize("run", FAST, ids=lambda run: run.id)
def test_pipeline_equals_one_process_bit_for_bit(run: Run) -> None:
    assert results(False, run.p)[run] == []


@pytest.mark.slow
@pytest.mark.parametrize("run", SLOW, ids=lambda run: run.id)
def test_every_number_of_microbatches_equals_one_process(run: Run) -> None:
    assert results(True, run.p)[run] == []
