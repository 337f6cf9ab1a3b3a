"""The passes (see `sennit.ops.passes`) of the provider that the table chooses for the tensors at hand.

`ops.provider.passes = "torch"` turns the own C++ library off inside attention, the loss and the linear maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sennit.ops import passes
from sennit.ops.table import select


def _pick(x: Tensor) -> Any:
    return select("passes", x.device.type, x.dtype, (), {}).fn


def softmax_(scores: Tensor, lse: Tensor, first: Tensor, last: Tensor, scale: float) -> None:
    """See `passes.softmax_`."""
    _pick(scores).softmax_(scores, lse, first, last, scale)


def exponentials_(scores: Tensor, lse: Tensor, first: Tensor, last: Tensor, scale: float) -> None:
    """See `passes.exponentials_`."""
    _pick(scores).exponentials_(scores, lse, first, last, scale)


def softmax_backward_(ds: Tensor, p: Tensor, delta: Tensor, first: Tensor, last: Tensor, scale: float) -> None:
    """See `passes.softmax_backward_`."""
    _pick(ds).softmax_backward_(ds, p, delta, first, last, scale)


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """See `passes.row_dots`."""
    return _pick(a).row_dots(a, b)


def rope_rows(x: Tensor, cos: Tensor | None, sin: Tensor | None, groups: int) -> Tensor:
    """See `passes.rope_rows`."""
    return _pick(x).rope_rows(x, cos, sin, groups)


def rope_heads(rows: Tensor, cos: Tensor | None, sin: Tensor | None, batch: int, length: int) -> Tensor:
    """See `passes.rope_heads`."""
    return _pick(rows).rope_heads(rows, cos, sin, batch, length)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `passes.swiglu`."""
    return _pick(gate).swiglu(gate, up)


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """See `passes.swiglu_backward`."""
    return _pick(gate).swiglu_backward(dy, gate, up)


def weight_gradients(grads: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    """See `passes.weight_gradients`."""
    return _pick(x).weight_gradients(grads, x)


def weight_sum(weight: Tensor, dtype: torch.dtype) -> passes.WeightSum:
    """Return a new `passes.WeightSum` for gradients of `weight`, added up in `dtype`."""
    return _pick(weight).WeightSum(weight, dtype)


def column_sums(x: Tensor) -> Tensor:
    """See `passes.column_sums`."""
    return _pick(x).column_sums(x)


def rows_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """See `passes.rows_product`."""
    _pick(a).rows_product(a, b, out)


def logit_statistics(logits: Tensor, labels: Tensor, first: int, real: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `passes.logit_statistics`."""
    return _pick(logits).logit_statistics(logits, labels, first, real)


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
    """See `passes.logit_gradient_`."""
    _pick(logits).logit_gradient_(logits, labels, first, real, lse, weight, on_softmax, on_label, on_all)


__all__ = [
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
    "weight_gradients",
    "weight_sum",
]
