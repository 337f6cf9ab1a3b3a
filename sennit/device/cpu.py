"""The CPU: all cores of the machine, shared by the local ranks."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

import torch

from sennit.device.base import Device
from sennit.device.cores import available_cores, cpu_flags, cpuinfo, memory_limit_bytes, threads_per_rank
from sennit.errors import DeviceError

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}

SHAPES = ((2048, 1536, 512), (2048, 512, 3072), (2048, 2048, 1024), (2048, 2048, 2048))
"""Rows, inner and columns of the products whose best rate counts as the peak: large, and within the caches' reach."""

MEASUREMENTS = 3
"""Processes that measure the peak; the best counts, because a busy machine measures too little."""


class Cpu(Device):
    """x86-64 and ARM cores. bf16 counts as fast where there are instructions for it."""

    name = "cpu"
    torch_type = "cpu"
    comm_backend = "gloo"
    shared_by_ranks = True
    can_fork = True

    def __init__(self) -> None:
        bf16 = bool(cpu_flags() & {"amx_bf16", "avx512_bf16", "bf16"})
        self.fast_dtypes = ("bf16", "fp32") if bf16 else ("fp32",)

    def missing(self) -> str | None:
        return None

    def backend_missing(self) -> str | None:
        return None if torch.distributed.is_gloo_available() else "this PyTorch was built without gloo"

    def check_local_ranks(self, count: int) -> None:
        """Any number of ranks can share the cores."""

    def prepare_rank(self, *, local_rank: int) -> None:
        # Denormal numbers cost up to a hundred times a normal operation and carry nothing that training needs.
        torch.set_flush_denormal(True)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))

    def description(self) -> str:
        names = [line.partition(":")[2].strip() for line in cpuinfo() if line.startswith("model name")]
        return names[0] if names else os.uname().machine

    def count(self) -> int:
        return 1

    def peak_flops(self, dtype: str) -> float | None:
        """The best matrix-product rate on all cores: measured by the first few processes, kept in the cache directory.

        Raises DeviceError for a dtype that is not one of bf16, fp32 and fp64.
        """
        from sennit.paths import cache_dir

        if dtype not in TORCH_DTYPES:
            raise DeviceError(f"There is no peak rate for {dtype!r}; the dtypes are {', '.join(TORCH_DTYPES)}.")
        key = f"{self.description()}/{available_cores()} cores/torch {torch.__version__}/{dtype}"
        path = cache_dir() / "cpu-peak.json"
        rates = _read_rates(path).get(key, [])
        if len(rates) < MEASUREMENTS:
            rates = [*rates, measure_gemm_rate(TORCH_DTYPES[dtype], threads=available_cores())]
            _write_rates(path, {**_read_rates(path), key: rates})
        return max(rates)

    def memory_total_bytes(self) -> int:
        return memory_limit_bytes()

    def peak_memory_bytes(self) -> int:
        # VmHWM belongs to this program alone; ru_maxrss also remembers what the process ran before it.
        for line in _status():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def reset_peak_memory(self) -> None:
        """On Linux, start again from what is held now; elsewhere the peak of a process's life stays."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return

    def synchronize(self) -> None:
        """Work on the CPU is done when a call returns."""


def measure_gemm_rate(dtype: torch.dtype, *, threads: int) -> float:
    """Return the best rate of matrix products of SHAPES in `dtype`, FLOP/s; takes about half a second."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    best = 0.0
    try:
        for rows, inner, columns in SHAPES:
            a, b = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
            out = torch.empty(rows, columns, dtype=dtype)
            torch.mm(a, b.mT, out=out)
            end = time.perf_counter() + 0.1
            while (begin := time.perf_counter()) < end:
                torch.mm(a, b.mT, out=out)
                best = max(best, 2.0 * rows * inner * columns / (time.perf_counter() - begin))
    finally:
        torch.set_num_threads(before)
    return best


def _status() -> list[str]:
    try:
        return Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return []


def _read_rates(path: Path) -> dict[str, list[float]]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {key: rates for key, rates in known.items() if isinstance(rates, list)} if isinstance(known, dict) else {}


def _write_rates(path: Path, rates: dict[str, list[float]]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(rates, indent=1))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a cache that cannot be written costs half a second next time


def device() -> Cpu:
    """Return the entry."""
    return Cpu()


__all__ = ["Cpu", "device", "measure_gemm_rate"]
