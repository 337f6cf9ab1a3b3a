"""Providers from PyTorch's own fused operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sennit.ops import reference
from sennit.ops.documents import DocumentMask


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`."""
    total = x + delta
    return total, rms_norm(total, weight, eps)


def plain_causal(q: Tensor, k: Tensor, v: Tensor, *tables: Any, **kwargs: Any) -> bool:
    """Tell whether PyTorch's causal flag alone describes the mask of this call."""
    documents: DocumentMask | None = kwargs.get("documents")
    window = kwargs.get("window", 0)
    square = q.shape[1] == k.shape[1] or q.shape[1] == 1 or not kwargs.get("causal", True)
    return square and (documents is None or documents.single) and (window == 0 or window >= k.shape[1])


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
    """See `reference.attention`; only for calls that `plain_causal` accepts."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal and q.shape[2] > 1, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


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
    """See `reference.rope_attention`; only for calls that `plain_causal` accepts."""
    q, k = reference.apply_rope(q, cos, sin), reference.apply_rope(k, cos, sin)
    return attention(q, k, v, scale=scale)


@torch.no_grad()
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
    """See `reference.adamw_`."""
    for decay in sorted(set(weight_decays)):
        index = [i for i, value in enumerate(weight_decays) if value == decay]
        chosen = [grads[i].to(params[i].dtype) for i in index]
        if grad_scale != 1.0:
            chosen = torch._foreach_mul(chosen, grad_scale)
        steps = [torch.full((), float(step), device=params[i].device) for i in index]
        torch._fused_adamw_(
            [params[i] for i in index],
            list(chosen),
            [exp_avgs[i] for i in index],
            [exp_avg_sqs[i] for i in index],
            [],
            steps,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
    for param, shadow in zip(params, shadows or [], strict=False):
        if shadow is not None:
            shadow.copy_(param)


__all__ = ["adamw_", "add_rms_norm", "attention", "plain_causal", "rms_norm", "rope_attention"]
