"""A mistake on the command line: one paragraph, exit 2, nothing written."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.cli.program import SMALL, error_of, sennit

MISTAKES = {
    "unknown option": (["--steps", "3"], "no option --steps", "--train.steps"),
    "unknown field": (["--train.step", "3"], "no recipe field train.step", "train.steps"),
    "unknown preset": (["tinny"], "'tinny'", "tiny"),
    "unknown file": (["missing.toml"], "missing.toml", "tiny"),
    "wrong type": (["--train.steps", "many"], "train.steps='many'", "whole number"),
    "value missing": (["--train.steps"], "--train.steps needs a value", "int"),
    "two recipes": (["tiny", "other"], "one recipe", "tiny, other"),
    "no ranks": (["--nproc", "0"], "--nproc 0", "from 1 up"),
    "nproc is no number": (["--nproc", "two"], "--nproc", "--help"),
    "ranks do not fit": (["--nproc", "3", "--parallel.tp", "2"], "3 ranks", "multiple of 2"),
    "heads do not divide": (["--model.num_kv_heads", "3"], "model.num_kv_heads=3", "use"),
    "several at once": (["--model.num_kv_heads", "3", "--train.micro_batch_size", "3"], "(1)", "(2)"),
    "short option": (["-n", "3"], "-n", "--help"),
}


@pytest.mark.parametrize(("args", "what", "fix"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_one_paragraph_and_writes_nothing(args: list[str], what: str, fix: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "x"
    done = sennit("train", "--json", f"--run.dir={run_dir}", *args)
    document = error_of(done)
    assert document["exit_code"] == 2
    assert what in document["message"] and fix in document["message"], document["message"]
    assert len(done.stderr.splitlines()) == 1
    assert not any(tmp_path.iterdir())


def test_mistake_in_an_option_of_another_command() -> None:
    assert "--wrong" in error_of(sennit("doctor", "--json", "--wrong"))["message"]


def test_unknown_device_lists_the_known_ones(tmp_path: Path) -> None:
    done = sennit("train", "--json", f"--run.dir={tmp_path}/x", *SMALL, SENNIT_DEVICE="cudda")
    assert error_of(done)["kind"] == "DeviceError"
    assert "cpu, cuda, musa" in done.stderr and not any(tmp_path.iterdir())


def test_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    message = error_of(sennit("train", "--json", f"--run.dir={tmp_path}/file/x", *SMALL))["message"]
    assert f"{tmp_path}/file/x" in message and "--run.dir" in message


def test_port_in_use_is_named_with_the_fix(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = sennit("train", "--json", f"--run.dir={tmp_path}/x", *SMALL, **place)
    assert f"port {port}" in error_of(done)["message"] and "MASTER_PORT" in done.stderr
    assert not any(tmp_path.iterdir())


def test_nproc_inside_a_job_is_refused() -> None:
    done = sennit("train", "--json", "--nproc", "2", RANK="1", WORLD_SIZE="4", MASTER_ADDR="h", MASTER_PORT="1")
    assert "leave --nproc out" in error_of(done)["message"]
