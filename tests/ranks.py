"""Run a function on several ranks of one machine, forked from the test process.

API
    run_ranks(fn, world_size, *args, timeout=60, process_group=True, **kwargs) -> [fn's return value of each rank]
        `fn(*args, **kwargs)` runs on every rank, with the default gloo group initialised, torch on one thread, seed 0
        and RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment. Closures and
        large arguments cost nothing: they are forked, not sent. Results come back pickled.
        With process_group=False the rank starts without a group; `init_process_group("gloo")` then finds the others.
    fake_world(size, rank=0): a context in which this very process is one rank of a world whose collectives do nothing.

A fork takes milliseconds where a fresh process would import torch again. The price: a process that has used several
OpenMP threads cannot be forked safely (the child waits for threads it does not have), so the test process must call
`torch.set_num_threads(1)` before its first operator, as conftest.py does.

If a rank raises or dies, the others get a few seconds to notice and then end; the AssertionError holds every rank's
traceback, the first failure first. Past the timeout, every rank's stacks are dumped and the ranks are killed. Ranks
also die with the test process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import selectors
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

GRACE_SECONDS = 2.0
"""How long the other ranks may go on after one has failed, so that their own errors are seen too."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_HEADER = struct.Struct("<Q")
_PORT = struct.Struct("<I")


@dataclass(slots=True)
class _Rank:
    """One forked rank as the parent sees it. `message`: ("result", value) or ("error", traceback), once complete."""

    rank: int
    pid: int
    pipe: int
    stacks: Path
    received: bytearray = field(default_factory=bytearray)
    message: tuple[str, Any] | None = None
    failed_at: float = 0.0
    status: int | None = None

    def read(self) -> bool:
        """Take what the pipe holds; return whether the message, or the pipe, has ended."""
        part = os.read(self.pipe, 1 << 20)
        self.received += part
        if len(self.received) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self.received)
            if len(self.received) == _HEADER.size + size:
                self.message = pickle.loads(memoryview(self.received)[_HEADER.size :])
                return True
        return not part

    def wait(self, deadline: float) -> None:
        """Reap the process; kill it if it has not ended by `deadline`."""
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            else:
                time.sleep(0.001)

    def report(self) -> str:
        """Return how this rank ended, for the error message."""
        if self.message is not None and self.message[0] == "error":
            return f"--- rank {self.rank} raised\n{self.message[1].rstrip()}"
        if self.message is not None:
            return f"--- rank {self.rank} returned"
        stacks = self.stacks.read_text(errors="replace") if self.stacks.exists() else ""
        how = "was still running and was ended" if stacks else f"ended without a result, exit status {self.status}"
        return f"--- rank {self.rank} {how}\n{stacks.rstrip()}"


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    process_group: bool = True,
    **kwargs: Any,
) -> list[T]:
    """Return what `fn(*args, **kwargs)` returned on each of `world_size` forked ranks, in rank order.

    `timeout` in seconds bounds the whole call. Raises AssertionError with the tracebacks or stacks of all ranks.
    """
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        store = None
        gate, hold = os.pipe()  # says the port of the store to every rank, and by its end that all are done
        ranks: list[_Rank] = []
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            for rank in range(world_size):
                stacks = Path(folder, f"rank-{rank}.stacks")
                read_end, write_end = os.pipe()
                parent = os.getpid()
                pid = os.fork()
                if pid == 0:
                    os.close(hold)
                    _be_rank(parent, write_end, gate, stacks, rank, world_size, process_group, timeout,
                             lambda: fn(*args, **kwargs))  # fmt: skip
                os.close(write_end)
                ranks.append(_Rank(rank, pid, read_end, stacks))
            if not process_group:
                # For env://. It lives in this process, so that no rank's end takes it away. It starts a thread, and a
                # fork beside a busy thread may inherit a lock that nobody will release: so only now.
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(hold, _PORT.pack(store.port if store is not None else 0) * world_size)
            in_time = _collect(ranks, deadline)
        finally:
            os.close(hold)
            os.close(gate)
            _end(ranks)
            del store
        failed = sorted((r for r in ranks if r.failed_at), key=lambda r: r.failed_at)
        if failed or not in_time:
            others = [r for r in ranks if r not in failed]
            what = f"rank {failed[0].rank} of {world_size} failed first" if failed else f"no end after {timeout:g} s"
            raise AssertionError("\n".join([f"{what}:", *(r.report() for r in failed + others)]))
        return [r.message[1] for r in ranks]  # type: ignore[index]


def _collect(ranks: list[_Rank], deadline: float) -> bool:
    """Read all messages; return whether every rank was done in time. Returns soon after the first failure."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for key, _ in selector.select(left):
                rank: _Rank = key.data
                if not rank.read():
                    continue
                selector.unregister(rank.pipe)
                if rank.message is None or rank.message[0] == "error":
                    rank.failed_at = time.monotonic()
                    deadline = min(deadline, rank.failed_at + GRACE_SECONDS)
    return True


def _end(ranks: list[_Rank]) -> None:
    """End and reap every rank, after a dump of the stacks of those that have not answered."""
    waiting = [r for r in ranks if r.message is None and not r.failed_at]
    for rank in waiting:
        os.kill(rank.pid, signal.SIGUSR1)  # not yet reaped, so the pid is still ours
    if waiting:
        time.sleep(0.3)
    for rank in waiting:
        os.kill(rank.pid, signal.SIGKILL)
    deadline = time.monotonic() + 2.0
    for rank in ranks:
        os.close(rank.pipe)
        rank.wait(deadline)


def _be_rank(
    parent: int,
    pipe: int,
    gate: int,
    stacks: Path,
    rank: int,
    world_size: int,
    process_group: bool,
    timeout: float,
    call: Callable[[], Any],
) -> None:
    """The life of a forked rank. Never returns: the test process must not go on twice."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.alarm(0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR1, file=stacks.open("w"), all_threads=True)
        (port,) = _PORT.unpack(os.read(gate, _PORT.size))
        _prepare(rank, world_size, port)
        if process_group:
            # not a TCPStore: it asks DNS for the name of ::ffff:127.0.0.1, which takes seconds where none answers
            store = dist.FileStore(str(stacks.with_name("store")), world_size)
            limit = timedelta(seconds=timeout)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        body = pickle.dumps(("result", call()))
        code = 0
    except BaseException:
        body = pickle.dumps(("error", traceback.format_exc()))
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        _write_all(pipe, _HEADER.pack(len(body)) + body)
        if code == 0:
            os.read(gate, 1)  # keep the sockets open until every rank is done: peers may still be reading
    finally:
        os._exit(code)


def _prepare(rank: int, world_size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # env:// joins the parent's store instead of opening one in rank 0
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)


def _write_all(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """A context in which this process is `rank` of `size` ranks and collectives return at once, moving nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


__all__ = ["GRACE_SECONDS", "fake_world", "run_ranks"]
