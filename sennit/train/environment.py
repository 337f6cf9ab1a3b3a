"""The facts about a machine that explain a run's numbers."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

import sennit

if TYPE_CHECKING:
    from sennit.device import Device


def environment(device: Device, world_size: int) -> dict[str, Any]:
    """Return versions, device, threads and world size as plain data."""
    packages = {}
    for name in ("numpy", "pydantic", "safetensors", "tokenizers"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "sennit": sennit.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "device": device.name,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "world_size": world_size,
        "packages": packages,
    }


__all__ = ["environment"]
