"""Finds, builds and loads the C++ library.

It has a plain C interface and no dependency on PyTorch's headers, so it builds in seconds and outlives PyTorch's
releases. It is linked without an OpenMP runtime: its calls resolve to the one that PyTorch has loaded, so that both
share one pool of threads.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[3] / "csrc"
FOLDER = Path(__file__).resolve().parent / "lib"
VERSION = 1
"""Must equal `sennit_version()` of the library: an old build is refused instead of called with other arguments."""


def variants() -> dict[str, tuple[str, ...]]:
    """Return the builds for this kind of machine, best first: name -> compiler flags."""
    if platform.machine() in ("x86_64", "AMD64"):
        return {
            "x86-64-v4-bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"),
            "x86-64-v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
            "x86-64-v3": ("-march=x86-64-v3",),
        }
    return {platform.machine(): ()}


def runs_here(variant: str) -> bool:
    """Whether this CPU has the instructions of `variant`."""
    from sennit.device.cores import cpu_flags

    v4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    needed = {
        "x86-64-v4-bf16": v4 | {"avx512_bf16"},
        "x86-64-v4": v4,
        "x86-64-v3": {"avx2", "bmi2", "f16c", "fma"},
    }
    return needed.get(variant, set()) <= cpu_flags()


def path_of(variant: str) -> Path:
    """Return where the build of `variant` lies."""
    return FOLDER / f"sennit-{variant}.so"


def build(folder: Path = FOLDER, sources: Path = SOURCES) -> list[Path]:
    """Compile every variant and return the files. Raises RuntimeError, with the compiler's words, if that fails."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("no C++ compiler (g++) was found")
    folder.mkdir(parents=True, exist_ok=True)
    built = []
    for variant, flags in variants().items():
        target, objects = folder / f"sennit-{variant}.so", folder / f"sennit-{variant}.o"
        common = ["-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-fPIC", "-Wno-psabi"]
        steps = (
            [compiler, *common, "-fopenmp", *flags, "-c", str(sources / "kernels.cpp"), "-o", str(objects)],
            [compiler, "-shared", str(objects), "-o", str(target)],
        )
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(step)}: {done.stderr[-2000:]}")
        objects.unlink()
        built.append(target)
    return built


@functools.cache
def load() -> ctypes.CDLL | str:
    """Return the library, or why there is none."""
    if sys.platform != "linux":
        return f"only built on Linux, this is {sys.platform}"
    found = [variant for variant in variants() if runs_here(variant)]
    if not found:
        return "this CPU lacks the instructions (AVX2)"
    present = [path_of(variant) for variant in found if path_of(variant).exists()]
    if not present:
        return "not built: install a C++ compiler and run `python -m sennit.ops.cpu.build`"
    _publish_openmp()
    try:
        library = ctypes.CDLL(str(present[0]))
    except OSError as error:
        return f"{present[0].name} does not load: {error}"
    if library.sennit_version() != VERSION:
        return f"{present[0].name} is of another version; run `python -m sennit.ops.cpu.build`"
    library.sennit_sum_of_squares.restype = ctypes.c_double
    return library


def _publish_openmp() -> None:
    """Make the symbols of the OpenMP runtime that PyTorch has loaded visible to libraries loaded later."""
    import torch  # noqa: F401 - loads its runtime

    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.rpartition(" ")[2]
        if any(part in Path(name).name for part in ("libgomp", "libomp", "libiomp")):
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            return


def missing() -> str | None:
    """Return why the library cannot be used, or None."""
    found = load()
    return found if isinstance(found, str) else None


__all__ = ["VERSION", "build", "load", "missing", "path_of", "runs_here", "variants"]
