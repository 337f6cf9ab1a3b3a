"""What a decoder's configuration says about itself, against the model that is built from it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sennit import ops
from sennit.mesh import Mesh
from sennit.models import Decoder
from sennit.nn import DecoderConfig

SIZES = dict(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    vocab_size=131,
    padded_vocab_size=256,
    max_position=16,
)
VARIANTS = {
    "llama": dict(head_size=8),
    "tied": dict(head_size=8, tie_embeddings=True),
    "bias": dict(head_size=8, qkv_bias=True),
    "qk-norm": dict(head_size=16, qk_norm=True),
}


def config(variant: str) -> DecoderConfig:
    return DecoderConfig(**SIZES, **VARIANTS[variant])  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_rows_are_not_in_the_parameter_count(variant: str) -> None:
    made = config(variant)
    model = Decoder(Mesh(), made)
    tables = [p for name, p in model.named_parameters() if name in ("embedding.weight", "head.weight")]
    padding = sum(p.shape[0] - made.vocab_size for p in tables) * made.hidden_size
    assert made.num_parameters == sum(p.numel() for p in model.parameters()) - padding


def test_flops_equal_the_matrix_products_that_torch_counts() -> None:
    """Forward and backward of every linear layer and the head, without the attention core. Scenario I-54."""
    made = config("llama")
    model = Decoder(Mesh(), DecoderConfig(**{**SIZES, "padded_vocab_size": 131}, head_size=8))  # type: ignore[arg-type]
    model.materialise(torch.device("cpu"), seed=0)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    counter = FlopCounterMode(display=False)
    with ops.force(dict.fromkeys(("linear", "linears", "swiglu_linear"), "reference")), counter:
        model(tokens, model.context(tokens, dtype=torch.float32)).sum().backward()
    table = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    core = 12 * made.num_layers * made.num_heads * made.head_size * 16
    assert table["aten.mm"] + table.get("aten.addmm", 0) == 16 * (made.flops_per_token(16, causal=False) - core)


def matrix_weights(made: DecoderConfig) -> int:
    h, d = made.hidden_size, made.head_size
    layer = h * (made.num_heads + 2 * made.num_kv_heads) * d + made.num_heads * d * h + 3 * h * made.ffn_size
    return made.num_layers * layer + made.vocab_size * h


def test_causal_flops_count_the_visible_keys() -> None:
    made = config("llama")
    core = 12 * made.num_layers * made.num_heads * made.head_size
    weights = 6 * matrix_weights(made)
    assert made.flops_per_token(16) == weights + core * 8.5
    windowed = DecoderConfig(**SIZES, head_size=8, sliding_window=4)  # type: ignore[arg-type]
    seen = [min(i + 1, 4) for i in range(16)]
    assert windowed.flops_per_token(16) == weights + core * sum(seen) / 16
