"""Writing a model as a Hugging Face folder that transformers and inference servers load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sennit.errors import CheckpointError, ConfigError
from sennit.models.hf.config import config_to_hf
from sennit.models.hf.names import VOCAB_NAMES, to_hf_name
from sennit.models.hf.read import INDEX_NAME, SINGLE_NAME, parameter_shapes, stored_shape
from sennit.nn.config import DecoderConfig

MAX_SHARD_BYTES = 5 * 10**9
EXPORT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class SavesTokenizer(Protocol):
    """A tokenizer as an export needs it."""

    @property
    def eos_id(self) -> int:
        """Id of the token that ends a text."""
        ...

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        ...


def write_hf(
    folder: Path,
    weights: Mapping[str, Tensor],
    config: DecoderConfig,
    *,
    tokenizer: SavesTokenizer | None = None,
    dtype: str = "bf16",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> int:
    """Write `weights` (full tensors by parameter name) as Hugging Face `folder` and return the bytes of its tensors.

    The folder holds safetensors shards of at most `max_shard_bytes` (a larger tensor is a shard of its own) with an
    index, config.json, generation_config.json and the tokenizer. `dtype`: bf16 or fp32. Rows that pad the vocabulary
    are left out. It appears at once and complete: everything is written beside it and then renamed.
    Raises CheckpointError if the folder exists or a tensor is missing, ConfigError for a model that Hugging Face
    cannot describe.
    """
    if dtype not in EXPORT_DTYPES:
        raise ConfigError(f"dtype={dtype!r} is unknown; use {' or '.join(EXPORT_DTYPES)}.")
    eos_id = None if tokenizer is None else tokenizer.eos_id
    plain = config_to_hf(config, dtype=str(EXPORT_DTYPES[dtype]).removeprefix("torch."), eos_id=eos_id)
    check_free(folder)
    tensors = _checked(weights, config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.tmp-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        total = _write_shards(temporary, tensors, config.vocab_size, EXPORT_DTYPES[dtype], max_shard_bytes)
        _write_json(temporary / "config.json", plain)
        _write_json(temporary / "generation_config.json", {"bos_token_id": None, "eos_token_id": plain["eos_token_id"]})
        if tokenizer is not None:
            tokenizer.save(temporary)
        mode = (temporary / "config.json").stat().st_mode & 0o777
        for path in temporary.iterdir():
            path.chmod(mode)  # safetensors writes files that only their owner may read
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if folder.is_dir():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return total


def check_free(folder: Path) -> None:
    """Raise CheckpointError if `folder` exists and is not an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already and is left untouched. Give another --out, or remove it first.")


def _checked(weights: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Return the tensors of the model in a fixed order. Padding rows may be more or fewer than `config` says."""
    tensors = {}
    for name, shape in parameter_shapes(config).items():
        tensor = weights.get(name)
        if tensor is None:
            raise CheckpointError(f"The weights have no {name}; the recipe's model has it. They are of another model.")
        rows = stored_shape(name, shape, config.vocab_size)[0]
        fits = tensor.shape[0] >= rows if name in VOCAB_NAMES else tensor.shape[0] == rows
        if not fits or tuple(tensor.shape[1:]) != shape[1:]:
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)}, the recipe's model has {list(shape)}. The weights are of "
                f"another model."
            )
        tensors[name] = tensor
    return tensors


def plan_shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Group names in order so that the `sizes` (bytes) of a group add up to at most `max_bytes`, if more than one."""
    shards: list[list[str]] = []
    room = -1
    for name, size in sizes.items():
        if size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _write_shards(folder: Path, tensors: dict[str, Tensor], vocab_size: int, dtype: torch.dtype, limit: int) -> int:
    from safetensors.torch import save_file

    sizes = {}
    for name, tensor in tensors.items():
        rows = stored_shape(name, tuple(tensor.shape), vocab_size)[0]
        sizes[name] = rows * tensor[0].numel() * dtype.itemsize
    shards = plan_shards(sizes, limit)
    where = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        part = {}
        for name in names:
            rows = stored_shape(name, tuple(tensors[name].shape), vocab_size)[0]
            part[to_hf_name(name)] = tensors[name].detach()[:rows].to("cpu", dtype).contiguous()
        save_file(part, str(folder / file), metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    total = sum(sizes.values())
    if len(shards) > 1:
        _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})
    return total


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


__all__ = ["EXPORT_DTYPES", "MAX_SHARD_BYTES", "check_free", "plan_shards", "write_hf"]
