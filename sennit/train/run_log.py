"""What a run writes about itself while it trains: metrics.jsonl, TensorBoard, the progress line."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any


class RunLog:
    """Writes metrics of rank 0 into the run directory and shows progress on stderr. On other ranks it does nothing.

    Each line of metrics.jsonl is one JSON object with a `kind`: step, eval, checkpoint, resume, sample. A resumed run
    appends; lines of steps that are run again are dropped first, so that each step appears once.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        active: bool,
        start_step: int,
        total_steps: int,
        tensorboard: bool,
        progress: bool = True,
    ) -> None:
        self.active = active
        self._file = None
        self._board = None
        self._progress = None
        if not active:
            return
        path = run_dir / "metrics.jsonl"
        drop_after(path, start_step)
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=start_step)
        self._progress = Progress(start_step, total_steps) if progress else None

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record and mirror its numbers to TensorBoard."""
        if self._file is None:
            return
        record = {"kind": kind, **{key: _finite(value) for key, value in fields.items()}, "time": time.time()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._board is not None and "step" in fields:
            for key, value in fields.items():
                if key != "step" and isinstance(value, (int, float)) and math.isfinite(value):
                    self._board.add_scalar(f"{kind}/{key}", value, fields["step"])

    def show(self, step: int, fields: dict[str, Any]) -> None:
        """Update the progress line after `step` finished steps."""
        if self._progress is not None:
            self._progress.update(step, fields)

    def message(self, text: str) -> None:
        """Print a line above the progress line."""
        if self._progress is not None:
            self._progress.message(text)

    def sync(self) -> None:
        """Make everything written so far durable (called before a checkpoint is announced)."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """End the progress line and close the files."""
        if self._progress is not None:
            self._progress.close()
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


class Progress:
    """A progress line with rate and ETA on a terminal; a plain line now and then when stderr is not a terminal."""

    def __init__(self, start_step: int, total_steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        self._console = Console(stderr=True)
        self._total = total_steps
        self._last_line = 0.0
        self._bar = None
        if self._console.is_terminal:
            bar = [BarColumn(bar_width=20)] if self._console.width >= 120 else []
            columns = (MofNCompleteColumn(), *bar, TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True)))
            self._bar = RichProgress(*columns, console=self._console)
            self._task = self._bar.add_task("train", total=total_steps, completed=start_step, text="starting")
            self._bar.start()

    def update(self, step: int, fields: dict[str, Any]) -> None:
        """Show `step` finished steps and the numbers of the newest one."""
        text = describe(fields, narrow=self._bar is not None and self._console.width < 100)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
            return
        now = time.monotonic()
        if now - self._last_line >= 10.0 or step in (1, self._total):
            self._last_line = now
            self.message(f"step {step}/{self._total}  {text}")

    def message(self, text: str) -> None:
        """Print one line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Stop redrawing."""
        if self._bar is not None:
            self._bar.stop()


def describe(fields: dict[str, Any], *, narrow: bool = False) -> str:
    """Return the numbers of a step in one line: loss, bits per byte, norm (not if `narrow`), rate, MFU, time left."""
    parts = [f"loss {fields['loss']:.4f}"]
    if fields.get("bits_per_byte") is not None:
        parts.append(f"{fields['bits_per_byte']:.3f} bits/byte")
    if not narrow:
        parts.append(f"norm {fields['grad_norm']:.2f}")
    parts.append(f"{fields['tokens_per_second']:,.0f} tokens/s")
    if fields.get("mfu") is not None:
        parts.append(f"MFU {100 * fields['mfu']:.0f} %")
    if fields.get("eta_seconds") is not None:
        minutes, seconds = divmod(int(fields["eta_seconds"]), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    return "  ".join(parts)


def drop_after(path: Path, step: int) -> None:
    """Keep the records of the first `step` steps; drop later ones (they run again) and a torn last line. Atomic."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("step", 0) <= step:
            kept.append(line)
    temporary = path.with_suffix(".jsonl.tmp")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    temporary.replace(path)


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value


__all__ = ["Progress", "RunLog", "describe", "drop_after"]
