"""Linear layers split over tensor-parallel ranks, and the embedding. They hold weights and do local products only;
the collectives around them are segments of the layer that uses them (arXiv 1909.08053)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sennit import ops
from sennit.mesh import Mesh, collectives
from sennit.nn.parameter import Init, local, new_parameter


class ColumnLinear(nn.Module):
    """y = x W^T + b with the output features split over tp: [.., i] -> [.., o / tp]."""

    def __init__(self, mesh: Mesh, in_features: int, out_features: int, *, std: float, bias: bool = False) -> None:
        super().__init__()
        self.weight = new_parameter(mesh, (out_features, in_features), Init("normal", std), shard=0)
        self.bias = new_parameter(mesh, (out_features,), Init("zeros"), shard=0) if bias else None

    def local_parts(self) -> tuple[Tensor, Tensor | None]:
        """Return this rank's weight [o / tp, i] and bias [o / tp]."""
        return local(self.weight), None if self.bias is None else local(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[.., i] -> this rank's [.., o / tp]."""
        return ops.linear(x, *self.local_parts())


class RowLinear(nn.Module):
    """y = x W^T with the input features split over tp: [.., i / tp] -> a partial sum [.., o] on each rank."""

    def __init__(self, mesh: Mesh, in_features: int, out_features: int, *, std: float) -> None:
        super().__init__()
        self.weight = new_parameter(mesh, (out_features, in_features), Init("normal", std), shard=1)

    def forward(self, x: Tensor) -> Tensor:
        """[.., i / tp] -> partial sums [.., o]."""
        return ops.linear(x, local(self.weight))

    def of_swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Apply the map to silu(gate) * up: [.., i / tp] -> partial sums [.., o]."""
        return ops.swiglu_linear(gate, up, local(self.weight))


class ReplicatedHeadsLinear(nn.Module):
    """Key or value projection when tp exceeds the number of kv heads: all ranks hold the whole weight, each applies
    the rows of the one head it needs, and the rows' gradients are summed over the ranks.

    [.., h] -> [.., d]: the head of this rank.
    """

    def __init__(self, mesh: Mesh, in_features: int, num_heads: int, head_size: int, *, std: float, bias: bool) -> None:
        super().__init__()
        self.weight = new_parameter(mesh, (num_heads * head_size, in_features), Init("normal", std))
        self.bias = new_parameter(mesh, (num_heads * head_size,), Init("zeros")) if bias else None
        self._tp = mesh.tp
        self._start = mesh.tp.rank // (mesh.tp.size // num_heads) * head_size
        self._head_size = head_size

    def _rows(self, weight: Tensor) -> Tensor:
        return collectives.replicated_weight(local(weight), self._tp).narrow(0, self._start, self._head_size)

    def local_parts(self) -> tuple[Tensor, Tensor | None]:
        """Return the rows [d, h] of this rank's head and their bias [d]."""
        return self._rows(self.weight), None if self.bias is None else self._rows(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[.., h] -> [.., d]."""
        return ops.linear(x, *self.local_parts())


def project(x: Tensor, *maps: ColumnLinear | ReplicatedHeadsLinear) -> tuple[Tensor, ...]:
    """Apply several linear maps to one input [.., i]: one operator, so that their input gradients add up in place."""
    weights, biases = zip(*(m.local_parts() for m in maps), strict=True)
    return ops.linears(x, weights, biases)


class VocabEmbedding(nn.Module):
    """Token embedding with the vocabulary's rows split over tp. Rows from `vocab_size` on only pad the split."""

    def __init__(self, mesh: Mesh, vocab_size: int, padded_vocab_size: int, hidden_size: int, *, std: float) -> None:
        super().__init__()
        init = Init("normal", std, live_rows=vocab_size)
        self.weight = new_parameter(mesh, (padded_vocab_size, hidden_size), init, shard=0)
        self._tp = mesh.tp

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] int64 -> [b, s, h]; over tp > 1 a partial sum, zero for tokens of other ranks' rows."""
        weight = local(self.weight)
        if self._tp.size == 1:
            return torch.nn.functional.embedding(tokens, weight)
        index = tokens - self._tp.rank * weight.shape[0]
        mine = (index >= 0) & (index < weight.shape[0])
        rows = torch.nn.functional.embedding(torch.where(mine, index, 0), weight)
        return rows * mine.unsqueeze(-1).to(rows.dtype)


class Head(nn.Module):
    """Output projection to the vocabulary: holds the rows [v / tp, h]; the loss and the logits are computed from them."""

    def __init__(self, mesh: Mesh, vocab_size: int, padded_vocab_size: int, hidden_size: int, *, std: float) -> None:
        super().__init__()
        init = Init("normal", std, live_rows=vocab_size)
        self.weight = new_parameter(mesh, (padded_vocab_size, hidden_size), init, shard=0)


__all__ = ["ColumnLinear", "Head", "ReplicatedHeadsLinear", "RowLinear", "VocabEmbedding", "project"]
