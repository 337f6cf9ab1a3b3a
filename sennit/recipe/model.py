"""Recipe sections `model` and `data`: what is trained, on what."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from sennit.recipe.base import Section, choice, section


class Family(StrEnum):
    """Whose names and conventions a decoder follows when it is exchanged with Hugging Face."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    MISTRAL = "mistral"


class RopeScalingKind(StrEnum):
    """How rotary frequencies are stretched for long contexts."""

    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


class RopeScalingSection(Section):
    """Stretching of rotary frequencies (`model.rope_scaling`)."""

    kind: RopeScalingKind = choice(RopeScalingKind.NONE, "none, linear, llama3 (Llama 3.1) or yarn (arXiv 2309.00071)")
    factor: float = Field(1.0, ge=1.0, description="how many times longer the context becomes")
    original_max_position: int = Field(0, ge=0, description="context length of pre-training, tokens (llama3, yarn)")
    low_freq_factor: float = Field(1.0, gt=0, description="llama3: wavelengths longer than original / this are divided")
    high_freq_factor: float = Field(4.0, gt=0, description="llama3: wavelengths shorter than original / this are kept")
    beta_fast: float = Field(32.0, gt=0, description="yarn: rotations above which a frequency is kept")
    beta_slow: float = Field(1.0, gt=0, description="yarn: rotations below which a frequency is divided")
    attention_factor: float = Field(0.0, ge=0, description="multiplies cos and sin; 0 = derived from factor (yarn)")


class ModelSection(Section):
    """The decoder (`model`)."""

    family: Family = choice(Family.LLAMA, "names and conventions: llama, qwen2, qwen3 or mistral")
    hidden_size: int = Field(ge=1, description="width of the residual stream")
    num_layers: int = Field(ge=1, description="number of decoder layers")
    num_heads: int = Field(ge=1, description="query heads")
    num_kv_heads: int = Field(ge=1, description="key and value heads; fewer than num_heads is grouped-query attention")
    head_size: int = Field(0, ge=0, description="size of a head; 0 = hidden_size / num_heads")
    ffn_size: int = Field(ge=1, description="inner width of the SwiGLU block")
    vocab_size: int = Field(0, ge=0, description="tokens that can be predicted; 0 = the tokenizer's")
    vocab_multiple: int = Field(128, ge=1, description="embedding rows are padded to a multiple of this")
    max_position: int = Field(0, ge=0, description="longest context the model is declared for; 0 = train.seq_len")
    norm_eps: float = Field(1e-5, gt=0, le=1e-1, description="epsilon of RMSNorm")
    rope_theta: float = Field(10000.0, gt=1, description="base of the rotary frequencies")
    rope_scaling: RopeScalingSection = section(RopeScalingSection, "stretching of rotary frequencies")
    tie_embeddings: bool = Field(False, description="use the embedding as the output head")
    qkv_bias: bool = Field(False, description="add biases to the query, key and value projections (Qwen2)")
    qk_norm: bool = Field(False, description="normalise queries and keys per head (Qwen3)")
    sliding_window: int = Field(0, ge=0, description="keys a query sees, itself included (Mistral); 0 = all before it")
    init_std: float = Field(0.02, gt=0, le=1, description="standard deviation of the initial weights")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of residual-branch outputs set to zero in training")
    init_from: str = Field("", description="Hugging Face folder or checkpoint whose weights the run starts from")


class BlendEntry(Section):
    """One source of a blend (`data.blend`)."""

    path: str = Field(min_length=1, description="prefix of .bin/.idx, or a text, JSONL or parquet file or folder")
    weight: float = Field(gt=0, description="share of the samples, relative to the other weights")


class DataSection(Section):
    """Text and tokenizer (`data`)."""

    source: str | Annotated[tuple[str, ...], Field(strict=False)] = Field(
        "stdlib", description="stdlib (sources of this Python), or files, folders or .bin/.idx prefixes: a string or a list"
    )
    blend: Annotated[tuple[BlendEntry, ...], Field(strict=False)] = Field(
        (), description='weighted sources instead of source: [{path = "a", weight = 0.7}, ...]'
    )
    tokenizer: str = Field(
        "bpe:4096", min_length=1, description="bpe:N (trained on the text), bytes, or a tokenizer.json or its folder"
    )
    validation_fraction: float = Field(0.02, ge=0, lt=1, description="share of the documents held out for evaluation")
    mask_documents: bool = Field(True, description="attention and positions stop at document ends")
    cache_dir: str = Field("", description="where built data is kept; empty = $SENNIT_CACHE or ~/.cache/sennit")


__all__ = ["BlendEntry", "DataSection", "Family", "ModelSection", "RopeScalingKind", "RopeScalingSection"]
