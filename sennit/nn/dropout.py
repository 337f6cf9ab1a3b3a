"""Dropout whose masks depend on what is dropped, not on which rank drops it.

The mask of a sample is drawn from (seed, sample number, layer, site) alone. So tensor-parallel ranks agree, sequence
shards take their slice of one mask, data ranks differ because their samples do, recomputation draws the same mask
again without saved random state, and every layout trains the same model.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sennit.mesh import Axis


@dataclass(frozen=True, slots=True)
class DropoutKey:
    """Names the samples of a microbatch: the run's seed and each row's global sample number.

    `index` [b, s]: the positions that this rank holds of rows of `length` tokens, where it does not hold them all.
    """

    seed: int
    samples: tuple[int, ...]
    index: Tensor | None = None
    length: int = 0

    def of_positions(self, index: Tensor, length: int) -> DropoutKey:
        """Return the key for a rank that holds the positions `index` [b, s] of rows of `length` tokens."""
        return replace(self, index=index, length=length)


def dropout_mask(key: DropoutKey, site: str, shape: torch.Size, probability: float, axis: Axis, *, sharded: bool) -> Tensor:
    """Return the bool mask (True = keep) [b, s, h] for this rank.

    `shape` is the local shape. `sharded`: the rank holds part `axis.rank` of the sequence, else the whole of it.
    """
    _, length, width = shape
    full = length * axis.size if sharded else length
    start = length * axis.rank if sharded else 0
    generator = torch.Generator()
    rows = []
    for row, sample in enumerate(key.samples):
        digest = hashlib.blake2b(f"{key.seed}/{sample}/{site}".encode(), digest_size=7).digest()
        generator.manual_seed(int.from_bytes(digest, "little"))
        values = torch.rand((key.length or full, width), generator=generator)
        if key.index is not None:
            values = values[key.index[row].cpu()]
        rows.append(values[start : start + length] >= probability)
    return torch.stack(rows)


def dropout(x: Tensor, key: DropoutKey, site: str, probability: float, axis: Axis, *, sharded: bool) -> Tensor:
    """Return `x` [b, s, h] with elements dropped with `probability` and the others scaled by 1 / (1 - probability)."""
    mask = dropout_mask(key, site, x.shape, probability, axis, sharded=sharded).to(x.device)
    return torch.where(mask, x / (1.0 - probability), torch.zeros((), dtype=x.dtype, device=x.device))


__all__ = ["DropoutKey", "dropout", "dropout_mask"]
