"""The device mesh of a job: which ranks share what, as named axes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from sennit.mesh.axis import Axis

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh dimensions from the slowest to the fastest varying rank; tensor-parallel neighbours are adjacent ranks."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The axes of the mesh as this rank sees them.

    `loss` joins the dimensions over which tokens are distributed (dp_replicate x dp_shard x cp): sums of losses and
    token counts are complete after a sum over it. `data` is the part of it that draws different samples
    (dp_replicate x dp_shard). `shard` is what parameters are sharded over: dp_shard, and cp with it (cp ranks hold
    the same weights anyway). `cp` is `ring` x `ulysses`: its ranks exchange keys and values around the ring, and heads
    for sequence inside a Ulysses group. `world` spans all ranks. `device_mesh` is None in a job of one process.
    """

    pp: Axis = field(default_factory=lambda: Axis("pp"))
    dp_replicate: Axis = field(default_factory=lambda: Axis("dp_replicate"))
    dp_shard: Axis = field(default_factory=lambda: Axis("dp_shard"))
    cp: Axis = field(default_factory=lambda: Axis("cp"))
    tp: Axis = field(default_factory=lambda: Axis("tp"))
    loss: Axis = field(default_factory=lambda: Axis("loss"))
    data: Axis = field(default_factory=lambda: Axis("data"))
    shard: Axis = field(default_factory=lambda: Axis("dp_shard"))
    ring: Axis = field(default_factory=lambda: Axis("ring"))
    ulysses: Axis = field(default_factory=lambda: Axis("ulysses"))
    world: Axis = field(default_factory=lambda: Axis("world"))
    device_mesh: DeviceMesh | None = None

    def axis(self, name: str) -> Axis:
        """Return the axis called `name` (one of DIMENSIONS, or loss, data, world)."""
        return getattr(self, name)

    def submesh(self, *names: str) -> DeviceMesh:
        """Return the torch DeviceMesh over `names`; only in a job of several processes."""
        assert self.device_mesh is not None, "a job of one process has no device mesh"
        first, *others = names
        with warnings.catch_warnings():
            # torch announces that flattened dimensions will have to be kept by hand; FSDP2 and DTensor need them sliced.
            warnings.filterwarnings("ignore", message="Slicing a flattened dim")
            return self.device_mesh[names] if others else self.device_mesh[first]


def build_mesh(
    *,
    device_type: str = "cpu",
    pp: int = 1,
    dp_replicate: int = 1,
    dp_shard: int = 1,
    cp: int = 1,
    tp: int = 1,
    ulysses: int = 1,
) -> Mesh:
    """Build the mesh over all ranks of the initialised default process group; `ulysses` divides cp.

    The product of the sizes must equal the world size (checked before, by `check_run`). Collective: every rank must
    call it. With one process and no process group, returns a mesh of axes of size 1.
    """
    sizes: dict[str, int] = dict(zip(DIMENSIONS, (pp, dp_replicate, dp_shard, cp, tp), strict=True))
    if not dist.is_initialized():
        assert all(size == 1 for size in sizes.values()), f"no process group for a mesh of {sizes}"
        return Mesh()
    from torch.distributed.device_mesh import init_device_mesh

    device_mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=DIMENSIONS)
    axes = {name: _axis_of(device_mesh, name, sizes[name]) for name in DIMENSIONS}
    data = _joined(device_mesh, "data", ("dp_replicate", "dp_shard"), sizes)
    loss = data if cp == 1 else _joined(device_mesh, "loss", ("dp_replicate", "dp_shard", "cp"), sizes)
    shard = axes["dp_shard"]
    if shard.size > 1 and cp > 1:
        shard = _joined(device_mesh, "dp_shard_cp", ("dp_shard", "cp"), sizes)
    ring, inner = _split_cp(device_mesh, axes["cp"], ulysses)
    world = Axis("world", dist.get_world_size(), dist.get_rank(), dist.group.WORLD if dist.get_world_size() > 1 else None)
    return Mesh(
        **axes, data=data, loss=loss, shard=shard, ring=ring, ulysses=inner, world=world, device_mesh=device_mesh
    )


def _axis_of(device_mesh: DeviceMesh, name: str, size: int) -> Axis:
    if size == 1:
        return Axis(name)
    return Axis(name, size, device_mesh.get_local_rank(name), device_mesh.get_group(name))


def _joined(device_mesh: DeviceMesh, name: str, dims: tuple[str, ...], sizes: dict[str, int]) -> Axis:
    """Return one axis over several mesh dimensions, reusing a dimension's group when the others have size 1."""
    wide = [dim for dim in dims if sizes[dim] > 1]
    if not wide:
        return Axis(name)
    if len(wide) == 1:
        one = _axis_of(device_mesh, wide[0], sizes[wide[0]])
        return Axis(name, one.size, one.rank, one.group)
    flat = device_mesh[tuple(wide)]._flatten(name)
    return Axis(name, flat.size(), flat.get_local_rank(), flat.get_group())


def _split_cp(device_mesh: DeviceMesh, cp: Axis, ulysses: int) -> tuple[Axis, Axis]:
    """Return cp as (ring, ulysses); the ranks of a Ulysses group are neighbours."""
    if ulysses == 1:
        return Axis("ring", cp.size, cp.rank, cp.group), Axis("ulysses")
    if ulysses == cp.size:
        return Axis("ring"), Axis("ulysses", cp.size, cp.rank, cp.group)
    ranks = device_mesh.mesh.unflatten(DIMENSIONS.index("cp"), (cp.size // ulysses, ulysses))
    place = DIMENSIONS.index("cp")
    rings = ranks.movedim(place, -1).reshape(-1, cp.size // ulysses)
    groups = ranks.movedim(place + 1, -1).reshape(-1, ulysses)
    return new_axis("ring", rings.tolist()), new_axis("ulysses", groups.tolist())


def new_axis(name: str, groups: list[list[int]]) -> Axis:
    """Return this rank's axis over new process groups, given as lists of global ranks that do not overlap.

    Collective: every rank of the job calls it with equal arguments. A rank in none of the lists gets an axis of size 1.
    """
    mine, me = Axis(name), dist.get_rank()
    for ranks in groups:
        group: Any = dist.new_group(ranks) if len(ranks) > 1 else None
        if me in ranks and group is not None:
            mine = Axis(name, len(ranks), ranks.index(me), group)
    return mine


__all__ = ["DIMENSIONS", "Mesh", "build_mesh", "new_axis"]
