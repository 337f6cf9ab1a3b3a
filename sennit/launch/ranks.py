"""The ranks that an engine (torchrun, SLURM, MPI) has already started, read from the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sennit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place in a job: `rank` of `world_size`, `local_rank` of `local_world_size` on this machine."""

    engine: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    def environment(self) -> dict[str, str]:
        """Return the variables by which PyTorch knows its place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


NAMES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    ("Open MPI", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Engine and its variables for rank, world size, local rank and local world size."""


def find_ranks(environ: Mapping[str, str] | None = None) -> Ranks | None:
    """Return this process's place in a job that an engine started, or None outside one (a job of one rank is none).

    environ: the environment to read; None is this process's. Raises ConfigError for contradictory variables.
    """
    environ = os.environ if environ is None else environ
    for engine, *names in NAMES:
        if names[0] in environ and names[1] in environ:
            if engine == "SLURM" and not _is_slurm_task(environ):
                continue
            return _read(engine, names, environ)
    return None


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process: the batch script itself has rank variables, but is no rank."""
    return any(name in environ for name in ("SLURM_STEP_ID", "SLURM_STEPID", "MASTER_ADDR"))


def _read(engine: str, names: list[str], environ: Mapping[str, str]) -> Ranks | None:
    rank_name, size_name, local_name, local_size_name = names
    rank = _integer(rank_name, environ[rank_name])
    step_size = environ.get("SLURM_STEP_NUM_TASKS", "") if engine == "SLURM" else ""  # a step may use part of a job
    world_size = _integer(size_name, step_size, environ[size_name])
    if rank >= world_size:
        raise ConfigError(
            f"{engine} says {rank_name}={rank} and {size_name}={world_size}: a rank is less than the number of ranks; "
            f"correct the two variables, or unset them to run as one process."
        )
    if world_size == 1 and engine != "torchrun":
        return None
    local_rank = _integer(local_name, environ.get(local_name, "0"))
    local_text = environ.get(local_size_name, "").partition("(")[0]  # SLURM writes 4(x2) for four on each of two nodes
    local_size = _integer(local_size_name, local_text, str(max(local_rank + 1, _spread(environ, world_size))))
    port = _integer("MASTER_PORT", environ.get("MASTER_PORT", ""), _default_port(environ))
    address = _master_addr(engine, local_size, world_size, environ)
    return Ranks(engine, rank, world_size, local_rank, local_size, address, port)


def _integer(name: str, text: str, default: str = "") -> int:
    text = text.strip() or default
    if not text.isdecimal():
        raise ConfigError(f"The environment variable {name}={text!r} is not a whole number; correct it or unset it.")
    return int(text)


def _spread(environ: Mapping[str, str], world_size: int) -> int:
    """Return the number of local ranks if they are spread evenly over SLURM's nodes, or are all on this machine."""
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    return -(-world_size // max(int(nodes), 1)) if nodes.isdecimal() else world_size


def _default_port(environ: Mapping[str, str]) -> str:
    """Return a port that all ranks derive alike and that two jobs on one machine do not share."""
    job = environ.get("SLURM_JOB_ID", "")
    return str(20000 + int(job) % 10000) if job.isdecimal() else "29500"


def _master_addr(engine: str, local_size: int, world_size: int, environ: Mapping[str, str]) -> str:
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if engine == "SLURM" and nodes:
        return first_host(nodes)
    if local_size >= world_size:
        return "127.0.0.1"
    raise ConfigError(
        f"{engine} started {world_size} ranks on several machines, but MASTER_ADDR is not set: export it as the host "
        f"name of rank 0's machine, the same on all ranks."
    )


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: `gpu[07-09,12],cpu1` is gpu07."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part for part in match.groups() if part) if match else nodes


__all__ = ["Ranks", "find_ranks", "first_host"]
