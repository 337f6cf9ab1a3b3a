"""`sennit export`: a checkpoint becomes a folder that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from sennit.cli.main import run
from tests.models.hf_models import loaded, logits
from tests.models.runs import make_run, weights_of


def test_export_loads_in_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_run(tmp_path / "run", model__family="qwen3", model__qk_norm="true")
    code = run(["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf"), "--dtype", "fp32", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == 0 and document["family"] == "qwen3" and document["step"] == 0
    assert document["parameters"] == trainer.config.num_parameters == document["bytes"] // 4

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    tokens = torch.tensor([list(b"the quick brown fox")])
    with torch.no_grad():
        expected = theirs(tokens).logits
    ours = logits(trainer.model.eval(), tokens)
    assert expected.shape[-1] == 257 and (ours - expected).abs().max() <= 1e-5
    assert theirs.generation_config.eos_token_id == 256

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.decode(tokenizer("caf\u00e9")["input_ids"]) == "caf\u00e9" and tokenizer.eos_token_id == 256
    for name, parameter in loaded(tmp_path / "hf", vocab_multiple=128).named_parameters():
        assert torch.equal(parameter, weights_of(trainer)[name]), name


def test_bf16_is_half_as_large_and_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_run(tmp_path / "run")
    assert run(["export", str(tmp_path / "run" / "checkpoints" / "step-0"), "--out", str(tmp_path / "hf")]) == 0
    out = capsys.readouterr().out
    assert "llama" in out and "bf16" in out and str(tmp_path / "hf") in out
    size = (tmp_path / "hf" / "model.safetensors").stat().st_size
    assert 0 <= size - 2 * trainer.config.num_parameters < 8192
    assert len({path.stat().st_mode for path in (tmp_path / "hf").iterdir()}) == 1


def test_mistakes_are_one_paragraph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run")
    assert run(["export", str(tmp_path / "absent"), "--out", str(tmp_path / "hf"), "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["kind"] == "CheckpointError" and captured.err.count("\n") == 1
    assert run(["export", str(tmp_path / "run"), "--out", str(tmp_path / "run")]) == 2
    assert "exists already" in capsys.readouterr().err
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").unlink()
    assert run(["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf"), "--dtype", "fp8"]) == 2
    assert "fp8" in capsys.readouterr().err and not (tmp_path / "hf").exists()
