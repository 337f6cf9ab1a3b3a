"""Tiny Hugging Face models with random weights, one for each convention that an exchange must get right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from sennit.mesh import Mesh
from sennit.models import Decoder, build_decoder
from sennit.models.hf import HFWeights, config_from_hf, load_hf_json, read_into

VOCAB = 131

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama2-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}}),
    "yarn": ("Llama", {"rope_parameters": _YARN}),
    "yarn-attention": ("Llama", {"rope_parameters": {**_YARN, "attention_factor": 1.3, "beta_fast": 16.0}}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 24}),
}


def hf_model(case: str) -> Any:
    """Return the transformers model of `case`: float32, eager attention, weights and biases far from their start."""
    family, fields = CASES[case]
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.1, generator=generator)
            if "norm" in name:
                parameter.add_(1.0)
    return model


def saved(case: str, folder: Path, **options: Any) -> Any:
    """Save the model of `case` as `folder` and return it."""
    model = hf_model(case)
    model.save_pretrained(folder, **options)
    return model


def loaded(folder: Path, *, mesh: Mesh | None = None, vocab_multiple: int = 8) -> Decoder:
    """Return our decoder, in float32, with the weights in Hugging Face `folder`."""
    config = config_from_hf(load_hf_json(folder), vocab_multiple=vocab_multiple)
    model = build_decoder(config, mesh or Mesh(), device=torch.device("cpu"), dtype=torch.float32, seed=None)
    with HFWeights(folder) as weights:
        read_into(weights, dict(model.named_parameters()), config.vocab_size)
    return model.eval()


@torch.no_grad()
def logits(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Return our logits [b, s, v] of the real tokens."""
    return model(tokens, model.context(tokens, dtype=torch.float32))[..., : model.config.vocab_size]
