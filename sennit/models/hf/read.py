"""Reading the weights of a Hugging Face folder, each rank only the part that it holds."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sennit.errors import CheckpointError
from sennit.models.hf.names import VOCAB_NAMES, to_hf_name
from sennit.nn.config import DecoderConfig
from sennit.nn.parameter import local_part

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


class HFWeights:
    """The tensors of a Hugging Face folder: one safetensors file, or several with an index. Nothing is read until
    asked for; use it as a context manager.

    Raises CheckpointError if the folder has no safetensors, a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self._where = self._find()

    def __enter__(self) -> HFWeights:
        return self

    def __exit__(self, *args: object) -> None:
        self._files.clear()
        self._stack.close()

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._where)

    def file_of(self, name: str) -> Path:
        """Return the file that holds tensor `name`."""
        return self.folder / self._where[name]

    def _find(self) -> dict[str, str]:
        index = self.folder / INDEX_NAME
        if index.is_file():
            try:
                where = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{index} is damaged: {error!r}. Fetch the model again.") from None
            for file in sorted(set(where.values())):
                held = self._keys(file)
                lost = sorted(name for name, place in where.items() if place == file and name not in held)
                if lost:
                    raise CheckpointError(
                        f"{self.folder / file} lacks tensor {lost[0]}, which {INDEX_NAME} says it holds. Fetch the "
                        f"model again."
                    )
            return where
        if (self.folder / SINGLE_NAME).is_file():
            return dict.fromkeys(self._keys(SINGLE_NAME), SINGLE_NAME)
        if any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pth")):
            raise CheckpointError(
                f"{self.folder} has its weights in pickle files (*.bin), which can run any code when they are read and "
                f"are refused. Fetch the safetensors version of the model, or save it again with "
                f"model.save_pretrained(folder) of transformers."
            )
        raise CheckpointError(
            f"{self.folder} has neither {SINGLE_NAME} nor {INDEX_NAME}. Give a complete model folder."
        )

    def _open(self, file: str) -> Any:
        if file not in self._files:
            from safetensors import SafetensorError, safe_open

            path = self.folder / file
            try:
                self._files[file] = self._stack.enter_context(safe_open(str(path), framework="pt"))
            except FileNotFoundError:
                raise CheckpointError(f"The weights file {path} is missing. Fetch the model again.") from None
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"The weights file {path} is damaged: {error}. Fetch the model again.") from None
        return self._files[file]

    def _keys(self, file: str) -> frozenset[str]:
        return frozenset(self._open(file).keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`."""
        return tuple(self._slice(name).get_shape())

    def _slice(self, name: str) -> Any:
        view = self._open(self._where[name]).get_slice(name)
        if view.get_dtype() not in _DTYPES:
            raise CheckpointError(
                f"Tensor {name} in {self.file_of(name)} has dtype {view.get_dtype()}; weights in F32, F16 or BF16 are "
                f"supported. Use a version of the model that is not quantised."
            )
        return view

    def read(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """Return the part of tensor `name` that begins at `start` and has shape `size`."""
        ranges = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        return self._slice(name)[ranges]


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the global shape of every parameter of a decoder, by name; vocabulary rows are the padded ones."""
    from sennit.mesh import Mesh
    from sennit.models.decoder import Decoder

    return {name: tuple(parameter.shape) for name, parameter in Decoder(Mesh(), config).named_parameters()}


def check_weights(weights: HFWeights, shapes: Mapping[str, tuple[int, ...]], vocab_size: int) -> None:
    """Raise CheckpointError unless `weights` holds exactly the tensors that parameters of `shapes` need.

    Tensors that carry no information are allowed: `rotary_emb.inv_freq`, and `lm_head.weight` of a tied model.
    """
    expected = {to_hf_name(name): stored_shape(name, shape, vocab_size) for name, shape in shapes.items()}
    missing = sorted(expected.keys() - weights.names)
    if missing:
        raise CheckpointError(
            f"{weights.folder} lacks {_some(missing)}, which a model with this config.json has. The folder is "
            f"incomplete or of another model."
        )
    ignored = {"lm_head.weight"} if "head.weight" not in shapes else set()
    extra = sorted(
        name for name in weights.names - expected.keys() if name not in ignored and not name.endswith(".inv_freq")
    )
    if extra:
        raise CheckpointError(
            f"{weights.file_of(extra[0])} holds {_some(extra)}, which a model with this config.json does not have. The "
            f"folder mixes two models, or the model has a part that is not supported."
        )
    for name, shape in expected.items():
        if weights.shape(name) != shape:
            raise CheckpointError(
                f"Tensor {name} in {weights.file_of(name)} has shape {list(weights.shape(name))}; the model needs "
                f"{list(shape)}. The weights and the configuration belong to different models."
            )


def stored_shape(name: str, shape: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Return the shape that parameter `name` of global `shape` has in a Hugging Face file: without padding rows."""
    return (vocab_size, *shape[1:]) if name in VOCAB_NAMES else tuple(shape)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    return f"{names[0]}{more}"


@torch.no_grad()
def read_into(weights: HFWeights, parameters: Mapping[str, Tensor], vocab_size: int) -> None:
    """Fill `parameters` (by name, plain tensors or DTensors of any placement) in place, converting to their dtype.

    Each rank reads only its own part. Rows that pad the vocabulary become zero.
    Raises CheckpointError for missing, unknown or wrongly shaped tensors, before anything is written.
    """
    check_weights(weights, {name: tuple(p.shape) for name, p in parameters.items()}, vocab_size)
    for name, parameter in parameters.items():
        target, start = local_part(parameter)
        size = list(target.shape)
        if name in VOCAB_NAMES:
            size[0] = max(min(size[0], vocab_size - start[0]), 0)
            target[size[0] :].zero_()
        if 0 not in size:
            target[: size[0]].copy_(weights.read(to_hf_name(name), start, tuple(size)))


__all__ = [
    "INDEX_NAME",
    "SINGLE_NAME",
    "HFWeights",
    "check_weights",
    "parameter_shapes",
    "read_into",
    "stored_shape",
]
