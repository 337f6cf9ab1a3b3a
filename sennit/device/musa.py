"""Moore Threads GPUs. Needs the package torch_musa, which registers the device type with PyTorch when imported."""

from __future__ import annotations

import importlib
import importlib.util

from sennit.device.base import AcceleratorDevice


class Musa(AcceleratorDevice):
    """MUSA devices. A peak rate is listed only where the vendor states it, so MFU is not reported on other models."""

    name = "musa"
    torch_type = "musa"
    comm_backend = "mccl"
    rates = {"s4000": {"bf16": 98.0}}  # as the vendor's own training examples count MFU on the MTT S4000

    def missing(self) -> str | None:
        if importlib.util.find_spec("torch_musa") is None:
            return "the package torch_musa is not installed"
        try:
            importlib.import_module("torch_musa")
        except (ImportError, OSError, RuntimeError) as error:
            return f"the package torch_musa does not import ({error})"
        return super().missing()


def device() -> Musa:
    """Return the entry."""
    return Musa()


__all__ = ["Musa", "device"]
