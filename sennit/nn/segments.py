"""A layer is a list of segments; this module runs such lists, with or without recomputation.

Nothing else describes a layer's structure a second time: the plain forward folds the segments, recomputation chooses
among them by name, the profiler labels by them, and forward/backward overlap will zip two lists of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

State = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A named step of a layer: `fn(*state)` returns the next state, a tuple of tensors (or None).

    `resource` is what it keeps busy, "compute" or "comm". `out` names, for each tensor of the new state, how it lies
    over the tensor-parallel ranks: `sequence` (each rank its part of the sequence), `replicated` (equal on all),
    `input` (equal on all, its gradient still a partial sum) or `partial` (a partial sum). Tests prove it.
    """

    name: str
    resource: str
    fn: Callable[..., State]
    out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recompute:
    """Which segments run again in the backward pass instead of keeping their inner tensors.

    `mode`: none, full (one region for the whole list) or selective (each run of neighbouring segments in `names`).
    """

    mode: str = "none"
    names: frozenset[str] = frozenset()

    def wants(self, segment: Segment) -> bool:
        """Tell whether `segment` is recomputed."""
        return self.mode == "full" or (self.mode == "selective" and segment.name in self.names)


def regions(segments: Sequence[Segment], recompute: Recompute = Recompute()) -> list[Segment]:
    """Return the segments to run, with each maximal run of those that `recompute` wants as one checkpointed segment.

    Of such a region only the input state is kept; its random state is restored when it runs again.
    """
    if recompute.mode == "none":
        return list(segments)
    found, index = [], 0
    while index < len(segments):
        stop = index
        while stop < len(segments) and recompute.wants(segments[stop]):
            stop += 1
        if stop > index:
            found.append(_checkpointed(segments[index:stop]))
            index = stop
        else:
            found.append(segments[index])
            index += 1
    return found


def run_segments(segments: Sequence[Segment], state: State, recompute: Recompute = Recompute()) -> State:
    """Fold `state` through `segments` and return the last state; under grad mode with recomputation (`regions`)."""
    if recompute.mode != "none" and torch.is_grad_enabled():
        segments = regions(segments, recompute)
    for segment in segments:
        with torch.profiler.record_function(segment.name):
            state = segment.fn(*state)
    return state


def _checkpointed(segments: Sequence[Segment]) -> Segment:
    from torch.utils.checkpoint import checkpoint

    def fold(*inputs: Tensor | None) -> State:
        current: State = inputs
        for segment in segments:
            current = segment.fn(*current)
        return current

    def region(*inputs: Tensor | None) -> State:
        return checkpoint(fold, *inputs, use_reentrant=False, preserve_rng_state=True)  # type: ignore[return-value]

    return Segment("+".join(segment.name for segment in segments), "compute", region, segments[-1].out)


__all__ = ["Recompute", "Segment", "State", "regions", "run_segments"]
