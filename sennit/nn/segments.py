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


def run_segments(segments: Sequence[Segment], state: State, recompute: Recompute = Recompute()) -> State:
    """Fold `state` through `segments` and return the last state.

    Under grad mode, each maximal run of segments that `recompute` wants is one checkpointed region: only its input
    state is kept and its random state is restored when it runs again.
    """
    active = recompute.mode != "none" and torch.is_grad_enabled()
    index = 0
    while index < len(segments):
        stop = index + 1
        if active and recompute.wants(segments[index]):
            while stop < len(segments) and recompute.wants(segments[stop]):
                stop += 1
            state = _checkpointed(segments[index:stop], state)
        else:
            with torch.profiler.record_function(segments[index].name):
                state = segments[index].fn(*state)
        index = stop
    return state


def _checkpointed(segments: Sequence[Segment], state: State) -> State:
    from torch.utils.checkpoint import checkpoint

    def region(*inputs: Tensor | None) -> State:
        current: State = inputs
        for segment in segments:
            current = segment.fn(*current)
        return current

    return checkpoint(region, *state, use_reentrant=False, preserve_rng_state=True)  # type: ignore[return-value]


__all__ = ["Recompute", "Segment", "State", "run_segments"]
