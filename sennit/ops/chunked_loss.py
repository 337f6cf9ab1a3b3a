"""The head's product and the cross-entropy in one operator that never holds all logits.

Chunks of tokens: their logits are computed, replaced in place by the gradient, multiplied into the gradients of the
hidden state and the weight, and dropped. So the backward pass has nothing left to do but scale what forward made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sennit.mesh import Axis, collectives
from sennit.ops import kernels

CHUNK_LOGITS = 16 << 20
"""Logits that exist at a time."""

NATIVE_CHUNKS = 4
"""Up to this many chunks the weight's gradient adds up in its own dtype, beyond that in float32."""


class LinearCrossEntropy(torch.autograd.Function):
    """See `reference.linear_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab_size: int,
        axis: Axis,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        scale: float,
        chunk: int,
    ) -> Tensor:
        tokens = x.shape[0]
        rows = chunk or max(min(CHUNK_LOGITS // weight.shape[0], tokens), 1)
        rows = max(-(-tokens // -(-tokens // rows)), 1) if tokens else 1
        need_x, need_weight = ctx.needs_input_grad[:2]
        first = axis.rank * weight.shape[0]
        real = min(max(vocab_size - first, 0), weight.shape[0])
        wide = torch.promote_types(x.dtype, torch.float32)
        total = x.new_zeros((), dtype=torch.float64)
        dx = torch.empty_like(x) if need_x else None
        sums = None
        if need_weight:
            few = -(-tokens // rows) <= NATIVE_CHUNKS
            sums = kernels.weight_sum(weight, weight.dtype if few else wide)
        # One for all chunks: fresh pages cost as much as the product.
        buffer = x.new_empty((min(rows, tokens), weight.shape[0]))
        for start in range(0, tokens, rows):
            part = slice(start, start + rows)
            label, inputs = labels[part], x[part]
            logits = torch.mm(inputs, weight.mT, out=buffer[: len(inputs)])
            top, exponentials, target, every = kernels.logit_statistics(logits, label, first, real)
            if axis.size > 1:
                highest = collectives.all_reduce_max(top, axis)
                exponentials = exponentials * (top - highest).exp()
                exponentials, target, every = collectives.all_reduce_sum(
                    torch.stack((exponentials, target, every)), axis
                )
                top = highest
            lse = exponentials.log() + top
            losses = lse - target
            if label_smoothing:
                losses = losses * (1.0 - label_smoothing) + (lse - every / vocab_size) * label_smoothing
            if z_loss:
                losses = losses + z_loss * lse.square()
            counted = (label != ignore_index).to(lse.dtype)
            total += torch.where(counted > 0, losses, torch.zeros_like(losses)).sum(dtype=torch.float64)
            if need_x or need_weight:
                kernels.logit_gradient_(
                    logits,
                    label,
                    first,
                    real,
                    lse,
                    counted * scale,
                    1.0 + 2.0 * z_loss * lse,
                    1.0 - label_smoothing,
                    label_smoothing / vocab_size,
                )
                if dx is not None:
                    kernels.rows_product(logits, weight, dx[part])
                if sums is not None:
                    sums.add(logits, inputs)
        logits = buffer = None  # before the weight's gradient takes its final form: this is where memory peaks
        ctx.save_for_backward(dx, None if sums is None else sums.result(weight.dtype))
        return (total * scale).to(wide)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        dx, dweight = ctx.saved_tensors
        if grad.device.type != "cpu" or float(grad) != 1.0:
            dx = None if dx is None else dx * grad.to(dx.dtype)
            dweight = None if dweight is None else dweight * grad.to(dweight.dtype)
        return dx, dweight, None, None, None, None, None, None, None, None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    axis: Axis | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    chunk: int = 0,
) -> Tensor:
    """See `reference.linear_cross_entropy`. `chunk`: tokens a chunk, 0 = as many as make CHUNK_LOGITS."""
    return LinearCrossEntropy.apply(
        x,
        weight,
        labels,
        vocab_size,
        axis or Axis("tp"),
        ignore_index,
        label_smoothing,
        z_loss,
        scale,
        chunk,
    )


__all__ = ["LinearCrossEntropy", "linear_cross_entropy"]
