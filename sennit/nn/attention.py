"""Grouped-query attention on this rank's heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sennit import ops
from sennit.mesh import Mesh
from sennit.nn.config import DecoderConfig
from sennit.nn.dropout import DropoutKey
from sennit.nn.linear import ColumnLinear, ReplicatedHeadsLinear, RowLinear, project
from sennit.nn.norm import RMSNorm
from sennit.ops.context_parallel import ContextShards, context_attention
from sennit.ops.documents import DocumentMask


class LayerCache:
    """Keys and values [b, max_length, g, d] of one layer during generation; `length` positions are filled."""

    def __init__(self, batch: int, max_length: int, num_heads: int, head_size: int, *, like: Tensor) -> None:
        self.k = like.new_zeros((batch, max_length, num_heads, head_size))
        self.v = torch.zeros_like(self.k)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [b, s, g, d] after the filled positions and return all filled ones [b, length, g, d]."""
        stop = self.length + k.shape[1]
        self.k[:, self.length : stop] = k
        self.v[:, self.length : stop] = v
        self.length = stop
        return self.k[:, :stop], self.v[:, :stop]


@dataclass(slots=True)
class Context:
    """What a microbatch's layers share: rotary tables, document boundaries, dropout key, generation caches.

    `cos`, `sin`: [s, d/2] or [b, s, d/2]. `sequence_parallel`: activations between layers are split over tp.
    `shards`: which tokens this and the other context-parallel ranks hold; s is then this rank's part.
    `key_mask`: [b, keys] bool, False for padding on the left of shorter prompts (generation only).
    """

    cos: Tensor
    sin: Tensor
    documents: DocumentMask | None = None
    sequence_parallel: bool = False
    dropout: DropoutKey | None = None
    caches: dict[int, LayerCache] | None = None
    key_mask: Tensor | None = None
    shards: ContextShards | None = None


class Attention(nn.Module):
    """Multi-head attention with grouped kv heads, RoPE, optional qkv bias, qk-norm and sliding window.

    Query heads are split over tp. kv heads are split too, or, when there are fewer of them than ranks, each rank
    computes the one head that its query heads read.
    """

    def __init__(self, mesh: Mesh, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        h, d, tp = config.hidden_size, config.head_size, mesh.tp.size
        std, out_std = config.init_std, config.init_std / (2 * config.num_layers) ** 0.5
        self.wq = ColumnLinear(mesh, h, config.num_heads * d, std=std, bias=config.qkv_bias)
        kv = config.num_kv_heads * d
        if config.num_kv_heads >= tp:
            self.wk: ColumnLinear | ReplicatedHeadsLinear = ColumnLinear(mesh, h, kv, std=std, bias=config.qkv_bias)
            self.wv: ColumnLinear | ReplicatedHeadsLinear = ColumnLinear(mesh, h, kv, std=std, bias=config.qkv_bias)
        else:
            self.wk = ReplicatedHeadsLinear(mesh, h, config.num_kv_heads, d, std=std, bias=config.qkv_bias)
            self.wv = ReplicatedHeadsLinear(mesh, h, config.num_kv_heads, d, std=std, bias=config.qkv_bias)
        self.wo = RowLinear(mesh, config.num_heads * d, h, std=out_std)
        self.q_norm = RMSNorm(mesh, d, config.norm_eps, partial_weight=True) if config.qk_norm else None
        self.k_norm = RMSNorm(mesh, d, config.norm_eps, partial_weight=True) if config.qk_norm else None
        self.head_size = d
        self.window = config.sliding_window
        self.layer = layer

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[b, s, h] -> a partial sum [b, s, h]."""
        d = self.head_size
        q, k, v = (y.unflatten(-1, (-1, d)) for y in project(x, self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if context.shards is not None:
            q, k = ops.apply_rope(q, context.cos, context.sin), ops.apply_rope(k, context.cos, context.sin)
            out = context_attention(q, k, v, context.shards, window=self.window)
        elif context.caches is None:
            out = ops.rope_attention(
                q, k, v, context.cos, context.sin, documents=context.documents, window=self.window
            )
        else:
            out = self._cached(q, k, v, context)
        return self.wo(out.flatten(-2))

    def _cached(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        assert context.caches is not None
        q = ops.apply_rope(q, context.cos, context.sin)
        k, v = context.caches[self.layer].append(ops.apply_rope(k, context.cos, context.sin), v)
        if context.key_mask is None:
            return ops.attention(q, k, v, causal=True, window=self.window)
        return _masked_attention(q, k, v, context.key_mask[:, : k.shape[1]], self.window)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, window: int) -> Tensor:
    """Causal attention for prompts of different length, padded on the left: q [b, s, n, d], k, v [b, keys, g, d].

    `key_mask` [b, keys]: which keys are real. A padded query sees only itself, so that its softmax is defined.
    """
    queries, keys = q.shape[1], k.shape[1]
    row = torch.arange(keys - queries, keys, device=q.device)[:, None]
    column = torch.arange(keys, device=q.device)[None, :]
    visible = column <= row
    if window:
        visible = visible & (column > row - window)
    visible = (visible & key_mask[:, None, :]) | (column == row)
    out = nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=visible[:, None], enable_gqa=True
    )
    return out.transpose(1, 2)


__all__ = ["Attention", "Context", "LayerCache"]
