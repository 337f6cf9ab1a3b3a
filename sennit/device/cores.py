"""The cores and the memory this process may use. Imports no torch: start-up needs the numbers before that."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def cpuinfo() -> list[str]:
    """Return the lines of /proc/cpuinfo, or nothing where there is no such file."""
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def cpu_flags() -> frozenset[str]:
    """Return the instruction-set flags of the first core."""
    for line in cpuinfo():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def available_cores() -> int:
    """Return how many cores this process may use: its affinity mask, cut by the quota of its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for text in cgroup_values("cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdecimal() and period.isdecimal():
            cores = min(cores, math.ceil(int(quota) / int(period)))
    quotas, periods = cgroup_values("cpu/cpu.cfs_quota_us"), cgroup_values("cpu/cpu.cfs_period_us")
    for quota, period in zip(quotas, periods, strict=False):
        if quota.isdecimal() and period.isdecimal():
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(cores, 1)


def threads_per_rank(local_ranks: int) -> int:
    """Return the threads of each of `local_ranks` processes that share the cores."""
    return max(available_cores() // max(local_ranks, 1), 1)


def memory_limit_bytes() -> int:
    """Return the machine's memory, or less where a control group allows this process less."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        for text in cgroup_values(name):
            if text.isdecimal():
                limit = min(limit, int(text))
    return limit


def cgroup_values(name: str) -> Iterator[str]:
    """Yield the setting `name` of this process's control group and of each group above it, where they exist."""
    controller, _, _ = name.rpartition("/")
    for folder in _cgroup_folders(controller):
        try:
            yield (folder / name.rpartition("/")[2]).read_text().strip()
        except OSError:
            continue


def _cgroup_folders(controller: str) -> list[Path]:
    """Return the folders of this process's group, innermost first; `controller` is a version 1 hierarchy or empty."""
    top = CGROUPS / controller
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return [top]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            inner = top / path.strip("/")
            return [inner, *(parent for parent in inner.parents if parent.is_relative_to(top))]
    return [top]


__all__ = ["available_cores", "cgroup_values", "cpu_flags", "cpuinfo", "memory_limit_bytes", "threads_per_rank"]
