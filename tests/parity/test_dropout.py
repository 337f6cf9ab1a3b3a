"""Dropout on any layout drops what one process drops."""

from __future__ import annotations

import pytest

from tests.parity.cases import errors_by_world, reference
from tests.parity.runs import TOLERANCE, Case

CASES = [
    *(Case(layout, dropout=0.5) for layout in ("dp2", "tp2", "tp2-sp", "dp2-tp2", "dp2-tp2-sp", "fsdp2-tp2-sp")),
    *(Case(layout, dropout=0.5, accumulate=2) for layout in ("dp2", "fsdp2")),
    Case("dp2-tp2-sp", dropout=0.5, options=(("recompute.mode", "full"),)),
]
errors = errors_by_world(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_masks_agree_in_a_tp_group_and_differ_over_data_ranks(case: Case) -> None:
    """Parity with one process can hold only if replicated activations share a mask over tp, sequence shards take their
    parts of it, and data ranks drop what their samples' masks say. Scenario I-09."""
    found = errors(case)
    assert found.worst <= TOLERANCE, found
    with_dropout, without = (reference(c.alone()) for c in (case, Case("one")))
    assert with_dropout.records[0].loss != without.records[0].loss, "dropout is active"
