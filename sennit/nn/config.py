"""What a decoder is, after every zero and default of the recipe has been resolved."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those seen in pre-training.

    `kind`: none, linear (positions / factor), llama3 (Llama 3.1: low frequencies divided, smooth band between) or yarn
    (arXiv 2309.00071). `attention_factor` multiplies cos and sin; 0 means derived (yarn: 0.1 ln(factor) + 1).
    """

    kind: str = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of a dense decoder. `vocab_size` counts real tokens, `padded_vocab_size` parameter rows."""

    family: str = "llama"
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    vocab_size: int
    padded_vocab_size: int
    max_position: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int = 0
    init_std: float = 0.02
    dropout: float = 0.0

    @property
    def num_parameters(self) -> int:
        """Number of trained parameters; rows that pad the vocabulary are not counted."""
        h, d = self.hidden_size, self.head_size
        q, kv = self.num_heads * d, self.num_kv_heads * d
        attention = h * (q + 2 * kv) + q * h + (q + 2 * kv if self.qkv_bias else 0) + (2 * d if self.qk_norm else 0)
        layer = attention + 3 * h * self.ffn_size + 2 * h
        return self.num_layers * layer + self.vocab_size * h * (1 if self.tie_embeddings else 2) + h

    def flops_per_token(self, seq_len: int, *, causal: bool = True) -> float:
        """Model FLOPs of forward and backward for one token of a sequence of `seq_len` (2 a multiply-add).

        Matrix products only: 6 per weight of every linear layer and of the head (not the embedding look-up), plus the
        attention core, 12 * num_heads * head_size * (keys a query sees). `causal` counts the visible half
        ((s + 1) / 2 keys a query; the window if that is smaller), otherwise all s keys: the number that a
        framework without a causal kernel would execute. Recomputation is never counted.
        Source: Megatron-LM's formula (arXiv 2104.04473, appendix), with GQA and window.
        """
        h, d = self.hidden_size, self.head_size
        q, kv = self.num_heads * d, self.num_kv_heads * d
        weights = self.num_layers * (h * (q + 2 * kv) + q * h + 3 * h * self.ffn_size) + self.vocab_size * h
        window = min(self.sliding_window or seq_len, seq_len)
        keys = (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len if causal else float(seq_len)
        return 6.0 * weights + 12.0 * self.num_layers * q * keys

    def __post_init__(self) -> None:
        assert self.padded_vocab_size >= self.vocab_size > 0
        assert self.num_heads % self.num_kv_heads == 0 and math.isfinite(self.rope_theta)


__all__ = ["DecoderConfig", "RopeScaling"]
