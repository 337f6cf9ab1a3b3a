"""torch.profiler on request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch


class StepProfiler:
    """Profiles the steps from `steps[0]` to `steps[1]` (1-based, both included; empty: never).

    Writes profile/rank-N.json (Chrome and Perfetto read it) and profile/rank-N.txt (operators by time) into the run.
    """

    def __init__(self, steps: Sequence[int], run_dir: Path, rank: int) -> None:
        self._first, self._last = (steps[0], steps[-1]) if steps else (0, -1)
        self._folder, self._rank = run_dir / "profile", rank
        self._profiler: torch.profiler.profile | None = None

    @contextlib.contextmanager
    def step(self, index: int) -> Iterator[None]:
        """Wrap step `index` (0-based)."""
        number = index + 1
        if number == self._first:
            self._profiler = torch.profiler.profile(profile_memory=True)
            self._profiler.start()
        yield
        if self._profiler is not None and number >= self._last:
            self._profiler.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._folder / f"rank-{self._rank}.json"))
            table = self._profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
            (self._folder / f"rank-{self._rank}.txt").write_text(table)
            self._profiler = None


__all__ = ["StepProfiler"]
