"""RMSNorm."""

from __future__ import annotations

from torch import Tensor, nn

from sennit import ops
from sennit.mesh import Mesh, collectives
from sennit.nn.parameter import Init, local, new_parameter


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (arXiv 1910.07467), with the residual addition fused in.

    `partial_weight`: each tensor-parallel rank applies the weight to other tokens or heads, so that its gradient is a
    partial sum and is added up where the weight is used.
    """

    def __init__(self, mesh: Mesh, size: int, eps: float, *, partial_weight: bool) -> None:
        super().__init__()
        self.weight = new_parameter(mesh, (size,), Init("ones"))
        self.eps = eps
        self._tp = mesh.tp
        self._partial_weight = partial_weight

    def _weight(self, *, partial: bool) -> Tensor:
        weight = local(self.weight)
        return collectives.replicated_weight(weight, self._tp) if partial else weight

    def forward(self, x: Tensor) -> Tensor:
        """[.., h] -> [.., h]."""
        return ops.rms_norm(x, self._weight(partial=self._partial_weight), self.eps)

    def add(self, x: Tensor, delta: Tensor | None, *, sequence: bool = False) -> tuple[Tensor, Tensor]:
        """Return (x + delta, norm(x + delta)), both [b, s, h].

        `sequence`: this rank holds a part of the sequence only.
        """
        weight = self._weight(partial=sequence)
        if delta is None:
            return x, ops.rms_norm(x, weight, self.eps)
        return ops.add_rms_norm(x, delta, weight, self.eps)


__all__ = ["RMSNorm"]
