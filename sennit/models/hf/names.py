"""Tensor names of this package and of Hugging Face, one to one. The dense families share them; values never change."""

from __future__ import annotations

import re

_OUTER = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_INNER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_OUTER_BACK = {theirs: ours for ours, theirs in _OUTER.items()}
_INNER_BACK = {theirs: ours for ours, theirs in _INNER.items()}
_LAYER = re.compile(r"layers\.(0|[1-9]\d*)\.(.+)\.(weight|bias)")
_PREFIX = "model."

VOCAB_NAMES = frozenset({"embedding.weight", "head.weight"})
"""Parameters with one row a token, whose row count is padded here and not there."""


def to_hf_name(name: str) -> str:
    """Return the Hugging Face name of parameter `name`. Raises KeyError for a name that no dense decoder has."""
    if name in _OUTER:
        return _OUTER[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _INNER:
        raise KeyError(name)
    return f"{_PREFIX}layers.{match[1]}.{_INNER[match[2]]}.{match[3]}"


def from_hf_name(name: str) -> str:
    """Return the name of the parameter that Hugging Face calls `name`. Raises KeyError for any other tensor."""
    if name in _OUTER_BACK:
        return _OUTER_BACK[name]
    match = _LAYER.fullmatch(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
    if match is None or match[2] not in _INNER_BACK:
        raise KeyError(name)
    return f"layers.{match[1]}.{_INNER_BACK[match[2]]}.{match[3]}"


__all__ = ["VOCAB_NAMES", "from_hf_name", "to_hf_name"]
