"""Several linear maps of one input as one operator: their input gradients add up inside the matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sennit.ops import kernels
from sennit.ops.weight_queue import hand_over


class JoinedLinear(torch.autograd.Function):
    """x [.., i], weights [o_n, i], biases [o_n] or None -> products [.., o_n]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parts: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parts[:count], parts[count:]
        ctx.save_for_backward(x)
        ctx.weights = weights
        ctx.biased = [bias is not None for bias in biases]
        return tuple(torch.nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,), weights = ctx.saved_tensors, ctx.weights
        need_x, _, *need = ctx.needs_input_grad
        rows = [grad.flatten(0, -2) for grad in grads]
        dx = None
        if need_x:
            dx = rows[0] @ weights[0]
            for grad, weight in zip(rows[1:], weights[1:], strict=True):
                dx.addmm_(grad, weight)
            dx = dx.view(x.shape)
        count, inputs = len(weights), x.flatten(0, -2)
        wanted = [i for i in range(count) if need[i]]
        gradients = hand_over(
            [weights[i] for i in wanted], lambda: kernels.weight_gradients([rows[i] for i in wanted], inputs)
        )
        found = dict(zip(wanted, gradients, strict=True))
        dweights = [found.get(i) for i in range(count)]
        dbiases = [
            kernels.column_sums(grad) if ctx.biased[i] and need[count + i] else None for i, grad in enumerate(rows)
        ]
        return dx, None, *dweights, *dbiases


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """See `reference.linears`."""
    return JoinedLinear.apply(x, len(weights), *weights, *biases)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.linear`."""
    return linears(x, (weight,), (bias,))[0]


class SwigluLinear(torch.autograd.Function):
    """gate, up [.., f], weight [o, f] -> [.., o]. silu(gate) * up is computed again in the backward pass, not kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.weight = weight
        return torch.nn.functional.linear(kernels.swiglu(gate, up), weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # type: ignore[override]
        (gate, up), weight = ctx.saved_tensors, ctx.weight
        rows = grad.flatten(0, -2)
        dweight = None
        if ctx.needs_input_grad[2]:
            (dweight,) = hand_over(
                [weight], lambda: kernels.weight_gradients([rows], kernels.swiglu(gate, up).flatten(0, -2))
            )
        return *kernels.swiglu_backward((rows @ weight).view(gate.shape), gate, up), dweight


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """See `reference.swiglu_linear`."""
    return SwigluLinear.apply(gate, up, weight)


__all__ = ["JoinedLinear", "SwigluLinear", "linear", "linears", "swiglu_linear"]
