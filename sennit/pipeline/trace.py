"""Timelines as Chrome trace events, which Perfetto (https://ui.perfetto.dev) and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sennit.pipeline.schedule import ops_of
from sennit.pipeline.simulate import Timeline


def chrome_trace(timelines: Mapping[str, Timeline], *, microseconds: float = 1e6) -> dict[str, Any]:
    """Return the trace of named timelines: a process for each, a thread for each rank, an event for each item.

    `microseconds`: how many of them one unit of the timelines is (seconds by default). A pair is one event that names
    both of its operations.
    """
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append({"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}})
        for rank, items in enumerate(timeline.events):
            thread = {"pid": process, "tid": rank}
            events.append({"name": "thread_name", "ph": "M", **thread, "args": {"name": f"rank {rank}"}})
            for event in items:
                ops = ops_of(event.item)
                events.append(
                    {
                        "name": " & ".join(_title(op.kind, op.stage, op.microbatch) for op in ops),
                        "cat": "&".join(op.kind for op in ops),
                        "ph": "X",
                        "ts": event.start * microseconds,
                        "dur": (event.end - event.start) * microseconds,
                        **thread,
                        "args": {
                            "kind": [op.kind for op in ops],
                            "stage": [op.stage for op in ops],
                            "microbatch": [op.microbatch for op in ops],
                        },
                    }
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _title(kind: str, stage: int, microbatch: int) -> str:
    return f"{kind} stage {stage}" + (f" mb {microbatch}" if microbatch >= 0 else "")


def save_trace(path: str | Path, timelines: Mapping[str, Timeline], *, microseconds: float = 1e6) -> None:
    """Write `chrome_trace` to `path`, atomically."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(chrome_trace(timelines, microseconds=microseconds)), encoding="utf-8")
    temporary.replace(path)


__all__ = ["chrome_trace", "save_trace"]
