"""Gradients between backward and optimizer: accumulation over microbatches, reduction over data ranks, the norm.

Two cases. Under FSDP2 the wrapper reduces; it is told to communicate with the last microbatch only. Otherwise
`GradientReducer` accumulates in float32 (float64 for float64 parameters) and sums over the data axis in buckets, each
as soon as its last gradient is ready, so that communication overlaps with the rest of the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit import ops
from sennit.mesh import Axis, Mesh

BUCKET_BYTES = 32 << 20


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's plain gradient tensor of a parameter (zeros if it has none)."""
    grad = parameter.grad
    if grad is None:
        return torch.zeros_like(local_data(parameter))
    return grad.to_local() if hasattr(grad, "to_local") else grad  # type: ignore[attr-defined]


def local_data(parameter: Tensor) -> Tensor:
    """Return this rank's plain storage of a parameter or state tensor, outside autograd."""
    data = parameter.detach()
    return data.to_local() if hasattr(data, "to_local") else data  # type: ignore[attr-defined]


@dataclass(slots=True)
class _Bucket:
    members: list[int] = field(default_factory=list)
    waiting: int = 0
    buffer: Tensor | None = None
    work: Any = None


class GradientReducer:
    """Collects the gradients of parameters that every data rank holds whole.

    `collect()` after the last backward returns the sums over microbatches and over `axis`, in parameter order. With
    one microbatch and one data rank they are the autograd gradients themselves, in the parameters' dtype; otherwise
    they are float32 (float64).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.parameters = list(parameters)
        self.axis = axis
        self._sums: list[Tensor | None] = [None] * len(self.parameters)
        self._buckets = self._assign(bucket_bytes)
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.members}
        self._keep_native = True
        self._last = True
        self._next_bucket = 0
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, i=index: self._ready(i))

    def _assign(self, bucket_bytes: int) -> list[_Bucket]:
        """Fill buckets in reverse parameter order, the order in which gradients become ready."""
        buckets, size = [_Bucket()], 0
        for index in reversed(range(len(self.parameters))):
            if size >= bucket_bytes:
                buckets.append(_Bucket())
                size = 0
            buckets[-1].members.append(index)
            size += local_data(self.parameters[index]).numel() * 4
        return buckets

    def begin(self, num_microbatches: int) -> None:
        """Start a step of `num_microbatches` backward passes."""
        self._keep_native = num_microbatches == 1 and self.axis.size == 1
        self._next_bucket = 0
        for bucket in self._buckets:
            bucket.waiting, bucket.work, bucket.buffer = len(bucket.members), None, None
        self._sums = [None] * len(self.parameters)
        for parameter in self.parameters:
            parameter.grad = None

    def microbatch(self, *, last: bool) -> None:
        """Announce the next backward pass; buckets are reduced during the last one."""
        self._last = last

    def _ready(self, index: int) -> None:
        if self._keep_native:
            return
        parameter = self.parameters[index]
        gradient = local_gradient(parameter)
        wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        total = self._sums[index]
        self._sums[index] = gradient.to(wide) if total is None else total.add_(gradient)
        parameter.grad = None
        if self._last and self.axis.size > 1:
            self._bucket_of[index].waiting -= 1
            while self._next_bucket < len(self._buckets) and self._buckets[self._next_bucket].waiting == 0:
                self._launch(self._buckets[self._next_bucket])
                self._next_bucket += 1

    def _launch(self, bucket: _Bucket) -> None:
        bucket.buffer = torch.cat([self._sum(i).flatten() for i in bucket.members])
        bucket.work = reduce_gradients(bucket.buffer, self.axis)

    def _sum(self, index: int) -> Tensor:
        total = self._sums[index]
        if total is None:  # the parameter took no part in this step's losses
            data = local_data(self.parameters[index])
            total = data.new_zeros(data.shape, dtype=torch.promote_types(data.dtype, torch.float32))
            self._sums[index] = total
        return total

    def collect(self) -> list[Tensor]:
        """Wait for the reductions and return the gradients, local tensors in parameter order."""
        if self._keep_native:
            return [local_gradient(parameter) for parameter in self.parameters]
        if self.axis.size > 1:
            while self._next_bucket < len(self._buckets):
                self._launch(self._buckets[self._next_bucket])
                self._next_bucket += 1
            for bucket in self._buckets:
                if bucket.work is not None:
                    bucket.work.wait()
                assert bucket.buffer is not None
                sizes = [self._sum(i).numel() for i in bucket.members]
                for i, part in zip(bucket.members, bucket.buffer.split(sizes), strict=True):
                    self._sums[i] = part.view(self._sum(i).shape)
        return [self._sum(i) for i in range(len(self.parameters))]


def reduce_gradients(buffer: Tensor, axis: Axis) -> Any:
    """Start the sum of `buffer` over the data axis in place; returns a handle with `wait()`."""
    return dist.all_reduce(buffer, group=axis.group, async_op=True)


class ShardedGradients:
    """The same interface over FSDP2, which accumulates and reduces by itself."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.model = model
        self.parameters = list(parameters)

    def begin(self, num_microbatches: int) -> None:
        """Start a step."""
        for parameter in self.parameters:
            parameter.grad = None

    def microbatch(self, *, last: bool) -> None:
        """Let only the last backward pass communicate gradients."""
        self.model.set_requires_gradient_sync(last)  # type: ignore[operator]

    def collect(self) -> list[Tensor]:
        """Return the reduced local shards in parameter order."""
        return [local_gradient(parameter) for parameter in self.parameters]


def gradient_norm(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], mesh: Mesh) -> float:
    """Return the global L2 norm; every parameter counts once however many ranks hold a copy of it.

    A rank contributes a parameter's shard if it is the first among the ranks that hold the same shard, which the
    parameter's placements tell. One all-reduce over the world.
    """
    mine = [g for p, g in zip(parameters, gradients, strict=True) if _is_first_holder(p, mesh)]
    total = ops.sum_of_squares(mine).to(torch.float64).reshape(1)
    if mesh.world.size > 1:
        dist.all_reduce(total, group=mesh.world.group)
    return float(total.sqrt())


def _is_first_holder(parameter: Tensor, mesh: Mesh) -> bool:
    sharded: set[str] = set()
    if hasattr(parameter, "placements"):
        names = parameter.device_mesh.mesh_dim_names or ()  # type: ignore[attr-defined]
        for name, placement in zip(names, parameter.placements, strict=True):  # type: ignore[attr-defined]
            if not placement.is_replicate():
                sharded.add(name)
    axes = (mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp)
    return all(axis.rank == 0 for axis in axes if axis.name not in sharded)


__all__ = ["GradientReducer", "ShardedGradients", "gradient_norm", "local_data", "local_gradient", "reduce_gradients"]
