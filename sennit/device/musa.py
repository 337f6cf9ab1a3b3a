"""Moore Threads GPUs. Needs the package torch_musa, which registers the device type with PyTorch when imported."""

from __future__ import annotations

import importlib.util

from sennit.device.base import AcceleratorDevice


class Musa(AcceleratorDevice):
    """MUSA devices. Peak rates of the models are not published per dtype, so MFU is not reported on them."""

    name = "musa"
    torch_type = "musa"
    comm_backend = "mccl"

    def missing(self) -> str | None:
        if importlib.util.find_spec("torch_musa") is None:
            return "the package torch_musa is not installed"
        importlib.import_module("torch_musa")
        return super().missing()


def device() -> Musa:
    """Return the entry."""
    return Musa()


__all__ = ["Musa", "device"]
