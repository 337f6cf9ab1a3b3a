"""What a device entry says and does."""

from __future__ import annotations

import torch


class Device:
    """One kind of device.

    `torch_type`: device type in PyTorch. `comm_backend`: process-group backend. `fast_dtypes`: recipe names of the
    formats it computes fast in. `has_streams`: work is asynchronous. `shared_by_ranks`: local ranks share one device
    (the cores of a CPU), so rates do not grow with their number.
    """

    name = ""
    torch_type = ""
    comm_backend = ""
    fast_dtypes: tuple[str, ...] = ()
    has_streams = False
    shared_by_ranks = False

    def missing(self) -> str | None:
        """Return why the device cannot be used on this machine, or None."""
        raise NotImplementedError

    def prepare_rank(self, *, local_rank: int) -> None:
        """Bind this process to its share of the device; called once before the process group starts."""
        raise NotImplementedError

    def description(self) -> str:
        """Return the model name of the device."""
        raise NotImplementedError

    def peak_flops(self, dtype: str) -> float | None:
        """Return the peak rate in the recipe's `dtype`, FLOP/s of one device, or None if it is not known."""
        raise NotImplementedError

    def memory_total_bytes(self) -> int:
        """Return the memory of one device."""
        raise NotImplementedError

    def peak_memory_bytes(self) -> int:
        """Return the most memory this process has held."""
        raise NotImplementedError

    def reset_peak_memory(self) -> None:
        """Start the measure of `peak_memory_bytes` again, where the device can."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait for all work given to the device."""


class AcceleratorDevice(Device):
    """A device behind `torch.accelerator`. Subclasses name it and list its models' peak rates."""

    has_streams = True
    fast_dtypes = ("bf16",)
    rates: dict[str, dict[str, float]] = {}
    """Part of the model's name -> dense peak rate by dtype, TFLOP/s, from the vendor's data sheets."""

    def missing(self) -> str | None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type != self.torch_type:
            return f"this PyTorch ({torch.__version__}) sees no {self.torch_type} device"
        return None

    def _module(self):  # noqa: ANN202 - a torch backend module has no type
        return torch.get_device_module(self.torch_type)

    def prepare_rank(self, *, local_rank: int) -> None:
        torch.accelerator.set_device_index(local_rank % max(torch.accelerator.device_count(), 1))

    def description(self) -> str:
        return self._module().get_device_name()

    def peak_flops(self, dtype: str) -> float | None:
        model = self.description().lower()
        for part, rates in self.rates.items():
            if part in model:
                return rates[dtype] * 1e12 if dtype in rates else None
        return None

    def memory_total_bytes(self) -> int:
        return int(self._module().get_device_properties(torch.accelerator.current_device_index()).total_memory)

    def peak_memory_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated())

    def reset_peak_memory(self) -> None:
        torch.accelerator.reset_peak_memory_stats()

    def synchronize(self) -> None:
        torch.accelerator.synchronize()


__all__ = ["AcceleratorDevice", "Device"]
