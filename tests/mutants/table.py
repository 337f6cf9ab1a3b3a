"""Every communication of a training step, each left out in turn, and the fast test that notices.

A mutant puts the identity (or the rank's own part, where the shape must change) in place of one communication. Its
killer is a check that passes without the mutant and must fail with it. Where a collective communicates in its forward
and in its backward pass, each is a mutant of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import sennit.train.engine
import sennit.train.gradients
import sennit.train.optimizer
import sennit.train.trainer
from sennit.mesh import Axis, Mesh, collectives
from sennit.models import StagedDecoder
from sennit.nn import ReplicatedHeadsLinear, RMSNorm, local
from sennit.train.gradients import ShardedGradients
from sennit.train.trainer import Trainer
from tests.mesh.test_collectives import check_pairs, check_without_gradient
from tests.mutants.killers import layout_equals_one_process, on_ranks, random_state_is_that_of_rank_zero
from tests.parity.runs import Case
from tests.pipeline.runs import Run
from tests.pipeline.test_generation import check_generation

Killer = Callable[[], None]


@dataclass(frozen=True)
class Mutant:
    """`apply` leaves out `covers`, functions of Sennit that communicate; `killer` raises AssertionError then."""

    covers: str
    apply: Callable[[pytest.MonkeyPatch], None]
    killer: Killer


def own_copies(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The shape of an all-gather, without it."""
    return torch.cat([x] * axis.size, dim)


def own_part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The shape of a reduce-scatter, without the sum."""
    return x.chunk(axis.size, dim)[axis.rank].contiguous()


def set_to(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, value)


def forward(function: Any, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return set_to(function, "forward", staticmethod(value))


def backward(function: Any, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return set_to(function, "backward", staticmethod(value))


def identity(x: Tensor, axis: Axis) -> Tensor:
    return x


def gather_own(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
    ctx.axis, ctx.dim = axis, dim
    return own_copies(x, axis, dim)


def scatter_own(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
    ctx.axis, ctx.dim = axis, dim
    return own_part(x, axis, dim)


def first_part(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
    ctx.axis, ctx.dim = axis, dim
    return x.chunk(axis.size, dim)[0].contiguous()


def gradient_part(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return own_part(grad, ctx.axis, ctx.dim), None, None


def gradient_copies(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return own_copies(grad, ctx.axis, ctx.dim), None, None


def sequence_of(x: Tensor, axis: Axis) -> Tensor:
    """The shape of heads_to_sequence, with this rank's tokens only."""
    return torch.cat([x.chunk(axis.size, 2)[axis.rank]] * axis.size, 1)


def heads_of(x: Tensor, axis: Axis) -> Tensor:
    """The shape of sequence_to_heads, with this rank's heads only."""
    return torch.cat([x.chunk(axis.size, 1)[axis.rank]] * axis.size, 2)


