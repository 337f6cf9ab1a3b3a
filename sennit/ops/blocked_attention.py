"""Causal attention as batched matrix products over blocks of queries.

For each block of queries only the keys that some of them can see are read, so a causal pass does about half of the
full products and documents or windows cost what they show. Scores exist for one block at a time; the backward pass
computes them again from the log-sum-exp, so memory grows linearly with the sequence length. On a CPU this beats the
fused kernel of PyTorch, whose backward pass is slow there.

Rows: with n query heads on g kv heads, r = n / g, the queries of one kv head form one matrix with row = position * r +
head, so that grouped heads need no copies of the keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sennit.ops import kernels
from sennit.ops.documents import DocumentMask

BLOCK_ROWS = 256
"""Rows of scores (positions x heads of a group) computed together; a multiple of it for long sequences."""

BLOCK_SCORES = 16 << 20
"""Scores of a block of a long sequence, at most."""

SHORT_KEYS = 1024
"""Up to this many keys a sequence counts as short."""


def block_rows(matrices: int, keys: int) -> int:
    """Return the rows of a block for `matrices` products with `keys` keys.

    Long sequences take larger blocks: each block copies the keys that it sees.
    """
    if keys <= SHORT_KEYS:
        return BLOCK_ROWS
    fit = BLOCK_SCORES // (matrices * keys) // BLOCK_ROWS * BLOCK_ROWS
    return min(max(fit, BLOCK_ROWS), 4 * BLOCK_ROWS)


class Blocks:
    """Which keys each block of query rows reads.

    `first`, `last`: the visible keys [first, last) of each query, int32 [b or 1, queries].
    """

    def __init__(
        self,
        batch: int,
        groups: int,
        queries: int,
        keys: int,
        repeat: int,
        causal: bool,
        documents: DocumentMask | None,
        window: int,
    ) -> None:
        position = torch.arange(keys - queries, keys, dtype=torch.int32)[None]
        last = position + 1 if causal else torch.full_like(position, keys)
        first = torch.zeros_like(position)
        if window:
            first = (position - (window - 1)).clamp_(min=0)
        if documents is not None:
            starts = documents.starts[:, -queries:]
            first = torch.maximum(first, starts)
            if not causal:
                raise ValueError("documents need causal attention")
        self.first = first.expand(first.shape[0], queries)
        self.last = last.expand(first.shape[0], queries)
        self.repeat = repeat
        self.batch = batch
        size = max(block_rows(batch * groups, keys) // repeat, 1)
        lowest = first.amin(0)
        self.spans = [
            (start, min(start + size, queries), int(lowest[start]), int(last[0, min(start + size, queries) - 1]))
            for start in range(0, queries, size)
        ]

    def bounds(self, start: int, stop: int, low: int) -> tuple[Tensor, Tensor]:
        """Visible range of each row of queries [start, stop), relative to key `low`: int32 [b or 1, rows]."""
        pair = (bound[:, start:stop] - low for bound in (self.first, self.last))
        first, last = (x.repeat_interleave(self.repeat, 1) if self.repeat > 1 else x.contiguous() for x in pair)
        return first, last


class BlockedAttention(torch.autograd.Function):
    """softmax(q k^T * scale) v on rows: q [B, s * r, d], k, v [B, keys, d], B = b * g -> heads [b, s, n, d]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float) -> Tensor:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        r = blocks.repeat
        for start, stop, low, high in blocks.spans:
            rows = slice(start * r, stop * r)
            p = torch.bmm(q[:, rows], k[:, low:high].mT)
            kernels.softmax_(p, lse[:, rows], *blocks.bounds(start, stop, low), scale)
            out[:, rows] = torch.bmm(p, v[:, low:high])
        heads = kernels.rope_heads(out, None, None, blocks.batch, q.shape[1] // r)
        ctx.blocks, ctx.scale = blocks, scale
        ctx.save_for_backward(q, k, v, heads, lse)  # the heads are what the next layer keeps too
        return heads

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        q, k, v, heads, lse = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        r, groups = blocks.repeat, q.shape[0] // blocks.batch
        sums = lse.dtype if len(blocks.spans) > 1 else q.dtype
        delta = kernels.row_dots(grad, heads).unflatten(-1, (groups, r)).transpose(1, 2).reshape(lse.shape)
        grad = kernels.rope_rows(grad, None, None, groups)
        dq = torch.empty_like(q)
        dk = dv = None
        # From the last block back: usually it sees every key, so that its products begin the sums.
        for start, stop, low, high in reversed(blocks.spans):
            rows, keys = slice(start * r, stop * r), slice(low, high)
            dout, bounds = grad[:, rows], blocks.bounds(start, stop, low)
            p = torch.bmm(q[:, rows], k[:, keys].mT)
            kernels.exponentials_(p, lse[:, rows], *bounds, ctx.scale)
            dv = _added(dv, torch.bmm(p.mT, dout), keys, like=v, dtype=sums)
            ds = torch.bmm(dout, v[:, keys].mT)
            kernels.softmax_backward_(ds, p, delta[:, rows], *bounds, ctx.scale)
            dq[:, rows] = torch.bmm(ds, k[:, keys])
            dk = _added(dk, torch.bmm(ds.mT, q[:, rows]), keys, like=k, dtype=sums)
        assert dk is not None and dv is not None
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def _added(total: Tensor | None, part: Tensor, keys: slice, *, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Add `part` [B, keys, d] to the sum over blocks, in `dtype`; None begins it."""
    if total is None:
        if part.shape == like.shape:
            return part.to(dtype)
        total = torch.zeros_like(like, dtype=dtype)
    total[:, keys] += part
    return total


class ToRows(torch.autograd.Function):
    """x [b, s, n, d] -> rows [b * g, s * r, d], rotated on the way if there are tables."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor | None, sin: Tensor | None, groups: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.batch, ctx.length = x.shape[:2]
        return kernels.rope_rows(x, cos, sin, groups)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return kernels.rope_heads(grad, cos, sin, ctx.batch, ctx.length), None, None, None


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
    """See `reference.attention`; the result has the dtype of `q`."""
    return _attend(q, k, v, None, None, causal, documents, window, scale)


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
    """See `reference.rope_attention`."""
    return _attend(q, k, v, cos, sin, True, documents, window, scale)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    causal: bool,
    documents: DocumentMask | None,
    window: int,
    scale: float | None,
) -> Tensor:
    b, s, n, d = q.shape
    groups = k.shape[2]
    blocks = Blocks(b, groups, s, k.shape[1], n // groups, causal, documents, window)
    rows = (
        ToRows.apply(q, cos, sin, groups),
        ToRows.apply(k, cos, sin, groups),
        ToRows.apply(v, None, None, groups),
    )
    return BlockedAttention.apply(*rows, blocks, d**-0.5 if scale is None else scale)


__all__ = ["BlockedAttention", "Blocks", "attention", "rope_attention"]
