"""Round trips, retention, replacement, and checkpoints of another model."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from sennit import checkpoint
from sennit.checkpoint.folders import locked
from sennit.checkpoint.manifest import FileRecord, Manifest, encode_manifest, hash_file, read_manifest
from sennit.errors import CheckpointError
from tests.checkpoint.common import equal, holds, save_steps, small_state, zeros


def test_a_state_comes_back_exactly(tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path / "checkpoints", 5, small_state(5), meta={"progress": {"step": 5}}, keep=2)
    assert saved.path == tmp_path / "checkpoints" / "step-5" and saved.seconds > 0
    assert holds(saved.path, 5)
    found = checkpoint.open_latest(tmp_path / "checkpoints")
    assert found is not None and found == checkpoint.describe(saved.path) == checkpoint.verify(saved.path)
    assert (found.path, found.step, found.bytes) == (saved.path, 5, saved.bytes)
    assert saved.bytes == sum(f.stat().st_size for f in saved.path.iterdir() if f.name != "manifest.json")
    full = checkpoint.load_full(saved.path)
    assert equal(full, small_state(5)["model"])
    with pytest.raises(CheckpointError, match="no part 'ema'"):
        checkpoint.load_full(saved.path, part="ema")


def test_the_format_is_that_of_torch(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    dcp_to_torch_save(tmp_path / "step-1", tmp_path / "full.pt")
    loaded = torch.load(tmp_path / "full.pt", weights_only=True)
    assert equal(loaded, small_state(1))


def test_nothing_to_open(tmp_path: Path) -> None:
    assert checkpoint.open_latest(tmp_path / "absent") is None
    (tmp_path / "step-3").mkdir()
    assert checkpoint.open_latest(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"step-3/manifest.json is missing"):
        checkpoint.read_meta(tmp_path / "step-3")
    with pytest.raises(CheckpointError, match=r"step-4/manifest.json does not exist"):
        checkpoint.load(tmp_path / "step-4", small_state(1))


def test_keep_removes_the_oldest_and_never_counts_a_damaged_one(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3"]
    os.truncate(tmp_path / "step-3" / "__0_0.distcp", 10)
    save_steps(tmp_path, 4, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3", "step-4"]
    save_steps(tmp_path, 5, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-4", "step-5"]
    save_steps(tmp_path, 6, keep=1)
    assert os.listdir(tmp_path) == ["step-6"] and holds(tmp_path / "step-6", 6)


def test_the_newest_is_the_one_saved_last(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 12, keep=2)  # back to 10, then on to 12
    assert sorted(os.listdir(tmp_path)) == ["step-12", "step-20"]
    found = checkpoint.open_latest(tmp_path)
    assert found is not None and found.step == 12


def test_the_same_step_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 4)
    checkpoint.save(tmp_path, 4, small_state(40), meta={"progress": {"step": 40}}, keep=2)
    assert os.listdir(tmp_path) == ["step-4"] and holds(tmp_path / "step-4", 40)

    # a crash between the two renames: the former one still counts, and the next save puts it back
    (tmp_path / "step-4").rename(tmp_path / ".step-4.old-0123456789ab")
    found = checkpoint.open_latest(tmp_path)
    assert found is not None and holds(found.path, 40)
    save_steps(tmp_path, 5)
    assert sorted(os.listdir(tmp_path)) == ["step-4", "step-5"] and holds(tmp_path / "step-4", 40)


def test_leftovers_go_unless_another_process_is_saving(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    for kind in ("tmp", "trash"):
        (tmp_path / f".step-2.{kind}-00ff").mkdir()
        (tmp_path / f".step-2.{kind}-00ff" / "__0_0.distcp").write_bytes(b"half")
    with locked(tmp_path), pytest.raises(CheckpointError, match="Another process is saving"):
        save_steps(tmp_path, 2)
    assert len(os.listdir(tmp_path)) == 3
    save_steps(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    other = zeros(small_state(1))
    other["model"]["embedding.weight"] = torch.zeros(8, 3)
    other["model"]["head.weight"] = torch.zeros(2)
    other["optimizer"]["norm.weight"]["exp_avg"] = torch.zeros(())
    del other["optimizer"]["embedding.weight"]
    with pytest.raises(CheckpointError) as info:
        checkpoint.load(tmp_path / "step-1", other)
    for part in (
        "model.head.weight is not in the checkpoint",
        "optimizer.embedding.weight.exp_avg is only in the checkpoint",
        "model.embedding.weight has shape [7, 3] in the checkpoint and [8, 3] here",
        "optimizer.norm.weight.exp_avg is torch.float64 in the checkpoint and torch.float32 here",
    ):
        assert part in str(info.value)
    assert equal(other, zeros(other)), "a tensor was changed"


def test_a_state_that_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state\['model.steps'\] is a int"):
        checkpoint.save(tmp_path, 1, {"model": {"steps": 3}}, meta={})
    with pytest.raises(ValueError, match="both called 'a.b.c'"):
        checkpoint.save(tmp_path, 1, {"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.ones(1)}}, meta={})
    with pytest.raises(CheckpointError, match="is not JSON"):
        checkpoint.save(tmp_path, 1, small_state(1), meta={"loss": float("nan")})
    assert not os.listdir(tmp_path)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("/nowhere/at/all",)


def test_metadata_cannot_run_code(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    folder = tmp_path / "step-1"
    manifest = read_manifest(folder)
    path = folder / ".metadata"
    path.write_bytes(pickle.dumps(Evil()))
    files = [f for f in manifest.files if f.name != ".metadata"]
    files.append(FileRecord(".metadata", path.stat().st_size, hash_file(path)))
    (folder / "manifest.json").write_bytes(encode_manifest(Manifest(1, 1, tuple(files), manifest.meta)))
    with pytest.raises(CheckpointError, match="refers to posix.mkdir"):
        checkpoint.load(folder, small_state(1))
