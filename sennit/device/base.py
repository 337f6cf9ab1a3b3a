"""What a device entry says and does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from sennit.errors import DeviceError


class Device(ABC):
    """One kind of device.

    `torch_type`: device type in PyTorch. `comm_backend`: process-group backend. `fast_dtypes`: recipe names of the
    formats it computes fast in. `has_streams`: work is asynchronous. `shared_by_ranks`: local ranks share one device
    (the cores of a CPU), so rates do not grow with their number. `can_fork`: ranks may be forked from a process that
    has asked for this device.
    """

    name = ""
    torch_type = ""
    comm_backend = ""
    fast_dtypes: tuple[str, ...] = ()
    has_streams = False
    shared_by_ranks = False
    can_fork = False

    @abstractmethod
    def missing(self) -> str | None:
        """Return why the device cannot be used on this machine, or None."""

    @abstractmethod
    def backend_missing(self) -> str | None:
        """Return why `comm_backend` cannot be used on this machine, or None."""

    @abstractmethod
    def check_local_ranks(self, count: int) -> None:
        """Raise DeviceError if this machine cannot give `count` ranks a device each."""

    @abstractmethod
    def prepare_rank(self, *, local_rank: int) -> None:
        """Bind this process to its share of the device; called once before the process group starts."""

    @abstractmethod
    def description(self) -> str:
        """Return the model name of the device."""

    @abstractmethod
    def count(self) -> int:
        """Return how many of these devices the machine has."""

    @abstractmethod
    def peak_flops(self, dtype: str) -> float | None:
        """Return the peak rate in the recipe's `dtype`, FLOP/s of one device, or None if it is not known."""

    @abstractmethod
    def memory_total_bytes(self) -> int:
        """Return the memory of one device that this process may use."""

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Return the most memory this process has held at once."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Start the measure of `peak_memory_bytes` again, where the system can."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work given to the device."""

    def resolve_dtype(self, dtype: str) -> str:
        """Return the format that `precision.dtype` means here: auto is bf16 if that is fast, else fp32."""
        if dtype != "auto":
            return dtype
        return "bf16" if "bf16" in self.fast_dtypes else "fp32"


class AcceleratorDevice(Device):
    """A device behind `torch.accelerator`. Subclasses name it and list its models' peak rates."""

    has_streams = True
    fast_dtypes = ("bf16",)
    rates: dict[str, dict[str, float]] = {}
    """Part of the model's name -> dense peak rate by dtype, TFLOP/s, from data sheets; the first match counts."""

    def missing(self) -> str | None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type != self.torch_type:
            return f"this PyTorch ({torch.__version__}) sees no {self.torch_type} device"
        return None

    def backend_missing(self) -> str | None:
        if not torch.distributed.is_backend_available(self.comm_backend):
            return f"this PyTorch ({torch.__version__}) was built without {self.comm_backend}"
        return None

    def _module(self) -> Any:
        return torch.get_device_module(self.torch_type)

    def count(self) -> int:
        return torch.accelerator.device_count()

    def check_local_ranks(self, count: int) -> None:
        if count > self.count():
            raise DeviceError(
                f"{count} local ranks need a {self.name} device each, and this machine shows {self.count()}: start "
                f"--nproc {self.count()}, or choose the CPU with SENNIT_DEVICE=cpu."
            )

    def prepare_rank(self, *, local_rank: int) -> None:
        # A scheduler may show each rank only its own device, as number 0.
        torch.accelerator.set_device_index(local_rank if self.count() > 1 else 0)

    def description(self) -> str:
        return self._module().get_device_name()

    def peak_flops(self, dtype: str) -> float | None:
        model = self.description().lower()
        rates = next((rates for part, rates in self.rates.items() if part in model), {})
        return rates[dtype] * 1e12 if dtype in rates else None

    def memory_total_bytes(self) -> int:
        return int(self._module().get_device_properties(torch.accelerator.current_device_index()).total_memory)

    def peak_memory_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated())

    def reset_peak_memory(self) -> None:
        torch.accelerator.reset_peak_memory_stats()

    def synchronize(self) -> None:
        torch.accelerator.synchronize()


__all__ = ["AcceleratorDevice", "Device"]
