"""Type checking of our layers with the package spmd-types, on a fake process group of any size.

Tensor-parallel axis: global types. A split tensor names the dimension that is split, a product over a split dimension
becomes a partial sum by itself, and nothing is assumed about layer code. Data axes: local types. Activations vary,
parameters are replicated with gradients that are partial until the gradient reduction, and the loss is a partial sum.

Three functions are opaque to the checker and get their type here: the embedding look-up in a part of the vocabulary
(its result is a partial sum), a slice whose start depends on the rank (replicated kv heads), and the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types.checker import typecheck
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

import sennit.models.decoder
import sennit.nn.linear
import sennit.nn.norm
from sennit import ops
from sennit.mesh import Mesh, build_mesh
from sennit.models import Decoder
from sennit.models.build import shard_parameters
from sennit.nn import Context, DecoderConfig, ReplicatedHeadsLinear, VocabEmbedding
from sennit.nn import parameter as parameters
from sennit.ops.context_parallel import ContextShards

BATCH, LENGTH, HIDDEN = 2, 16, 16


def tiny_config(**changes: Any) -> DecoderConfig:
    """Return a one-layer decoder whose sizes divide by tp = 8."""
    sizes: dict[str, Any] = dict(
        hidden_size=HIDDEN,
        num_layers=1,
        num_heads=8,
        num_kv_heads=8,
        head_size=4,
        ffn_size=16,
        vocab_size=60,
        padded_vocab_size=64,
        max_position=LENGTH,
    )
    return DecoderConfig(**{**sizes, **changes})


FAMILIES = {
    "llama": tiny_config(),
    "llama-tied": tiny_config(tie_embeddings=True),
    "qwen2": tiny_config(family="qwen2", qkv_bias=True, num_kv_heads=8),
    "qwen3": tiny_config(family="qwen3", qk_norm=True),
    "mistral": tiny_config(family="mistral", sliding_window=4),
    "few-kv-heads": tiny_config(family="qwen3", qk_norm=True, qkv_bias=True, num_kv_heads=2),
}


@contextmanager
def fake_mesh(**sizes: Any) -> Iterator[Mesh]:
    """Yield the mesh of rank 0 in a job of as many ranks as the product of `sizes`, none of which exist."""
    world = math.prod(size for name, size in sizes.items() if name != "ulysses")
    dist.init_process_group(backend="fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield build_mesh(**sizes)
    finally:
        dist.destroy_process_group()


def _tp(mesh: Mesh) -> Any:
    return mesh.tp.group


def data_groups(mesh: Mesh) -> tuple[Any, ...]:
    """Return the groups over which ranks have other tokens: data ranks and context-parallel ranks."""
    return tuple(axis.group for axis in (mesh.dp_replicate, mesh.dp_shard, mesh.cp) if axis.size > 1)


def layout_type(mesh: Mesh, layout: str) -> dict[Any, Any]:
    """Return the type of an activation [b, s, h] that lies over the tensor-parallel ranks as `Segment.out` says."""
    types: dict[Any, Any] = {group: spmd.V for group in data_groups(mesh)}
    if mesh.tp.size > 1:
        on_tp = {"sequence": spmd.S(1), "replicated": spmd.I, "input": spmd.R, "partial": spmd.P}
        types[_tp(mesh)] = on_tp[layout]
    return types


@contextmanager
def checking(mesh: Mesh) -> Iterator[None]:
    """Check every operation in the block, strictly."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        _type_parameters(patch, mesh)
        _type_embedding(patch, mesh)
        _type_replicated_heads(patch, mesh)
        stack.enter_context(spmd.set_current_mesh(mesh.device_mesh, local_axes=data_groups(mesh)))
        stack.enter_context(typecheck(strict_mode="strict", local=False))
        stack.enter_context(ops.force(dict.fromkeys(REFERENCE_OPS, "reference")))
        yield


REFERENCE_OPS = ("apply_rope", "rms_norm", "add_rms_norm", "swiglu", "rope_attention", "linear", "linears", "swiglu_linear")


def _type_parameters(patch: pytest.MonkeyPatch, mesh: Mesh) -> None:
    """A parameter is I on tp if whole, S if split (its DTensor says which), and R on every data axis."""
    real = parameters.local

    def local(weight: Tensor) -> Tensor:
        plain = real(weight)
        types: dict[Any, Any] = {group: spmd.R for group in data_groups(mesh)}
        if mesh.tp.size > 1:
            (placement,) = weight.placements  # type: ignore[attr-defined]
            types[_tp(mesh)] = spmd.I if placement.is_replicate() else spmd.S(placement.dim)
        return spmd.assert_type(plain, types)  # type: ignore[return-value]

    for module in (sennit.nn.linear, sennit.nn.norm, sennit.models.decoder):
        patch.setattr(module, "local", local)


def _type_embedding(patch: pytest.MonkeyPatch, mesh: Mesh) -> None:
    real = VocabEmbedding.forward

    def forward(self: VocabEmbedding, tokens: Tensor) -> Tensor:
        with spmd.local():
            rows = real(self, tokens)
            return rows if mesh.tp.size == 1 else spmd.reinterpret(rows, _tp(mesh), src=spmd.V, dst=spmd.P)

    patch.setattr(VocabEmbedding, "forward", forward)


