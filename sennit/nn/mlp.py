"""The gated feed-forward block."""

from __future__ import annotations

from torch import Tensor, nn

from sennit.mesh import Mesh
from sennit.nn.config import DecoderConfig
from sennit.nn.linear import ColumnLinear, RowLinear, project


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202), the ffn features split over tp."""

    def __init__(self, mesh: Mesh, config: DecoderConfig) -> None:
        super().__init__()
        h, f = config.hidden_size, config.ffn_size
        self.gate = ColumnLinear(mesh, h, f, std=config.init_std)
        self.up = ColumnLinear(mesh, h, f, std=config.init_std)
        self.down = RowLinear(mesh, f, h, std=config.init_std / (2 * config.num_layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> a partial sum [b, s, h]."""
        return self.down.of_swiglu(*project(x, self.gate, self.up))


__all__ = ["SwiGLU"]
