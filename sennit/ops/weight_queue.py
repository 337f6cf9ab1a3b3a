"""Putting off weight gradients: the backward pass for inputs now, the one for weights when a schedule has time for it.

The backward of every linear operator hands its weight gradients to `hand_over`. Inside `deferring(queue)` they are not
computed but queued, with what they need (the operator's input and the gradient of its output); `queue.run()` computes
them, in the order in which they were queued, and adds them to the weights as autograd would have.

Operators keep the weight tensor itself, never a saved copy of it: recomputation unpacks saved tensors as other tensors,
and a gradient given to those would be lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class WeightQueue:
    """Weight gradients that are still to be computed, first in, first out."""

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: Callable[[], None]) -> None:
        """Add a job, which computes and delivers gradients."""
        self._jobs.append(job)

    @torch.no_grad()
    def run(self) -> None:
        """Do all jobs; what each one held is freed when it is done."""
        while self._jobs:
            self._jobs.popleft()()


_active: WeightQueue | None = None  # not per thread: on accelerators, autograd runs backward on a thread of its own


@contextmanager
def deferring(queue: WeightQueue | None) -> Iterator[None]:
    """Let the backward passes in the block put their weight gradients into `queue`; None computes them at once."""
    global _active
    before, _active = _active, queue
    try:
        yield
    finally:
        _active = before


def hand_over(weights: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> list[Tensor | None]:
    """Return the gradients of `weights` that `compute` makes, or None for each if they are put off.

    Only leaves can receive a gradient later; the gradients of others are computed at once.
    """
    queue = _active
    if queue is None or not all(weight.is_leaf for weight in weights):
        return list(compute())

    def job() -> None:
        for weight, gradient in zip(weights, compute(), strict=True):
            deliver(weight, gradient)

    queue.put(job)
    return [None] * len(weights)


def deliver(weight: Tensor, gradient: Tensor) -> None:
    """Add `gradient` to `weight.grad`, then call what waits for it (`on_gradient`)."""
    weight.grad = gradient if weight.grad is None else weight.grad + gradient
    hook = getattr(weight, "_sennit_on_gradient", None)
    if hook is not None:
        hook(weight)


def on_gradient(weight: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call `hook(weight)` whenever a gradient was added to the leaf `weight`, by autograd or from a queue.

    Meant for hooks that take the gradient away: autograd also calls when an operator has put its gradient off, and then
    there is none.
    """

    def by_autograd(leaf: Tensor) -> None:
        if leaf.grad is not None:
            hook(leaf)

    weight.register_post_accumulate_grad_hook(by_autograd)
    weight._sennit_on_gradient = hook  # type: ignore[attr-defined]


__all__ = ["WeightQueue", "deferring", "deliver", "hand_over", "on_gradient"]
