"""Calling the C++ library with tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from sennit.ops.cpu.library import load

DTYPES = (torch.float32, torch.bfloat16)


def kind(x: Tensor) -> int:
    """Return the library's number for the dtype of `x`."""
    return 1 if x.dtype == torch.bfloat16 else 0


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    """Return the address of the data of `x`, or null."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def integers(*values: int) -> list[ctypes.c_int64]:
    """Return sizes and strides as the library takes them."""
    return [ctypes.c_int64(value) for value in values]


def real(value: float) -> ctypes.c_float:
    """Return a float argument."""
    return ctypes.c_float(value)


def call(name: str, *arguments: Any) -> Any:
    """Call a function of the library; the number of threads is appended."""
    library = load()
    assert not isinstance(library, str), library
    return getattr(library, f"sennit_{name}")(*arguments, ctypes.c_int(torch.get_num_threads()))


__all__ = ["DTYPES", "call", "integers", "kind", "pointer", "real"]
