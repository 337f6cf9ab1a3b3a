"""The pictures of a run as data. The page and the PNG draw the same panels, each in its own way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from sennit.report import words
from sennit.report.facts import mfu_denominator, mfu_words
from sennit.report.run_data import Array, RunData
from sennit.report.series import group_means, smooth, smoothing_window, thin


class Style(StrEnum):
    """How a trace is drawn."""

    LINE = "line"
    FAINT = "faint"
    DASHED = "dashed"
    POINTS = "points"
    DIAMOND = "diamond"
    CROSS = "cross"
    STACK = "stack"
    HIDDEN = "hidden"


@dataclass(slots=True)
class Trace:
    """A curve: `x` in finished steps [n], `y` [n] in the panel's unit; `color` is a role, not a colour."""

    name: str
    x: Array
    y: Array
    color: str
    style: Style = Style.LINE
    texts: list[str] | None = None
    right: bool = False


@dataclass(slots=True)
class Panel:
    """A picture over steps.

    `right_axis`: title of a second axis; `y_max`: where the left axis ends (0: where the curves do); `note`: a few words
    beside the title.
    """

    key: str
    title: str
    y_axis: str
    traces: list[Trace]
    right_axis: str = ""
    from_zero: bool = False
    y_max: float = 0.0
    log: bool = False
    note: str = ""


@dataclass(slots=True)
class Shares:
    """A total split into parts: (name, seconds, colour role), drawn as bars."""

    key: str
    title: str
    parts: list[tuple[str, float, str]] = field(default_factory=list)
    note: str = ""


SMOOTH_FROM = 400
"""Steps from which noisy curves get a smoothed one on top."""

PHASE_COLORS = {"data": "phase0", "forward": "phase1", "backward": "phase2", "optimizer": "phase3"}


def build_panels(run: RunData) -> list[Panel]:
    """Return the pictures for which the run has data, in the order of the page."""
    makers = (
        loss_panel,
        bits_panel,
        rate_panel,
        norm_panel,
        throughput_panel,
        memory_panel,
        phase_panel,
    )
    return [panel for panel in (make(run) for make in makers) if panel is not None]


def loss_panel(run: RunData) -> Panel | None:
    """Return the loss in nats a token: raw, smoothed, held-out, with checkpoints and skipped updates."""
    traces = list(_train_curves(run, "loss")) + list(_eval_curve(run, "loss"))
    if not traces:
        return None
    traces += _marks(run)
    return Panel("loss", "Loss", "nats a token", traces)


def bits_panel(run: RunData) -> Panel | None:
    """Return bits per byte of text, with gzip -9 on the same held-out text to compare."""
    traces = list(_train_curves(run, "bits_per_byte")) + list(_eval_curve(run, "bits_per_byte"))
    if not traces:
        return None
    gzip = run.summary.get("gzip_bits_per_byte")
    if isinstance(gzip, (int, float)) and np.isfinite(gzip):
        ends = np.array([min(t.x[0] for t in traces), max(t.x[-1] for t in traces)])
        traces.append(Trace("gzip -9, held-out", ends, np.full(2, float(gzip)), "gzip", Style.DASHED))
    note = "bits per byte of text, comparable between tokenizers"
    return Panel("bits", "Compression", "bits per byte", traces, note=note)


def rate_panel(run: RunData) -> Panel | None:
    """Return the learning rate."""
    return _simple(run, "lr", "Learning rate", "lr", "rate")


def norm_panel(run: RunData) -> Panel | None:
    """Return the gradient norm before clipping, on a log axis if its range is wide; the clipping limit as a line."""
    panel = _simple(run, "grad_norm", "Gradient norm", "norm", "global norm before clipping")
    if panel is None:
        return None
    limit = run.setting("optimizer.clip_norm")
    values = run.steps["grad_norm"]
    finite = values[np.isfinite(values) & (values > 0)]
    panel.log = bool(finite.size and finite.max() > 20 * np.median(finite))
    if isinstance(limit, (int, float)) and limit > 0:
        trace = panel.traces[0]
        ends = np.array([trace.x[0], trace.x[-1]])
        panel.traces.append(Trace("clip_norm", ends, np.full(2, float(limit)), "gzip", Style.DASHED))
    return panel


def throughput_panel(run: RunData) -> Panel | None:
    """Return tokens/s and, on the right axis, the MFU with its denominator."""
    panel = _simple(run, "tokens_per_second", "Throughput", "speed", "tokens/s")
    if panel is None:
        return None
    panel.traces[0].name = "tokens/s"
    panel.from_zero = True
    mfu = 100.0 * run.steps["mfu"]
    denominator = mfu_denominator(run)
    if denominator is not None and np.isfinite(mfu).any():
        x, y = thin(run.steps["step"], mfu)
        panel.traces.append(Trace("MFU, %", x, y, "speed", Style.HIDDEN, right=True))
        panel.right_axis = f"MFU, {mfu_words(run)}"
    return panel


def memory_panel(run: RunData) -> Panel | None:
    """Return the peak memory of rank 0 so far, GiB."""
    values = run.steps["peak_memory_bytes"] / 2**30
    if not np.isfinite(values).any():
        return None
    x, y = thin(run.steps["step"], values)
    device = run.environment.get("device")
    where = f" ({device})" if isinstance(device, str) and device else ""
    trace = Trace(f"peak memory{where}", x, y, "memory")
    return Panel("memory", "Memory", "peak so far, GiB, rank 0", [trace], from_zero=True)


