"""The device table. A device is one file here; nothing outside this folder names a vendor.

Importing this package does not import torch; asking for a device does.
"""

from __future__ import annotations

import difflib
import importlib
import os
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
    name = name or os.environ.get("SENNIT_DEVICE") or None
    if name is None:
        return next(device for device in map(load_device, DEVICES) if device.missing() is None)
    device = load_device(name)
    why = device.missing()
    if why is not None:
        raise DeviceError(f"The device {name} cannot be used here: {why}. Choose another with SENNIT_DEVICE.")
    return device


def load_device(name: str) -> Device:
    """Return the table's entry, whether or not the machine has such a device. Raises DeviceError if there is none."""
    if name not in DEVICES:
        near = difflib.get_close_matches(name.lower(), DEVICES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise DeviceError(f"There is no device {name!r}; the devices are {', '.join(sorted(DEVICES))}.{hint}")
    return importlib.import_module(f"sennit.device.{name}").device()


def __getattr__(name: str) -> object:
    """Return `Device` on first use, so that importing this package costs nothing."""
    if name == "Device":
        return importlib.import_module("sennit.device.base").Device
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["DEVICES", "Device", "get_device", "load_device"]
