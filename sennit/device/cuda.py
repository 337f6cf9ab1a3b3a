"""NVIDIA GPUs."""

from __future__ import annotations

from sennit.device.base import AcceleratorDevice


class Cuda(AcceleratorDevice):
    """CUDA devices; peak rates are the dense ones of NVIDIA's data sheets (no sparsity)."""

    name = "cuda"
    torch_type = "cuda"
    comm_backend = "nccl"
    rates = {
        "gb200": {"bf16": 2500.0, "fp32": 80.0, "fp64": 40.0},
        "b200": {"bf16": 2250.0, "fp32": 75.0, "fp64": 37.0},
        "h200 nvl": {"bf16": 835.5, "fp32": 60.0, "fp64": 60.0},
        "h200": {"bf16": 989.4, "fp32": 66.9, "fp64": 66.9},
        "h100 pcie": {"bf16": 756.0, "fp32": 51.2, "fp64": 51.2},
        "h100 nvl": {"bf16": 835.5, "fp32": 60.0, "fp64": 60.0},
        "h100": {"bf16": 989.4, "fp32": 66.9, "fp64": 66.9},
        "h800": {"bf16": 989.4, "fp32": 66.9},
        "h20": {"bf16": 148.0, "fp32": 44.0},
        "a100": {"bf16": 312.0, "fp32": 19.5, "fp64": 19.5},
        "a800": {"bf16": 312.0, "fp32": 19.5},
        "l40s": {"bf16": 362.0, "fp32": 91.6},
        "rtx 4090": {"bf16": 165.2, "fp32": 82.6},
    }


def device() -> Cuda:
    """Return the entry."""
    return Cuda()


__all__ = ["Cuda", "device"]
