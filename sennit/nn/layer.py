"""A pre-norm decoder layer as a list of segments."""

from __future__ import annotations

from torch import Tensor, nn

from sennit.mesh import Mesh, collectives
from sennit.nn.attention import Attention, Context
from sennit.nn.config import DecoderConfig
from sennit.nn.dropout import dropout
from sennit.nn.mlp import SwiGLU
from sennit.nn.norm import RMSNorm
from sennit.nn.segments import Recompute, Segment, State, run_segments


class DecoderLayer(nn.Module):
    """norm, attention, norm, mlp around a residual stream.

    The state between segments is (x, y): the residual stream and the branch. Between layers, y is the branch output
    that has not been added yet (None before the first layer), so that every addition fuses with the norm behind it.
    """

    def __init__(self, mesh: Mesh, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(mesh, config.hidden_size, config.norm_eps, partial_weight=False)
        self.attention = Attention(mesh, config, layer)
        self.mlp_norm = RMSNorm(mesh, config.hidden_size, config.norm_eps, partial_weight=False)
        self.mlp = SwiGLU(mesh, config)
        self.recompute = Recompute()
        self._tp = mesh.tp
        self._dropout = config.dropout
        self._layer = layer

    def segments(self, context: Context) -> list[Segment]:
        """Return the layer's segments in order, for a microbatch with `context`."""
        between = "sequence" if context.sequence_parallel else "replicated"

        def norm(module: RMSNorm, x: Tensor, delta: Tensor | None) -> State:
            return module.add(x, delta, sequence=context.sequence_parallel)

        def enter(x: Tensor, y: Tensor) -> State:
            if context.sequence_parallel:
                return x, collectives.gather_sequence(y, self._tp)
            return x, collectives.copy_to(y, self._tp)

        def leave(site: str, x: Tensor, y: Tensor) -> State:
            if context.sequence_parallel:
                y = collectives.scatter_sequence(y, self._tp)
            else:
                y = collectives.reduce_from(y, self._tp)
            if self._dropout and self.training and context.dropout is not None:
                collectives.finish_started()
                site = f"{self._layer}/{site}"
                y = dropout(y, context.dropout, site, self._dropout, self._tp, sharded=context.sequence_parallel)
            return x, y

        return [
            Segment("attention_norm", "compute", lambda x, y=None: norm(self.attention_norm, x, y), (between, between)),
            Segment("attention_gather", "comm", enter, (between, "input")),
            Segment("attention", "compute", lambda x, y: (x, self.attention(y, context)), (between, "partial")),
            Segment("attention_reduce", "comm", lambda x, y: leave("attention", x, y), (between, between)),
            Segment("mlp_norm", "compute", lambda x, y: norm(self.mlp_norm, x, y), (between, between)),
            Segment("mlp_gather", "comm", enter, (between, "input")),
            Segment("mlp", "compute", lambda x, y: (x, self.mlp(y)), (between, "partial")),
            Segment("mlp_reduce", "comm", lambda x, y: leave("mlp", x, y), (between, between)),
        ]

    def forward(self, x: Tensor, delta: Tensor | None, context: Context) -> State:
        """(x [b, s, h], delta [b, s, h] or None) -> (x, delta); s is this rank's part under sequence parallelism."""
        return run_segments(self.segments(context), (x, delta), self.recompute)


__all__ = ["DecoderLayer"]
