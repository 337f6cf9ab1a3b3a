"""The dense decoder: embedding, layers, final norm, head, loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sennit import ops
from sennit.mesh import Mesh, collectives
from sennit.nn import (
    Context,
    DecoderConfig,
    DecoderLayer,
    DropoutKey,
    Head,
    LayerCache,
    Recompute,
    RMSNorm,
    Rope,
    VocabEmbedding,
    initialise,
    parameter_inits,
)
from sennit.nn.parameter import local
from sennit.ops.documents import DocumentMask


class Decoder(nn.Module):
    """A causal language model of any of the dense families, built on the meta device.

    Parameters are uninitialised until `materialise` is called, after parallel wrappers have been applied.
    """

    def __init__(self, mesh: Mesh, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.mesh = mesh
        h, std = config.hidden_size, config.init_std
        self.embedding = VocabEmbedding(mesh, config.vocab_size, config.padded_vocab_size, h, std=std)
        self.layers = nn.ModuleList(DecoderLayer(mesh, config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(mesh, h, config.norm_eps, partial_weight=False)
        self.head = None
        if not config.tie_embeddings:
            self.head = Head(mesh, config.vocab_size, config.padded_vocab_size, h, std=std)
        self.inits = parameter_inits(self)
        self._rope = Rope(config)

    def set_recompute(self, recompute: Recompute) -> None:
        """Choose what every layer recomputes in its backward pass."""
        for layer in self.layers:
            layer.recompute = recompute  # type: ignore[assignment]

    def materialise(self, device: torch.device, *, seed: int | None) -> None:
        """Allocate the parameters on `device`; fill them from `seed`, or leave them undefined for a load if None."""
        self.to_empty(device=device)
        if seed is not None:
            initialise(self, self.inits, seed=seed)

    def context(
        self,
        tokens: Tensor,
        *,
        dtype: torch.dtype,
        positions: Tensor | None = None,
        documents: DocumentMask | None = None,
        sequence_parallel: bool = False,
        dropout: DropoutKey | None = None,
        caches: list[LayerCache] | None = None,
        key_mask: Tensor | None = None,
        start: int = 0,
    ) -> Context:
        """Return what the layers share for a microbatch of `tokens` [b, s].

        `positions` [b, s] are needed where they do not simply count from `start` (packed documents, padded prompts).
        """
        length = tokens.shape[1]
        if positions is None and start:
            positions = torch.arange(start, start + length, device=tokens.device).expand_as(tokens)
        longest = start + length
        if caches is not None:
            longest = max(longest, caches[0].k.shape[1])
        cos, sin = self._rope(longest, device=tokens.device, dtype=dtype, positions=positions)
        if positions is None:
            cos, sin = cos[:length], sin[:length]
        return Context(cos, sin, documents, sequence_parallel, dropout, caches, key_mask)

    def forward(
        self, tokens: Tensor, context: Context, labels: Tensor | None = None, loss: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """Return the loss of `labels` [b, s], or this rank's logits [b, s, v / tp] without labels.

        The loss is `loss(hidden [t, h], weight [v / tp, h], labels [t])`; it computes the head's product itself, in
        chunks, so that full logits never exist.
        """
        x = self.embed(tokens, context)
        delta: Tensor | None = None
        for layer in self.layers:
            x, delta = layer(x, delta, context)
        hidden = self.final(x, delta, context)
        weight = local(self.embedding.weight if self.head is None else self.head.weight)
        if labels is None:
            return ops.linear(hidden, weight)
        assert loss is not None
        return loss(hidden.flatten(0, 1), weight, labels.flatten())

    def embed(self, tokens: Tensor, context: Context) -> Tensor:
        """[b, s] -> the residual stream [b, s, h], or this rank's part of it under sequence parallelism."""
        x = self.embedding(tokens)
        if context.sequence_parallel:
            return collectives.scatter_sequence(x, self.mesh.tp)
        return collectives.reduce_from(x, self.mesh.tp)

    def final(self, x: Tensor, delta: Tensor | None, context: Context) -> Tensor:
        """Return the normed hidden state [b, s, h], whole on every tensor-parallel rank."""
        _, hidden = self.norm.add(x, delta, sequence=context.sequence_parallel)
        if context.sequence_parallel:
            return collectives.gather_sequence(hidden, self.mesh.tp)
        return collectives.copy_to(hidden, self.mesh.tp)

    def new_caches(self, batch: int, max_length: int) -> list[LayerCache]:
        """Return empty key/value caches for `batch` sequences of up to `max_length` tokens, for this rank's heads."""
        config = self.config
        heads = max(config.num_kv_heads // self.mesh.tp.size, 1)
        like = local(self.norm.weight.detach())
        return [LayerCache(batch, max_length, heads, config.head_size, like=like) for _ in self.layers]


__all__ = ["Decoder"]
