"""The state that a checkpoint holds: named tensors, nested in dicts in the program, flat on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

FILE_OVERHEAD_BYTES = 4096
"""Upper estimate of what a tensor costs on disk beyond its data: archive headers, alignment, its metadata."""

MAX_LISTED = 5


def flatten(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a nested dict by their dotted path, sharing storage.

    Raises TypeError for a value that is neither a dict nor a Tensor, and ValueError if two paths read the same.
    """
    flat: dict[str, Tensor] = {}

    def visit(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                visit(f"{prefix}.{key}" if prefix else str(key), inner)
        elif not isinstance(value, Tensor):
            raise TypeError(f"state[{prefix!r}] is a {type(value).__name__}; a state holds only dicts and tensors")
        elif prefix in flat:
            raise ValueError(f"two values of the state are both called {prefix!r}")
        else:
            flat[prefix] = value

    visit("", state)
    return flat


def estimate_bytes(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Return by name the bytes that each tensor of a flat state takes on disk over all ranks (a DTensor whole)."""
    return {name: t.numel() * t.element_size() + FILE_OVERHEAD_BYTES for name, t in state.items()}


def compare(state: Mapping[str, Tensor], all_names: set[str], metadata: Metadata) -> str | None:
    """Return how a flat state differs in names, shapes or dtypes from what was saved, or None if it does not.

    `all_names`: the names that any rank has; with a pipeline, one rank has a part of them.
    """
    saved = metadata.state_dict_metadata
    problems = [f"{name} is not in the checkpoint" for name in state if name not in saved]
    problems += [f"{name} is only in the checkpoint" for name in saved if name not in all_names]
    for name, tensor in state.items():
        entry = saved.get(name)
        if entry is None:
            continue
        if not isinstance(entry, TensorStorageMetadata):
            problems.append(f"{name} is not a tensor in the checkpoint")
        elif tuple(entry.size) != tuple(tensor.shape):
            problems.append(f"{name} has shape {list(entry.size)} in the checkpoint and {list(tensor.shape)} here")
        elif entry.properties.dtype != tensor.dtype:
            problems.append(f"{name} is {entry.properties.dtype} in the checkpoint and {tensor.dtype} here")
    if not problems:
        return None
    more = f"; and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
    return "; ".join(problems[:MAX_LISTED]) + more


__all__ = ["compare", "estimate_bytes", "flatten"]
