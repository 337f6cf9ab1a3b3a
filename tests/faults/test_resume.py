"""A run that was killed, or that changes its layout, goes on as if nothing had happened."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from sennit.checkpoint import load_full
from tests.faults.runs import command, environment, losses, train, write_recipe

pytestmark = pytest.mark.heavy


def logged_steps(run_dir: Path) -> int:
    """Return how many steps a run has logged."""
    try:
        return (run_dir / "metrics.jsonl").read_text().count('"kind": "step"')
    except OSError:
        return 0


def test_killed_at_random_moments_a_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Killed three times, each time after a random number of logged steps, then left to finish."""
    recipe = write_recipe(tmp_path)
    train(recipe, tmp_path / "whole")
    victim = tmp_path / "victim"
    for steps in sorted(random.Random(7).sample(range(1, 11), 3)):
        process = subprocess.Popen(
            command(recipe, victim), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
        )
        deadline = time.monotonic() + 120
        while logged_steps(victim) < steps:
            assert process.poll() is None and time.monotonic() < deadline, "the run ended before it was killed"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    train(recipe, victim)
    assert losses(victim) == losses(tmp_path / "whole")
    expected = load_full(tmp_path / "whole" / "checkpoints" / "step-12")
    actual = load_full(victim / "checkpoints" / "step-12")
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name


def test_a_run_moves_through_layouts_with_the_same_losses(tmp_path: Path) -> None:
    """dp 2 -> tp 2 -> one rank -> fsdp 2, three steps each, against twelve steps on one rank."""
    recipe = write_recipe(tmp_path)
    train(recipe, tmp_path / "one")
    moving = tmp_path / "moving"
    stages = [
        ("3", ["--nproc", "2", "--parallel.dp_replicate", "2"]),
        ("6", ["--nproc", "2", "--parallel.tp", "2"]),
        ("9", []),
        ("12", ["--nproc", "2", "--parallel.dp_shard", "2"]),
    ]
    for steps, layout in stages:
        train(recipe, moving, "--train.steps", steps, *layout)
    expected, actual = losses(tmp_path / "one"), losses(moving)
    assert expected.keys() == actual.keys()
    for step, loss in expected.items():
        assert actual[step] == pytest.approx(loss, rel=1e-6), f"step {step}"


def test_stopping_and_going_on_equals_not_stopping(tmp_path: Path) -> None:
    """Bit for bit, with Muon, at a step that is no multiple of the checkpoint interval."""
    recipe = write_recipe(tmp_path, optimizer="muon")
    train(recipe, tmp_path / "whole")
    train(recipe, tmp_path / "parts", "--train.steps", "5")
    train(recipe, tmp_path / "parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    """Started again, it says so and returns the summary that it had; without its summary it only makes that again."""
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    first = train(recipe, run_dir, "--train.steps", "3")
    before = (run_dir / "metrics.jsonl").read_bytes()
    assert train(recipe, run_dir, "--train.steps", "3") == first
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    (run_dir / "summary.json").unlink()
    again = train(recipe, run_dir, "--train.steps", "3")
    assert {k: again[k] for k in ("loss_first", "loss_last", "bits_per_byte", "steps")} == {
        k: first[k] for k in ("loss_first", "loss_last", "bits_per_byte", "steps")
    }


def test_a_run_moves_through_pipelines_with_the_same_losses(tmp_path: Path) -> None:
    """DualPipeV on two ranks -> one rank -> ZB-V on two, sharded -> context parallel, against twelve steps on one rank."""
    recipe = write_recipe(tmp_path)
    fields = ["--model.num_layers", "4", "--train.micro_batch_size", "1"]
    train(recipe, tmp_path / "one", *fields)
    moving = tmp_path / "moving"
    pipeline = ["--parallel.pp", "2", "--parallel.schedule"]
    stages = [
        ("3", ["--nproc", "2", *pipeline, "dualpipev"]),
        ("5", []),
        ("8", ["--nproc", "4", *pipeline, "zb-v", "--parallel.dp_shard", "2"]),
        ("10", ["--nproc", "2", "--parallel.cp", "2"]),
        ("12", ["--nproc", "2", *pipeline, "dualpipe"]),
    ]
    for steps, layout in stages:
        train(recipe, moving, *fields, "--train.steps", steps, *layout)
    expected, actual = losses(tmp_path / "one"), losses(moving)
    assert expected.keys() == actual.keys()
    for step, loss in expected.items():
        assert actual[step] == pytest.approx(loss, rel=1e-6), f"step {step}"
