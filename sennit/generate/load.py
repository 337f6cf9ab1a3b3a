"""A model for generation from a run, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sennit.errors import CheckpointError, ConfigError, DataError
from sennit.mesh import Mesh
from sennit.models import DTYPES, Decoder, build_decoder, decoder_config
from sennit.models.hf import HFWeights, config_from_hf, is_hf_folder, load_checkpoint_weights, load_hf_json, read_into
from sennit.nn import DecoderConfig

if TYPE_CHECKING:
    from sennit.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedModel:
    """A model with its tokenizer. `source`: the folder the weights came from. `eos_ids`: tokens that end a text.
    `prefix`: tokens the model expects before every text (a begin-of-text token), usually none."""

    model: Decoder
    tokenizer: Tokenizer
    source: Path
    eos_ids: list[int]
    prefix: list[int]

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens to give the model for `prompt`."""
        return self.prefix + self.tokenizer.encode(prompt)


def load_model(path: Path, *, mesh: Mesh, device: torch.device, dtype: str) -> LoadedModel:
    """Load the model at `path` onto `mesh` in `dtype` (bf16, fp32, fp64), ready for `generate`.

    Collective over the mesh for a checkpoint. Raises CheckpointError if there is no complete model at `path`,
    DataError without its tokenizer, ConfigError if it does not divide over the mesh.
    """
    if is_hf_folder(path):
        return _load_hf(path, mesh, device, dtype)
    if not path.is_dir():
        raise CheckpointError(
            f"There is no folder {path}. Give a run directory, a folder checkpoints/step-N, or a Hugging Face model "
            f"folder."
        )
    return _load_checkpoint(path, mesh, device, dtype)


def _load_hf(folder: Path, mesh: Mesh, device: torch.device, dtype: str) -> LoadedModel:
    from sennit.data.tokenizer import load_tokenizer

    plain = load_hf_json(folder)
    config = config_from_hf(plain, where=str(folder / "config.json"), vocab_multiple=mesh.tp.size)
    tokenizer = load_tokenizer(folder)
    model = _build(config, mesh, device, dtype)
    with HFWeights(folder) as weights:
        read_into(weights, dict(model.named_parameters()), config.vocab_size)
    model.to(DTYPES[dtype])
    generation = _read_optional(folder / "generation_config.json")
    eos = {*_token_ids(plain, "eos_token_id"), *_token_ids(generation, "eos_token_id"), tokenizer.eos_id}
    return LoadedModel(model, tokenizer, folder, sorted(eos), _prefix(tokenizer))


def _load_checkpoint(path: Path, mesh: Mesh, device: torch.device, dtype: str) -> LoadedModel:
    from sennit import checkpoint
    from sennit.checkpoint import resolve
    from sennit.recipe import parse_recipe

    folder = resolve(path)
    meta = checkpoint.read_meta(folder)
    recipe = parse_recipe(meta["recipe"], str(folder))
    config = decoder_config(recipe, int(meta["vocab_size"]))
    tokenizer = find_tokenizer(folder, recipe.data.tokenizer)
    model = _build(config, mesh, device, dtype)
    load_checkpoint_weights(folder, dict(model.named_parameters()), config)
    model.to(DTYPES[dtype])
    return LoadedModel(model, tokenizer, folder, [tokenizer.eos_id], [])


def find_tokenizer(checkpoint: Path, spec: str) -> Tokenizer:
    """Return the tokenizer of the run that `checkpoint` (run/checkpoints/step-N) belongs to.

    `spec`: the recipe's data.tokenizer, used if the run directory has none any more. Raises DataError.
    """
    from sennit.data.tokenizer import load_tokenizer

    kept = checkpoint.resolve().parent.parent / "tokenizer"
    if (kept / "tokenizer.json").is_file():
        return load_tokenizer(kept)
    if spec.startswith("bpe:"):
        raise DataError(
            f"The tokenizer of {checkpoint} is missing: {kept} was written when the run began. Put the run's tokenizer "
            f"folder there."
        )
    return load_tokenizer(spec)


def _build(config: DecoderConfig, mesh: Mesh, device: torch.device, dtype: str) -> Decoder:
    check_tensor_parallel(config, mesh.tp.size)
    model = build_decoder(config, mesh, device=device, dtype=DTYPES[dtype], seed=None)
    return model.requires_grad_(False).eval()


def check_tensor_parallel(config: DecoderConfig, size: int) -> None:
    """Raise ConfigError unless the model divides over `size` tensor-parallel ranks."""
    problems = [
        f"{name}={value} is not a multiple"
        for name, value in (
            ("num_heads", config.num_heads),
            ("ffn_size", config.ffn_size),
            ("padded vocabulary", config.padded_vocab_size),
        )
        if value % size
    ]
    if config.num_kv_heads % size and size % config.num_kv_heads:
        problems.append(f"num_kv_heads={config.num_kv_heads} is neither a multiple nor a divisor")
    if problems:
        raise ConfigError(f"The model does not divide over {size} ranks: {'; '.join(problems)}. Use another --nproc.")


def _token_ids(plain: dict[str, Any], name: str) -> list[int]:
    value = plain.get(name)
    if value is None:
        return []
    return [value] if isinstance(value, int) else [int(item) for item in value]


def _read_optional(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _prefix(tokenizer: Tokenizer) -> list[int]:
    """Return what the tokenizer's own template puts before a text: the template of "x" up to the tokens of "x"."""
    plain = tokenizer.backend.encode("x", add_special_tokens=False).ids
    full = tokenizer.backend.encode("x", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []


__all__ = ["LoadedModel", "check_tensor_parallel", "find_tokenizer", "load_model"]
