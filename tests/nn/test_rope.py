"""Rotary frequencies and tables."""

from __future__ import annotations

import math

import pytest
import torch

from sennit.nn import DecoderConfig, Rope, RopeScaling, rope_frequencies

SCALINGS = {
    "none": (RopeScaling(), {"rope_type": "default"}),
    "linear": (RopeScaling(kind="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        RopeScaling(kind="llama3", factor=8.0, original_max_position=512),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ),
    "yarn": (
        RopeScaling(kind="yarn", factor=4.0, original_max_position=512),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    ),
    "yarn-attention-factor": (
        RopeScaling(kind="yarn", factor=4.0, original_max_position=512, attention_factor=1.5),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 1.5},
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_equal_those_of_transformers(kind: str) -> None:
    utilities = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    scaling, theirs = SCALINGS[kind]
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 10000.0, **theirs},
    )
    mine, factor = rope_frequencies(64, 10000.0, scaling, 2048)
    if kind == "none":
        expected, their_factor = 1.0 / (10000.0 ** (torch.arange(0, 64, 2).float() / 64)), 1.0
    else:
        expected, their_factor = utilities.ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(mine, expected, rtol=1e-6, atol=0)
    assert math.isclose(factor, their_factor, rel_tol=1e-12)


def config() -> DecoderConfig:
    return DecoderConfig(
        hidden_size=32,
        num_layers=1,
        num_heads=4,
        num_kv_heads=4,
        head_size=8,
        ffn_size=32,
        vocab_size=8,
        padded_vocab_size=8,
        max_position=8,
    )


def test_tables_grow_and_stay_the_same() -> None:
    rope = Rope(config())
    device = torch.device("cpu")
    short = rope(5, device=device, dtype=torch.float32)
    long = rope(40, device=device, dtype=torch.float32)
    for a, b in zip(short, long, strict=True):
        assert a.shape == (5, 4) and b.shape == (40, 4)
        assert torch.equal(a, b[:5])


def test_tables_are_float32_whatever_the_activations_are() -> None:
    rope = Rope(config())
    device = torch.device("cpu")
    assert rope(4, device=device, dtype=torch.bfloat16)[0].dtype == torch.float32
    assert rope(4, device=device, dtype=torch.float64)[0].dtype == torch.float64


def test_positions_choose_the_rows() -> None:
    rope = Rope(config())
    device = torch.device("cpu")
    positions = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])
    cos, sin = rope(4, device=device, dtype=torch.float32, positions=positions)
    plain_cos, plain_sin = rope(4, device=device, dtype=torch.float32)
    assert cos.shape == (2, 4, 4)
    assert torch.equal(cos[1], plain_cos) and torch.equal(sin[0], plain_sin[positions[0]])
