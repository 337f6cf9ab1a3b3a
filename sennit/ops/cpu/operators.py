"""Norm, SwiGLU, AdamW and the sum of squares in C++."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from sennit.ops.cpu import passes
from sennit.ops.cpu.native import call, integers, kind, pointer, real


class AddRMSNorm(torch.autograd.Function):
    """(x, delta or None, weight [h]) -> (x + delta, norm); without delta the first result is x itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, weight = x.contiguous(), weight.contiguous()
        total = x if delta is None else torch.empty_like(x)
        y = torch.empty_like(x)
        rows, h = x.numel() // x.shape[-1], x.shape[-1]
        rstd = torch.empty(rows, dtype=torch.float32)
        delta = None if delta is None else delta.contiguous()
        tensors = (pointer(t) for t in (x, delta, weight, total, y, rstd))
        call("norm_forward", kind(x), *tensors, *integers(rows, h), real(eps))
        ctx.save_for_backward(total, weight, rstd)
        ctx.added = delta is not None
        return total, y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dtotal: Tensor | None, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None]:  # type: ignore[override]
        total, weight, rstd = ctx.saved_tensors
        dy = dy.contiguous()
        dtotal = dtotal.contiguous() if ctx.added and dtotal is not None else None
        dx, dweight = torch.empty_like(total), torch.empty(weight.shape, dtype=torch.float32)
        tensors = (pointer(t) for t in (dy, dtotal, total, weight, rstd, dx, dweight))
        call("norm_backward", kind(total), *tensors, *integers(rstd.numel(), total.shape[-1]))
        return dx, dx if ctx.added else None, dweight.to(weight.dtype), None


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`."""
    return AddRMSNorm.apply(x, delta, weight, eps)


class RMSNorm(torch.autograd.Function):
    """x [.., h], weight [h] -> norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return AddRMSNorm.forward(ctx, x, None, weight, eps)[1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        dx, _, dweight, _ = AddRMSNorm.backward.__wrapped__(ctx, None, dy)  # type: ignore[attr-defined]
        return dx, dweight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`."""
    return RMSNorm.apply(x, weight, eps)


class SwiGLU(torch.autograd.Function):
    """gate, up [.., f] -> silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return passes.swiglu(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return passes.swiglu_backward(dy, *ctx.saved_tensors)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `reference.swiglu`."""
    return SwiGLU.apply(gate, up)


def _pointers(tensors: list[Tensor | None]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))


def _sizes(tensors: list[Tensor]) -> ctypes.Array:
    return (ctypes.c_int64 * len(tensors))(*(t.numel() for t in tensors))


def _kinds(tensors: list[Tensor]) -> ctypes.Array:
    return (ctypes.c_int32 * len(tensors))(*(kind(t) for t in tensors))


def adamw_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    shadows: list[Tensor | None] | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decays: list[float],
    step: int,
    grad_scale: float,
) -> None:
    """See `reference.adamw_`: one pass over all tensors."""
    grads = [g.contiguous() for g in grads]
    copies = shadows or [None] * len(params)
    lists = (_pointers(list(x)) for x in (params, grads, exp_avgs, exp_avg_sqs, copies))
    decays = (ctypes.c_float * len(params))(*weight_decays)
    numbers = (lr, beta1, beta2, eps, 1.0 - beta1**step, 1.0 - beta2**step, grad_scale)
    call("adamw", *integers(len(params)), _sizes(params), _kinds(grads), *lists, decays, *(real(x) for x in numbers))


def updates_here(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    shadows: list[Tensor | None] | None,
    **_: Any,
) -> bool:
    """Whether `adamw_` handles these tensors: contiguous float32 state, float32 or bfloat16 gradients."""
    state = [*params, *exp_avgs, *exp_avg_sqs]
    return (
        all(x.dtype == torch.float32 and x.is_contiguous() for x in state)
        and all(g.dtype in (torch.float32, torch.bfloat16) for g in grads)
        and all(s is None or (s.dtype == torch.bfloat16 and s.is_contiguous()) for s in shadows or [])
    )


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """See `reference.sum_of_squares`."""
    tensors = [x.contiguous() for x in tensors]
    total = call("sum_of_squares", *integers(len(tensors)), _sizes(tensors), _kinds(tensors), _pointers(list(tensors)))
    return torch.tensor(total, dtype=torch.float64)


def sums_here(tensors: list[Tensor]) -> bool:
    """Whether `sum_of_squares` handles these tensors."""
    return all(x.dtype in (torch.float32, torch.bfloat16) for x in tensors)


__all__ = ["adamw_", "add_rms_norm", "rms_norm", "sum_of_squares", "sums_here", "swiglu", "updates_here"]
