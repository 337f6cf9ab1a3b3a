"""A decoder whose parts lie on the ranks of a pipeline, for inference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit.mesh import Mesh
from sennit.models.decoder import Decoder
from sennit.nn import Context, DecoderConfig, LayerCache


class StagedDecoder:
    """Stands for the whole model where it is called: every rank of the pipeline gets the same result.

    `parts`: this rank's parts by number; `owners`: the pipeline rank that runs each part. The parts run one after the
    other, each on its rank; what a part returns goes to all ranks of the pipeline. Collective over the pipeline.
    """

    def __init__(self, mesh: Mesh, config: DecoderConfig, parts: Mapping[int, Decoder], owners: Sequence[int]) -> None:
        self.mesh, self.config = mesh, config
        self.parts, self.owners = dict(parts), list(owners)
        assert mesh.pp.group is not None
        self._ranks = dist.get_process_group_ranks(mesh.pp.group)

    @property
    def training(self) -> bool:
        """Whether the parts are in training mode."""
        return next(iter(self.parts.values())).training

    def train(self, mode: bool = True) -> StagedDecoder:
        """Set the mode of all parts."""
        for part in self.parts.values():
            part.train(mode)
        return self

    def eval(self) -> StagedDecoder:
        """Set all parts to evaluation mode."""
        return self.train(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's parts."""
        for part in self.parts.values():
            yield from part.parameters()

    def context(self, tokens: Tensor, **options: Any) -> Context:
        """See `Decoder.context`."""
        return next(iter(self.parts.values())).context(tokens, **options)

    def new_caches(self, batch: int, max_length: int) -> dict[int, LayerCache]:
        """See `Decoder.new_caches`; of this rank's layers."""
        caches: dict[int, LayerCache] = {}
        for part in self.parts.values():
            caches.update(part.new_caches(batch, max_length))
        return caches

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, context: Context, labels: Tensor | None = None, loss: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """See `Decoder.forward`; outside autograd."""
        x: Tensor | None = None
        for number, owner in enumerate(self.owners):
            mine = self.mesh.pp.rank == owner
            x = self._share(self.parts[number](tokens, context, labels, loss, x) if mine else None, owner)
        assert x is not None
        return x

    def _share(self, value: Tensor | None, owner: int) -> Tensor:
        """Return the owner's `value` on all ranks of the pipeline."""
        group, source = self.mesh.pp.group, self._ranks[owner]
        facts = [None if value is None else (tuple(value.shape), value.dtype)]
        dist.broadcast_object_list(facts, source, group=group)
        assert facts[0] is not None
        shape, dtype = facts[0]
        if value is None:
            value = torch.empty(shape, dtype=dtype, device=next(self.parameters()).device)
        value = value.contiguous()
        dist.broadcast(value, source, group=group)
        return value


__all__ = ["StagedDecoder"]
