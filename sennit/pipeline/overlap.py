"""Forward/backward overlap: two lists of segments, zipped so that each hides the other's communication.

A `Tape` runs a stage segment by segment, cutting the autograd graph between them, so that the backward pass can be run
segment by segment too. Communication segments start their collectives and return at once
(`collectives.asynchronous`); they are finished before the same side's next segment. The two sides take turns, and a
turn ends where a communication has been started. So the order is the same on every rank, whatever finishes when.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sennit.mesh import collectives
from sennit.nn import Segment, State


class _Step(NamedTuple):
    segment: Segment
    inputs: State
    outputs: State


class Tape:
    """One microbatch's way through a list of segments.

    The last segment's state holds tensors only. After `forward` is exhausted it is in `outputs`; after `backward`, the
    gradients are in the `.grad` of `inputs`.
    """

    def __init__(self, segments: list[Segment]) -> None:
        self.segments = segments
        self.inputs: tuple[Tensor, ...] = ()
        self.outputs: tuple[Tensor, ...] = ()
        self._steps: list[_Step] = []

    def forward(self, inputs: tuple[Tensor, ...]) -> Iterator[Segment]:
        """Run the segments on leaves `inputs`, yielding each one after it has run or started."""
        self.inputs = inputs
        state: State = inputs
        for index, segment in enumerate(self.segments):
            leaves = state if index == 0 else tuple(_leaf(x) for x in state)
            with torch.profiler.record_function(segment.name), collectives.asynchronous(_is_comm(segment)) as started:
                state = segment.fn(*leaves)
            self._steps.append(_Step(segment, leaves, state))
            yield segment
            started.finish()
        self.outputs = tuple(x for x in state if x is not None)

    def backward(self, gradients: tuple[Tensor, ...]) -> Iterator[Segment]:
        """Run the backward passes of the segments in reverse, yielding each segment after it has run or started."""
        current: tuple[Tensor | None, ...] = gradients
        self.outputs = ()
        while self._steps:
            segment, inputs, outputs = self._steps.pop()
            pairs = [
                (y, g)
                for y, g in zip(outputs, current, strict=True)
                if y is not None and g is not None and y.requires_grad
            ]
            with torch.profiler.record_function(segment.name), collectives.asynchronous(_is_comm(segment)) as started:
                current = _backward(segment, inputs, pairs)
            yield segment
            started.finish()
        for x, g in zip(self.inputs, current, strict=True):
            x.grad = g


def _leaf(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().requires_grad_(x.requires_grad)


def _is_comm(segment: Segment) -> bool:
    return segment.resource == "comm"


def _backward(segment: Segment, inputs: State, pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor | None, ...]:
    """Return the gradients of `inputs`; those of parameters accumulate in the parameters."""
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    if not pairs:
        return (None,) * len(inputs)
    outputs, gradients = [y for y, _ in pairs], [g for _, g in pairs]
    if _is_comm(segment):
        # A collective that has only been started must not be copied into a `.grad`, and such a segment has no weights.
        found = iter(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True) if wanted else ())
        return tuple(next(found) if x is not None and x.requires_grad else None for x in inputs)
    torch.autograd.backward(outputs, gradients)
    result = tuple(None if x is None else x.grad for x in inputs)
    for x in wanted:
        x.grad = None
    return result


def zipped(forward: Iterator[Segment], backward: Iterator[Segment]) -> Iterator[tuple[str, Segment]]:
    """Run two passes in turns, yielding ("F" or "B", segment). The backward begins: its last segment's communication
    then runs beside the forward's first computation."""
    sides = {"B": backward, "F": forward}
    turn = "B"
    while sides:
        for segment in sides[turn]:
            yield turn, segment
            if _is_comm(segment) and len(sides) > 1:
                break
        else:
            del sides[turn]
        if sides:
            turn = next((side for side in sides if side != turn), next(iter(sides)))


__all__ = ["Tape", "zipped"]
