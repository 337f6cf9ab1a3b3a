"""Settings that must be in the environment before a process starts, because libraries read them once.

glibc's allocator takes large blocks from the kernel and gives them back at once, so every large tensor is page-faulted
anew, 8192 faults for 32 MB. Kept in the heap instead, eager operators that are bound by memory run 2.6 to 6 times
faster, and a whole training step several percent. The memory is not returned to the system before the process ends.

Threads that wait by spinning take the cores from those they wait for as soon as anything else runs on the machine: with
one busy core of two, a training step took 4 to 7 times as long as with threads that sleep at once. On a quiet machine
sleeping at once costs 14 %; the number of turns chosen here costs 3 % and keeps most of the gain.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from sennit.device.cores import threads_per_rank

GUARD = "SENNIT_STARTED"
"""Set by the command line once the settings are in force; a user who sets it to 1 turns them off."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable: the value that training starts with, whether the user set it, and what it is for."""

    name: str
    value: str
    from_user: bool
    reason: str


def start_up_settings(local_ranks: int = 1, environ: Mapping[str, str] | None = None) -> list[Setting]:
    """Return the variables for a job with `local_ranks` processes on this machine. Values in `environ` win.

    environ: the environment to start from; None is this process's.
    """
    environ = os.environ if environ is None else environ
    wanted = []
    if platform.libc_ver()[0] == "glibc" and "GLIBC_TUNABLES" not in environ:
        wanted += [
            ("MALLOC_MMAP_MAX_", "0", "large tensors come from the heap, not from fresh pages"),
            ("MALLOC_TRIM_THRESHOLD_", str(8 * 2**30), "freed memory stays with the process, bytes"),
            ("MALLOC_TOP_PAD_", str(256 * 2**20), "the heap grows in steps of this many bytes"),
            ("MALLOC_ARENA_MAX", "1", "one heap for all threads, so that freed blocks are used again"),
        ]
    wanted.append(("GOMP_SPINCOUNT", "10000", "waiting threads soon sleep: spinning ones starve each other on a busy machine"))
    wanted.append(("OMP_NUM_THREADS", str(threads_per_rank(local_ranks)), "cores / local ranks"))
    return [Setting(name, environ.get(name) or value, name in environ, why) for name, value, why in wanted]


def restart(local_ranks: int) -> None:
    """Start this program again in this process with the settings in force; returns if that has happened already.

    It also returns where it would do harm or nothing: torch is already imported (the caller is a program of its own),
    or there is nothing to change.
    """
    if os.environ.get(GUARD) or "torch" in sys.modules:
        return
    new = {setting.name: setting.value for setting in start_up_settings(local_ranks) if not setting.from_user}
    os.environ[GUARD] = "1"
    if not new:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **new})


__all__ = ["GUARD", "Setting", "restart", "start_up_settings"]
