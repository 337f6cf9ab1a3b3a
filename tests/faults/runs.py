"""Small training runs as a user starts them, for tests that interrupt or rearrange them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

MODEL = """
[model]
family = "llama"
hidden_size = 32
num_layers = 2
num_heads = 4
num_kv_heads = 2
ffn_size = 64
"""

RECIPE = (
    MODEL
    + """
[data]
source = "{source}"
tokenizer = "bytes"
validation_fraction = 0.1

[train]
steps = {steps}
micro_batch_size = 2
global_batch_size = 8
seq_len = 32

[precision]
dtype = "fp32"

[optimizer]
kind = "{optimizer}"

[lr]
peak = 1e-2
schedule = "cosine"
warmup_steps = 2
total_steps = 12

[checkpoint]
every = 3
keep = 2

[log]
sample_tokens = 0
tensorboard = false
"""
)


def write_recipe(folder: Path, *, steps: int = 12, optimizer: str = "adamw") -> Path:
    """Write a text folder and a recipe that trains on it; return the recipe's path."""
    source = folder / "text"
    source.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    words = ["def", "return", "for", "in", "x", "y", "(", ")", ":", "\n", "class", "self", "+", "="]
    for number in range(20):
        text = " ".join(generator.choices(words, k=150))
        (source / f"{number:02d}.txt").write_text(text)
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(source=source, steps=steps, optimizer=optimizer))
    return path


def command(recipe: Path, run_dir: Path, *options: str) -> list[str]:
    """Return the command line of a run."""
    return [sys.executable, "-m", "sennit", "train", str(recipe), "--run.dir", str(run_dir), "--json", *options]


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of a run: one thread a rank."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **extra}


def train(recipe: Path, run_dir: Path, *options: str) -> dict:
    """Train to the end and return the summary; fails the test with stderr otherwise."""
    done = subprocess.run(
        command(recipe, run_dir, *options), capture_output=True, text=True, env=environment(), timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def losses(run_dir: Path) -> dict[int, float]:
    """Return the loss of each step in metrics.jsonl; no step may appear twice."""
    found: dict[int, float] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "step":
            assert record["step"] not in found, f"step {record['step']} was logged twice"
            found[record["step"]] = record["loss"]
    return found
