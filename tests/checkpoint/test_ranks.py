"""Saving and loading by several ranks: another layout, failures on one rank, shared verification."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sennit import checkpoint
from sennit.checkpoint.load import _share
from sennit.checkpoint.manifest import FileRecord
from sennit.checkpoint.storage import _HashedFile
from sennit.errors import CheckpointError
from tests.checkpoint.common import equal, holds, save_steps
from tests.ranks import run_ranks

SHAPES = {
    "wq.weight": (8, 6),
    "wo.weight": (6, 8),
    "uneven.weight": (5, 3),
    "one_row.weight": (1, 4),
    "norm.weight": (6,),
}


def full_values(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sharded(values: dict[str, torch.Tensor], layout: str) -> dict[str, Any]:
    """`values` as DTensors in `layout`, and one plain tensor that all ranks share.

    tp: wq by rows, wo by columns, the rest whole. fsdp: every tensor by rows, by FSDP itself; of wq it then splits the
    rows that tp has left.
    """
    size = dist.get_world_size()
    tp_size = {"fsdp": 1, "tp": size, "fsdp-tp": 2}[layout]
    mesh = init_device_mesh("cpu", (size // tp_size, tp_size), mesh_dim_names=("dp_shard", "tp"))
    model: dict[str, Any] = dict(values)
    if "tp" in layout:
        split = {"wq.weight": Shard(0), "wo.weight": Shard(1)}
        model = {n: distribute_tensor(v, mesh["tp"], [split.get(n, Replicate())]) for n, v in values.items()}
    if "fsdp" in layout:
        module = nn.ParameterDict({name.replace(".", "_"): nn.Parameter(value) for name, value in model.items()})
        fully_shard(module, mesh=mesh["dp_shard"])
        model = {name: module[name.replace(".", "_")].detach() for name in model}
    return {"model": model, "random": {"cpu": torch.full((9,), 7, dtype=torch.uint8)}}


def save_in(layout: str, root: Path, step: int) -> None:
    group = checkpoint.new_checkpoint_group()
    checkpoint.save(root, step, sharded(full_values(step), layout), meta={"layout": layout}, keep=2, group=group)


def load_in(layout: str, root: Path, step: int, values: int = 0) -> None:
    """Load the newest checkpoint and compare it with `full_values(values)`; 0 means those of its step."""
    group = checkpoint.new_checkpoint_group()
    zero = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    state = sharded(zero, layout)
    state["random"]["cpu"].zero_()
    found = checkpoint.open_latest(root, group=group)
    assert found is not None and found.step == step
    checkpoint.load(found.path, state, group=group)
    for name, value in full_values(values or step).items():
        tensor = state["model"][name]
        assert isinstance(tensor, DTensor) and torch.equal(tensor.full_tensor(), value), name
    assert state["random"]["cpu"].tolist() == [7] * 9


def test_a_checkpoint_is_read_in_any_layout(tmp_path: Path) -> None:
    run_ranks(save_in, 2, "fsdp", tmp_path, 1)
    assert len(list((tmp_path / "step-1").glob("*.distcp"))) == 2
    run_ranks(load_in, 2, "tp", tmp_path, 1)
    run_ranks(load_in, 4, "fsdp-tp", tmp_path, 1)
    run_ranks(load_in, 3, "fsdp", tmp_path, 1)
    assert equal(checkpoint.load_full(tmp_path / "step-1"), full_values(1))

    run_ranks(save_in, 4, "fsdp-tp", tmp_path, 2)
    assert equal(checkpoint.load_full(tmp_path / "step-2"), full_values(2))
    alone = {
        "model": {name: torch.zeros(shape) for name, shape in SHAPES.items()},
        "random": {"cpu": torch.zeros(9, dtype=torch.uint8)},
    }
    checkpoint.load(tmp_path / "step-2", alone)
    assert equal(alone["model"], full_values(2))
    checkpoint.save(tmp_path, 3, alone, meta={}, keep=2)
    run_ranks(load_in, 2, "tp", tmp_path, 3, 2)


def test_ranks_with_different_parts(tmp_path: Path) -> None:
    """As the stages of a pipeline: each rank has its own names, and a checkpoint holds them all."""

    def stage(value: float) -> dict[str, Any]:
        return {"model": {f"layers.{dist.get_rank()}.w": torch.full((4,), value + dist.get_rank())}}

    def body() -> None:
        group = checkpoint.new_checkpoint_group()
        saved = checkpoint.save(tmp_path, 1, stage(1.0), meta={}, keep=2, group=group)
        state = stage(0.0)
        checkpoint.load(saved.path, state, group=group)
        assert equal(state, stage(1.0))

    run_ranks(body, 2)
    assert {name: t[0].item() for name, t in checkpoint.load_full(tmp_path / "step-1").items()} == {
        "layers.0.w": 1.0,
        "layers.1.w": 2.0,
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_is_an_error_on_all(tmp_path: Path, rank: int) -> None:
    def fail(self: _HashedFile, data: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def body() -> str:
        group = checkpoint.new_checkpoint_group()
        state = sharded(full_values(2), "fsdp")
        checkpoint.save(tmp_path, 1, state, meta={}, keep=1, group=group)
        write = _HashedFile.write
        if dist.get_rank() == rank:
            _HashedFile.write = fail  # type: ignore[method-assign]
        with pytest.raises(CheckpointError, match=f"step 2 could not be saved .* rank {rank}: .*Input/output") as info:
            checkpoint.save(tmp_path, 2, state, meta={}, keep=1, group=group)
        dist.barrier()
        assert os.listdir(tmp_path) == ["step-1"]
        dist.barrier()
        _HashedFile.write = write  # type: ignore[method-assign]
        checkpoint.save(tmp_path, 3, state, meta={}, keep=1, group=group)  # and the group still works
        return str(info.value)

    first, second = run_ranks(body, 2)
    assert first == second and os.listdir(tmp_path) == ["step-3"]


def test_a_rank_that_dies_does_not_hang_the_others(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)

    def body() -> None:
        group = checkpoint.new_checkpoint_group()
        if dist.get_rank() == 1:
            _HashedFile.write = lambda self, data: os._exit(9)  # type: ignore[method-assign,assignment]
        checkpoint.save(tmp_path, 2, sharded(full_values(2), "fsdp"), meta={}, keep=1, group=group)

    with pytest.raises(AssertionError, match="rank 1 ended without a result(?s:.*)rank 0 raised(?s:.*)CheckpointError"):
        run_ranks(body, 2)
    assert holds(tmp_path / "step-1", 1) and os.listdir(tmp_path) == ["step-1"]


def test_damage_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(save_in, 2, "fsdp", tmp_path, 1)
    run_ranks(save_in, 2, "fsdp", tmp_path, 2)
    path = tmp_path / "step-2" / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)

    def body() -> str:
        group = checkpoint.new_checkpoint_group()
        state = sharded({name: torch.zeros(shape) for name, shape in SHAPES.items()}, "fsdp")
        with pytest.raises(CheckpointError) as info:
            checkpoint.load(tmp_path / "step-2", state, group=group)
        assert not any(tensor.full_tensor().any() for tensor in state["model"].values())
        return str(info.value)

    first, second = run_ranks(body, 2)
    assert first == second and str(path) in first and f"intact is {tmp_path / 'step-1'};" in first
    run_ranks(load_in, 2, "fsdp", tmp_path, 1)  # open_latest passes over it


def test_every_file_is_hashed_by_exactly_one_rank() -> None:
    files = tuple(FileRecord(f"f{i}", size, "") for i, size in enumerate([5, 100, 7, 90, 1, 0, 40]))
    shares = [_share(files, rank, 3) for rank in range(3)]
    assert sorted(r.name for share in shares for r in share) == [f.name for f in files]
    assert max(sum(r.size for r in share) for share in shares) == 100
