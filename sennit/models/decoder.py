"""The dense decoder: embedding, layers, final norm, head, loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
    Segment,
    VocabEmbedding,
    initialise,
    parameter_inits,
    regions,
)
from sennit.nn.parameter import local
from sennit.ops.context_parallel import ContextShards
from sennit.ops.documents import DocumentMask


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the model: layers `start` to `stop` - 1, with the embedding and/or the final norm, head and loss."""

    start: int
    stop: int
    embeds: bool = True
    ends: bool = True

    @classmethod
    def whole(cls, config: DecoderConfig) -> Part:
        """Return the part that is the whole model."""
        return cls(0, config.num_layers)


class Decoder(nn.Module):
    """A causal language model of any of the dense families, or a part of one, built on the meta device.

    Parameters are uninitialised until `materialise` is called, after parallel wrappers have been applied. A part's
    parameters have the names that they have in the whole model.

    Tied embeddings: the part that ends the model uses the embedding's weight as its head. Where another part on this
    rank has the embedding, it is passed as `tied` and stays that part's; otherwise the part has a copy of its own.
    """

    def __init__(
        self, mesh: Mesh, config: DecoderConfig, part: Part | None = None, *, tied: VocabEmbedding | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.mesh = mesh
        self.part = part = part or Part.whole(config)
        h, std = config.hidden_size, config.init_std
        self.embedding: VocabEmbedding | None = None
        if part.embeds or (part.ends and config.tie_embeddings and tied is None):
            self.embedding = VocabEmbedding(mesh, config.vocab_size, config.padded_vocab_size, h, std=std)
        layers = {str(index): DecoderLayer(mesh, config, index) for index in range(part.start, part.stop)}
        self.layers = nn.ModuleDict(layers)
        self.norm = RMSNorm(mesh, h, config.norm_eps, partial_weight=False) if part.ends else None
        self.head = None
        if part.ends and not config.tie_embeddings:
            self.head = Head(mesh, config.vocab_size, config.padded_vocab_size, h, std=std)
        self.inits = parameter_inits(self)
        self.tied_leaf: Tensor | None = None
        self._tied = (tied,)  # in a tuple, so that it does not become a submodule
        self._rope = Rope(config)

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        """Yield the layers of this part in order."""
        yield from self.layers.values()  # type: ignore[misc]

    def set_recompute(self, recompute: Recompute) -> None:
        """Choose what every layer recomputes in its backward pass."""
        for layer in self.decoder_layers():
            layer.recompute = recompute

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
        caches: dict[int, LayerCache] | None = None,
        key_mask: Tensor | None = None,
        start: int = 0,
        shards: ContextShards | None = None,
    ) -> Context:
        """Return what the layers share for a microbatch of `tokens` [b, s].

        `positions` [b, s] are needed where they do not simply count from `start` (packed documents, padded prompts, a
        part of the sequence: `shards`).
        """
        length = tokens.shape[1]
        if positions is None and start:
            positions = torch.arange(start, start + length, device=tokens.device).expand_as(tokens)
        longest = start + length if shards is None else shards.length
        if caches is not None:
            longest = max(longest, *(cache.k.shape[1] for cache in caches.values()))
        cos, sin = self._rope(longest, device=tokens.device, dtype=dtype, positions=positions)
        if positions is None:
            cos, sin = cos[:length], sin[:length]
        return Context(cos, sin, documents, sequence_parallel, dropout, caches, key_mask, shards)

    def forward(
        self,
        tokens: Tensor,
        context: Context,
        labels: Tensor | None = None,
        loss: Callable[..., Tensor] | None = None,
        x: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of `labels` [b, s], or this rank's logits [b, s, v / tp] without labels.

        The loss is `loss(hidden [t, h], weight [v / tp, h], labels [t])`; it computes the head's product itself, in
        chunks, so that full logits never exist. A part of the model takes the residual stream `x` [b, s, h] of the
        part before it and returns its own, if it does not end the model.
        """
        if self.part.embeds:
            x = self.embed(tokens, context)
        assert x is not None
        delta: Tensor | None = None
        for layer in self.layers.values():
            x, delta = layer(x, delta, context)
            assert x is not None
        if not self.part.ends:
            return joined(x, delta)
        return self.end(self.final(x, delta, context), labels, loss)

    def embed(self, tokens: Tensor, context: Context) -> Tensor:
        """[b, s] -> the residual stream [b, s, h], or this rank's part of it under sequence parallelism."""
        assert self.embedding is not None
        return self._enter(self.embedding(tokens), context)

    def _enter(self, x: Tensor, context: Context) -> Tensor:
        if context.sequence_parallel:
            return collectives.scatter_sequence(x, self.mesh.tp)
        return collectives.reduce_from(x, self.mesh.tp)

    def final(self, x: Tensor, delta: Tensor | None, context: Context) -> Tensor:
        """Return the normed hidden state [b, s, h], whole on every tensor-parallel rank."""
        return self._leave(self._final_norm(x, delta, context), context)

    def _final_norm(self, x: Tensor, delta: Tensor | None, context: Context) -> Tensor:
        assert self.norm is not None
        _, hidden = self.norm.add(x, delta, sequence=context.sequence_parallel)
        return hidden

    def _leave(self, hidden: Tensor, context: Context) -> Tensor:
        if context.sequence_parallel:
            return collectives.gather_sequence(hidden, self.mesh.tp)
        return collectives.copy_to(hidden, self.mesh.tp)

    def end(self, hidden: Tensor, labels: Tensor | None, loss: Callable[..., Tensor] | None) -> Tensor:
        """Return the loss or the logits of the normed hidden state [b, s, h]; see `forward`."""
        weight = self.head_weight()
        if labels is None:
            return ops.linear(hidden, weight)
        assert loss is not None
        return loss(hidden.flatten(0, 1), weight, labels.flatten())

    def head_weight(self) -> Tensor:
        """Return this rank's rows of the output projection [v / tp, h]."""
        if self.head is not None:
            return local(self.head.weight)
        return local(self.tied_embedding.weight) if self.tied_leaf is None else self.tied_leaf

    @property
    def tied_embedding(self) -> VocabEmbedding:
        """The embedding whose weight this part uses as its head."""
        embedding = self._tied[0] or self.embedding
        assert embedding is not None
        return embedding

    def segments(
        self,
        tokens: Tensor,
        context: Context,
        labels: Tensor | None = None,
        loss: Callable[..., Tensor] | None = None,
    ) -> list[Segment]:
        """Return this part as one list of segments: the state (x [b, s, h],) of the part before it, or () for the part
        that embeds, becomes the same of this part, or (loss,) for the part that ends the model."""
        found: list[Segment] = []
        if self.part.embeds:
            embedding = self.embedding
            assert embedding is not None
            found.append(Segment("embedding", "compute", lambda *_: (embedding(tokens),)))
            found.append(Segment("embedding_reduce", "comm", lambda x: (self._enter(x, context),)))
        for layer in self.decoder_layers():
            found += regions(layer.segments(context), layer.recompute)
        if not self.part.ends:
            found.append(Segment("boundary", "compute", lambda x, y=None: (joined(x, y),)))
            return found
        found.append(Segment("final_norm", "compute", lambda x, y=None: (self._final_norm(x, y, context),)))
        found.append(Segment("final_gather", "comm", lambda x: (self._leave(x, context),)))
        found.append(Segment("head", "compute", lambda x: (self.end(x, labels, loss),)))
        return found

    def new_caches(self, batch: int, max_length: int) -> dict[int, LayerCache]:
        """Return empty key/value caches by layer for `batch` sequences of up to `max_length` tokens, for this rank's heads."""
        config = self.config
        heads = max(config.num_kv_heads // self.mesh.tp.size, 1)
        like = local(next(self.parameters()).detach())
        names = self.layers
        return {int(name): LayerCache(batch, max_length, heads, config.head_size, like=like) for name in names}


def joined(x: Tensor, delta: Tensor | None) -> Tensor:
    """Return the residual stream with the branch output that has not been added to it yet, [b, s, h]."""
    return x if delta is None else x + delta


__all__ = ["Decoder", "Part", "joined"]
