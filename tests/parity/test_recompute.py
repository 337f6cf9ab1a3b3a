"""Recomputation changes memory, never numbers: bit for bit, with dropout, on every kind of layout."""

from __future__ import annotations

import pytest
import torch

from tests.parity.runs import Case, Trace, trace
from tests.ranks import run_ranks

MODES: tuple[tuple[tuple[str, str], ...], ...] = (
    (("recompute.mode", "full"),),
    (("recompute.mode", "selective"), ("recompute.segments", '["attention", "mlp"]')),
    (("recompute.mode", "selective"), ("recompute.segments", '["attention_norm", "mlp_norm", "mlp"]')),
)


def same_bits(a: Trace, b: Trace) -> bool:
    pairs = [*zip(a.gradients, b.gradients, strict=True), (a.final, b.final)]
    equal = all(torch.equal(mine[name], theirs[name]) for mine, theirs in pairs for name in theirs)
    return equal and [r.loss for r in a.records] == [r.loss for r in b.records]


def differing_modes(layout: str, dropout: float) -> list[int]:
    plain = trace(Case(layout, dropout=dropout, steps=2))
    runs = [trace(Case(layout, dropout=dropout, steps=2, options=mode)) for mode in MODES]
    return [index for index, run in enumerate(runs) if not same_bits(run, plain)]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(("layout", "world"), [("one", 1), ("tp2-sp", 2), ("fsdp2", 2)])
def test_recomputation_does_not_change_a_bit(layout: str, world: int, dropout: float) -> None:
    """Scenario I-09, last part: the same masks are drawn when a segment runs again."""
    for differing in run_ranks(differing_modes, world, layout, dropout):
        assert differing == []
