"""The reference of every operator: short PyTorch that defines the numerics. Differentiated by autograd.

Statistics, softmax and the loss are computed in float32, or float64 for float64 inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from sennit.mesh import Axis, collectives
from sennit.ops.documents import DocumentMask


def wide(x: Tensor) -> Tensor:
    """Return `x` in the precision of statistics: float32, or float64 if it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension [.., h] (arXiv 1910.07467)."""
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * wide(weight)).to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x + delta, rms_norm(x + delta)), both [.., h]; the norm sees the rounded sum."""
    total = x + delta
    return total, rms_norm(total, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [.., f] (arXiv 2002.05202)."""
    return (functional.silu(wide(gate)) * wide(up)).to(gate.dtype)


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up, then W^T: gate, up [.., f], weight [o, f] -> [.., o]."""
    return functional.linear(swiglu(gate, up), weight)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [b, s, n, d] by the tables [s, d/2] or [b, s, d/2]; feature i pairs with i + d/2 (arXiv 2104.09864)."""
    a, b = wide(x).chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def visible(
    queries: int, keys: int, *, causal: bool, documents: DocumentMask | None, window: int, device: torch.device
) -> Tensor | None:
    """Return which keys each query sees, bool [b or 1, queries, keys], or None for all; the last query is the last key."""
    if not causal and documents is None and not window:
        return None
    row = torch.arange(keys - queries, keys, device=device)[:, None]
    column = torch.arange(keys, device=device)[None, :]
    mask = (column <= row)[None] if causal else torch.ones((1, queries, keys), dtype=torch.bool, device=device)
    if window:
        mask = mask & (column > row - window)
    if documents is not None:
        starts = documents.starts.to(device)
        mask = mask & (starts[:, -queries:, None] == starts[:, None, :])
    return mask


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
    """softmax(q k^T * scale) v for q [b, s, n, d], k and v [b, keys, g, d] -> [b, s, n, d].

    Query head i reads kv head i // (n / g). `window`: a query sees itself and the window - 1 keys before it (0: all).
    Holds a dense mask and all scores: for small sizes and as the truth for others.
    """
    n, g = q.shape[2], k.shape[2]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (wide(x).transpose(1, 2) for x in (q, k, v))
    if n != g:
        k, v = (x.repeat_interleave(n // g, 1) for x in (k, v))
    scores = q @ k.mT * factor
    mask = visible(q.shape[2], k.shape[2], causal=causal, documents=documents, window=window, device=q.device)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def attention_like(q: Tensor, k: Tensor, v: Tensor, **kwargs: object) -> Tensor:
    """`attention` returned in the dtype of `q`."""
    return attention(q, k, v, **kwargs).to(q.dtype)  # type: ignore[arg-type]


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
    """Rotate q and k, then causal `attention`."""
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    return attention_like(q, k, v, causal=True, documents=documents, window=window, scale=scale)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: [.., i] -> [.., o]."""
    return functional.linear(x, weight, bias)


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Apply several linear maps to one input: x [.., i] -> tuple of [.., o_n]."""
    return tuple(functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True))


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
    """`scale` times the sum of token losses of softmax(x W^T) over `vocab_size` classes: x [t, h], labels [t].

    weight [v / tp, h] holds this rank's rows; rows from `vocab_size` on are padding and take no part. A token's loss is
    (1 - label_smoothing) * nll(label) + label_smoothing * mean over classes of nll + z_loss * logsumexp^2; tokens
    labelled `ignore_index` count nothing. Over an axis, `x`'s gradient is this rank's partial sum. Holds all logits.
    """
    axis = axis or Axis("tp")
    first = axis.rank * weight.shape[0]
    columns = torch.arange(first, first + weight.shape[0], device=x.device)
    real = columns < vocab_size
    logits = wide(functional.linear(x, weight))
    top = collectives.all_reduce_max(logits.detach().masked_fill(~real, float("-inf")).amax(-1), axis)
    exponentials = (logits - top[:, None]).masked_fill(~real, float("-inf")).exp()
    lse = collectives.reduce_from(exponentials.sum(-1), axis).log() + top
    hit = labels[:, None] == columns
    target = collectives.reduce_from((logits * hit).sum(-1), axis)
    losses = lse - target
    if label_smoothing:
        mean = collectives.reduce_from((logits * real).sum(-1), axis) / vocab_size
        losses = losses * (1.0 - label_smoothing) + (lse - mean) * label_smoothing
    if z_loss:
        losses = losses + z_loss * lse.square()
    return (losses * (labels != ignore_index)).sum() * scale


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
    """One AdamW update in place (arXiv 1711.05101): params are masters, `shadows` their compute copies to refresh.

    Gradients are multiplied by `grad_scale` first; `step` counts from 1.
    """
    correct1, correct2 = 1.0 - beta1**step, 1.0 - beta2**step
    for index, (p, g, m, v) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        g = g.to(p.dtype) * grad_scale
        m.lerp_(g, 1.0 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
        p.mul_(1.0 - lr * weight_decays[index])
        p.addcdiv_(m, (v / correct2).sqrt_().add_(eps), value=-lr / correct1)
        shadow = None if shadows is None else shadows[index]
        if shadow is not None:
            shadow.copy_(p)


@torch.no_grad()
def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements as a float64 scalar."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([x.to(torch.float64).square().sum() for x in tensors]).sum()


__all__ = [
    "adamw_",
    "add_rms_norm",
    "apply_rope",
    "attention",
    "attention_like",
    "linear",
    "linear_cross_entropy",
    "linears",
    "rms_norm",
    "rope_attention",
    "sum_of_squares",
    "swiglu",
    "swiglu_linear",
    "visible",
    "wide",
]
