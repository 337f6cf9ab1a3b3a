"""Operators. Every function here is served by the provider that the table chooses for the device, dtype and call.

`reference` defines the numerics; `table` lists and forces providers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sennit.mesh import Axis
from sennit.ops import blocked_attention, chunked_loss, cpu, fused_torch, joined_linear, passes, reference
from sennit.ops.documents import DocumentMask
from sennit.ops.table import Provider, call, explain, force, operators, providers, register, select, set_forced


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension: x [.., h], weight [h] -> [.., h]."""
    return call("rms_norm", x, weight, eps)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x + delta, rms_norm(x + delta)), both [.., h]."""
    return call("add_rms_norm", x, delta, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up: [.., f] -> [.., f]."""
    return call("swiglu", gate, up)


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up, then a linear map: gate, up [.., f], weight [o, f] -> [.., o]."""
    return call("swiglu_linear", gate, up, weight)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [b, s, n, d] by tables [s, d/2] or [b, s, d/2] (half-split pairing)."""
    return call("apply_rope", x, cos, sin)


def rope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    documents: DocumentMask | None = None,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Rotate q [b, s, n, d] and k [b, s, g, d], then causal grouped-query attention with v [b, s, g, d].

    `documents`: attention stops at document borders. `window`: keys a query sees, itself included (0: all before it).
    `scale`: factor of the scores, default d^-0.5. Returns [b, s, n, d].
    """
    if documents is not None and documents.single:
        documents = None
    return call("rope_attention", q, k, v, cos, sin, documents=documents, window=window, scale=scale)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    documents: DocumentMask | None = None,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Grouped-query attention without rotation: q [b, s, n, d], k, v [b, keys, g, d] -> [b, s, n, d].

    With fewer queries than keys, the last query stands at the last key (generation with a cache).
    """
    return call("attention", q, k, v, causal=causal, documents=documents, window=window, scale=scale)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: x [.., i], weight [o, i], bias [o] -> [.., o]."""
    return call("linear", x, weight, bias)


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Apply several linear maps to one input: x [.., i], weights [o_n, i], biases [o_n] or None -> tuple of [.., o_n]."""
    return call("linears", x, weights, biases)


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
    """`scale` times the sum of the token losses of softmax(x W^T): a float32 (float64) scalar. See `reference`."""
    return call(
        "linear_cross_entropy",
        x,
        weight,
        labels,
        vocab_size=vocab_size,
        axis=axis,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        scale=scale,
        chunk=chunk,
    )


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
    """One AdamW update of the master tensors `params` in place, refreshing the compute copies `shadows`."""
    if not params:
        return
    options = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decays": weight_decays}
    options |= {"step": step, "grad_scale": grad_scale}
    lists = (params, grads, exp_avgs, exp_avg_sqs, shadows)
    select("adamw_", params[0].device.type, params[0].dtype, lists, options).fn(*lists, **options)


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements of `tensors` as a float64 scalar."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    lead = tensors[0]
    return select("sum_of_squares", lead.device.type, lead.dtype, (tensors,), {}).fn(tensors)


def _register() -> None:
    half = (torch.bfloat16, torch.float16)
    accelerators = ("cuda", "musa")
    for op in ("rms_norm", "add_rms_norm", "swiglu", "apply_rope", "rope_attention", "linear", "linears", "swiglu_linear"):
        register(op, "reference", getattr(reference, op))
    register("attention", "reference", reference.attention_like)
    for op in ("linear_cross_entropy", "adamw_", "sum_of_squares"):
        register(op, "reference", getattr(reference, op))
    for op in ("rms_norm", "add_rms_norm"):
        register(op, "torch", getattr(fused_torch, op), devices=accelerators, priority=10)
    register("adamw_", "torch", fused_torch.adamw_, priority=10)
    register("passes", "torch", passes)  # type: ignore[arg-type]
    for op in ("linear", "linears", "swiglu_linear"):
        register(op, "joined", getattr(joined_linear, op), priority=10)
    register("linear_cross_entropy", "chunked", chunked_loss.linear_cross_entropy, priority=10)
    for op in ("attention", "rope_attention"):
        blocked, fused = getattr(blocked_attention, op), getattr(fused_torch, op)
        register(op, "blocked", blocked, priority=10)
        fits = fused_torch.plain_causal
        register(op, "sdpa", fused, devices=accelerators, dtypes=half, priority=20, accepts=fits)
        register(op, "sdpa-cpu", fused, devices=("cpu",), priority=5, accepts=fits)
    cpu.register_all()


_register()

__all__ = [
    "DocumentMask",
    "Provider",
    "adamw_",
    "add_rms_norm",
    "apply_rope",
    "attention",
    "explain",
    "force",
    "linear",
    "linear_cross_entropy",
    "linears",
    "operators",
    "providers",
    "register",
    "rms_norm",
    "rope_attention",
    "set_forced",
    "sum_of_squares",
    "swiglu",
    "swiglu_linear",
]
