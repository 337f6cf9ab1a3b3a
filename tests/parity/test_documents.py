"""Documents packed into one row do not see each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sennit.ops.documents import DocumentMask
from tests.parity.runs import VOCAB, Case, mesh_of, new_trainer
from tests.ranks import run_ranks

A, B = 6, 10


def logits_of_b(layout: str, family: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's logits of document B after A, after another A, and alone at the same place in the row."""
    case = Case(layout, family, options=(("precision.dtype", "fp32"),))
    trainer = new_trainer(case, mesh_of(layout))
    tokens = torch.randint(0, VOCAB, (1, A + B), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[:, :A] = (tokens[:, :A] + 7) % VOCAB

    def logits(tokens: Tensor, documents: list[list[int]]) -> Tensor:
        positions = torch.tensor([[i for length in row for i in range(length)] for row in documents])
        context = trainer.model.context(
            tokens,
            dtype=torch.float32,
            positions=positions,
            documents=DocumentMask.from_lengths(documents),
            sequence_parallel=layout.endswith("sp"),
        )
        with torch.no_grad():
            return trainer.model(tokens, context)

    packed = logits(tokens, [[A, B]])[:, A:]
    changed = logits(other, [[A, B]])[:, A:]
    alone = logits(tokens[:, A:], [[B]])
    return packed, changed, alone


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize(("layout", "world"), [("one", 1), ("tp2-sp", 2)])
def test_a_later_document_does_not_see_an_earlier_one(layout: str, world: int, family: str) -> None:
    """B's logits do not change by a bit when A's tokens change, and are those of B alone: its positions restart. I-41."""
    for packed, changed, alone in run_ranks(logits_of_b, world, layout, family):
        assert torch.equal(packed, changed)
        torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)
