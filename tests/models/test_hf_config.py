"""Names map one to one; configurations map both ways, and what cannot be computed is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from sennit.errors import ConfigError
from sennit.mesh import Mesh
from sennit.models import Decoder
from sennit.models.hf import config_from_hf, config_to_hf, from_hf_name, hf_family, model_section, to_hf_name
from sennit.nn import DecoderConfig, RopeScaling
from sennit.recipe.model import ModelSection

PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 131,
}


def sizes(**fields: Any) -> DecoderConfig:
    base: dict[str, Any] = {
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 16,
        "ffn_size": 96,
        "vocab_size": 131,
        "padded_vocab_size": 131,
        "max_position": 64,
    }
    return DecoderConfig(**{**base, **fields})


def test_names_are_bijective() -> None:
    names = set()
    for flags in ({"qkv_bias": True}, {"qk_norm": True}):
        names |= {name for name, _ in Decoder(Mesh(), sizes(num_layers=12, **flags)).named_parameters()}
    theirs = {to_hf_name(name) for name in names}
    assert len(theirs) == len(names) > 150
    assert {from_hf_name(name) for name in theirs} == names
    assert to_hf_name("layers.11.attention.wq.bias") == "model.layers.11.self_attn.q_proj.bias"


@pytest.mark.parametrize("name", ["layers.0.mlp.router.weight", "layers.01.mlp.up.weight", "norm.bias", "head"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(KeyError):
        to_hf_name(name)
    with pytest.raises(KeyError):
        from_hf_name(name)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"model_type": "mixtral"}, "model_type='mixtral'"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type='dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_parameters.rope_type='longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "different layers"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0}}, "mscale"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 1}, "layer_types"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match="somewhere/config.json") as caught:
        config_from_hf({**PLAIN, "num_key_value_heads": 4, **fields}, where="somewhere/config.json")
    assert named in str(caught.value)


def test_both_spellings_of_rope_are_one() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 5.0, "original_max_position_embeddings": 32}
    old = config_from_hf({**PLAIN, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    new = config_from_hf({**PLAIN, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    assert old == new
    assert new.rope_theta == 5e5 and new.rope_scaling.kind == "llama3" and new.rope_scaling.low_freq_factor == 2.0
    assert new.num_kv_heads == 4, "llama without num_key_value_heads has as many as query heads"


@pytest.mark.parametrize(
    ("fields", "family"),
    [
        ({}, "llama"),
        ({"family": "mistral", "sliding_window": 5}, "mistral"),
        ({"family": "llama", "sliding_window": 5}, "mistral"),
        ({"family": "qwen2", "qkv_bias": True, "head_size": 32}, "qwen2"),
        ({"family": "llama", "qkv_bias": True, "sliding_window": 5}, "qwen2"),
        ({"family": "qwen3", "qk_norm": True}, "qwen3"),
        ({"family": "qwen2"}, "llama"),
    ],
)
def test_a_model_is_exported_as_a_family_that_computes_it(fields: dict[str, Any], family: str) -> None:
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_position=16, beta_fast=20.0)
    config = sizes(**fields, rope_scaling=scaling)
    assert hf_family(config) == family
    back = config_from_hf(config_to_hf(config))
    assert back == sizes(**{**fields, "family": family}, rope_scaling=config.rope_scaling)


def test_what_no_family_has_is_not_exported() -> None:
    with pytest.raises(ConfigError, match="model.qkv_bias and model.qk_norm"):
        config_to_hf(sizes(qkv_bias=True, qk_norm=True))
    with pytest.raises(ConfigError, match="attention_factor"):
        config_to_hf(sizes(rope_scaling=RopeScaling(kind="linear", factor=2.0, attention_factor=1.5)))


def test_the_model_section_is_complete() -> None:
    config = config_from_hf({**PLAIN, "model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True})
    section = ModelSection.model_validate(model_section(config, init_from="/models/x"))
    assert section.qkv_bias and section.tie_embeddings and section.init_from == "/models/x"
    assert set(model_section(config)) | {"vocab_multiple", "dropout"} == set(ModelSection.model_fields)
