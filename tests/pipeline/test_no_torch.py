"""Schedules are data: whatever plans or draws them starts without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import sennit.pipeline

FOLDER = Path(sennit.pipeline.__file__).parent
RUNNING = {"channels", "executor", "overlap", "plan", "stage"}
"""Modules that run a pipeline or need the model. All others are the data side."""


def test_data_modules_do_not_import_torch() -> None:
    modules = sorted({path.stem for path in FOLDER.glob("*.py")} - RUNNING - {"__init__"})
    assert {"schedule", "fixed", "simulate", "verify", "text", "formulas"} <= set(modules)
    # One interpreter: after each import it names the module if torch has come with it.
    program = (
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(f'sennit.pipeline.{name}')\n"
        "    if 'torch' in sys.modules: sys.exit(f'sennit.pipeline.{name} imports torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
