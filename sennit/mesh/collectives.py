"""Named collectives: every communication of a forward or backward pass is one of these functions.

Each pairs a forward with its transpose. Layer code calls them by name at the place where the communication arises,
always as `collectives.<name>(...)`, so that cost is visible there and a test can replace any single one of them.

| function | forward | backward | used for |
| --- | --- | --- | --- |
| copy_to | identity | all-reduce | entering a tensor-parallel region from a replicated activation |
| reduce_from | all-reduce | identity | leaving it again |
| gather_sequence | all-gather | reduce-scatter | entering from a sequence-sharded activation |
| scatter_sequence | reduce-scatter | all-gather | leaving to a sequence-sharded activation |
| split_sequence | slice | all-gather | replicated activation to sequence shards |
| replicated_weight | identity | all-reduce | a replicated weight that each rank applies to another part of the data |
| heads_to_sequence | all-to-all | all-to-all | this rank's part of the sequence, all heads -> the sequence, some heads |
| sequence_to_heads | all-to-all | all-to-all | and back |
| ring_shift | send to the next rank | none | keys and values that travel around a ring |
| gather_last | all-gather | slice | full logits for sampling |
| all_reduce_sum, all_reduce_max | all-reduce | none | statistics outside autograd |

Over an axis of size 1 all of them return their input.

`spmd_typecheck` states each function's type for the package `spmd-types`, which the tests use to prove that no
gradient is forgotten or counted twice; its words: R replicated with a partial gradient, I replicated with a complete
gradient, V different on every rank, P a partial sum. The package is not needed to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sennit.mesh.axis import Axis

# torch 2.13 renamed these and warns about the old names, which later releases may drop.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _group(axis: Axis) -> ProcessGroup:
    assert axis.group is not None, f"axis {axis.name} of size {axis.size} has no group"
    return axis.group


class Started:
    """Collectives that were started inside `asynchronous` and are not waited for yet.

    What they return holds no values before `finish`.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, Callable[[], object] | None]] = []

    def add(self, work: Any, after: Callable[[], object] | None = None) -> None:
        """Add a communication with a `wait()`; `after()` completes its result then."""
        self._waiting.append((work, after))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all of them."""
        for work, after in self._waiting:
            work.wait()
            if after is not None:
                after()
        self._waiting.clear()


_started: Started | None = None  # not per thread: on accelerators, autograd runs backward on a thread of its own


@contextmanager
def asynchronous(active: bool = True) -> Iterator[Started]:
    """Let the collectives in the block start and return at once; the caller calls `finish()` before using results.

    Between the two, computation runs beside the communication. With `active` False nothing changes.
    """
    global _started
    started = Started()
    before, _started = _started, started if active else None
    try:
        yield started
    finally:
        _started = before


def finish_started() -> None:
    """Wait for what the surrounding `asynchronous` block has started so far: for code that reads a result in it."""
    if _started is not None:
        _started.finish()


def _run(collective: Callable[..., Any], *args: Any, after: Callable[[], object] | None = None, **options: Any) -> None:
    if _started is not None:
        _started.add(collective(*args, async_op=True, **options), after)
        return
    collective(*args, **options)
    if after is not None:
        after()


def _all_reduce(x: Tensor, axis: Axis) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    _run(dist.all_reduce, out, group=axis.group)
    return out


def _all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """[.., n, ..] on each rank -> [.., size * n, ..] with the ranks' parts in order along `dim`."""
    dim = dim % x.dim()
    parts = x.new_empty((axis.size, *x.shape))
    flat = parts.view(axis.size * x.shape[0], *x.shape[1:])
    if dim == 0:
        _run(_gather_into, flat, x.contiguous(), group=axis.group)
        return flat
    out = x.new_empty((*x.shape[:dim], axis.size * x.shape[dim], *x.shape[dim + 1 :]))
    places = out.unflatten(dim, (axis.size, x.shape[dim]))
    _run(_gather_into, flat, x.contiguous(), group=axis.group, after=lambda: places.copy_(parts.movedim(0, dim)))
    return out


