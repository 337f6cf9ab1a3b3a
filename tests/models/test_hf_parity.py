"""The same weights give the same logits as transformers, and survive the way out and back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from sennit.models.hf import HFWeights, load_hf_json, read_into, write_hf
from tests.models.hf_models import CASES, VOCAB, loaded, logits, saved

TOLERANCE = 1e-5
"""Absolute, on float32 logits of order 1."""


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 48), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs = saved(case, tmp_path / "hf")
    with torch.no_grad():
        expected = theirs(tokens()).logits
    assert expected.std() > 0.3, "the comparison needs logits that depend on the input"
    ours = logits(loaded(tmp_path / "hf"), tokens())
    assert (ours - expected).abs().max() <= TOLERANCE


ROUND_TRIPS = ("llama2", "llama2-tied", "llama3", "yarn-attention", "qwen2-window", "qwen3", "mistral")


@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_export_loads_in_transformers_and_comes_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    theirs = saved(case, tmp_path / "hf")
    first = loaded(tmp_path / "hf")
    weights = {name: parameter.detach() for name, parameter in first.named_parameters()}
    write_hf(tmp_path / "out", weights, first.config, dtype="fp32", max_shard_bytes=50_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert load_hf_json(tmp_path / "out")["model_type"] == theirs.config.model_type

    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert again.config.vocab_size == VOCAB
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, theirs(tokens()).logits)

    second = loaded(tmp_path / "out", vocab_multiple=32)
    assert {**vars_of(second.config), "padded_vocab_size": 0} == {**vars_of(first.config), "padded_vocab_size": 0}
    for name, parameter in second.named_parameters():
        rows = VOCAB if name in ("embedding.weight", "head.weight") else parameter.shape[0]
        assert torch.equal(parameter[:rows], weights[name][:rows]), name
        assert not parameter[rows:].any(), f"padding rows of {name}"


def test_bf16_export_rounds_once(tmp_path: Path) -> None:
    saved("llama2", tmp_path / "hf")
    model = loaded(tmp_path / "hf")
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_hf(tmp_path / "out", weights, model.config)
    assert load_hf_json(tmp_path / "out")["torch_dtype"] == "bfloat16"
    with HFWeights(tmp_path / "out") as files:
        assert files.read("model.norm.weight", (0,), (64,)).dtype == torch.bfloat16
        back = {name: torch.full_like(value, float("nan")) for name, value in weights.items()}
        read_into(files, back, VOCAB)
    for name, value in back.items():
        assert torch.equal(value, weights[name].bfloat16().float()), name


def vars_of(config: object) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}  # type: ignore[attr-defined]
