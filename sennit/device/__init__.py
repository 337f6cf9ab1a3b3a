"""The device table. A device is one file here; nothing outside this folder names a vendor.

Importing this package does not import torch; asking for a device does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from sennit.errors import DeviceError

if TYPE_CHECKING:
    from sennit.device.base import Device

DEVICES = ("cuda", "musa", "cpu")
"""Modules of this folder, each with a function `device()`; the first that is present is the default."""


def get_device(name: str | None = None) -> Device:
    """Return the device called `name`, or the default: the first present of DEVICES.

    The environment variable SENNIT_DEVICE overrides the default. Raises DeviceError if the name is unknown or the
    device is not usable on this machine.
    """
    import os

    name = name or os.environ.get("SENNIT_DEVICE") or None
    if name is not None:
        if name not in DEVICES:
            raise DeviceError(f"There is no device {name!r}; the devices are {', '.join(DEVICES)}.")
        device = load(name)
        why = device.missing()
        if why is not None:
            raise DeviceError(f"The device {name} cannot be used here: {why}.")
        return device
    for candidate in DEVICES:
        device = load(candidate)
        if device.missing() is None:
            return device
    raise DeviceError("No device can be used here; even the CPU entry refused.")


def load(name: str) -> Device:
    """Return the entry of the table, whether or not the machine has such a device."""
    return importlib.import_module(f"sennit.device.{name}").device()


__all__ = ["DEVICES", "get_device", "load"]
