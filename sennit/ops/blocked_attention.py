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

    `first`, `last`: the visible keys [first, last) of each query, int32 [b or 1, queries]; an empty range sees none.
    `repeat`: query heads of a kv head. `spans`: (first query, past the last, first key, past the last) of each block
    in which anything is visible.
    """

    def __init__(self, first: Tensor, last: Tensor, *, batch: int, groups: int, keys: int, repeat: int) -> None:
        self.first, self.last, self.repeat, self.batch = first, last, repeat, batch
        queries = first.shape[1]
        size = max(block_rows(batch * groups, keys) // repeat, 1)
        seen = first < last
        lowest = torch.where(seen, first, keys).amin(0)
        highest = torch.where(seen, last, 0).amax(0)
        self.all_see = bool(seen.all())
        self.spans = []
        for start in range(0, queries, size):
            stop = min(start + size, queries)
            low, high = int(lowest[start:stop].min()), int(highest[start:stop].max())
            if low < high:
                self.spans.append((start, stop, low, high))

    @classmethod
    def of(
        cls,
        batch: int,
        groups: int,
        queries: int,
        keys: int,
        repeat: int,
        causal: bool,
        documents: DocumentMask | None,
        window: int,
    ) -> Blocks:
        """Return the blocks of queries that stand at the last of the keys, with the usual masks."""
        position = torch.arange(keys - queries, keys, dtype=torch.int32)[None]
        last = position + 1 if causal else torch.full_like(position, keys)
        first = torch.zeros_like(position)
        if window:
            first = (position - (window - 1)).clamp_(min=0)
        if documents is not None:
            first = torch.maximum(first, documents.starts[:, -queries:])
            if not causal:
                raise ValueError("documents need causal attention")
        last = last.expand(first.shape[0], queries)
        return cls(first, last, batch=batch, groups=groups, keys=keys, repeat=repeat)

    def bounds(self, start: int, stop: int, low: int) -> tuple[Tensor, Tensor]:
        """Visible range of each row of queries [start, stop), relative to key `low`: int32 [b or 1, rows]."""
        pair = (bound[:, start:stop] - low for bound in (self.first, self.last))
        first, last = (x.repeat_interleave(self.repeat, 1) if self.repeat > 1 else x.contiguous() for x in pair)
        return first, last


def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float) -> tuple[Tensor, Tensor]:
    """Return (softmax(q k^T * scale) v, log-sum-exp): rows q [B, s * r, d], k, v [B, keys, d], B = b * g -> [B, s * r, d]
    and [B, s * r]. A query that sees nothing has log-sum-exp -inf and an undefined, finite result."""
    out = torch.empty_like(q) if blocks.all_see else torch.zeros_like(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    if not blocks.all_see:
        lse.fill_(float("-inf"))
    r = blocks.repeat
    for start, stop, low, high in blocks.spans:
        rows = slice(start * r, stop * r)
        first, last = blocks.bounds(start, stop, low)
        p = torch.bmm(q[:, rows], k[:, low:high].mT)
        if blocks.all_see:
            kernels.softmax_(p, lse[:, rows], first, last, scale)
        else:
            # Softmax is not defined over nothing: such rows look at some key, and their result is dropped.
            blind = first >= last
            mine = lse.new_empty(p.shape[:2])
            kernels.softmax_(p, mine, torch.where(blind, 0, first), torch.where(blind, 1, last), scale)
            blind = blind.repeat_interleave(p.shape[0] // blind.shape[0], 0)
            lse[:, rows] = mine.masked_fill_(blind.to(mine.device), float("-inf"))
        out[:, rows] = torch.bmm(p, v[:, low:high])
    return out, lse


def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, lse: Tensor, delta: Tensor, blocks: Blocks, scale: float, sums: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of q, k and v in rows; those of k and v in `sums`, None if nothing is visible.

    `grad`: of the output. `lse`, `delta` [B, rows]: log-sum-exp and row sums of grad * output, over all keys there are.
    """
    dq = torch.empty_like(q) if blocks.all_see else torch.zeros_like(q)
    dk = dv = None
    r = blocks.repeat
    # From the last block back: usually it sees every key, so that its products begin the sums.
    for start, stop, low, high in reversed(blocks.spans):
        rows, keys = slice(start * r, stop * r), slice(low, high)
        dout, bounds = grad[:, rows], blocks.bounds(start, stop, low)
        p = torch.bmm(q[:, rows], k[:, keys].mT)
        kernels.exponentials_(p, lse[:, rows], *bounds, scale)
        dv = _added(dv, torch.bmm(p.mT, dout), keys, like=v, dtype=sums)
        ds = torch.bmm(dout, v[:, keys].mT)
        kernels.softmax_backward_(ds, p, delta[:, rows], *bounds, scale)
        dq[:, rows] = torch.bmm(ds, k[:, keys])
        dk = _added(dk, torch.bmm(ds.mT, q[:, rows]), keys, like=k, dtype=sums)
    return dq, dk, dv


def delta_of(grad: Tensor, heads: Tensor, groups: int, like: Tensor) -> Tensor:
    """Return the row sums of grad * heads, both [b, s, n, d], as rows [B, s * r] like the log-sum-exp."""
    repeat = heads.shape[2] // groups
    return kernels.row_dots(grad, heads).unflatten(-1, (groups, repeat)).transpose(1, 2).reshape(like.shape)


class BlockedAttention(torch.autograd.Function):
    """softmax(q k^T * scale) v on rows: q [B, s * r, d], k, v [B, keys, d], B = b * g -> heads [b, s, n, d]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float) -> Tensor:
        out, lse = attend(q, k, v, blocks, scale)
        heads = kernels.rope_heads(out, None, None, blocks.batch, q.shape[1] // blocks.repeat)
        ctx.blocks, ctx.scale = blocks, scale
        ctx.save_for_backward(q, k, v, heads, lse)  # the heads are what the next layer keeps too
        return heads

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        q, k, v, heads, lse = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        groups = q.shape[0] // blocks.batch
        sums = lse.dtype if len(blocks.spans) > 1 else q.dtype
        delta = delta_of(grad, heads, groups, lse)
        rows = kernels.rope_rows(grad, None, None, groups)
        dq, dk, dv = attend_backward(q, k, v, rows, lse, delta, blocks, ctx.scale, sums)
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
    blocks = Blocks.of(b, groups, s, k.shape[1], n // groups, causal, documents, window)
    rows = (
        ToRows.apply(q, cos, sin, groups),
        ToRows.apply(k, cos, sin, groups),
        ToRows.apply(v, None, None, groups),
    )
    return BlockedAttention.apply(*rows, blocks, d**-0.5 if scale is None else scale)


__all__ = [
    "BlockedAttention",
    "Blocks",
    "attend",
    "attend_backward",
    "attention",
    "delta_of",
    "rope_attention",
]
