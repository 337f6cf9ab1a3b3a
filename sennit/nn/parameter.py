"""Parameters: where they live on the mesh, how they start, and how compute code sees them.

A parameter that is split over tensor-parallel ranks is a DTensor, so that checkpoints, norms and initialisation know
its place. Compute is local: layers call `local(weight)` and get this rank's plain tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sennit.mesh import Mesh

INIT_BLOCK_ROWS = 64
"""Rows that share one random generator. Part of the definition of the initial weights: changing it changes them."""


@dataclass(frozen=True, slots=True)
class Init:
    """How a parameter starts: `normal` with `std`, `ones` or `zeros`; rows from `live_rows` on (padding) are zero."""

    kind: str = "normal"
    std: float = 0.02
    live_rows: int = -1


def new_parameter(mesh: Mesh, shape: tuple[int, ...], init: Init, *, shard: int | None = None) -> nn.Parameter:
    """Return an uninitialised parameter of global `shape` on the meta device.

    `shard`: the dimension that is split over tensor-parallel ranks, or None for one that every rank holds whole.
    The size of that dimension must divide by tp (checked by the recipe's rules).
    """
    tp = mesh.tp
    if tp.size == 1:
        parameter = nn.Parameter(torch.empty(shape, device="meta"))
    else:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        local_shape = list(shape)
        if shard is not None:
            assert shape[shard] % tp.size == 0, f"size {shape[shard]} of dimension {shard} over tp={tp.size}"
            local_shape[shard] //= tp.size
        placement = Replicate() if shard is None else Shard(shard)
        data = torch.empty(local_shape, device="meta")
        parameter = nn.Parameter(DTensor.from_local(data, mesh.submesh("tp"), [placement], run_check=False))
    parameter.sennit_init = init  # type: ignore[attr-defined]
    return parameter


def local(weight: Tensor) -> Tensor:
    """Return this rank's plain tensor of a parameter; gradients flow back to the parameter, or to its leaf (`leaf_of`)."""
    leaf = getattr(weight, "_sennit_leaf", None)
    if leaf is not None:
        return leaf
    return weight.to_local() if hasattr(weight, "to_local") else weight  # type: ignore[attr-defined]


def leaf_of(weight: Tensor) -> Tensor:
    """Return the plain tensor that collects this rank's gradient of a parameter from now on: itself, or for a DTensor a
    leaf that shares its storage, which `local` returns henceforth.

    Gradients that are put off (`ops.weight_queue`) can only be given to leaves.
    """
    if not hasattr(weight, "to_local"):
        return weight
    leaf = getattr(weight, "_sennit_leaf", None)
    if leaf is None:
        leaf = weight.detach().to_local().requires_grad_(weight.requires_grad)  # type: ignore[attr-defined]
        weight._sennit_leaf = leaf  # type: ignore[attr-defined]
    return leaf


def parameter_inits(model: nn.Module) -> dict[str, Init]:
    """Return each parameter's `Init` by name. Call it before anything (FSDP, to_empty) replaces the parameters."""
    return {name: parameter.sennit_init for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]


@torch.no_grad()
def initialise(model: nn.Module, inits: dict[str, Init], *, seed: int) -> None:
    """Fill every parameter in place with values that depend on (seed, name, global row) alone, never on the layout."""
    for name, parameter in model.named_parameters():
        init = inits[name]
        target, offsets = local_part(parameter)
        if init.kind != "normal":
            target.fill_(1.0 if init.kind == "ones" else 0.0)
            continue
        for rows, values in _normal_blocks(name, tuple(parameter.shape), offsets[0], target.shape[0], init, seed):
            columns = values.narrow(1, offsets[1], target.shape[1]) if target.dim() > 1 else values
            target[rows].copy_(columns)


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return (this rank's tensor, its offset in each dimension of the full tensor)."""
    if not hasattr(parameter, "to_local"):
        return parameter.detach(), (0,) * parameter.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape,
        parameter.device_mesh,  # type: ignore[attr-defined]
        parameter.placements,  # type: ignore[attr-defined]
    )
    tensor = parameter.detach().to_local()  # type: ignore[attr-defined]
    assert tuple(tensor.shape) == tuple(shape), f"local shape {tuple(tensor.shape)}, expected {tuple(shape)}"
    return tensor, tuple(offset)


def _normal_blocks(
    name: str, shape: tuple[int, ...], first_row: int, num_rows: int, init: Init, seed: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows of the local tensor, full-width float32 values) for the blocks that overlap the local rows."""
    live = shape[0] if init.live_rows < 0 else init.live_rows
    generator = torch.Generator()
    for block in range(first_row // INIT_BLOCK_ROWS, -(-(first_row + num_rows) // INIT_BLOCK_ROWS)):
        start = block * INIT_BLOCK_ROWS
        stop = min(start + INIT_BLOCK_ROWS, shape[0])
        key = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=7).digest()
        generator.manual_seed(int.from_bytes(key, "little"))
        values = torch.randn((stop - start, *shape[1:]), generator=generator).mul_(init.std)
        if live < stop:
            values[max(live - start, 0) :] = 0.0
        low, high = max(start, first_row), min(stop, first_row + num_rows)
        if low < high:
            yield slice(low - first_row, high - first_row), values[low - start : high - start]


__all__ = ["INIT_BLOCK_ROWS", "Init", "initialise", "leaf_of", "local", "local_part", "new_parameter", "parameter_inits"]
