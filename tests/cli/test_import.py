"""`sennit import`: a Hugging Face folder becomes a recipe that starts from its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sennit.cli.main import run
from sennit.data.tokenizer import byte_tokenizer
from sennit.device import get_device
from sennit.mesh import Mesh
from sennit.models.hf import init_weights
from sennit.recipe import check_run, load_recipe
from sennit.train.trainer import Trainer
from tests.models.hf_models import VOCAB, loaded, saved


def test_the_recipe_trains_the_same_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "hf"
    saved("qwen3", folder)
    byte_tokenizer().save(folder)
    assert run(["import", str(folder), "--out", str(tmp_path / "r.toml"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["family"] == "qwen3" and document["recipe"] == str(tmp_path / "r.toml")

    recipe = check_run(load_recipe(str(tmp_path / "r.toml"), {"precision.dtype": "fp32"}), 1)
    assert recipe.model.init_from == recipe.data.tokenizer == str(folder)
    trainer = Trainer(recipe, Mesh(), get_device("cpu"), train_loader=None, vocab_size=VOCAB)  # type: ignore[arg-type]
    init_weights(trainer, recipe.model.init_from)
    assert document["parameters"] == trainer.config.num_parameters
    for name, parameter in loaded(folder, vocab_multiple=128).named_parameters():
        assert torch.equal(parameter, trainer.engine.masters[name]), name


def test_into_a_folder_and_never_over_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved("mistral", tmp_path / "hf")
    assert run(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    assert "sennit train" in captured.out and "no tokenizer.json" in captured.err
    assert load_recipe(str(tmp_path / "out" / "recipe.toml")).model.sliding_window == 7
    assert run(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "out")]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_model_that_is_not_supported_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved("llama2", tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attention_bias": True}))
    assert run(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "r.toml")]) == 2
    assert "attention_bias" in capsys.readouterr().err and not (tmp_path / "r.toml").exists()
