"""Attention over a sequence whose tokens are spread over context-parallel ranks.

The ranks form a ring of Ulysses groups. Inside a group, all-to-alls turn parts of the sequence with all heads into the
group's part of the sequence with some heads, and back (arXiv 2309.14509). Around the ring, keys and values travel from
rank to rank while each computes with those it has; partial results are merged by their log-sum-exp (arXiv 2310.01889).

Every rank's positions ascend, so the keys of another rank that a query sees are one contiguous run of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sennit.mesh import Axis, collectives
from sennit.ops import kernels
from sennit.ops.blocked_attention import Blocks, attend, attend_backward, delta_of
from sennit.ops.sharding import document_starts, shard_sequence


@dataclass(slots=True)
class ContextShards:
    """Which positions of a microbatch lie where.

    `index` int64 [b, s_local]: this rank's. `held` int64 [ring, b, s_ring]: those of each rank of the ring (all of its
    Ulysses group). `starts` int64 [b, s]: where the document of each position begins.
    """

    index: Tensor
    held: Tensor
    starts: Tensor
    ring: Axis
    ulysses: Axis
    _ranges: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    @classmethod
    def of(cls, lengths: list[list[int]], *, cp: Axis, ring: Axis, ulysses: Axis) -> ContextShards:
        """Return the shards of rows with documents of `lengths`. Raises ValueError if a row does not divide."""
        ranks = shard_sequence(lengths, ring=ring.size, ulysses=ulysses.size)
        held = ranks.unflatten(0, (ring.size, ulysses.size)).movedim(1, 2).flatten(2, 3)
        return cls(ranks[cp.rank], held, document_starts(lengths), ring, ulysses)

    @property
    def length(self) -> int:
        """Tokens of a whole row, s."""
        return self.starts.shape[1]

    def take(self, x: Tensor) -> Tensor:
        """[b, s] of all tokens -> [b, s_local] of this rank's."""
        return x.gather(1, self.index.to(x.device))

    def ranges(self, window: int) -> list[tuple[Tensor, Tensor]]:
        """Return, for each rank of the ring, the run of its keys that each of this ring rank's queries sees: (first, past
        the last), int32 [b, s_ring]."""
        if window not in self._ranges:
            position = self.held[self.ring.rank].contiguous()
            lowest = self.starts.gather(1, position)
            if window:
                lowest = torch.maximum(lowest, position - (window - 1))
            self._ranges[window] = [
                (
                    torch.searchsorted(keys, lowest).to(torch.int32),
                    torch.searchsorted(keys, position, right=True).to(torch.int32),
                )
                for keys in map(torch.Tensor.contiguous, self.held)
            ]
        return self._ranges[window]


def context_attention(
    q: Tensor, k: Tensor, v: Tensor, shards: ContextShards, *, window: int = 0, scale: float | None = None
) -> Tensor:
    """Causal attention within documents: this rank's tokens q [b, s_local, n, d], k, v [b, s_local, g, d], rotated
    already -> [b, s_local, n, d]. `window`, `scale`: as in `ops.attention`. Collective over the cp axis."""
    group = shards.ulysses
    if k.shape[2] % group.size:  # fewer kv heads than ranks: each is needed on several
        k, v = (x.repeat_interleave(group.size // x.shape[2], 2) for x in (k, v))
    q, k, v = (collectives.heads_to_sequence(x, group) for x in (q, k, v))
    out = RingAttention.apply(q, k, v, shards.ranges(window), shards.ring, q.shape[-1] ** -0.5 if scale is None else scale)
    return collectives.sequence_to_heads(out, group)


class RingAttention(torch.autograd.Function):
    """q [b, s, n, d], k, v [b, s, g, d] of each rank of the ring -> [b, s, n, d]; `ranges`: `ContextShards.ranges`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ranges: list[tuple[Tensor, Tensor]], axis: Axis, scale: float
    ) -> Tensor:
        batch, length, n, _ = q.shape
        groups = k.shape[2]
        blocks = [
            Blocks(first, last, batch=batch, groups=groups, keys=length, repeat=n // groups) for first, last in ranges
        ]
        rows = kernels.rope_rows(q, None, None, groups)
        kv = torch.stack([kernels.rope_rows(x, None, None, groups) for x in (k, v)])
        total = lse = None
        held = kv
        for step in range(axis.size):
            arriving = collectives.ring_shift(held, axis) if step + 1 < axis.size else None
            mine = blocks[(axis.rank - step) % axis.size]
            if mine.spans:
                out, part = attend(rows, held[0], held[1], mine, scale)
                if total is None or lse is None:  # the first keys are its own, and every query sees itself
                    total, lse = out.to(part.dtype), part
                else:
                    both = torch.logaddexp(lse, part)
                    total = total * (lse - both).exp()[..., None] + out * (part - both).exp()[..., None]
                    lse = both
            if arriving is not None:
                held = arriving()
        assert total is not None and lse is not None
        heads = kernels.rope_heads(total.to(q.dtype), None, None, batch, length)
        ctx.blocks, ctx.axis, ctx.scale, ctx.shape = blocks, axis, scale, k.shape
        ctx.save_for_backward(rows, kv, heads, lse)
        return heads

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        rows, held, heads, lse = ctx.saved_tensors
        axis: Axis = ctx.axis
        batch, length, groups, _ = ctx.shape
        delta = delta_of(grad, heads, groups, lse)
        dout = kernels.rope_rows(grad, None, None, groups)
        dq = torch.zeros_like(rows, dtype=lse.dtype)
        dkv = torch.zeros_like(held, dtype=lse.dtype)
        for step in range(axis.size):
            arriving = collectives.ring_shift(held, axis) if step + 1 < axis.size else None
            blocks = ctx.blocks[(axis.rank - step) % axis.size]
            if blocks.spans:
                part, dk, dv = attend_backward(
                    rows, held[0], held[1], dout, lse, delta, blocks, ctx.scale, lse.dtype
                )
                assert dk is not None and dv is not None
                dq += part
                dkv[0] += dk
                dkv[1] += dv
            if arriving is not None:
                held = arriving()
            dkv = collectives.ring_shift(dkv, axis)()  # the gradients go with their keys, and at the end home
        dk, dv = (kernels.rope_heads(x.to(held.dtype), None, None, batch, length) for x in dkv)
        return kernels.rope_heads(dq.to(rows.dtype), None, None, batch, length), dk, dv, None, None, None

    @staticmethod
    def spmd_typecheck(*, q: Tensor, k: Tensor, v: Tensor, ranges: Any, axis: Axis, scale: float) -> Any:
        """Every rank has other queries and keys, and gets complete gradients of its own: all alike, V on the ring."""
        from spmd_types import rules

        for bounds in ranges:
            for bound in bounds:
                rules.ignore(bound)
        for x in (k, v):
            rules.assert_type(x, rules.get_local_type(q), rules.get_partition_spec(q))
        return q


__all__ = ["ContextShards", "RingAttention", "context_attention"]
