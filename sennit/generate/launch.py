"""`sennit generate` on several ranks of this machine."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sennit.device import Device
from sennit.generate.job import GenerateSettings, run_generate
from sennit.launch.failure import Failure, RankError, first_cause, load_failures
from sennit.launch.rank import COLLATERAL_WAIT_SECONDS, end_with_parent

LOOPBACK = "127.0.0.1"


def launch_generate(settings: GenerateSettings, nproc: int, *, device: Device) -> None:
    """Run `run_generate` on `nproc` ranks of this machine and return when all have ended well.

    Raises RankError with the first cause when a rank fails, KeyboardInterrupt for Ctrl-C, SystemExit for another
    signal, DeviceError if there are fewer devices than ranks.
    """
    device.check_local_ranks(nproc)
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the host name resolves to
    sys.stdout.flush()
    sys.stderr.flush()
    logging.disable(logging.ERROR)  # the agent's account of a failure; ours is shorter
    try:
        with tempfile.TemporaryDirectory(prefix="sennit-") as folder:
            _launch(settings, nproc, device, Path(folder))
    finally:
        logging.disable(logging.NOTSET)


def _launch(settings: GenerateSettings, nproc: int, device: Device, folder: Path) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",
        local_addr=LOOPBACK,
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork" if device.can_fork else "spawn",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        shutdown_timeout=5,
    )
    try:
        elastic_launch(config, _rank)(settings, str(folder), os.getpid())
    except ChildFailedError as error:
        detected = [(rank, failure.exitcode) for rank, failure in error.failures.items()]
        raise RankError(first_cause(load_failures(folder), detected), nproc) from None
    except SignalException as error:
        if int(error.sigval) == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + int(error.sigval)) from None


def _rank(settings: GenerateSettings, failures: str, launcher: int) -> None:
    """Generate as a rank that `launch_generate` started; on an error leave a Failure in `failures` and end."""
    logging.disable(logging.NOTSET)
    for number in (signal.SIGTERM, signal.SIGINT):  # end at once, also inside a collective
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(launcher)
    rank = int(os.environ["RANK"])
    try:
        run_generate(settings)
    except BaseException as error:
        failure = Failure.of(error, rank)
        failure.save(Path(failures))
        if failure.collateral:
            time.sleep(COLLATERAL_WAIT_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure.exit_code or 1)  # at once: leaving a process group properly would wait for the others


__all__ = ["launch_generate"]
