"""Whatever happens to the files, a damaged checkpoint is refused by the name of the file and a good one is offered."""

from __future__ import annotations

import errno
import logging
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import pytest
import torch

from sennit import checkpoint
from sennit.checkpoint.folders import _remove, put_in_place
from sennit.checkpoint.storage import _HashedFile
from sennit.errors import CheckpointError
from tests.checkpoint.common import equal, holds, save_steps, small_state, zeros


def damage(path: Path, kind: str, pick: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if kind == "flip":
        data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
    elif kind == "truncate":
        del data[pick.randrange(len(data)) :]
    elif kind == "zeros":
        start = pick.randrange(len(data))
        data[start : start + 64] = bytes(b ^ 0xFF for b in data[start : start + 64])
    elif kind == "append":
        data += b"\n"
    if kind == "remove":
        path.unlink()
    else:
        path.write_bytes(data)


def test_every_damage_is_refused_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    save_steps(tmp_path, 1, 2)
    good, bad = tmp_path / "step-1", tmp_path / "step-2"
    spare = tmp_path / "spare"
    shutil.copytree(bad, spare)
    names = sorted(os.listdir(bad))
    assert names == [".metadata", "__0_0.distcp", "manifest.json"]
    pick = random.Random(0)
    for trial in range(100):
        name = names[trial % 3]
        kind = pick.choice(["flip", "flip", "flip", "truncate", "zeros", "append", "remove"])
        damage(bad / name, kind, pick)
        state = zeros(small_state(2))
        with pytest.raises(CheckpointError) as info:
            checkpoint.load(bad, state)
        assert str(bad / name) in str(info.value), (trial, kind, info.value)
        assert f"intact is {good};" in str(info.value)
        assert equal(state, zeros(state)), (trial, kind)
        caplog.clear()
        found = checkpoint.open_latest(tmp_path)
        assert found is not None and found.path == good
        assert any(str(bad / name) in message for message in caplog.messages), (trial, kind)
        shutil.copyfile(spare / name, bad / name)
    assert holds(bad, 2)


def test_no_other_checkpoint_to_offer(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / "step-1" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="__0_0.distcp is missing(?s:.*)no other intact checkpoint"):
        checkpoint.load(tmp_path / "step-1", small_state(1))
    with pytest.raises(CheckpointError, match="__0_0.distcp is missing"):
        checkpoint.load_full(tmp_path / "step-1")


def save_value(root: Path, step: int, value: int) -> None:
    checkpoint.save(root, step, small_state(value), meta={"progress": {"step": value}}, keep=2)


def count_calls(fn: Callable[[], None], within: CodeType, kill_at: int = 0) -> int:
    """Run `fn` and return the calls of any function made inside `within`; SIGKILL this process at the `kill_at`-th."""
    calls = depth = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls, depth
        if frame.f_code is within:
            depth += {"call": 1, "return": -1}.get(event, 0)
        calls += depth > 0
        if depth and calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return calls


def run_killed(fn: Callable[[], None], within: CodeType, kill_at: int) -> None:
    """Run `fn` in a fork that is killed at that call, if it makes so many."""
    pid = os.fork()
    if pid == 0:
        try:
            count_calls(fn, within, kill_at)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (-signal.SIGKILL, 0)


def test_a_kill_at_any_moment_leaves_the_former_or_the_new_checkpoint(tmp_path: Path) -> None:
    save_value(tmp_path, 1, 1)
    save_value(tmp_path, 2, 2)
    # a third of the kills anywhere in a save, a third between the renames of its commit, a third in removing an old one
    spans = [
        (function.__code__, count_calls(lambda v=value: save_value(tmp_path, v, v), function.__code__))
        for value, function in enumerate((checkpoint.save, put_in_place, _remove), start=3)
    ]
    pick = random.Random(0)
    step, value, committed = 5, 5, 0
    for trial in range(120):
        code, calls = spans[trial % 3]
        next_step, next_value = step + (trial // 3 % 2), value + 1  # every other one replaces the newest
        at = pick.randrange(1, calls + 40)  # a replacement makes a few more
        run_killed(lambda s=next_step, v=next_value: save_value(tmp_path, s, v), code, at)
        for path in tmp_path.glob("step-*"):
            checkpoint.verify(path)
        found = checkpoint.open_latest(tmp_path)
        assert found is not None, (trial, os.listdir(tmp_path))
        got = found.meta["progress"]["step"]
        assert holds(found.path, got)
        assert (found.step, got) in ((step, value), (next_step, next_value)), trial
        committed += got == next_value
        step, value = found.step, got
    assert 40 < committed < 110, "the kills missed the commit"
    save_value(tmp_path, step + 1, value + 1)
    assert len(os.listdir(tmp_path)) == 2, "leftovers"


def test_a_full_disk_found_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 1)

    def full(self: _HashedFile, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(_HashedFile, "write", full)
        with pytest.raises(
            CheckpointError, match=rf"no space left .* in {tmp_path}: .* at least \d+ bytes are missing"
        ):
            save_steps(tmp_path, 2, keep=1)
    assert os.listdir(tmp_path) == ["step-1"] and holds(tmp_path / "step-1", 1)


def test_a_limit_met_in_the_middle_of_a_file(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(CheckpointError, match="no space left") as info:
            checkpoint.save(tmp_path, 2, {"model": {"w": torch.ones(1000, 1000)}}, meta={}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    missing = int(str(info.value).split("at least ")[1].split()[0])
    assert 4_000_000 - 300_000 <= missing <= 4_000_000
    assert os.listdir(tmp_path) == ["step-1"] and holds(tmp_path / "step-1", 1)


def test_too_little_space_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    state = {"model": {"w": torch.ones(1000)}}
    with pytest.raises(CheckpointError, match=rf"about {4000 + 4096} bytes and at least {4000 + 4096 - 1000} bytes"):
        checkpoint.save(tmp_path, 2, state, meta={}, keep=1)
    assert os.listdir(tmp_path) == ["step-1"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="No checkpoint can be saved into .*checkpoints"):
        save_steps(tmp_path / "checkpoints", 1)
