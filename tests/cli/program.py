"""Runs the program `sennit` as a user does, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RANKS_PROBE = Path(__file__).with_name("ranks_probe.py")

SMALL = (
    "--model.hidden_size=64 --model.num_layers=2 --model.num_heads=4 --model.num_kv_heads=2 --model.ffn_size=128 "
    "--model.vocab_size=4096 --data.source=random --train.steps=3 --train.seq_len=32 --train.micro_batch_size=2 "
    "--train.global_batch_size=12 --train.eval_every=0 --log.sample_tokens=0 --lr.warmup_steps=0"
).split()
"""Overrides that make the default recipe a run of a second, on 1, 2 or 3 ranks."""


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without what an engine or a started program has set, plus `variables`."""
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SENNIT_STARTED", "OMP_NUM_THREADS")
    kept = {k: v for k, v in os.environ.items() if k not in unwanted and not k.startswith(("SLURM_", "OMPI_", "PMI_"))}
    return {**kept, "COLUMNS": "110", **variables}


def sennit(*args: str, probe: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `sennit *args` and return its output. probe: a mode of ranks_probe.py, in place of real training."""
    return subprocess.run(
        command(*args, probe=probe), env=environment(**variables), capture_output=True, text=True, timeout=120
    )


def command(*args: str, probe: str | None = None) -> list[str]:
    """Return the words of the command line."""
    start = ["-m", "sennit"] if probe is None else [str(RANKS_PROBE), probe]
    return [sys.executable, *start, *args]


def error_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the error document of a `--json` call that failed as it should: one paragraph last, no stack trace."""
    document = json.loads(done.stdout)["error"]
    assert done.returncode == document["exit_code"], done.stderr
    assert done.stderr.splitlines()[-1] == f"error: {document['message']}"
    return document
