"""Stages that take no real time: every boundary tensor carries the virtual time at which it became available.

A rank's clock advances by the cost of each operation and waits for what arrives later. The real executor over real
processes then has an exact makespan, whatever the load of the machine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sennit.nn import Segment
from sennit.ops.weight_queue import hand_over
from sennit.pipeline.channels import TensorSpec
from sennit.pipeline.schedule import Schedule
from sennit.pipeline.simulate import Costs

SPEC = TensorSpec((1,), torch.float64)


class Clock:
    """The virtual time of this rank."""

    now = 0.0


class _Work(torch.autograd.Function):
    """Forward: wait for the input, then F. Backward: wait for the gradient, then I, then W or its postponement."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, costs: tuple[float, float, float]) -> Tensor:
        ctx.weight, ctx.costs = weight, costs
        Clock.now = max(Clock.now, float(x)) + costs[0]
        return torch.full_like(x, Clock.now)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        Clock.now = max(Clock.now, float(grad)) + ctx.costs[1]

        def weights() -> list[Tensor]:
            Clock.now += ctx.costs[2]
            return [torch.ones_like(ctx.weight)]

        (found,) = hand_over([ctx.weight], weights)
        return torch.full_like(grad, Clock.now), found, None


class VirtualStage:
    """A virtual stage with the costs of a simulation; the last one's loss is 0."""

    def __init__(self, schedule: Schedule, costs: Costs, stage: int) -> None:
        self.first = schedule.prev[stage] is None
        self.last = schedule.next[stage] is None
        self.weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        self.costs = costs.forward[stage], costs.input[stage], costs.weight[stage]

    def forward(self, microbatch: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = torch.zeros(SPEC.shape, dtype=SPEC.dtype, requires_grad=True) if self.first else inputs[0]
        y = _Work.apply(x, self.weight, self.costs)
        return (y.sum() * 0.0,) if self.last else (y,)

    def input_specs(self, microbatch: int) -> tuple[TensorSpec, ...]:
        return () if self.first else (SPEC,)

    def output_specs(self, microbatch: int) -> tuple[TensorSpec, ...]:
        return () if self.last else (SPEC,)

    def segments(self, microbatch: int) -> list[Segment]:
        return [Segment("work", "compute", lambda *inputs: self.forward(microbatch, inputs))]


__all__ = ["Clock", "VirtualStage"]
