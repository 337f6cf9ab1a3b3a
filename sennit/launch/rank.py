"""One rank of a run: its log, its signals, and how its end is reported."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sennit.errors import ConfigError, SennitError
from sennit.launch.failure import Failure, RankError
from sennit.launch.logs import log_folder, log_path, rank_log

if TYPE_CHECKING:
    from sennit.launch.ranks import Ranks

COLLATERAL_WAIT_SECONDS = 2.0
"""A rank that lost a peer waits this long before it ends, so that whoever watches sees the culprit end first."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_alone(function: Callable[[], object], run_dir: str) -> None:
    """Run `function()` as a job of one process, with its log in `run_dir`. Raises as `run_logged`."""
    with log_folder(run_dir):
        run_logged(function, run_dir, rank=0, world_size=1, visible=True)


def run_engine_rank(function: Callable[[], object], run_dir: str, ranks: Ranks) -> None:
    """Run `function()` as the rank that an engine started. Raises RankError for whatever ends it."""
    os.environ.update(ranks.environment())
    try:
        with log_folder(run_dir):
            run_logged(function, run_dir, rank=ranks.rank, world_size=ranks.world_size, visible=True)
    except RankError as error:
        if error.failure.collateral:
            time.sleep(COLLATERAL_WAIT_SECONDS)
        raise
    except SennitError as error:
        raise RankError(Failure.of(error, ranks.rank), ranks.world_size) from None


def local_rank(function: Callable[..., object], args: tuple[Any, ...], failures: str, launcher: int) -> None:
    """Run `function(*args)` in a process that our launcher started; on an error, leave a Failure in the folder
    `failures` and end.

    launcher: its process id. This process ends with it, whatever ends it.
    """
    logging.disable(logging.NOTSET)
    for number in (signal.SIGTERM, signal.SIGINT):  # end at once, also inside a collective; checkpoints are atomic
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(launcher)
    try:
        function(*args)
    except BaseException as error:
        failure = Failure.of(error, int(os.environ["RANK"]))
        failure.save(Path(failures))
        if failure.collateral:
            time.sleep(COLLATERAL_WAIT_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure.exit_code or 1)  # at once: leaving a process group properly would wait for the others


def run_logged(function: Callable[[], object], run_dir: str, *, rank: int, world_size: int, visible: bool) -> None:
    """Run `function()` with the log of `rank` in the run directory; `visible` ranks also show their stderr.

    Raises SennitError as it is, and everything else as RankError, with its trace in the log.
    """
    with rank_log(log_path(run_dir, rank), visible=visible) as log:
        try:
            function()
        except SennitError as error:
            log.write(f"error: {error}\n")
            raise
        except Exception as error:
            failure = Failure.of(_explained(error), rank)
            log.write(failure.trace or f"error: {failure.message}\n")
            raise RankError(failure, world_size) from error


def _explained(error: Exception) -> Exception:
    """Return a paragraph for errors of the start that a user can mend, else the error itself."""
    if "EADDRINUSE" in str(error) or (isinstance(error, OSError) and error.errno == errno.EADDRINUSE):
        return port_in_use(os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))
    return error


def port_in_use(address: str, port: str | int) -> ConfigError:
    """Return the error for a rendezvous port that another program holds."""
    return ConfigError(
        f"The port {port} on {address}, at which the ranks of this job meet, is in use by another program: set "
        f"MASTER_PORT to a free port, the same on all ranks (torchrun: --master-port, or --standalone on one machine)."
    )


def check_port(ranks: Ranks) -> None:
    """Raise ConfigError on rank 0 if the port where the ranks meet is taken. Costs no import of torch."""
    if ranks.rank != 0 or ranks.world_size == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return  # torchrun's agent has opened the port itself
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", ranks.master_port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise port_in_use(ranks.master_addr, ranks.master_port) from None


def end_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent, process `parent`, ends; end now if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


__all__ = ["check_port", "end_with_parent", "local_rank", "port_in_use", "run_alone", "run_engine_rank", "run_logged"]
