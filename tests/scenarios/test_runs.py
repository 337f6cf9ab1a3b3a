"""What users of other frameworks saw go wrong with whole runs, started as a user starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sennit.checkpoint import load_full
from tests.faults.runs import command, environment, train, write_recipe

pytestmark = pytest.mark.heavy


def export(run_dir: Path, out: Path) -> dict[str, torch.Tensor]:
    line = [sys.executable, "-m", "sennit", "export", str(run_dir), "--out", str(out), "--dtype", "fp32"]
    done = subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(out / "model.safetensors")


def test_rows_that_pad_the_vocabulary_leak_into_the_export(tmp_path: Path) -> None:
    """Trained with tp 2: exported with the tokens that exist, with the logits of the run. Scenario I-02."""
    transformers = pytest.importorskip("transformers")
    run_dir = tmp_path / "run"
    train(write_recipe(tmp_path), run_dir, "--train.steps", "2", "--nproc", "2", "--parallel.tp", "2")
    weights = export(run_dir, tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert model.config.vocab_size == 257
    assert weights["model.embed_tokens.weight"].shape == weights["lm_head.weight"].shape == (257, 32)
    saved = load_full(run_dir / "checkpoints" / "step-2")
    assert saved["embedding.weight"].shape == (384, 32)
    assert torch.equal(saved["embedding.weight"][:257], weights["model.embed_tokens.weight"])
    assert not saved["head.weight"][257:].any()


def test_the_export_depends_on_the_layout_it_was_trained_in(tmp_path: Path) -> None:
    """Weights that did not move, saved in three layouts and exported: the same bits. Scenarios I-57, I-44."""
    recipe = write_recipe(tmp_path)
    still = ["--train.steps", "1", "--lr.peak", "1e-30"]
    layouts = {"one": [], "tp2": ["--nproc", "2", "--parallel.tp", "2"], "fsdp2": ["--nproc", "2"]}
    exports = {}
    for name, options in layouts.items():
        train(recipe, tmp_path / name, *still, *options)
        exports[name] = export(tmp_path / name, tmp_path / f"hf-{name}")
    for name in ("tp2", "fsdp2"):
        assert exports[name].keys() == exports["one"].keys()
        for weight, tensor in exports["one"].items():
            assert torch.equal(tensor, exports[name][weight]), f"{name}: {weight}"


def test_the_schedule_changes_silently_on_resume(tmp_path: Path) -> None:
    """Another total length is a warning, and the rate follows the new curve by step number. Scenario I-47."""
    recipe = write_recipe(tmp_path)
    train(recipe, tmp_path / "run", "--train.steps", "3")
    line = command(recipe, tmp_path / "run", "--train.steps", "4", "--lr.total_steps", "40")
    done = subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "learning-rate schedule differs" in done.stderr


def test_the_data_changes_silently_on_resume(tmp_path: Path) -> None:
    """Another seed or batch would skip and repeat samples: refused, and nothing of the run is touched. Scenario I-48."""
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    train(recipe, run_dir, "--train.steps", "3")
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.parent.name != "logs"}
    for change in (["--run.seed", "1"], ["--train.global_batch_size", "16"], ["--data.tokenizer", "bpe:300"]):
        line = command(recipe, run_dir, "--train.steps", "4", *change)
        done = subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=120)
        assert done.returncode == 2, done.stderr[-3000:]
        assert change[0].removeprefix("--") in done.stdout
    assert before == {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file() and p.parent.name != "logs"}
