"""Damaged, incomplete and foreign folders are refused with the tensor and the file; layouts read only their part."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sennit.errors import CheckpointError, ConfigError
from sennit.mesh import Mesh, build_mesh
from sennit.models import build_decoder, hold_in
from sennit.models.hf import init_weights, write_hf
from sennit.models.hf.write import plan_shards
from sennit.nn.parameter import local_part
from tests.models.hf_models import VOCAB, hf_model, loaded, saved
from tests.ranks import run_ranks

NAME = "model.layers.1.mlp.up_proj.weight"


def change(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda t: t.pop(NAME), NAME),
        (lambda t: t.update({"model.layers.7.mlp.up_proj.weight": torch.zeros(1)}), "model.layers.7"),
        (lambda t: t.update({NAME: torch.zeros(96, 63)}), "[96, 63]"),
        (lambda t: t.update({"model.embed_tokens.weight": torch.zeros(VOCAB + 1, 64)}), "[132, 64]"),
        (lambda t: t.update({NAME: torch.zeros(96, 64, dtype=torch.int8)}), "I8"),
    ],
    ids=["missing", "extra", "shape", "vocabulary", "dtype"],
)
def test_wrong_tensors_are_named(edit: Any, named: str, tmp_path: Path) -> None:
    saved("llama2", tmp_path)
    change(tmp_path, edit)
    with pytest.raises(CheckpointError) as caught:
        loaded(tmp_path)
    assert named in str(caught.value) and str(tmp_path) in str(caught.value)


def test_harmless_extras_are_allowed(tmp_path: Path) -> None:
    saved("llama2-tied", tmp_path)
    extra = {"lm_head.weight": torch.zeros(VOCAB, 64), "rotary_emb.inv_freq": torch.ones(8)}
    change(tmp_path, lambda tensors: tensors.update(extra))
    loaded(tmp_path)


def test_pickles_and_empty_folders_are_refused(tmp_path: Path) -> None:
    hf_model("llama2").config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="neither model.safetensors"):
        loaded(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="pickle"):
        loaded(tmp_path)


def test_a_missing_or_cut_shard_is_named(tmp_path: Path) -> None:
    saved("llama2", tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    loaded(tmp_path)
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=shards[1].name):
        loaded(tmp_path)
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=shards[1].name):
        loaded(tmp_path)


def test_an_export_is_all_or_nothing(tmp_path: Path) -> None:
    saved("llama2", tmp_path / "hf")
    model = loaded(tmp_path / "hf")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(CheckpointError, match="exists already"):
        write_hf(tmp_path / "hf", weights, model.config)

    class Broken:
        eos_id = 0

        def save(self, folder: Path) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_hf(tmp_path / "out", weights, model.config, tokenizer=Broken())
    with pytest.raises(CheckpointError, match="no norm.weight"):
        write_hf(tmp_path / "out", {k: v for k, v in weights.items() if k != "norm.weight"}, model.config)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_shards_are_filled_in_order() -> None:
    assert plan_shards({"a": 3, "b": 3, "c": 9, "d": 1, "e": 4}, 6) == [["a", "b"], ["c"], ["d", "e"]]


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_every_rank_reads_its_own_part(layout: Any, tmp_path: Path) -> None:
    saved("qwen2", tmp_path)
    whole = {name: p.detach() for name, p in loaded(tmp_path).named_parameters()}
    config = loaded(tmp_path).config

    def rank() -> int:
        mesh = build_mesh(**layout)
        model = build_decoder(config, mesh, device=torch.device("cpu"), dtype=torch.bfloat16, seed=1)
        masters = hold_in(model, torch.bfloat16)
        refreshed: list[bool] = []
        trainer: Any = SimpleNamespace(
            slots=[SimpleNamespace(name=name, master=master) for name, master in masters.items()],
            config=config,
            optimizer=SimpleNamespace(refresh=lambda: refreshed.append(True)),
        )
        init_weights(trainer, tmp_path)
        assert refreshed == [True]
        count = 0
        for name, master in masters.items():
            part, start = local_part(master)
            index = tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))
            assert part.dtype == torch.float32 and torch.equal(part, whole[name][index]), name
            count += part.numel()
        return count

    counts = run_ranks(rank, 4 if len(layout) == 2 else 2)
    assert max(counts) < 0.75 * sum(p.numel() for p in whole.values())


def test_weights_of_another_model_do_not_fit(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    config = loaded(tmp_path).config
    plain = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**plain, "head_dim": 16, "model_type": "llama"}))
    model = build_decoder(config, Mesh(), device=torch.device("cpu"), dtype=torch.float32, seed=1)
    slots = [SimpleNamespace(name=name, master=p.detach()) for name, p in model.named_parameters()]
    trainer: Any = SimpleNamespace(slots=slots, config=config)
    with pytest.raises(ConfigError, match=r"model.head_size is 32 here and 16 there; model.qk_norm"):
        init_weights(trainer, tmp_path)
    with pytest.raises(CheckpointError, match="no folder"):
        init_weights(trainer, tmp_path / "absent")
