"""Reading a run directory for a report: tolerant of runs that are unfinished, interrupted or damaged at the end."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sennit.errors import DataError

Array = NDArray[np.float64]

RUN_FILES = ("metrics.jsonl", "recipe.toml", "summary.json", "environment.json")
"""A folder with at least one of these is a run."""

COLUMNS = (
    "step",
    "loss",
    "bits_per_byte",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_second",
    "tflops",
    "mfu",
    "step_seconds",
    "peak_memory_bytes",
    "time",
    "skipped",
)
"""Numbers of a step record; a missing or non-finite one is NaN. Units as in metrics.jsonl."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at `step` (finished steps): `kind` is checkpoint, resume or sample; `fields` the rest."""

    kind: str
    step: int
    fields: dict[str, Any]


@dataclass(slots=True)
class RunData:
    """A run as its directory tells it.

    `steps`: a float64 array [n] for each name of COLUMNS, sorted by step, each step once. `phases`: seconds [n].
    `evals`: step, loss, bits_per_byte, each [m]. `unreadable_lines`: lines of metrics.jsonl that were left out.
    """

    path: Path
    steps: dict[str, Array]
    phases: dict[str, Array]
    evals: dict[str, Array]
    events: list[Event] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    recipe_text: str = ""
    unreadable_lines: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Number of recorded steps."""
        return len(self.steps["step"])

    def events_of(self, kind: str) -> list[Event]:
        """Return the events of one kind in order."""
        return [event for event in self.events if event.kind == kind]

    def setting(self, path: str) -> Any:
        """Return the recipe's value at `section.field`, or None."""
        value: Any = self.recipe
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value


def load_run(run_dir: Path) -> RunData:
    """Return what is known about the run in `run_dir`.

    Missing or damaged files leave their part empty, with a line in `notes`.
    Raises DataError if there is no run at `run_dir` at all.
    """
    check_run_exists(run_dir)
    notes: list[str] = []
    records, unreadable = read_records(run_dir / "metrics.jsonl", notes)
    if unreadable:
        plural = "line" if unreadable == 1 else "lines"
        notes.append(f"{unreadable} unreadable {plural} of metrics.jsonl left out (an interrupted write leaves one).")
    steps, phases = step_table([r for r in records if r["kind"] == "step"])
    text = _read_text(run_dir / "recipe.toml", notes)
    return RunData(
        path=run_dir,
        steps=steps,
        phases=phases,
        evals=eval_table([r for r in records if r["kind"] == "eval"]),
        events=[
            Event(r["kind"], r["step"], {k: v for k, v in r.items() if k not in ("kind", "step")})
            for r in records
            if r["kind"] not in ("step", "eval")
        ],
        summary=_read_json(run_dir / "summary.json", notes),
        environment=_read_json(run_dir / "environment.json", notes),
        recipe=_parse_recipe(text, notes),
        recipe_text=text,
        unreadable_lines=unreadable,
        notes=notes,
    )


def check_run_exists(run_dir: Path) -> None:
    """Raise DataError, naming the path and the runs beside it, unless `run_dir` holds a run."""
    if run_dir.is_dir() and any((run_dir / name).is_file() for name in RUN_FILES):
        return
    if not run_dir.exists():
        problem = f"There is no run at {run_dir}: no such folder."
    elif not run_dir.is_dir():
        problem = f"There is no run at {run_dir}: it is a file, and a run is a folder such as runs/tiny."
    else:
        problem = f"There is no run at {run_dir}: the folder holds none of {', '.join(RUN_FILES)}."
    found: list[Path] = []
    for parent in dict.fromkeys((run_dir, run_dir.parent, Path("runs"))):
        if parent.is_dir():
            found += [metrics.parent for metrics in parent.glob("*/metrics.jsonl")]
    found = sorted(set(found), key=lambda path: path.stat().st_mtime, reverse=True)[:5]
    advice = f"Runs nearby: {', '.join(map(str, found))}." if found else "Train one first with `sennit train`."
    raise DataError(f"{problem} {advice}")


def read_records(path: Path, notes: list[str]) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a metrics file that have a kind and a step, and the number of unusable lines."""
    records, unreadable = [], 0
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not line.strip():
                    continue
                record = _record(line)
                if record is None:
                    unreadable += 1
                else:
                    records.append(record)
    except FileNotFoundError:
        pass
    except OSError as error:
        notes.append(f"{path.name} could not be read to its end: {error.strerror}.")
    return records, unreadable


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    step = number(record.get("step"))
    if math.isnan(step) or step < 0:
        return None
    record["step"] = int(step)
    return record


def step_table(records: list[dict[str, Any]]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the columns and the phases of step records; of records of the same step the last one counts."""
    rows = [latest for _, latest in sorted({r["step"]: r for r in records}.items())]
    columns = {name: np.array([number(r.get(name)) for r in rows], dtype=np.float64) for name in COLUMNS}
    times = [r["seconds"] if isinstance(r.get("seconds"), dict) else {} for r in rows]
    names: dict[str, None] = dict.fromkeys(["data", "forward", "backward", "optimizer"])
    for entry in times:
        names.update(dict.fromkeys(entry))
    phases = {name: np.array([number(entry.get(name)) for entry in times], dtype=np.float64) for name in names}
    return columns, {name: values for name, values in phases.items() if np.isfinite(values).any()}


def eval_table(records: list[dict[str, Any]]) -> dict[str, Array]:
    """Return step, loss and bits_per_byte of evaluation records, sorted, each step once."""
    rows = [latest for _, latest in sorted({r["step"]: r for r in records}.items())]
    return {name: np.array([number(r.get(name)) for r in rows]) for name in ("step", "loss", "bits_per_byte")}


def number(value: Any) -> float:
    """Return `value` as a finite float, or NaN if it is not a number, not finite or too large."""
    if not isinstance(value, (int, float)):
        return math.nan
    try:
        result = float(value)
    except OverflowError:
        return math.nan
    return result if math.isfinite(result) else math.nan


def _read_text(path: Path, notes: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        notes.append(f"{path.name} could not be read: {error.strerror}.")
        return ""


def _read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    text = _read_text(path, notes)
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    notes.append(f"{path.name} is damaged and was left out.")
    return {}


def _parse_recipe(text: str, notes: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        notes.append("recipe.toml is not valid TOML; it is shown as it is.")
        return {}


__all__ = ["COLUMNS", "Array", "Event", "RunData", "check_run_exists", "load_run", "number"]