def _type_replicated_heads(patch: pytest.MonkeyPatch, mesh: Mesh) -> None:
    """The rank's own rows of a replicated weight: no other rank group has them, so they vary; in rank order they are
    the heads, each repeated. From I (the forgotten `replicated_weight`) there is no such step."""
    real = ReplicatedHeadsLinear._rows

    def rows(self: ReplicatedHeadsLinear, weight: Tensor) -> Tensor:
        mine = real(self, weight)
        with spmd.local():
            mine = spmd.reinterpret(mine, _tp(mesh), src=spmd.R, dst=spmd.V, expert_mode=True)
        return spmd.assert_type(mine, {_tp(mesh): spmd.S(0)})  # type: ignore[return-value]

    patch.setattr(ReplicatedHeadsLinear, "_rows", rows)


def vocab_parallel_loss(mesh: Mesh) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a stand-in for `ops.linear_cross_entropy` that takes and returns what it states.

    hidden [t, h] is an `input` (its gradient is a partial sum), weight [v / tp, h] is split, and the loss is equal on
    all tensor-parallel ranks with gradient 1 on each: replicated and complete.
    """

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        every = {group: spmd.V for group in data_groups(mesh)}
        on_tp = mesh.tp.size > 1
        spmd.assert_type(hidden, {**every, **({_tp(mesh): spmd.R} if on_tp else {})})
        spmd.assert_type(weight, {_tp(mesh): spmd.S(0)} if on_tp else {group: spmd.R for group in every})
        partial = (hidden @ weight.T).sum()
        return spmd.all_reduce(partial, _tp(mesh), src=spmd.P, dst=spmd.I) if on_tp else partial

    return loss


def new_model(mesh: Mesh, config: DecoderConfig, *, fsdp: bool) -> Decoder:
    model = Decoder(mesh, config)
    if fsdp:
        shard_parameters(model, mesh, dtype=torch.float32, reshard_after_forward=True)
    model.materialise(torch.device("cpu"), seed=0)
    return model


def new_inputs(mesh: Mesh, model: Decoder, *, sequence_parallel: bool) -> tuple[Tensor, Tensor, Context]:
    """Return typed (tokens [b, s], residual stream [b, s, h], context)."""
    with spmd.no_typecheck():
        shards, whole = None, LENGTH // mesh.cp.size
        if mesh.cp.size > 1:
            whole = 2 * mesh.tp.size
            lengths = [[whole * mesh.cp.size]] * BATCH
            shards = ContextShards.of(lengths, cp=mesh.cp, ring=mesh.ring, ulysses=mesh.ulysses)
            shards.ranges(model.config.sliding_window)  # made once; positions are no activations
        tokens = torch.zeros(BATCH, whole, dtype=torch.int64)
        context = model.context(
            tokens,
            dtype=torch.float32,
            positions=None if shards is None else shards.index,
            sequence_parallel=sequence_parallel,
            shards=shards,
        )
        length = whole // mesh.tp.size if sequence_parallel else whole
        x = torch.randn(BATCH, length, HIDDEN, requires_grad=True)
    spmd.assert_type(context.cos, spmd.R)
    spmd.assert_type(context.sin, spmd.R)
    spmd.assert_type(x, layout_type(mesh, "sequence" if sequence_parallel else "replicated"))
    spmd.assert_type(tokens, layout_type(mesh, "input"))
    return tokens, x, context


def check_segments(mesh: Mesh, model: Decoder, x: Tensor, context: Context) -> None:
    """Run a layer segment by segment and assert the layout that each segment names."""
    between = "sequence" if context.sequence_parallel else "replicated"
    state: tuple[Tensor | None, ...] = (x, None)
    (only,) = model.decoder_layers()
    for layer in (only, only):
        for segment in layer.segments(context):
            state = segment.fn(*state)
            assert len(segment.out) == len(state)
            for tensor, layout in zip(state, segment.out, strict=True):
                spmd.assert_type(tensor, layout_type(mesh, layout))  # type: ignore[arg-type]
    for tensor in state:
        spmd.assert_type(tensor, layout_type(mesh, between))  # type: ignore[arg-type]


@contextmanager
def fsdp_passes_types() -> Iterator[None]:
    """Let activations keep their types through FSDP2's hooks, whose own communication is not checked here."""

    def before(real: Callable[..., Any]) -> Callable[..., Any]:
        def hook(self: FSDPState, module: nn.Module, args: Any, kwargs: Any) -> Any:
            with spmd.no_typecheck():
                result = real(self, module, args, kwargs)
            _copy_types((args, kwargs), result)
            return result

        return hook

    def after(real: Callable[..., Any]) -> Callable[..., Any]:
        def hook(self: FSDPState, module: nn.Module, inputs: Any, output: Any) -> Any:
            with spmd.no_typecheck():
                result = real(self, module, inputs, output)
            _copy_types(output, result)
            return result

        return hook

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPState, "_pre_forward", before(FSDPState._pre_forward))
        patch.setattr(FSDPState, "_post_forward", after(FSDPState._post_forward))
        yield


def _copy_types(source: Any, target: Any) -> None:
    for old, new in zip(tree_leaves(source), tree_leaves(target), strict=True):
        if isinstance(old, Tensor) and old is not new and spmd.has_local_type(old):
            spmd.assert_type(new, spmd.get_local_type(old), spmd.get_partition_spec(old))
