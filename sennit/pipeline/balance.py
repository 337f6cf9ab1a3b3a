"""How many layers each part of the model gets.

Every part should take equally long. The embedding, the head with its loss and multi-token prediction modules cost
something too, so the parts that hold them get fewer layers.
"""

from __future__ import annotations

from collections.abc import Sequence


def balanced_layers(
    num_layers: int, parts: int, *, layer: float = 1.0, first: float = 0.0, last: float = 0.0, groups: Sequence[int] = ()
) -> list[int]:
    """Return layers by part so that the slowest rank is as fast as possible, then the other parts as even as possible.

    `layer`: cost of one layer; `first`, `last`: cost of the embedding and of the head (with loss and multi-token
    prediction), in the same unit. `groups`: the rank of each part (default: each part its own); a rank's parts add up.
    Every part gets at least one layer, but the last may have none if the head alone costs more than a share.
    """
    owner = list(groups) or list(range(parts))
    extra = [0.0] * parts
    extra[0] += first
    extra[-1] += last
    sizes = [1] * parts
    if parts > 1 and last >= layer * num_layers / parts:
        sizes[-1] = 0
    loads: dict[int, float] = dict.fromkeys(owner, 0.0)
    for part, size in enumerate(sizes):
        loads[owner[part]] += size * layer + extra[part]
    for _ in range(num_layers - sum(sizes)):
        # The layer goes where its rank, and then the part itself, stays smallest.
        best = min(range(parts), key=lambda i: (loads[owner[i]] + layer, sizes[i] * layer + extra[i], -i))
        sizes[best] += 1
        loads[owner[best]] += layer
    return sizes


def layer_ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, one past the last) layer of each part."""
    ranges, start = [], 0
    for size in sizes:
        ranges.append((start, start + size))
        start += size
    return ranges


__all__ = ["balanced_layers", "layer_ranges"]
