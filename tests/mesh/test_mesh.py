"""The mesh: neighbours, joined axes, and one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from sennit.mesh import DIMENSIONS, Axis, Mesh, build_mesh
from tests.ranks import fake_world, run_ranks

pytestmark = pytest.mark.apart


def check_axes() -> None:
    rank = dist.get_rank()
    mesh = build_mesh(dp_replicate=2, dp_shard=2, tp=2)
    members = {name: dist.get_process_group_ranks(mesh.axis(name).group) for name in ("dp_replicate", "dp_shard", "tp")}
    assert members["tp"] == [rank // 2 * 2, rank // 2 * 2 + 1], "tensor-parallel ranks are neighbours"
    assert members["dp_shard"] == [rank & ~2, rank | 2]
    assert members["dp_replicate"] == [rank & ~4, rank | 4]
    assert (mesh.dp_replicate.rank, mesh.dp_shard.rank, mesh.tp.rank) == (rank >> 2, rank >> 1 & 1, rank & 1)
    for joined in (mesh.data, mesh.loss):
        assert (joined.size, joined.rank) == (4, rank >> 1)
        assert dist.get_process_group_ranks(joined.group) == [rank & 1, 2 + (rank & 1), 4 + (rank & 1), 6 + (rank & 1)]
    assert (mesh.world.size, mesh.world.rank, mesh.pp.size, mesh.cp.size) == (8, rank, 1, 1)


@pytest.mark.parametrize("rank", range(8))
def test_ranks_find_their_place_on_every_axis(rank: int) -> None:
    with fake_world(8, rank):
        check_axes()


def check_reuse() -> None:
    mesh = build_mesh(dp_replicate=2)
    assert mesh.data.group is mesh.dp_replicate.group, "an axis that joins one dimension reuses its group"
    assert (mesh.data.name, mesh.loss.size) == ("data", 2)


def test_joining_one_dimension_makes_no_new_group() -> None:
    run_ranks(check_reuse, 2)


def test_one_process_needs_no_process_group() -> None:
    mesh = build_mesh()
    assert mesh == Mesh()
    assert all(mesh.axis(name).size == 1 and mesh.axis(name).group is None for name in DIMENSIONS)


def test_a_rank_outside_its_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="axis tp: rank 2 is outside 0..1"):
        Axis("tp", 2, 2)
