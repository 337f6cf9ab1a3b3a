"""The rank harness itself: results come back, failures and hangs are reported and leave no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import fake_world, run_ranks


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def total(scale: float, size: int) -> torch.Tensor:
    x = torch.full((size,), scale * (dist.get_rank() + 1))
    dist.all_reduce(x)
    assert os.environ["RANK"] == str(dist.get_rank()) and torch.get_num_threads() == 1
    return x


def test_results_come_back_in_rank_order() -> None:
    offset = 10  # a closure: nothing has to be importable
    assert run_ranks(lambda: dist.get_rank() + offset, 4) == [10, 11, 12, 13]
    for x in run_ranks(total, 3, 2.0, size=1_000_000):  # larger than a pipe
        assert x.shape == (1_000_000,) and float(x[0]) == 12.0


def test_ranks_may_make_their_own_group() -> None:
    def own() -> int:
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        dist.barrier()
        return dist.get_world_size()

    assert run_ranks(own, 2, process_group=False) == [2, 2]


def test_an_error_ends_all_ranks_with_their_tracebacks() -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise ValueError("the reason")
        dist.barrier()

    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 1 of 3 failed first:\n(?s:.*)ValueError: the reason") as info:
        run_ranks(fail, 3)
    assert all(f"--- rank {rank} " in str(info.value) for rank in range(3))
    assert time.monotonic() - begin < 20


def test_a_killed_rank_is_named() -> None:
    def die() -> None:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(AssertionError, match="rank 0 ended without a result, exit status -9"):
        run_ranks(die, 2)


def test_a_hang_ends_with_every_stack(tmp_path: Path) -> None:
    def hang_here() -> None:
        (tmp_path / str(os.getpid())).touch()
        if dist.get_rank() == 0:
            dist.recv(torch.zeros(1), src=1)
        time.sleep(60)

    with pytest.raises(AssertionError, match="no end after 2 s") as info:
        run_ranks(hang_here, 2, timeout=2)
    assert str(info.value).count("in hang_here") == 2
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2 and not any(is_alive(pid) for pid in pids)


def test_ranks_die_with_the_test_process(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, signal, time\n"
        "from tests.ranks import run_ranks\n"
        "def wait():\n"
        f"    pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\n"
        f"    while len(os.listdir({str(tmp_path)!r})) < 2: time.sleep(0.01)\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    time.sleep(60)\n"
        "run_ranks(wait, 2)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    pids = [int(path.name) for path in tmp_path.iterdir()]
    deadline = time.monotonic() + 5
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pids) == 2 and not any(is_alive(pid) for pid in pids)


def test_fake_world_moves_nothing() -> None:
    with fake_world(1024, rank=3):
        assert dist.get_world_size() == 1024 and dist.get_rank() == 3
        dist.barrier()
    assert not dist.is_initialized()