def own_sequence_of_heads(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
    ctx.axis = axis
    return sequence_of(x, axis)


def own_heads_of_sequence(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
    ctx.axis = axis
    return heads_of(x, axis)


def gradient_of_own_heads(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return heads_of(grad, ctx.axis), None


def gradient_of_own_sequence(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return sequence_of(grad, ctx.axis), None


def own_rows(self: ReplicatedHeadsLinear, weight: Tensor) -> Tensor:
    return local(weight).narrow(0, self._start, self._head_size)


def without_all_reduce_of(dtype: torch.dtype) -> Callable[[pytest.MonkeyPatch], None]:
    """Let the trainer's all-reduces of tensors of `dtype` do nothing."""

    def all_reduce(tensor: Tensor, **options: Any) -> None:
        if tensor.dtype != dtype:
            dist.all_reduce(tensor, **options)

    return set_to(sennit.train.trainer, "dist", SimpleNamespace(all_reduce=all_reduce, broadcast=dist.broadcast))


def norm_of_this_rank(parameters: Any, gradients: Any, mesh: Mesh, owned: Any) -> float:
    return sennit.train.gradients.gradient_norm(parameters, gradients, replace(mesh, world=Axis("world")), owned)


def own_row(out: Tensor, parts: Tensor, axis: Axis) -> Any:
    """The shape of the reduce-scatter of gradients, without the sum."""
    out.copy_(parts[axis.rank])
    return SimpleNamespace(wait=lambda: None)


def losses_of_this_stage(self: Trainer, value: Tensor) -> float:
    real_pp = self.mesh
    self.mesh = replace(self.mesh, pp=Axis("pp"))
    try:
        return REAL_SUM_OF_LOSSES(self, value)
    finally:
        self.mesh = real_pp


def shared_with_nobody(self: StagedDecoder, value: Tensor | None, owner: int) -> Tensor:
    """The shape of what the owner has, without its values."""
    found = REAL_SHARE(self, value, owner)
    return torch.zeros_like(found) if value is None else found


REAL_SUM_OF_LOSSES = Trainer._sum_of_losses
REAL_SHARE = StagedDecoder._share


def without_sum_over_replicas(patch: pytest.MonkeyPatch) -> None:
    real = ShardedGradients.microbatch

    def microbatch(self: ShardedGradients, *, last: bool) -> None:
        real(self, last=last)
        self.model.set_requires_all_reduce(False)  # type: ignore[operator]

    patch.setattr(ShardedGradients, "microbatch", microbatch)


def shard_by_shard(patch: pytest.MonkeyPatch) -> None:
    """Muon iterates on each rank's shard by itself."""
    patch.setattr(sennit.train.optimizer, "_like", lambda parameter, data: data)
    patch.setattr(sennit.train.optimizer, "_local_part", lambda update, parameter: update)


tp2, tp2_sp = layout_equals_one_process(Case("tp2")), layout_equals_one_process(Case("tp2-sp"))
fsdp2 = layout_equals_one_process(Case("fsdp2"))
dp2 = layout_equals_one_process(Case("dp2"))
qwen3_tp2 = layout_equals_one_process(Case("tp2", "qwen3"))
kv_heads = layout_equals_one_process(Case("tp2", options=(("model.num_kv_heads", "1"),)))
hsdp = layout_equals_one_process(Case("hsdp2x2"))
cp2 = layout_equals_one_process(Case("cp2"))
cp2_ulysses = layout_equals_one_process(Case("cp2-ulysses"))
pp2 = layout_equals_one_process(Case("pp2"))
pp2_tied = layout_equals_one_process(Case("pp2", "llama-tied"))
pp2_dualpipe = layout_equals_one_process(Case("pp2-dualpipe"))
pp2_fsdp2 = layout_equals_one_process(Case("pp2-fsdp2"))
muon = layout_equals_one_process(Case("fsdp2", optimizer="muon", data="plain"))
pairs = on_ranks(check_pairs)
outside_autograd = on_ranks(check_without_gradient)

MUTANTS: dict[str, Mutant] = {
    "copy_to backward": Mutant("copy_to", set_to(collectives, "copy_to", identity), tp2),
    "reduce_from forward": Mutant("reduce_from", forward(collectives._ReduceFrom, lambda ctx, x, axis: x.clone()), tp2),
    "gather_sequence forward": Mutant("gather_sequence", forward(collectives._Gather, gather_own), tp2_sp),
    "gather_sequence backward": Mutant("gather_sequence", backward(collectives._Gather, gradient_part), tp2_sp),
    "scatter_sequence forward": Mutant("scatter_sequence", forward(collectives._Scatter, scatter_own), tp2_sp),
    "scatter_sequence backward": Mutant("scatter_sequence", backward(collectives._Scatter, gradient_copies), tp2_sp),
    "split_sequence forward": Mutant(
        "split_sequence", forward(collectives._Split, first_part), pairs
    ),
    "split_sequence backward": Mutant("split_sequence", backward(collectives._Split, gradient_copies), pairs),
    "replicated_weight of norms over the sequence": Mutant(
        "replicated_weight", set_to(collectives, "replicated_weight", identity), tp2_sp
    ),
    "replicated_weight of qk-norms": Mutant(
        "replicated_weight", set_to(RMSNorm, "_weight", lambda self, *, partial: local(self.weight)), qwen3_tp2
    ),
    "replicated_weight of kv heads": Mutant("replicated_weight", set_to(ReplicatedHeadsLinear, "_rows", own_rows), kv_heads),
    "heads_to_sequence forward": Mutant(
        "heads_to_sequence", forward(collectives._HeadsToSequence, own_sequence_of_heads), cp2_ulysses
    ),
    "heads_to_sequence backward": Mutant(
        "heads_to_sequence", backward(collectives._HeadsToSequence, gradient_of_own_heads), cp2_ulysses
    ),
    "sequence_to_heads forward": Mutant(
        "sequence_to_heads", forward(collectives._SequenceToHeads, own_heads_of_sequence), cp2_ulysses
    ),
    "sequence_to_heads backward": Mutant(
        "sequence_to_heads", backward(collectives._SequenceToHeads, gradient_of_own_sequence), cp2_ulysses
    ),
    "ring_shift": Mutant("ring_shift", set_to(collectives, "ring_shift", lambda x, axis: lambda: x), cp2),
    "exchange of an all-to-all": Mutant("_exchange", set_to(collectives, "_exchange", lambda parts, axis: parts), cp2_ulysses),
    "sum of gradients over context-parallel ranks": Mutant(
        "reduce_gradients",
        set_to(sennit.train.gradients, "reduce_gradients", lambda buffer, axis: SimpleNamespace(wait=lambda: None)),
        cp2,
    ),
    "gather_last": Mutant(
        "gather_last", set_to(collectives, "gather_last", lambda x, axis: own_copies(x, axis, -1)), outside_autograd
    ),
    "all_reduce_sum of the loss over the vocabulary": Mutant(
        "all_reduce_sum", set_to(collectives, "all_reduce_sum", identity), tp2
    ),
    "all_reduce_max of the loss over the vocabulary": Mutant(
        "all_reduce_max", set_to(collectives, "all_reduce_max", identity), tp2
    ),
    "sum of gradients over data ranks": Mutant(
        "reduce_gradients",
        set_to(sennit.train.gradients, "reduce_gradients", lambda buffer, axis: SimpleNamespace(wait=lambda: None)),
        dp2,
    ),
    "sum, not mean, of gradients under FSDP": Mutant(
        "shard_parameters",
        set_to(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None),
        fsdp2,
    ),
    "sum of gradients over replicas under FSDP": Mutant("shard_parameters", without_sum_over_replicas, hsdp),
    "sum of squares of the gradient norm": Mutant(
        "gradient_norm", set_to(sennit.train.trainer, "gradient_norm", norm_of_this_rank), fsdp2
    ),
    "gradient norm counts copies once": Mutant(
        "gradient_norm", set_to(sennit.train.gradients, "_is_first_holder", lambda parameter, mesh: True), tp2
    ),
    "number of counted tokens": Mutant("Trainer._count", without_all_reduce_of(torch.int64), dp2),
    "sum of losses over stages": Mutant(
        "Trainer._sum_of_losses", set_to(Trainer, "_sum_of_losses", losses_of_this_stage), pp2
    ),
    "sum of gradients over shards in a pipeline": Mutant(
        "_scatter_sum", set_to(sennit.train.gradients, "_scatter_sum", own_row), pp2_fsdp2
    ),
    "sum of gradients over the copies of a bidirectional pipeline": Mutant(
        "_replica_axes", set_to(sennit.train.engine, "_replica_axes", lambda plan, mesh: {}), pp2_dualpipe
    ),
    "sum of gradients over the two ends of a tied pipeline": Mutant(
        "sum_of_uses", set_to(sennit.train.engine, "sum_of_uses", lambda gradient, tied: gradient), pp2_tied
    ),
    "sharing of what each part of a model returns": Mutant(
        "StagedDecoder._share",
        set_to(StagedDecoder, "_share", shared_with_nobody),
        lambda: check_generation(Run("1f1b", 2, 4)),
    ),
    "sum of losses": Mutant("Trainer._sum_of_losses", without_all_reduce_of(torch.float64), dp2),
    "gathering of sharded matrices in Muon": Mutant("Muon._muon", shard_by_shard, muon),
    "random state of a checkpoint": Mutant(
        "Trainer._random_state",
        set_to(Trainer, "_random_state", lambda self: torch.get_rng_state()),
        random_state_is_that_of_rank_zero,
    ),
}

__all__ = ["MUTANTS", "Killer", "Mutant"]
