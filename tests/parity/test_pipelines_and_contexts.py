"""Pipelines, context parallelism and their products with everything else are the same run as one process.

Float64, relative error at most 1e-10, packed documents whose borders fall on the cuts, uneven masks; up to 16 ranks.
"""

from __future__ import annotations

import pytest

from tests.parity.cases import check, errors_by, errors_by_world
from tests.parity.runs import FAMILIES, LAYOUTS, Case

NEW = [name for name, layout in LAYOUTS.items() if layout.pp > 1 or layout.cp > 1]
FAST = [
    *(Case(layout) for layout in NEW),
    *(Case(layout, "llama-tied", "adamw", "idle") for layout in NEW if LAYOUTS[layout].world <= 4),
    *(Case(layout, "mistral") for layout in ("cp2", "cp4-both", "cp4-ulysses")),
    *(Case(layout, data="plain") for layout in ("cp2", "cp4", "cp2-ulysses", "pp2-cp2")),
    *(Case(layout, dropout=0.5) for layout in ("cp2", "cp2-tp2-sp", "pp2", "pp2-tp2-sp", "pp2-tp2-overlap")),
    Case("cp4-ulysses", options=(("model.num_kv_heads", "1"),)),
    Case("cp2", options=(("recompute.mode", "full"),)),
    Case("pp2-fsdp2", optimizer="muon", data="plain"),
]
SLOW = [
    Case(layout, family, optimizer, data)
    for layout in NEW
    for family in FAMILIES
    for optimizer in ("sgd", "adamw")
    for data in ("packed", "plain")
]
fast = errors_by_world(FAST)
SLOW = [case for case in SLOW if case not in FAST]
slow = errors_by(lambda case: case.layout, SLOW)


@pytest.mark.parametrize("case", FAST, ids=lambda case: case.id)
def test_layout_equals_one_process(case: Case) -> None:
    """Also scenario I-16: clipping (adamw) by one norm over all stages."""
    check(case, fast(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.id)
def test_every_family_on_every_layout(case: Case) -> None:
    check(case, slow(case))
