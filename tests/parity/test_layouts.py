"""Every layout is the same run as one process: loss, gradient norm, every full gradient, weights after three steps.

Float64, relative error at most 1e-10. Plain gradient descent without clipping shows a wrong scale that Adam and
clipping would hide; AdamW with clipping shows a wrong norm. The data are packed documents with uneven masks, or a
batch half of whose rows have no counted token, so that some ranks have none (scenarios I-10 and I-13).
"""

from __future__ import annotations

import pytest

from tests.parity.cases import check, errors_by, errors_by_world
from tests.parity.runs import FAMILIES, LAYOUTS, Case

MANY = [name for name, layout in LAYOUTS.items() if name != "one" and layout.pp == layout.cp == 1]
FEW = [name for name in MANY if LAYOUTS[name].world <= 4]
SPLIT = ["tp2", "tp2-sp", "fsdp2-tp2-sp"]

FAST = [
    *(Case(layout, optimizer="sgd", data="packed") for layout in FEW),
    *(Case(layout, optimizer="adamw", data="idle", accumulate=2 if LAYOUTS[layout].world <= 2 else 1) for layout in FEW),
    *(Case(layout, family) for family in FAMILIES if family != "llama" for layout in SPLIT),
    *(Case(layout, optimizer="muon", data="plain") for layout in ("tp2-sp", "fsdp2", "fsdp2-tp2-sp")),
    *(Case(layout, optimizer="sgd", accumulate=4) for layout in ("dp2", "fsdp2", "fsdp2-keep", "tp2-sp")),
    *(Case(layout, optimizer="sgd", accumulate=2) for layout in ("hsdp2x2", "dp2-tp2")),
]
SLOW = [
    *(
        Case(layout, family, optimizer, data)
        for layout in MANY
        for family in FAMILIES
        for optimizer in ("sgd", "adamw", "muon")
        for data in ("packed", "plain")
    ),
    *(
        Case(layout, "llama-tied", optimizer, "packed", accumulate=2)
        for layout in MANY
        for optimizer in ("sgd", "adamw")
        if 8 % (2 * LAYOUTS[layout].data_ranks) == 0
    ),
]
fast = errors_by_world(FAST)
SLOW = [case for case in SLOW if case not in FAST]
slow = errors_by(lambda case: case.layout, SLOW)


@pytest.mark.parametrize("case", FAST, ids=lambda case: case.id)
def test_layout_equals_one_process(case: Case) -> None:
    """Scenarios I-01, I-03, I-06, I-10, I-13, I-15, I-59: the label 130 of a vocabulary of 131 occurs, tp4 exceeds the
    two kv heads, and whole weights must stay bit-equal on all ranks that hold them."""
    check(case, fast(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.id)
def test_every_family_on_every_layout(case: Case) -> None:
    """The full product of layouts, families, optimizers and data."""
    check(case, slow(case))