def _reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum over the ranks of [.., size * n, ..]; this rank keeps its own [.., n, ..]."""
    dim = dim % x.dim()
    parts = x.unflatten(dim, (axis.size, x.shape[dim] // axis.size)).movedim(dim, 0).contiguous()
    out = x.new_empty(parts.shape[1:])
    _run(_scatter_into, out, parts.view(axis.size * out.shape[0], *out.shape[1:]), group=axis.group)
    return out


def _slice(x: Tensor, axis: Axis, dim: int) -> Tensor:
    size = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * size, size)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_reduce(grad, ctx.axis), None

    @staticmethod
    def spmd_typecheck(*, x: Tensor, axis: Axis) -> Any:
        from spmd_types import I, R, rules

        return rules.reinterpret(x, _group(axis), src=I, dst=R)


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return _all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None

    @staticmethod
    def spmd_typecheck(*, x: Tensor, axis: Axis) -> Any:
        from spmd_types import I, P, rules

        return rules.all_reduce(x, _group(axis), src=P, dst=I)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _reduce_scatter(grad, ctx.axis, ctx.dim), None, None

    @staticmethod
    def spmd_typecheck(*, x: Tensor, axis: Axis, dim: int) -> Any:
        from spmd_types import R, S, rules

        return rules.all_gather(x, _group(axis), src=S(dim), dst=R)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _reduce_scatter(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _all_gather(grad, ctx.axis, ctx.dim), None, None

    @staticmethod
    def spmd_typecheck(*, x: Tensor, axis: Axis, dim: int) -> Any:
        from spmd_types import P, S, rules

        return rules.reduce_scatter(x, _group(axis), src=P, dst=S(dim))


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _slice(x, axis, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _all_gather(grad, ctx.axis, ctx.dim), None, None

    @staticmethod
    def spmd_typecheck(*, x: Tensor, axis: Axis, dim: int) -> Any:
        from spmd_types import I, S, rules

        return rules.convert(x, _group(axis), src=I, dst=S(dim))


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _to_sequence(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _to_heads(grad, ctx.axis), None

    @staticmethod
    def spmd_typecheck(*, x: Tensor, axis: Axis) -> Any:
        from spmd_types import V, rules

        return rules.all_to_all(x, _group(axis), src=V, dst=V)


class _SequenceToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _to_heads(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _to_sequence(grad, ctx.axis), None

    @staticmethod
    def spmd_typecheck(*, x: Tensor, axis: Axis) -> Any:
        from spmd_types import V, rules

        return rules.all_to_all(x, _group(axis), src=V, dst=V)


def _exchange(parts: Tensor, axis: Axis) -> Tensor:
    """[size, ..]: part i goes to rank i -> [size, ..]: part i comes from rank i."""
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=axis.group)
    return out


def _to_sequence(x: Tensor, axis: Axis) -> Tensor:
    parts = x.unflatten(2, (axis.size, -1)).movedim(2, 0).contiguous()  # [size, b, s, n / size, d]
    return _exchange(parts, axis).movedim(0, 1).flatten(1, 2)


def _to_heads(x: Tensor, axis: Axis) -> Tensor:
    parts = x.unflatten(1, (axis.size, -1)).movedim(1, 0).contiguous()  # [size, b, s / size, n, d]
    return _exchange(parts, axis).movedim(0, 2).flatten(2, 3)


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Return `x` [..]; its gradient is summed over `axis`. For a replicated input of column-parallel layers."""
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def replicated_weight(weight: Tensor, axis: Axis) -> Tensor:
    """Return `weight` [..]; its gradient is summed over `axis`.

    For a weight that is stored whole on every rank but applied to this rank's tokens, heads or rows only. Whether a
    gradient is partial follows from how the weight is used, so the call stands where it is used.
    """
    return weight if axis.size == 1 else _CopyTo.apply(weight, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of `x` [..] over `axis`; the gradient passes unchanged."""
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


def gather_sequence(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """[b, s/size, h] -> [b, s, h] in rank order; the gradient is reduce-scattered."""
    return x if axis.size == 1 else _Gather.apply(x, axis, dim)


def scatter_sequence(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """Partial sums [b, s, h] -> this rank's part [b, s/size, h] of their sum; the gradient is gathered."""
    return x if axis.size == 1 else _Scatter.apply(x, axis, dim)


def split_sequence(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """Replicated [b, s, h] -> this rank's part [b, s/size, h]; the gradient is gathered."""
    return x if axis.size == 1 else _Split.apply(x, axis, dim)


def heads_to_sequence(x: Tensor, axis: Axis) -> Tensor:
    """[b, s, n, d] -> [b, size * s, n / size, d]: the ranks' parts of the sequence in order, this rank's heads."""
    return x if axis.size == 1 else _HeadsToSequence.apply(x, axis)


def sequence_to_heads(x: Tensor, axis: Axis) -> Tensor:
    """[b, size * s, n, d] -> [b, s, size * n, d]: this rank's part of the sequence, all heads in order."""
    return x if axis.size == 1 else _SequenceToHeads.apply(x, axis)


@torch.no_grad()
def ring_shift(x: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Start to send `x` to the next rank of the ring; the returned function waits and returns what the rank before sent.

    `x` must not change before that. Outside autograd.
    """
    if axis.size == 1:
        return lambda: x
    group = _group(axis)
    after = dist.get_global_rank(group, (axis.rank + 1) % axis.size)
    before = dist.get_global_rank(group, (axis.rank - 1) % axis.size)
    out, sent = torch.empty_like(x), x.contiguous()
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, after, group), dist.P2POp(dist.irecv, out, before, group)]
    )

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return out

    return wait


@torch.no_grad()
def gather_last(x: Tensor, axis: Axis) -> Tensor:
    """[.., v/size] -> [.., v], outside autograd (sampling)."""
    return x if axis.size == 1 else _all_gather(x, axis, -1)


@torch.no_grad()
def all_reduce_sum(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of `x` over `axis`, outside autograd."""
    return x if axis.size == 1 else _all_reduce(x, axis)


@torch.no_grad()
def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """Return the element-wise maximum of `x` over `axis`, outside autograd."""
    if axis.size == 1:
        return x
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=dist.ReduceOp.MAX, group=axis.group)
    return out


__all__ = [
    "all_reduce_max",
    "all_reduce_sum",
    "copy_to",
    "gather_last",
    "gather_sequence",
    "heads_to_sequence",
    "reduce_from",
    "replicated_weight",
    "ring_shift",
    "scatter_sequence",
    "sequence_to_heads",
    "split_sequence",
]
