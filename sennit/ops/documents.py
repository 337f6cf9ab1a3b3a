"""Where documents begin and end in a packed batch, for attention that stops at their borders."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(slots=True)
class DocumentMask:
    """The lengths of the documents in each row [b] of a packed batch [b, s]; they add up to s in every row.

    A token attends to earlier tokens of its own document only. Nothing of size s x s is ever held.
    """

    lengths: list[list[int]]
    _starts: Tensor | None = field(default=None, repr=False)

    @classmethod
    def from_lengths(cls, lengths: list[list[int]]) -> DocumentMask:
        """Return the mask of rows with documents of `lengths`. Raises ValueError if the rows differ in total."""
        totals = {sum(row) for row in lengths}
        if len(totals) != 1 or any(size <= 0 for row in lengths for size in row):
            raise ValueError(f"document lengths must be positive and add up to one row length, got totals {totals}")
        return cls(lengths)

    @property
    def row_length(self) -> int:
        """Tokens in a row, s."""
        return sum(self.lengths[0])

    @property
    def max_length(self) -> int:
        """Tokens of the longest document."""
        return max(size for row in self.lengths for size in row)

    @property
    def single(self) -> bool:
        """Whether every row is one document, which needs no mask beyond the causal one."""
        return all(len(row) == 1 for row in self.lengths)

    @property
    def starts(self) -> Tensor:
        """The position at which each token's document begins, int32 [b, s] on the CPU."""
        if self._starts is None:
            rows = []
            for row in self.lengths:
                begins = torch.tensor([0, *accumulate(row)][:-1], dtype=torch.int32)
                rows.append(begins.repeat_interleave(torch.tensor(row)))
            self._starts = torch.stack(rows)
        return self._starts

    @property
    def cu_seqlens(self) -> Tensor:
        """Borders of all documents in the flattened batch, int32 [documents + 1]."""
        return torch.tensor([0, *accumulate(size for row in self.lengths for size in row)], dtype=torch.int32)


__all__ = ["DocumentMask"]
