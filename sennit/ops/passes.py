"""Small passes over memory that the larger operators are made of, each with its definition in PyTorch.

On a CPU the own C++ library replaces them by passes that read and write each element once (`sennit.ops.cpu.passes`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sennit.ops import reference


def _hidden(scores: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Return which scores [B, rows, cols] lie outside the visible ranges [b or 1, rows], as bool [B or 1, rows, cols]."""
    column = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    first, last = first.to(scores.device), last.to(scores.device)
    hidden = (column < first[..., None]) | (column >= last[..., None])
    if hidden.shape[0] > 1:
        hidden = hidden.repeat_interleave(scores.shape[0] // hidden.shape[0], 0)
    return hidden


def softmax_(scores: Tensor, lse: Tensor, first: Tensor, last: Tensor, scale: float) -> None:
    """Replace scores [B, rows, cols] by softmax(scores * scale) over the visible range; write lse [B, rows]."""
    wide = reference.wide(scores) * scale
    wide = wide.masked_fill_(_hidden(scores, first, last), float("-inf"))
    lse.copy_(wide.logsumexp(-1))
    scores.copy_((wide - lse[..., None]).exp_())


def exponentials_(scores: Tensor, lse: Tensor, first: Tensor, last: Tensor, scale: float) -> None:
    """Replace scores [B, rows, cols] by exp(scores * scale - lse) in the visible range and 0 outside."""
    wide = (reference.wide(scores) * scale - lse[..., None]).exp_()
    scores.copy_(wide.masked_fill_(_hidden(scores, first, last), 0.0))


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of a * b over the last dimension: [B, rows, d] -> [B, rows], float32 or float64."""
    return (reference.wide(a) * reference.wide(b)).sum(-1)


def softmax_backward_(ds: Tensor, p: Tensor, delta: Tensor, first: Tensor, last: Tensor, scale: float) -> None:
    """Replace ds [B, rows, cols], the gradient of p, by the gradient of the scores: p * (ds - delta) * scale.

    Outside the visible range p is 0, and so is the result.
    """
    ds.copy_((reference.wide(ds) - delta[..., None]) * p * scale)


def rows_of(x: Tensor, groups: int) -> Tensor:
    """[b, s, n, d] -> [b * g, s * (n / g), d]."""
    b, s, n, d = x.shape
    return x.reshape(b, s, groups, n // groups, d).permute(0, 2, 1, 3, 4).reshape(b * groups, s * (n // groups), d)


def heads_of(rows: Tensor, batch: int, length: int) -> Tensor:
    """[b * g, s * r, d] -> [b, s, g * r, d]."""
    groups, d = rows.shape[0] // batch, rows.shape[-1]
    out = rows.reshape(batch, groups, length, rows.shape[1] // length, d).permute(0, 2, 1, 3, 4)
    return out.reshape(batch, length, -1, d)


def rope_rows(x: Tensor, cos: Tensor | None, sin: Tensor | None, groups: int) -> Tensor:
    """Rotate x [b, s, n, d] (not at all without tables) and return it as rows [b * g, s * (n / g), d]."""
    return rows_of(x if cos is None or sin is None else reference.apply_rope(x, cos, sin), groups)


def rope_heads(rows: Tensor, cos: Tensor | None, sin: Tensor | None, batch: int, length: int) -> Tensor:
    """Undo `rope_rows`: rows [b * g, s * r, d] -> [b, s, n, d], rotated back."""
    heads = heads_of(rows, batch, length)
    return heads if cos is None or sin is None else reference.apply_rope(heads, cos, -sin)


def rows_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b: [t, k], [k, n] -> [t, n]."""
    torch.mm(a, b, out=out)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return reference.swiglu(gate, up)


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, given that of silu(gate) * up."""
    d, g = reference.wide(dy), reference.wide(gate)
    s = torch.sigmoid(g)
    return (d * up * s * (1.0 + g * (1.0 - s))).to(gate.dtype), (d * g * s).to(up.dtype)


def weight_gradients(grads: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    """Return grad^T x of each grad [t, o_n] with the same x [t, i]: [o_n, i]."""
    return [grad.mT @ x for grad in grads]


class WeightSum:
    """The sum of grad^T x over chunks of tokens: grad [t, o], x [t, i] -> [o, i], added up in `dtype`."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.total = torch.zeros_like(weight, dtype=dtype)
        self._first = True

    def add(self, grad: Tensor, x: Tensor) -> None:
        """Add a chunk."""
        if self.total.dtype == grad.dtype:
            torch.addmm(self.total, grad.mT, x, beta=0.0 if self._first else 1.0, out=self.total)
        else:
            self.total += grad.mT @ x
        self._first = False

    def result(self, dtype: torch.dtype) -> Tensor:
        """Return the sum [o, i]."""
        return self.total.to(dtype)


def column_sums(x: Tensor) -> Tensor:
    """Return the sum over rows, added up in float32 (float64): x [t, o] -> [o]."""
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def logit_statistics(logits: Tensor, labels: Tensor, first: int, real: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (maximum, sum of exp(logit - maximum), logit of the label or 0, sum of logits), each [t].

    logits [t, v] are the classes first .. first + v - 1, of which the first `real` columns exist.
    """
    wide = reference.wide(logits[:, :real])
    if real == 0:
        zero = wide.new_zeros(logits.shape[0])
        return torch.full_like(zero, float("-inf")), zero, zero.clone(), zero.clone()
    top = wide.amax(-1)
    exponentials = (wide - top[:, None]).exp_().sum(-1)
    index = labels - first
    mine = (index >= 0) & (index < real)
    target = wide.gather(1, torch.where(mine, index, 0)[:, None])[:, 0]
    return top, exponentials, torch.where(mine, target, torch.zeros_like(target)), wide.sum(-1)


def logit_gradient_(
    logits: Tensor,
    labels: Tensor,
    first: int,
    real: int,
    lse: Tensor,
    weight: Tensor,
    on_softmax: Tensor,
    on_label: float,
    on_all: float,
) -> None:
    """Replace logits [t, v] by weight * (on_softmax * softmax - on_label * onehot - on_all); 0 in padded columns.

    `weight`, `on_softmax`, `lse`: [t].
    """
    wide = (reference.wide(logits[:, :real]) - lse[:, None]).exp_().mul_((weight * on_softmax)[:, None])
    if on_all:
        wide -= (weight * on_all)[:, None]
    index = labels - first
    mine = (index >= 0) & (index < real)
    if real:
        wide.scatter_add_(1, torch.where(mine, index, 0)[:, None], (-on_label * weight * mine)[:, None])
    logits[:, :real].copy_(wide)
    logits[:, real:].zero_()


__all__ = [
    "WeightSum",
    "column_sums",
    "exponentials_",
    "heads_of",
    "logit_gradient_",
    "logit_statistics",
    "rope_heads",
    "rope_rows",
    "rows_of",
    "rows_product",
    "row_dots",
    "softmax_",
    "softmax_backward_",
    "swiglu",
    "swiglu_backward",
    "weight_gradients",
]
