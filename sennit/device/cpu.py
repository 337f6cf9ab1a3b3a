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

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


class Cpu(Device):
    """x86-64 and ARM cores. bf16 counts as fast where there are instructions for it."""

    name = "cpu"
    torch_type = "cpu"
    comm_backend = "gloo"
    shared_by_ranks = True

    def __init__(self) -> None:
        flags = cpu_flags()
        self.fast_dtypes = ("bf16", "fp32") if {"amx_bf16", "avx512_bf16"} & flags or "bf16" in flags else ("fp32",)

    def missing(self) -> str | None:
        return None

    def prepare_rank(self, *, local_rank: int) -> None:
        # Denormal numbers cost up to a hundred times a normal operation and carry nothing that training needs.
        torch.set_flush_denormal(True)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))

    def description(self) -> str:
        for line in _cpuinfo():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
        return os.uname().machine

    def peak_flops(self, dtype: str) -> float | None:
        """The best matrix-product rate on all cores, measured once for a machine and kept in the cache directory."""
        from sennit.paths import cache_dir

        key = f"{self.description()}/{torch.__version__}/{available_cores()}/{dtype}"
        path = cache_dir() / "cpu-peak.json"
        known = _read_json(path)
        if key not in known:
            known[key] = measure_gemm_rate(TORCH_DTYPES[dtype], threads=available_cores())
            _write_json(path, known)
        return known[key]

    def memory_total_bytes(self) -> int:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
            try:
                total = min(total, int(Path(name).read_text()))
            except (OSError, ValueError):
                continue
        return total

    def peak_memory_bytes(self) -> int:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def reset_peak_memory(self) -> None:
        """The kernel keeps the peak of a process's life; there is nothing to reset."""


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def cpu_flags() -> frozenset[str]:
    """Return the instruction-set flags of the first core."""
    for line in _cpuinfo():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(local_ranks: int) -> int:
    """Return the threads of each of `local_ranks` processes that share the cores."""
    return max(available_cores() // max(local_ranks, 1), 1)


def measure_gemm_rate(dtype: torch.dtype, *, threads: int) -> float:
    """Return the best rate of matrix products of three large shapes, FLOP/s; takes about a second."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    best = 0.0
    try:
        for rows, inner, columns in ((2048, 1536, 512), (2048, 512, 3072), (2048, 2048, 1024)):
            a, b = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
            out = torch.empty(rows, columns, dtype=dtype)
            for _ in range(8):
                begin = time.perf_counter()
                torch.mm(a, b.mT, out=out)
                best = max(best, 2.0 * rows * inner * columns / (time.perf_counter() - begin))
    finally:
        torch.set_num_threads(before)
    return best


def _read_json(path: Path) -> dict[str, float]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _write_json(path: Path, document: dict[str, float]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(document))
        temporary.replace(path)
    except OSError:
        return  # a cache that cannot be written costs a second next time


def device() -> Cpu:
    """Return the entry."""
    return Cpu()


__all__ = ["Cpu", "available_cores", "cpu_flags", "device", "measure_gemm_rate", "threads_per_rank"]
