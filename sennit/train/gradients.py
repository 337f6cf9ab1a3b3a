"""Gradients between backward and optimizer: accumulation over microbatches, reduction over data ranks, the norm.

Two cases. Where FSDP2's hooks run, the wrapper reduces; it is told to communicate with the last microbatch only.
Otherwise `GradientReducer` accumulates in float32 (float64 for float64 parameters) and sums over the ranks that hold
the same weights, in buckets: each as soon as its last gradient is ready, so that communication overlaps with the rest of
the backward pass, or, in a pipeline, when the schedule says that a stage is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit import ops
from sennit.mesh import Axis, Mesh
from sennit.ops.weight_queue import on_gradient

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
class GradientGroup:
    """Parameters whose gradients are reduced in the same way.

    `members`: (index of the parameter, the leaves that collect its gradient: one for each use). `replicas`: the axis over
    which copies of the weights, or of their shards, are held; `shards`: the axis over which each weight is sharded.
    `stages`: the virtual stages that must be finished before; empty: reduced as soon as the last backward has filled it.
    """

    members: list[tuple[int, list[Tensor]]]
    replicas: Axis
    shards: Axis = field(default_factory=lambda: Axis("dp_shard"))
    stages: frozenset[int] = frozenset()

    @property
    def communicates(self) -> bool:
        """Whether several ranks take part."""
        return self.replicas.size > 1 or self.shards.size > 1


@dataclass(slots=True)
class _Bucket:
    group: GradientGroup
    members: list[int] = field(default_factory=list)
    leaves: int = 0
    waiting: int = 0
    result: Callable[[], Tensor] | None = None


class GradientReducer:
    """Sums gradients over microbatches and over the ranks that hold the same weights.

    `collect()` after the last backward returns the sums, local tensors in parameter order. With one microbatch and no
    other rank they are the autograd gradients themselves, in the parameters' dtype; otherwise float32 (float64).
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], groups: Sequence[GradientGroup], *, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.parameters = list(parameters)
        self.groups = list(groups)
        self._leaves: dict[int, list[Tensor]] = {}
        self._sums: dict[tuple[int, int], Tensor] = {}
        self._results: dict[int, Tensor] = {}
        self._buckets = [bucket for group in self.groups for bucket in _buckets_of(group, self.parameters, bucket_bytes)]
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.members}
        self._keep_native = True
        self._last = True
        self._finished: set[int] = set()
        for group in self.groups:
            for index, leaves in group.members:
                self._leaves[index] = leaves
                for use, leaf in enumerate(leaves):
                    on_gradient(leaf, lambda leaf, key=(index, use): self._ready(key, leaf))
        assert sorted(self._leaves) == list(range(len(self.parameters))), "every parameter is in exactly one group"

    def begin(self, num_microbatches: int) -> None:
        """Start a step of `num_microbatches` backward passes."""
        self._keep_native = num_microbatches == 1 and not any(group.communicates for group in self.groups)
        self._finished = set()
        self._sums.clear()
        self._results.clear()
        for bucket in self._buckets:
            bucket.waiting, bucket.result = bucket.leaves, None
        for leaves in self._leaves.values():
            for leaf in leaves:
                leaf.grad = None

    def microbatch(self, *, last: bool) -> None:
        """Announce the next backward pass; buckets are reduced during the last one."""
        self._last = last

    def _ready(self, key: tuple[int, int], leaf: Tensor) -> None:
        if self._keep_native:
            return
        gradient, total = leaf.grad, self._sums.get(key)
        assert gradient is not None
        wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        self._sums[key] = gradient.to(wide) if total is None else total.add_(gradient)
        leaf.grad = None
        bucket = self._bucket_of[key[0]]
        if self._last and bucket.group.communicates and not bucket.group.stages:
            bucket.waiting -= 1
            self._launch_ready()

    def _launch_ready(self) -> None:
        """Reduce, in the one order that all ranks keep, the buckets that are full."""
        for bucket in self._buckets:
            if bucket.result is None:
                if bucket.waiting:
                    return
                self._launch(bucket)

    def finish_stage(self, stage: int) -> None:
        """Reduce what the virtual stage `stage`, which will get no more gradients in this step, was the last to fill."""
        self._finished.add(stage)
        for bucket in self._buckets:
            stages = bucket.group.stages
            if bucket.result is None and stages and stages <= self._finished and bucket.group.communicates:
                self._launch(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        group, full = bucket.group, [self._sum(index) for index in bucket.members]
        if group.shards.size > 1:
            bucket.result = scatter_gradients(full, group.shards, group.replicas)
        else:
            buffer = torch.cat([gradient.flatten() for gradient in full])
            work = reduce_gradients(buffer, group.replicas)

            def result() -> Tensor:
                work.wait()
                return buffer

            bucket.result = result

    def _sum(self, index: int) -> Tensor:
        """Return the sum over microbatches and uses; zeros if the parameter took no part in this step's losses."""
        found = [self._sums[index, use] for use in range(len(self._leaves[index])) if (index, use) in self._sums]
        if not found:
            data = self._leaves[index][0]
            return data.new_zeros(data.shape, dtype=torch.promote_types(data.dtype, torch.float32))
        total = found[0]
        for other in found[1:]:
            total = total.add_(other)
        return total

    def collect(self) -> list[Tensor]:
        """Wait for the reductions and return the gradients, local tensors in parameter order."""
        if self._keep_native:
            return [_native(self._leaves[index]) for index in range(len(self.parameters))]
        for bucket in self._buckets:
            if bucket.group.communicates and bucket.result is None:
                self._launch(bucket)
        for bucket in self._buckets:
            if bucket.result is None:
                self._results.update((index, self._sum(index)) for index in bucket.members)
                continue
            shapes = [local_data(self.parameters[index]).shape for index in bucket.members]
            parts = bucket.result().split([shape.numel() for shape in shapes])
            for index, shape, part in zip(bucket.members, shapes, parts, strict=True):
                self._results[index] = part.view(shape)
        return [self._results[index] for index in range(len(self.parameters))]


def _buckets_of(group: GradientGroup, parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Fill buckets in reverse parameter order, the order in which gradients become ready."""
    buckets, size = [_Bucket(group)], 0
    for index, leaves in reversed(group.members):
        if size >= bucket_bytes:
            buckets.append(_Bucket(group))
            size = 0
        buckets[-1].members.append(index)
        buckets[-1].leaves += len(leaves)
        size += local_data(parameters[index]).numel() * 4
    return buckets


def _native(leaves: list[Tensor]) -> Tensor:
    """Return the gradient that autograd left in the leaves of one parameter, summed over its uses."""
    found = [leaf.grad for leaf in leaves if leaf.grad is not None]
    if not found:
        return torch.zeros_like(leaves[0])
    total = found[0]
    for other in found[1:]:
        total = total + other
    return total


def reduce_gradients(buffer: Tensor, axis: Axis) -> Any:
    """Start the sum of `buffer` over `axis` in place; returns a handle with `wait()`."""
    return dist.all_reduce(buffer, group=axis.group, async_op=True)


def scatter_gradients(gradients: Sequence[Tensor], shards: Axis, replicas: Axis) -> Callable[[], Tensor]:
    """Start the sum of whole gradients over both axes; the returned function waits for it and returns this rank's
    shards of them, flat and one after the other.

    A weight is cut along its first dimension into pieces of equal size, the last ones shorter or empty, as FSDP2 does.
    """
    rows = [-(-g.shape[0] // shards.size) for g in gradients]
    widths = [g[0].numel() if g.shape[0] else 0 for g in gradients]
    sizes = [row * width for row, width in zip(rows, widths, strict=True)]
    send = gradients[0].new_zeros((shards.size, sum(sizes)))
    for part, gradient, row, width in zip(send.split(sizes, 1), gradients, rows, widths, strict=True):
        for rank in range(shards.size):
            piece = gradient[rank * row : (rank + 1) * row]
            part[rank, : piece.shape[0] * width].copy_(piece.reshape(-1))
    mine = send.new_empty(send.shape[1])
    work = _scatter_sum(mine, send, shards)

    def result() -> Tensor:
        work.wait()
        if replicas.size > 1:
            reduce_gradients(mine, replicas).wait()
        kept = [max(min(row, g.shape[0] - shards.rank * row), 0) * width
                for g, row, width in zip(gradients, rows, widths, strict=True)]  # fmt: skip
        return torch.cat([part[:size] for part, size in zip(mine.split(sizes), kept, strict=True)])

    return result


def _scatter_sum(out: Tensor, parts: Tensor, axis: Axis) -> Any:
    """Start the sum of `parts` [size, n] over `axis`, of which this rank keeps its row in `out` [n]."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(out, parts.view(-1), group=axis.group, async_op=True)


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


def gradient_norm(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], mesh: Mesh, owned: Sequence[bool] | None = None
) -> float:
    """Return the global L2 norm; every parameter counts once however many ranks hold a copy of it.

    A rank contributes a parameter's shard if it is the first among the ranks that hold the same shard, which the
    parameter's placements tell. `owned`: False for parameters that count on another pipeline rank. One all-reduce over
    the world.
    """
    counted = owned or [True] * len(parameters)
    mine = [g for p, g, own in zip(parameters, gradients, counted, strict=True) if own and _is_first_holder(p, mesh)]
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
                sharded.update(("dp_shard", "cp") if name == "dp_shard_cp" else (name,))
    axes = (mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp)
    return all(axis.rank == 0 for axis in axes if axis.name not in sharded)


__all__ = [
    "GradientGroup",
    "GradientReducer",
    "ShardedGradients",
    "gradient_norm",
    "local_data",
    "local_gradient",
    "reduce_gradients",
    "scatter_gradients",
]
