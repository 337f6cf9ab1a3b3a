"""The passes of `sennit.ops.passes` in C++."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from sennit.ops import passes as torch_passes
from sennit.ops.cpu.native import call, integers, kind, pointer, real

GEMM_ROWS = 256
"""Products with more rows than this use a slower kernel when the inner dimension is long (oneDNN on AMX)."""


def _sizes(scores: Tensor, lse: Tensor, first: Tensor) -> ctypes.Array:
    batch, rows, cols = scores.shape
    bounds = first.shape[0]
    values = (batch, rows, cols, scores.stride(0), scores.stride(1), lse.stride(0), bounds, batch // bounds)
    return (ctypes.c_int64 * 8)(*values)


def softmax_(scores: Tensor, lse: Tensor, first: Tensor, last: Tensor, scale: float) -> None:
    """See `sennit.ops.passes.softmax_`."""
    sizes = _sizes(scores, lse, first)
    call("softmax", kind(scores), pointer(scores), pointer(lse), pointer(first), pointer(last), real(scale), sizes)


def exponentials_(scores: Tensor, lse: Tensor, first: Tensor, last: Tensor, scale: float) -> None:
    """See `sennit.ops.passes.exponentials_`."""
    sizes = _sizes(scores, lse, first)
    call("exponentials", kind(scores), pointer(scores), pointer(lse), pointer(first), pointer(last), real(scale), sizes)


def softmax_backward_(ds: Tensor, p: Tensor, delta: Tensor, first: Tensor, last: Tensor, scale: float) -> None:
    """See `sennit.ops.passes.softmax_backward_`."""
    sizes, p = _sizes(ds, delta, first), p.contiguous()
    arguments = pointer(ds), pointer(p), pointer(delta), pointer(first), pointer(last), real(scale), sizes
    call("softmax_backward", kind(ds), *arguments)


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """See `sennit.ops.passes.row_dots`."""
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty(a.shape[:-1], dtype=torch.float32)
    call("row_dots", kind(a), pointer(a), pointer(b), pointer(out), *integers(out.numel(), a.shape[-1]))
    return out


def _tables(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor | None, Tensor | None, int]:
    if cos is None or sin is None:
        return None, None, 0
    return cos.contiguous(), sin.contiguous(), cos.shape[-2] * cos.shape[-1] if cos.dim() == 3 else 0


def rope_rows(x: Tensor, cos: Tensor | None, sin: Tensor | None, groups: int) -> Tensor:
    """See `sennit.ops.passes.rope_rows`."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    b, s, n, d = x.shape
    out = x.new_empty((b * groups, s * (n // groups), d))
    cos, sin, per_row = _tables(cos, sin)
    sizes = integers(b, s, groups, n // groups, d, x.stride(0), x.stride(1), x.stride(2), per_row)
    call("rope", kind(x), pointer(x), pointer(out), pointer(cos), pointer(sin), real(1.0), *sizes, 1)
    return out


def rope_heads(rows: Tensor, cos: Tensor | None, sin: Tensor | None, batch: int, length: int) -> Tensor:
    """See `sennit.ops.passes.rope_heads`."""
    rows = rows.contiguous()
    groups, repeat, d = rows.shape[0] // batch, rows.shape[1] // length, rows.shape[-1]
    out = rows.new_empty((batch, length, groups * repeat, d))
    cos, sin, per_row = _tables(cos, sin)
    sizes = integers(batch, length, groups, repeat, d, out.stride(0), out.stride(1), out.stride(2), per_row)
    call("rope", kind(rows), pointer(rows), pointer(out), pointer(cos), pointer(sin), real(-1.0), *sizes, 0)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `sennit.ops.passes.swiglu`."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    call("swiglu_forward", kind(gate), pointer(gate), pointer(up), pointer(out), *integers(out.numel()))
    return out


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """See `sennit.ops.passes.swiglu_backward`."""
    dy, gate, up = dy.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    tensors = (pointer(t) for t in (dy, gate, up, dgate, dup))
    call("swiglu_backward", kind(gate), *tensors, *integers(dy.numel()))
    return dgate, dup


def transposed(x: Tensor) -> Tensor:
    """[r, c] of a 16-bit dtype, contiguous -> [c, r]."""
    x = x.contiguous()
    out = x.new_empty((x.shape[1], x.shape[0]))
    call("transpose16", pointer(x), pointer(out), *integers(*x.shape))
    return out


def weight_gradients(grads: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    """See `sennit.ops.passes.weight_gradients`.

    Products whose left operand is a transposed view run at half the rate in bf16. So either the gradients are
    transposed first, or x, which the products share, and the results, whichever moves less memory.
    """
    if x.dtype != torch.bfloat16:
        return [grad.mT @ x for grad in grads]
    outputs, (tokens, inputs) = sum(grad.shape[1] for grad in grads), x.shape
    if tokens * outputs <= tokens * inputs + outputs * inputs:
        return [transposed(grad) @ x for grad in grads]
    turned = transposed(x)
    return [transposed(turned @ grad) for grad in grads]


class WeightSum(torch_passes.WeightSum):
    """See `sennit.ops.passes.WeightSum`. In bf16 the sum is kept transposed, [i, o], and turned once at the end."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self._turned = weight.dtype == torch.bfloat16
        if not self._turned:
            super().__init__(weight, dtype)
            return
        outputs, inputs = weight.shape
        new = torch.empty if dtype == weight.dtype else torch.zeros  # the first product overwrites, or adds
        self.total = new((inputs, outputs), dtype=dtype)
        self._first = True

    def add(self, grad: Tensor, x: Tensor) -> None:
        """Add a chunk."""
        if not self._turned:
            super().add(grad, x)
        elif self.total.dtype == grad.dtype:
            torch.addmm(self.total, transposed(x), grad, beta=0.0 if self._first else 1.0, out=self.total)
        else:
            self.total += transposed(x) @ grad
        self._first = False

    def result(self, dtype: torch.dtype) -> Tensor:
        """Return the sum [o, i]."""
        total = super().result(dtype)
        return transposed(total) if self._turned else total


def column_sums(x: Tensor) -> Tensor:
    """See `sennit.ops.passes.column_sums`."""
    x = x.contiguous()
    out = x.new_empty(x.shape[1])
    call("column_sums", kind(x), pointer(x), pointer(out), *integers(*x.shape))
    return out


def rows_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """See `sennit.ops.passes.rows_product`."""
    step = GEMM_ROWS if a.dtype == torch.bfloat16 else max(a.shape[0], 1)
    for start in range(0, a.shape[0], step):
        torch.mm(a[start : start + step], b, out=out[start : start + step])


def logit_statistics(logits: Tensor, labels: Tensor, first: int, real_columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `sennit.ops.passes.logit_statistics`."""
    t, v = logits.shape
    out = torch.empty((4, t), dtype=torch.float32)
    top, exponentials, target, every = out.unbind()
    labels = labels.contiguous()
    parts = pointer(top), pointer(exponentials), pointer(target), pointer(every)
    call("logit_statistics", kind(logits), pointer(logits), pointer(labels), *parts, *integers(t, v, first, real_columns))
    return top, exponentials, target, every


def logit_gradient_(
    logits: Tensor,
    labels: Tensor,
    first: int,
    real_columns: int,
    lse: Tensor,
    weight: Tensor,
    on_softmax: Tensor,
    on_label: float,
    on_all: float,
) -> None:
    """See `sennit.ops.passes.logit_gradient_`."""
    labels, lse, weight, on_softmax = (x.contiguous() for x in (labels, lse, weight, on_softmax))
    tensors = pointer(labels), pointer(lse), pointer(weight), pointer(on_softmax)
    sizes = integers(*logits.shape, first, real_columns)
    call("logit_gradient", kind(logits), pointer(logits), *tensors, real(on_label), real(on_all), *sizes)


__all__ = [
    "WeightSum",
    "column_sums",
    "exponentials_",
    "logit_gradient_",
    "logit_statistics",
    "rope_heads",
    "rope_rows",
    "row_dots",
    "rows_product",
    "softmax_",
    "softmax_backward_",
    "swiglu",
    "swiglu_backward",
    "transposed",
    "weight_gradients",
]