def phase_panel(run: RunData) -> Panel | None:
    """Return where each step's time goes, stacked, milliseconds."""
    phases = with_rest(run)
    if not phases:
        return None
    x, means = group_means(run.steps["step"], phases)
    scale = 1000.0
    traces = [Trace(name, x, y * scale, phase_color(name), Style.STACK) for name, y in means.items()]
    total = scale * np.sum(list(means.values()), axis=0)
    usual = 1.5 * float(np.quantile(total, 0.98))  # one slow step, often the first, must not flatten all others
    y_max = usual if total.max() > usual > 0 else 0.0
    return Panel("phases", "Time of a step", "ms a step, rank 0", traces, from_zero=True, y_max=y_max)


def time_shares(run: RunData) -> Shares | None:
    """Return the total time by phase over the recorded steps, and of checkpoints."""
    phases = with_rest(run)
    if not phases:
        return None
    # With log.every > 1 a record stands for the steps since the last record.
    stands_for = np.diff(run.steps["step"], prepend=0.0)
    resumed = {event.step for event in run.events_of("resume")}
    stands_for[0] = 1.0 if resumed or run.setting("log.every") in (None, 1) else stands_for[0]
    parts = [(name, float(np.nansum(values * stands_for)), phase_color(name)) for name, values in phases.items()]
    saving = [event.fields.get("seconds") for event in run.events_of("checkpoint")]
    saved = sum(float(s) for s in saving if isinstance(s, (int, float)) and np.isfinite(s))
    if saved > 0:
        parts.append(("checkpoints", saved, "phase5"))
    return Shares("shares", "Where the time goes", parts, "in total over the recorded steps, rank 0")


def with_rest(run: RunData) -> dict[str, Array]:
    """Return seconds by phase, with the part of the step time that no phase covers as `rest` if it is over 1 %."""
    phases = dict(run.phases)
    if not phases:
        return {}
    covered = np.sum([np.nan_to_num(values, nan=0.0) for values in phases.values()], axis=0)
    rest = np.maximum(np.nan_to_num(run.steps["step_seconds"], nan=0.0) - covered, 0.0)
    if rest.sum() > 0.01 * covered.sum():
        phases["rest"] = rest
    return phases


def phase_color(name: str) -> str:
    """Return the colour role of a phase."""
    return PHASE_COLORS.get(name, "phase4")


def _simple(run: RunData, column: str, title: str, color: str, y_axis: str) -> Panel | None:
    values = run.steps[column]
    if not np.isfinite(values).any():
        return None
    x, y = thin(run.steps["step"], values)
    traces = [Trace(title.lower(), x, y, color)]
    if len(values) > SMOOTH_FROM and column != "lr":
        traces[0].style = Style.FAINT
        window = smoothing_window(len(values))
        x, y = thin(run.steps["step"], smooth(values, window))
        traces.append(Trace(f"smoothed over {window}", x, y, color))
    return Panel(column, title, y_axis, traces)


def _train_curves(run: RunData, column: str) -> Iterator[Trace]:
    values = run.steps[column]
    if not np.isfinite(values).any():
        return
    x, y = thin(run.steps["step"], values)
    yield Trace("train", x, y, "train", Style.FAINT)
    window = smoothing_window(len(values))
    x, y = thin(run.steps["step"], smooth(values, window))
    yield Trace(f"smoothed over {window}", x, y, "train")


def _eval_curve(run: RunData, column: str) -> Iterator[Trace]:
    values = run.evals[column]
    if not np.isfinite(values).any():
        return
    x, y = thin(run.evals["step"], values)
    yield Trace("held-out", x, y, "eval", Style.POINTS)


def _marks(run: RunData) -> list[Trace]:
    """Return checkpoints and skipped updates as marks on the loss curve."""
    marks = []
    step, loss = run.steps["step"], run.steps["loss"]
    finite = np.isfinite(loss)
    if not finite.any():
        return []
    saves = run.events_of("checkpoint")
    if saves:
        saves = [saves[i] for i in np.unique(np.linspace(0, len(saves) - 1, 200).astype(int))]
        x = np.array([float(event.step) for event in saves])
        window = smoothing_window(len(loss))
        y = np.interp(x, step[finite], smooth(loss, window)[finite])
        texts = [_checkpoint_text(event.fields) for event in saves]
        marks.append(Trace("checkpoint", x, y, "checkpoint", Style.DIAMOND, texts))
    skipped = np.flatnonzero(run.steps["skipped"] == 1.0)[:500]
    if skipped.size:
        y = np.interp(step[skipped], step[finite], loss[finite])
        marks.append(Trace("update skipped", step[skipped], y, "bad", Style.CROSS))
    return marks


def _checkpoint_text(fields: dict[str, object]) -> str:
    size, seconds = fields.get("bytes"), fields.get("seconds")
    parts = []
    if isinstance(size, (int, float)):
        parts.append(words.gibibytes(float(size)))
    if isinstance(seconds, (int, float)):
        parts.append(f"in {words.duration(float(seconds))}")
    return "saved " + ", ".join(parts) if parts else "saved"


__all__ = ["Panel", "Shares", "Style", "Trace", "build_panels", "time_shares"]
