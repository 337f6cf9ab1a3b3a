"""Hugging Face `config.json` to and from `DecoderConfig`, for the dense families llama, mistral, qwen2 and qwen3.

Reading accepts both spellings of rotary settings: `rope_theta` with `rope_scaling`, and `rope_parameters`
(transformers 5). Writing uses the former, which every release understands. What the decoder cannot compute is refused
by name: a model that loads is the model that was meant.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from sennit.errors import CheckpointError, ConfigError
from sennit.nn.config import DecoderConfig, RopeScaling

logger = logging.getLogger(__name__)

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# What transformers assumes for a field that a config.json leaves out (its configuration_<family>.py).
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048},
    "mistral": {
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {"num_key_value_heads": 32, "head_dim": None, "max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768, "sliding_window": 4096},
}
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


def load_hf_json(folder: Path) -> dict[str, Any]:
    """Return the parsed config.json of `folder`. Raises CheckpointError if it is missing or no JSON object."""
    path = folder / "config.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"There is no file {path}: a Hugging Face model folder has config.json and *.safetensors in it. Give the "
            f"path of such a folder."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}. Fetch the model again.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object. Fetch the model again.")
    return value


def config_from_hf(plain: dict[str, Any], *, where: str = "config.json", vocab_multiple: int = 1) -> DecoderConfig:
    """Return the decoder that the parsed config.json `plain` describes, its vocabulary padded to `vocab_multiple`.

    Raises ConfigError that names every field whose value is not supported; `where` is named in the message.
    """
    family = plain.get("model_type")
    if family not in ARCHITECTURES:
        raise ConfigError(
            f"{where}: model_type={family!r} is not supported; the families are {', '.join(sorted(ARCHITECTURES))}."
        )
    missing = [name for name in _SIZES if not isinstance(plain.get(name), int) or plain[name] < 1]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} must be given as positive whole numbers.")
    full = {**_DEFAULTS[family], **plain}
    window, problems = _window(family, full)
    scaling, theta, rope_problems = _rope(full)
    problems = [*_unsupported(full), *problems, *rope_problems]
    heads = full["num_attention_heads"]
    kv_heads = full["num_key_value_heads"] or heads
    if heads % kv_heads:
        problems.append(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if problems:
        raise ConfigError(f"{where} describes a model that is not supported: {'; '.join(problems)}.")
    if full.get("attention_dropout"):
        logger.warning("%s: attention_dropout=%s is left out", where, full["attention_dropout"])
    return DecoderConfig(
        family=family,
        hidden_size=full["hidden_size"],
        num_layers=full["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=full["head_dim"] or full["hidden_size"] // heads,
        ffn_size=full["intermediate_size"],
        vocab_size=full["vocab_size"],
        padded_vocab_size=-(-full["vocab_size"] // vocab_multiple) * vocab_multiple,
        max_position=full["max_position_embeddings"],
        norm_eps=float(full.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=bool(full.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        sliding_window=window,
        init_std=float(full.get("initializer_range", 0.02)),
    )


def _unsupported(full: dict[str, Any]) -> list[str]:
    problems = []
    for name in ("attention_bias", "mlp_bias"):
        if full.get(name):
            problems.append(f"{name}=true (a bias on the output projections; only q, k and v may have one)")
    activation = full.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        problems.append(f"hidden_act={activation!r} (only silu)")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if full.get(name):
            problems.append(f"{name}={full[name]} (mixture of experts)")
    if full.get("quantization_config"):
        problems.append("quantization_config (quantised weights; use a version of the model in bf16 or fp32)")
    if full.get("partial_rotary_factor", 1.0) not in (1.0, None):
        problems.append(f"partial_rotary_factor={full['partial_rotary_factor']} (only 1)")
    if (full.get("pretraining_tp") or 1) != 1:
        logger.warning("pretraining_tp=%s is ignored; the result differs by rounding only", full["pretraining_tp"])
    return problems


def _window(family: str, full: dict[str, Any]) -> tuple[int, list[str]]:
    """Return (keys a query sees or 0, problems)."""
    window = full.get("sliding_window") or 0
    if family == "llama":
        return 0, []
    layers = full["num_hidden_layers"]
    if family == "mistral":
        kinds = full.get("layer_types") or ["sliding_attention"] * layers
    else:
        if not full.get("use_sliding_window"):
            window = 0
        first = full.get("max_window_layers", 28)
        plain = ["sliding_attention" if index >= first else "full_attention" for index in range(layers)]
        kinds = full.get("layer_types") or plain
    if not window or all(kind == "full_attention" for kind in kinds):
        return 0, []
    if all(kind == "sliding_attention" for kind in kinds):
        return window, []
    return 0, ["layer_types / max_window_layers (a sliding window on some layers only; all or none may have one)"]


def _rope(full: dict[str, Any]) -> tuple[RopeScaling, float, list[str]]:
    """Return (scaling, theta, problems) from either spelling."""
    rope = dict(full.get("rope_parameters") or {}) or dict(full.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or full.get("rope_theta") or 10000.0)
    if any(isinstance(value, dict) for value in rope.values()):
        return RopeScaling(), theta, ["rope_parameters (different settings for different layers)"]
    field = "rope_parameters" if full.get("rope_parameters") else "rope_scaling"
    kind = rope.get("rope_type") or rope.get("type") or "default"
    problems = []
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        problems.append(f"{field}.partial_rotary_factor={rope['partial_rotary_factor']} (only 1)")
    if kind == "default":
        return RopeScaling(), theta, problems
    if kind not in ("linear", "llama3", "yarn"):
        return RopeScaling(), theta, [*problems, f"{field}.rope_type={kind!r} (only default, linear, llama3 and yarn)"]
    max_position = full["max_position_embeddings"]
    original = 0
    if kind != "linear":
        original = full.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        original = original or max_position
    if rope.get("truncate") is False:
        problems.append(f"{field}.truncate=false (the correction range is rounded)")
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        problems.append(f"{field}.mscale / mscale_all_dim (only attention_factor)")
    factor = rope.get("factor")
    if factor is None and kind == "yarn":
        factor = max_position / original
    if not isinstance(factor, (int, float)) or factor < 1:
        return RopeScaling(), theta, [*problems, f"{field}.factor={factor!r} (a number of at least 1 is needed)"]
    scaling = RopeScaling(
        kind=kind,
        factor=float(factor),
        original_max_position=int(original),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)) if kind == "llama3" else 1.0,
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)) if kind == "llama3" else 4.0,
        beta_fast=float(rope.get("beta_fast") or 32.0) if kind == "yarn" else 32.0,
        beta_slow=float(rope.get("beta_slow") or 1.0) if kind == "yarn" else 1.0,
        attention_factor=float(rope.get("attention_factor") or 0.0) if kind == "yarn" else 0.0,
    )
    return scaling, theta, problems


def hf_family(config: DecoderConfig) -> str:
    """Return the Hugging Face family that computes what `config` describes: its own if that fits, else one that does.

    Raises ConfigError for a combination that none of them has.
    """
    fits = {
        "llama": not (config.qkv_bias or config.qk_norm or config.sliding_window),
        "mistral": not (config.qkv_bias or config.qk_norm),
        "qwen2": config.qkv_bias and not config.qk_norm,
        "qwen3": config.qk_norm and not config.qkv_bias,
    }
    if fits.get(config.family):
        return config.family
    found = [family for family, fit in fits.items() if fit]
    if not found:
        raise ConfigError(
            "model.qkv_bias and model.qk_norm are both on: no Hugging Face family has both, so this model cannot be "
            "exported. Train it with one of them."
        )
    return found[0]


def config_to_hf(config: DecoderConfig, *, dtype: str = "bfloat16", eos_id: int | None = None) -> dict[str, Any]:
    """Return the config.json of `config`; `dtype` is that of the stored weights (bfloat16 or float32).

    Raises ConfigError for a model that no Hugging Face family describes.
    """
    family = hf_family(config)
    scaling = config.rope_scaling
    if scaling.kind in ("linear", "llama3") and scaling.attention_factor not in (0.0, 1.0):
        raise ConfigError(
            f"model.rope_scaling.attention_factor={scaling.attention_factor} with kind={scaling.kind}: Hugging Face "
            f"models have it with yarn only, so this model cannot be exported."
        )
    plain: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.ffn_size,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling_to_hf(config),
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
    }
    if family in ("llama", "qwen3"):
        plain["attention_bias"] = False
    if family == "llama":
        plain["mlp_bias"] = False
    if family == "mistral":
        plain["sliding_window"] = config.sliding_window or None
    if family in ("qwen2", "qwen3"):
        plain["use_sliding_window"] = bool(config.sliding_window)
        plain["sliding_window"] = config.sliding_window or None
        plain["max_window_layers"] = 0 if config.sliding_window else config.num_layers
    return plain


def _scaling_to_hf(config: DecoderConfig) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling.kind == "none":
        return None
    plain: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        plain["original_max_position_embeddings"] = scaling.original_max_position or config.max_position
    if scaling.kind == "llama3":
        plain |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        plain |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if scaling.attention_factor:
            plain["attention_factor"] = scaling.attention_factor
    return plain


def model_section(config: DecoderConfig, *, init_from: str = "") -> dict[str, Any]:
    """Return the recipe's model section (plain values, defaults included) of `config`."""
    scaling = config.rope_scaling
    return {
        "family": config.family,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_size": config.head_size,
        "ffn_size": config.ffn_size,
        "vocab_size": config.vocab_size,
        "max_position": config.max_position,
        "norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_embeddings": config.tie_embeddings,
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "sliding_window": config.sliding_window,
        "init_std": config.init_std,
        "init_from": init_from,
        "rope_scaling": {
            "kind": scaling.kind,
            "factor": scaling.factor,
            "original_max_position": scaling.original_max_position,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": scaling.attention_factor,
        },
    }


__all__ = ["ARCHITECTURES", "config_from_hf", "config_to_hf", "hf_family", "load_hf_json", "model_section"]
