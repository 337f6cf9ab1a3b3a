"""Which context-parallel rank holds which token of a sequence.

A causal query sees all tokens of its document before it, so early tokens are cheap and late ones dear. Each document is
cut into 2 x ring pieces, of which ring rank i takes pieces i and 2 x ring - 1 - i: equal work for all ranks, document
by document. What a document leaves over goes token by token to the ranks that have the fewest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor


def shard_sequence(lengths: Sequence[Sequence[int]], *, ring: int, ulysses: int = 1) -> Tensor:
    """Return the positions that each rank holds: int64 [ring * ulysses, b, s / (ring * ulysses)], ascending.

    `lengths`: the documents of each row, adding up to s in all rows. Rank i * ulysses + j has slice j of what ring rank i
    holds. Raises ValueError if s does not divide.
    """
    length = sum(lengths[0])
    if length % (ring * ulysses):
        raise ValueError(f"a sequence of {length} tokens does not divide over ring {ring} x ulysses {ulysses}")
    rows = []
    for documents in lengths:
        owner = ring_owners(documents, ring)
        order = np.argsort(owner, kind="stable").reshape(ring * ulysses, -1)
        rows.append(order)
    return torch.from_numpy(np.stack(rows, axis=1))


def ring_owners(documents: Sequence[int], ring: int) -> np.ndarray:
    """Return the ring rank of each token of a row with `documents`, int64 [s]; equally many tokens for each if ring
    divides s."""
    owner = np.zeros(sum(documents), np.int64)
    if ring == 1:
        return owner
    counts, work, left = [0] * ring, [0] * ring, []
    for start, size in zip(accumulate(documents, initial=0), documents, strict=False):
        piece = size // (2 * ring)
        whole = 2 * ring * piece
        index = np.arange(whole) // piece if piece else np.arange(0)
        owner[start : start + whole] = np.minimum(index, 2 * ring - 1 - index)
        left += [(start, token) for token in range(start + whole, start + size)]
    for start, token in left:
        rank = min(range(ring), key=lambda r: (counts[r], work[r], r))
        owner[token] = rank
        counts[rank] += 1
        work[rank] += token - start + 1
    return owner


def document_starts(lengths: Sequence[Sequence[int]]) -> Tensor:
    """Return the position at which each token's document begins: int64 [b, s]."""
    rows = []
    for documents in lengths:
        begins = torch.tensor([0, *accumulate(documents)][:-1])
        rows.append(begins.repeat_interleave(torch.tensor(list(documents))))
    return torch.stack(rows)


def causal_work(index: Tensor, lengths: Sequence[Sequence[int]]) -> Tensor:
    """Return how many (query, key) pairs each rank's queries see in attention: int64 [ranks], from `shard_sequence`."""
    starts = document_starts(lengths)
    position = torch.arange(starts.shape[1]).expand_as(starts)
    seen = position - starts + 1
    return torch.stack([seen.gather(1, mine).sum() for mine in index])


__all__ = ["causal_work", "document_starts", "ring_owners", "shard_sequence"]
