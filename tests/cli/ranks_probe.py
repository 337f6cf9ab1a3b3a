"""The program `sennit` with a stand-in for training, so that a test can choose how a rank ends.

Usage: ranks_probe.py MODE train ...: ok, data (the last rank finds bad data), bug, killed, long.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import sennit.cli.training as training
from sennit.cli.main import main
from sennit.errors import DataError


def stand_in(recipe: Any, *, json_output: bool = False) -> None:
    """Join the job, meet the other ranks a few times, then end as MODE says."""
    import torch
    import torch.distributed as dist

    from sennit.device import get_device

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    get_device("cpu").prepare_rank(local_rank=rank)
    if world_size > 1:
        dist.init_process_group("gloo")
    facts: dict[str, Any] = {"rank": rank, "threads": torch.get_num_threads(), "pid": os.getpid()}
    facts |= {"world_size": world_size, "malloc": os.environ.get("MALLOC_MMAP_MAX_")}
    print("started " + json.dumps(facts), file=sys.stderr, flush=True)
    for turn in range(600 if MODE == "long" else 6):
        if turn == 3 and rank == world_size - 1:
            fail()
        if world_size > 1:
            dist.all_reduce(torch.ones(1))
        if MODE == "long":
            time.sleep(0.1)
    if world_size > 1:
        dist.destroy_process_group()
    if rank == 0 and json_output:
        print(json.dumps(facts))


def fail() -> None:
    """Break this rank as MODE says."""
    if MODE == "data":
        raise DataError("token 999 in file x is out of range; build the file again.")
    if MODE == "bug":
        raise KeyError("norm")
    if MODE == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    MODE = sys.argv.pop(1)
    training.train_function = lambda: stand_in
    main()
