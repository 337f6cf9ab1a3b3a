"""A small state, and what the tests of checkpoints do with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sennit import checkpoint
from sennit.checkpoint.state import flatten


def small_state(value: int) -> dict[str, Any]:
    """A state whose every number follows from `value`, with a matrix, a vector, a scalar, bf16 and bytes."""
    generator = torch.Generator().manual_seed(value)
    return {
        "model": {
            "embedding.weight": torch.randn(7, 3, generator=generator),
            "norm.weight": torch.full((3,), float(value)),
        },
        "optimizer": {
            "embedding.weight": {"exp_avg": torch.randn(7, 3, generator=generator).bfloat16()},
            "norm.weight": {"exp_avg": torch.tensor(float(value), dtype=torch.float64)},
        },
        "random": {"cpu": torch.full((16,), value % 251, dtype=torch.uint8)},
    }


def zeros(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same names, shapes and dtypes, filled with zeros."""
    return {k: torch.zeros_like(v) if isinstance(v, Tensor) else zeros(v) for k, v in state.items()}


def equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two states hold the same names and exactly the same values."""
    x, y = flatten(a), flatten(b)
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


def save_steps(root: Any, *steps: int, keep: int = 0) -> None:
    """Save `small_state(step)` for each step."""
    for step in steps:
        checkpoint.save(root, step, small_state(step), meta={"progress": {"step": step}}, keep=keep)


def holds(path: Any, step: int) -> bool:
    """Whether the checkpoint at `path` loads and is exactly that of `step`."""
    state = zeros(small_state(step))
    checkpoint.load(path, state)
    return equal(state, small_state(step)) and checkpoint.read_meta(path) == {"progress": {"step": step}}
