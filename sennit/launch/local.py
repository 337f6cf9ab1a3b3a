"""`--nproc N`: local ranks through torch's elastic agent, without restarts."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sennit.launch.failure import RankError, first_cause, load_failures
from sennit.launch.rank import local_rank

if TYPE_CHECKING:
    from sennit.device import Device

LOOPBACK = "127.0.0.1"
SHOW_CURSOR = "\x1b[?25h"


def launch(function: Callable[..., object], *args: Any, nproc: int, device: Device) -> None:
    """Run `function(*args)` on `nproc` ranks of this machine and return when all have ended well.

    Each finds its place in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, joins the process group itself,
    and ends with the launcher. function: importable by name.
    Raises RankError with the first cause when a rank fails (all others have ended by then), KeyboardInterrupt for
    Ctrl-C, SystemExit for another signal, DeviceError if there are fewer devices than ranks.
    """
    device.check_local_ranks(nproc)
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the host name resolves to
    sys.stdout.flush()
    sys.stderr.flush()
    logging.disable(logging.ERROR)  # the agent's account of a failure; ours is shorter
    try:
        with tempfile.TemporaryDirectory(prefix="sennit-") as folder:
            _launch(function, args, nproc, device, Path(folder))
    finally:
        logging.disable(logging.NOTSET)


def _launch(function: Callable[..., object], args: tuple[Any, ...], nproc: int, device: Device, folder: Path) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",  # the system picks a free port
        local_addr=LOOPBACK,
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork" if device.can_fork else "spawn",  # a forked rank need not import torch again
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        shutdown_timeout=5,
    )
    try:
        elastic_launch(config, local_rank)(function, args, str(folder), os.getpid())
    except ChildFailedError as error:
        detected = [(rank, failure.exitcode) for rank, failure in error.failures.items()]
        raise RankError(first_cause(load_failures(folder), detected), nproc) from None
    except SignalException as error:
        if int(error.sigval) == 2:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + int(error.sigval)) from None
    finally:
        if sys.stderr.isatty():
            sys.stderr.write(SHOW_CURSOR)  # a rank that was ended while it drew its progress has hidden it


__all__ = ["launch"]
