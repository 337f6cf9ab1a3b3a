"""A made-up run directory, the same for the same arguments: what `sennit train` would have written."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

RECIPE = """[run]
name = "synthetic"
dir = ""
seed = 42

[model]
family = "llama"
hidden_size = 256
num_layers = 6

[data]
source = "stdlib"

[train]
steps = {steps}
global_batch_size = 16
seq_len = 512

[parallel]
tp = 2

[precision]
dtype = "bf16"

[optimizer]
clip_norm = 1.0
"""

SAMPLE = "(self, name):\n        if name is None:\n            raise ValueError('<script>alert(1)</script> & more')\n"


def step_record(step: int, steps: int, noise: random.Random) -> dict[str, object]:
    """Return the record of finished step `step` of `steps`."""
    loss = 2.1 + 6.2 * math.exp(-step / (0.08 * steps)) + 0.9 * (1 - step / steps) + noise.gauss(0, 0.05)
    rate = 9000 * (0.25 if step == 1 else 1.0) + noise.gauss(0, 150)
    seconds = 8192 / rate
    warmup = min(step / (0.05 * steps), 1.0)
    return {
        "kind": "step",
        "step": step,
        "loss": loss,
        "bits_per_byte": loss / 0.6931 / 3.2,
        "grad_norm": abs(1.2 * math.exp(-step / (0.2 * steps)) + 0.35 + noise.gauss(0, 0.04)),
        "lr": 3e-3 * warmup * (0.55 + 0.45 * math.cos(math.pi * step / steps)),
        "tokens": 8192 * step,
        "skipped": False,
        "tokens_per_second": rate,
        "tflops": rate * 9e7 / 1e12,
        "mfu": rate * 9e7 / 2.4e12,
        "step_seconds": seconds,
        "peak_memory_bytes": int(1.1 * 2**30 + min(step, 40) * 2**20),
        "seconds": {
            "data": 0.01 * seconds,
            "forward": 0.3 * seconds,
            "backward": 0.58 * seconds,
            "optimizer": 0.09 * seconds,
        },
        "time": 1.79e9 + 0.95 * step + (36000 if step > steps // 2 else 0),
    }


def make_run(folder: Path, *, steps: int = 300, finished: bool = True) -> Path:
    """Write a run of `steps` steps, stopped and resumed in its middle, with evaluations, checkpoints and samples."""
    noise = random.Random(7)
    folder.mkdir(parents=True, exist_ok=True)
    every = max(steps // 10, 1)
    records: list[dict[str, object]] = []
    for step in range(1, steps + 1):
        record = step_record(step, steps, noise)
        records.append(record)
        if step % every == 0:
            nats = float(record["loss"]) + 0.1  # type: ignore[arg-type]
            records.append({"kind": "eval", "step": step, "loss": nats, "bits_per_byte": nats / 0.6931 / 3.2})
        if step % (2 * every) == 0:
            path = f"runs/synthetic/checkpoints/step-{step}"
            records.append({"kind": "checkpoint", "step": step, "seconds": 0.8, "bytes": 131_000_000, "path": path})
        if step == steps // 2:
            records.append({"kind": "resume", "step": step, "from": f"runs/synthetic/checkpoints/step-{step}"})
            records.append({"kind": "sample", "step": step, "prompt": "def ", "text": "x(x, x):\n    x = x\n"})
    if finished:
        records.append({"kind": "sample", "step": steps, "prompt": "def __init__", "text": SAMPLE})
        (folder / "summary.json").write_text(json.dumps(summary(folder, records[-3], steps)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "recipe.toml").write_text(RECIPE.format(steps=steps))
    facts = {"sennit": "0.1.0", "torch": "2.13.0", "device": "cpu", "world_size": 2, "packages": {"numpy": "2.4.0"}}
    (folder / "environment.json").write_text(json.dumps(facts))
    return folder


def summary(folder: Path, last: dict[str, object], steps: int) -> dict[str, object]:
    """Return the summary document of the run."""
    return {
        "run_dir": str(folder),
        "steps": steps,
        "loss_first": 9.2,
        "loss_last": last.get("loss"),
        "bits_per_byte": 1.02,
        "gzip_bits_per_byte": 1.98,
        "tokens_per_second": 9000.0,
        "mfu": 0.337,
        "mfu_denominator_flops": 2.4e12,
        "peak_memory_bytes": int(1.14 * 2**30),
        "parameters": 12_345_678,
        "train_seconds": 290.0,
    }


@pytest.fixture
def write_run() -> Callable[..., Path]:
    """Return the function that writes a made-up run."""
    return make_run
