"""`sennit doctor`: what this machine can do, what is missing and why."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer

import sennit

if TYPE_CHECKING:
    from sennit.device import Device

PACKAGES = ("torch", "numpy", "pydantic", "tokenizers", "safetensors", "tensorboard", "plotly", "matplotlib")
OPTIONAL = {
    "pyarrow": "reading parquet files (pip install sennit[parquet])",
    "transformers": "checking exported models against Hugging Face",
    "triton": "operators written for GPUs",
    "flash_attn": "FlashAttention on CUDA",
    "torch_musa": "Moore Threads GPUs",
}
"""Packages that Sennit runs without, and what each is for."""


def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as one JSON document.")] = False,
    rates: Annotated[bool, typer.Option("--rates/--no-rates", help="Measure the CPU's peak rates.")] = True,
) -> None:
    """Say what this machine can do, what is missing and why."""
    document = examine(rates=rates)
    if json_output:
        from sennit.cli.output import print_json

        print_json(document)
    else:
        from sennit.cli.doctor_page import print_page

        print_page(document)


def examine(*, rates: bool = True) -> dict[str, Any]:
    """Return the machine's facts as plain data: versions, start_up, devices, default_device, operators, optional.

    rates: also ask for peak rates (on a CPU they are measured, about two seconds the first times).
    """
    from sennit.device import DEVICES, get_device, load_device
    from sennit.errors import DeviceError

    try:
        default, problem = get_device(), None
    except DeviceError as error:  # SENNIT_DEVICE names one that is not here
        default, problem = load_device("cpu"), str(error)
    return {
        "sennit": sennit.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version(name) for name in PACKAGES},
        "cache_dir": _cache_dir(),
        "default_device": default.name,
        "problem": problem,
        "devices": {name: device_facts(load_device(name), rates=rates) for name in DEVICES},
        "start_up": start_up_facts(),
        "operators": operator_facts(default.torch_type),
        "optional": optional_facts(),
    }


def device_facts(device: Device, *, rates: bool) -> dict[str, Any]:
    """Return the facts of one device; only `usable` and `why` if it is not here. Rates in FLOP/s of one device."""
    why = device.missing()
    if why is not None:
        return {"usable": False, "why": why, "backend": device.comm_backend}
    return {
        "usable": True,
        "model": device.description(),
        "count": device.count(),
        "memory_bytes": device.memory_total_bytes(),
        "fast_dtypes": list(device.fast_dtypes),
        "auto_dtype": device.resolve_dtype("auto"),
        "backend": device.comm_backend,
        "backend_why": device.backend_missing(),
        "peak_flops": {dtype: device.peak_flops(dtype) for dtype in ("bf16", "fp32", "fp64")} if rates else {},
    }


def start_up_facts() -> dict[str, Any]:
    """Return the settings that `sennit train` starts with here: value, who set it, and what for."""
    from sennit.device.cores import available_cores
    from sennit.launch.startup import GUARD, start_up_settings

    settings = [
        {
            "name": setting.name,
            "value": setting.value,
            "set_by": "you" if setting.from_user else "sennit train",
            "reason": setting.reason,
        }
        for setting in start_up_settings()
    ]
    denormals = {"name": "denormal numbers", "value": "flushed to zero", "reason": "they are slow on CPUs"}
    settings.append({**denormals, "set_by": "sennit train"})
    return {"cores": available_cores(), "switched_off": bool(os.environ.get(GUARD)), "settings": settings}


def operator_facts(device: str) -> dict[str, list[dict[str, Any]]]:
    """Return, by operator, its providers on `device` in the order of preference, each usable or why not."""
    from sennit import ops

    return {
        op: [{"provider": name, "usable": usable, "why": why} for name, usable, why in ops.explain(op, device)]
        for op in ops.operators()
    }


def optional_facts() -> dict[str, dict[str, Any]]:
    """Return, by optional package, its version (None if it is not installed) and what it is for."""
    return {
        name: {"version": version(name) if importlib.util.find_spec(name) else None, "for": purpose}
        for name, purpose in OPTIONAL.items()
    }


def version(package: str) -> str | None:
    """Return the installed version of `package`, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cache_dir() -> str:
    from sennit.paths import cache_dir

    return str(cache_dir())


__all__ = ["device_facts", "doctor", "examine", "operator_facts", "optional_facts", "start_up_facts", "version"]
