"""A forward and a backward zipped segment by segment hide each other's communication, on a virtual clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sennit.mesh import collectives
from sennit.nn import Segment
from sennit.ops.weight_queue import WeightQueue, deferring
from sennit.pipeline.overlap import Tape, zipped
from sennit.pipeline.schedule import Op
from sennit.pipeline.simulate import Costs, overlapped


class Machine:
    """A rank that computes one thing and communicates one thing at a time, without taking real time."""

    def __init__(self) -> None:
        self.now = self.network_free = 0.0
        self.log: list[str] = []

    def compute(self, time: float) -> None:
        self.now += time

    def communicate(self, time: float) -> None:
        """A collective that ends `time` after the network is free for it."""

        def collective(*, async_op: bool = False) -> Any:
            end = self.network_free = max(self.now, self.network_free) + time
            work = SimpleNamespace(wait=lambda: setattr(self, "now", max(self.now, end)))
            return work if async_op else work.wait()

        collectives._run(collective)


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward: Any, backward: Any) -> Tensor:
        ctx.back = backward
        ctx.save_for_backward(x, weight)
        forward()
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        ctx.back()
        return grad * weight, (grad * x).sum().reshape(1), None, None


def layers(machine: Machine, count: int, compute: float, comm: float, weight: Tensor) -> list[Segment]:
    """Layers like those with experts: attention, dispatch, experts, combine; backward computes twice as long."""
    one = torch.ones(1, dtype=weight.dtype)

    def segment(name: str, resource: str) -> Segment:
        if resource == "compute":
            steps, of = (lambda: machine.compute(compute), lambda: machine.compute(2 * compute)), weight
        else:
            steps, of = (lambda: machine.communicate(comm), lambda: machine.communicate(comm)), one
        return Segment(name, resource, lambda x: (_Timed.apply(x, of, *steps),))

    names = (("attention", "compute"), ("dispatch", "comm"), ("experts", "compute"), ("combine", "comm"))
    return [segment(*pair) for _ in range(count) for pair in names]


def run(count: int, compute: float, comm: float, *, together: bool) -> tuple[float, Tensor, Tensor, list[str]]:
    """Return (time of the forward and the backward, output, gradient of the weight, order of the segments)."""
    machine, weight = Machine(), torch.full((1,), 1.5, dtype=torch.float64, requires_grad=True)
    before, after = (Tape(layers(machine, count, compute, comm, weight)) for _ in range(2))
    for _ in before.forward((torch.ones(3, dtype=torch.float64, requires_grad=True),)):
        pass
    begin = machine.now
    inputs = (torch.arange(3, dtype=torch.float64).requires_grad_(),)
    gradients = (torch.ones(3, dtype=torch.float64),)
    order: list[str] = []
    if together:
        order = [f"{side}:{segment.name}" for side, segment in zipped(after.forward(inputs), before.backward(gradients))]
    else:
        for _ in (*after.forward(inputs), *before.backward(gradients)):
            pass
    assert weight.grad is not None
    return machine.now - begin, after.outputs[0].detach(), weight.grad, order


@pytest.mark.parametrize("comm", [0.3, 0.8, 1.0, 1.4, 2.0, 3.0])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_a_pair_hides_at_least_nine_tenths_of_what_can_be_hidden(count: int, comm: float) -> None:
    apart, y, gradient, _ = run(count, 1.0, comm, together=False)
    zipped_time, same_y, same_gradient, _ = run(count, 1.0, comm, together=True)
    assert torch.equal(y, same_y) and torch.equal(gradient, same_gradient)
    costs = Costs(
        (count * (2 + 2 * comm),), (count * (4 + 2 * comm),), (0.0,), 0.0, (count * 2 * comm,), (count * 2 * comm,)
    )
    best = overlapped(costs)(Op("F", 0, 1), Op("B", 0, 0))
    assert (apart - zipped_time) / (apart - best) >= 0.9


def test_the_order_is_that_of_one_communication_beside_one_computation() -> None:
    *_, order = run(1, 1.0, 1.0, together=True)
    assert order == [
        "B:combine", "F:attention", "F:dispatch", "B:experts", "B:dispatch", "F:experts", "F:combine", "B:attention",
    ]  # fmt: skip


def test_weight_gradients_wait_also_on_a_tape() -> None:
    from sennit import ops

    weight = torch.randn(4, 3, requires_grad=True)
    tape = Tape([Segment("linear", "compute", lambda x: (ops.linear(x, weight),))])
    x = torch.randn(5, 3, requires_grad=True)
    for _ in tape.forward((x,)):
        pass
    queue = WeightQueue()
    with deferring(queue):
        for _ in tape.backward((torch.ones(5, 4),)):
            pass
    assert x.grad is not None and weight.grad is None and len(queue) == 1
    queue.run()
    expected = torch.ones(5, 4).T @ x.detach()
    torch.testing.assert_close(weight.grad, expected)
