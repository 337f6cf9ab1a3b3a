"""Ranks: where they come from, how they end together, and what the user sees last."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sennit.errors import ConfigError, DataError
from sennit.launch import Ranks, find_ranks, start_up_settings
from sennit.launch.failure import Failure, RankError, first_cause
from sennit.launch.logs import Tee, log_folder
from sennit.launch.ranks import first_host
from tests.cli.program import RANKS_PROBE, SMALL, command, environment, error_of, sennit


def start(mode: str, nproc: int, run_dir: Path) -> subprocess.CompletedProcess[str]:
    return sennit("train", "--json", "--nproc", str(nproc), f"--run.dir={run_dir}", *SMALL, probe=mode)


def started(run_dir: Path) -> list[dict[str, Any]]:
    """Return what each rank wrote at its start, by rank."""
    texts = [path.read_text() for path in sorted(run_dir.glob("logs/rank-*.log"))]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("started ")]
    return [json.loads(line.removeprefix("started ")) for line in lines]


def test_two_local_ranks_share_the_cores_and_log_apart(tmp_path: Path) -> None:
    done = start("ok", 2, tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world_size"] == 2
    ranks = started(tmp_path)
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert {rank["threads"] for rank in ranks} == {max(len(os.sched_getaffinity(0)) // 2, 1)}
    assert {rank["malloc"] for rank in ranks} == {"0"}
    assert done.stderr.count("started") == 1, "rank 0 is the visible one"


def test_data_error_of_one_rank_ends_all_and_is_shown_last(tmp_path: Path) -> None:
    done = start("data", 3, tmp_path / "runs" / "x")
    document = error_of(done)
    assert document["kind"] == "DataError" and document["rank"] == 2 and document["exit_code"] == 2
    assert "rank 2 of 3: token 999 in file x" in document["message"]
    assert "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir()), "a run that never began leaves nothing"


@pytest.mark.parametrize(("mode", "words"), [("bug", "KeyError: 'norm' (in fail"), ("killed", "signal 9 (SIGKILL)")])
def test_first_cause_of_an_unexpected_end(mode: str, words: str, tmp_path: Path) -> None:
    done = start(mode, 2, tmp_path)
    document = error_of(done)
    assert words in document["message"] and document["rank"] == 1 and document["exit_code"] == 1
    assert ("Traceback" in done.stderr) == (mode == "bug")


@contextlib.contextmanager
def long_job(run_dir: Path):  # noqa: ANN201
    """Yield a job of two ranks that has started and would run for a minute, and its ranks' process ids."""
    words = command("train", "--json", "--nproc", "2", f"--run.dir={run_dir}", *SMALL, probe="long")
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        try:
            wait(lambda: len(started(run_dir)) == 2)
            yield job, [rank["pid"] for rank in started(run_dir)]
        finally:
            job.kill()


def wait(condition: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with long_job(tmp_path) as (job, pids):
        job.send_signal(signal.SIGKILL)
        wait(lambda: not any(map(alive, pids)), seconds=10)


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    with long_job(tmp_path) as (job, pids):
        job.send_signal(signal.SIGINT)
        stdout, stderr = job.communicate(timeout=30)
        assert job.returncode == 130 and json.loads(stdout)["error"]["kind"] == "Interrupted"
        assert stderr.splitlines()[-1].startswith("error: Interrupted")
        assert not any(map(alive, pids))


def test_under_torchrun_the_ranks_it_started_are_used(tmp_path: Path) -> None:
    engine = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [*engine, str(RANKS_PROBE), "ok", "train", "--json", f"--run.dir={tmp_path}", *SMALL]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world_size"] == 2
    assert [rank["rank"] for rank in started(tmp_path)] == [0, 1]


def test_ranks_of_engines() -> None:
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4(x2)"}
    slurm |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "123"}
    assert find_ranks(slurm) == Ranks("SLURM", 5, 8, 1, 4, "gpu07", 20123)
    mpi = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in (("RANK", 1), ("SIZE", 2), ("LOCAL_RANK", 1))}
    assert find_ranks(mpi) == Ranks("Open MPI", 1, 2, 1, 2, "127.0.0.1", 29500)
    assert find_ranks({}) is None
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    assert find_ranks(batch_script) is None, "the batch script is no rank"
    for wrong in ({"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}):
        with pytest.raises(ConfigError):
            find_ranks(wrong)
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        find_ranks({**mpi, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})


def test_first_host_of_a_node_list() -> None:
    nodes = {"n1": "n1", "n1,n2": "n1", "g[07-09,12],c1": "g07", "a[3]-ib": "a3-ib"}
    assert {node: first_host(node) for node in nodes} == nodes


def test_cause_is_the_error_and_not_the_lost_peer() -> None:
    lost = Failure.of(RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer"), 0)
    own = Failure.of(DataError("bad file"), 1)
    assert lost.collateral and not own.collateral
    assert first_cause([lost, own], [(0, 1)]) is own
    assert first_cause([lost], [(1, -9)]).message.startswith("was ended by signal 9")
    assert first_cause([lost], [(0, 1)]) is lost
    assert str(RankError(own, 2)) == "rank 1 of 2: bad file" and RankError(own, 2).exit_code == 2


def test_log_is_what_a_terminal_would_leave() -> None:
    shown, log = io.StringIO(), io.StringIO()
    stream = Tee(shown, log)
    for text in ("\r\x1b[2Kstep 1", "\r\x1b[2Kstep 2", "\r\x1b[2K\x1b[1mreport\x1b[0m: x\nstep", " 3\n"):
        stream.write(text)
    assert log.getvalue() == "report: x\nstep 3\n"
    assert "step 2" in shown.getvalue()


def test_log_folder_stays_once_a_run_has_begun(tmp_path: Path) -> None:
    for begun in (False, True):
        run_dir = tmp_path / "runs" / "x"
        with pytest.raises(DataError), log_folder(run_dir):
            if begun:
                (run_dir / "recipe.toml").touch()
            raise DataError("bad")
        assert run_dir.exists() == begun == any(tmp_path.iterdir())


def test_start_up_settings_of_the_user_win() -> None:
    values = {s.name: (s.value, s.from_user) for s in start_up_settings(10**6, {"MALLOC_TOP_PAD_": "1"})}
    assert values["OMP_NUM_THREADS"] == ("1", False)
    assert values.get("MALLOC_TOP_PAD_", ("1", True)) == ("1", True)
