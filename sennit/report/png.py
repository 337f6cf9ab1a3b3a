"""The report as one PNG: the same panels in a fixed, light layout, for a README or a chat."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from sennit.report import facts, words
from sennit.report.panels import Panel, Shares, Style, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sennit.report.run_data import RunData

COLORS = {
    "train": "#2f6fde",
    "eval": "#d9650b",
    "gzip": "#7a8797",
    "checkpoint": "#1d9a6c",
    "bad": "#d1293d",
    "resume": "#8a5cd0",
    "lr": "#8a5cd0",
    "norm": "#b3446c",
    "speed": "#1d9a6c",
    "memory": "#b0730c",
    "phase0": "#98a4b3",
    "phase1": "#6fa2f0",
    "phase2": "#2f6fde",
    "phase3": "#f0a35b",
    "phase4": "#cfd6df",
    "phase5": "#1d9a6c",
}
"""Colour by role: the light values of assets/page.css."""

TEXT, MUTED, GRID = "#1b2430", "#5b6878", "#e9edf3"
WIDTH, ROW_HEIGHT, HEAD_HEIGHT = 14.0, 2.75, 1.72
"""Inches."""
SAMPLE_LINES, SAMPLE_COLUMNS, LINE_HEIGHT = 9, 160, 0.17


def render_png(run: RunData, panels: list[Panel], shares: Shares | None, *, dpi: int = 100) -> bytes:
    """Return the dashboard as PNG bytes, 14 inches wide. Touches no global state of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(panels) + (shares is not None)
    rows = -(-count // 2)
    sample = _sample_lines(run) if count else []
    foot = 0.75 + LINE_HEIGHT * len(sample) if sample else 0.0
    height = HEAD_HEIGHT + max(rows, 0.5) * ROW_HEIGHT + foot
    figure = Figure(figsize=(WIDTH, height), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    _head(figure, run, height)
    if count:
        grid = figure.add_gridspec(
            rows,
            2,
            left=0.06,
            right=0.945,
            top=1 - HEAD_HEIGHT / height,
            bottom=(0.5 + foot) / height,
            hspace=0.52,
            wspace=0.24,
        )
        resumes = [event.step for event in run.events_of("resume")][-50:]
        for index, panel in enumerate(panels):
            _draw_panel(figure.add_subplot(grid[index // 2, index % 2]), panel, resumes)
        if shares is not None:
            _draw_shares(figure.add_subplot(grid[len(panels) // 2, len(panels) % 2]), shares)
        if sample:
            _draw_sample(figure, sample, foot, height)
    else:
        figure.text(0.5, 0.3, "No step has been recorded yet.", ha="center", color=MUTED, fontsize=13)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _head(figure: Figure, run: RunData, height: float) -> None:
    from sennit.report.page import run_name

    def text(x: float, inches: float, content: str, **style: Any) -> None:
        figure.text(x, 1 - inches / height, _plain(content), va="baseline", parse_math=False, **style)

    _, progress = facts.status(run)
    text(0.025, 0.34, run_name(run)[:80], fontsize=17, fontweight="bold", color=TEXT)
    text(0.025, 0.62, "  |  ".join([*facts.subtitle(run), progress])[:160], fontsize=10, color=MUTED)
    figures = facts.headline(run)
    for index, item in enumerate(figures):
        x = 0.025 + index * 0.96 / max(len(figures), 1)
        text(x, 0.93, item.label, fontsize=9, color=MUTED)
        text(x, 1.14, item.value, fontsize=13, fontweight="bold", color=TEXT)
        text(x, 1.32, item.detail[:30], fontsize=7, color=MUTED)


def _plain(text: str) -> str:
    """Return `text` in the characters that every font has."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)


def _sample_lines(run: RunData) -> list[str]:
    """Return the first lines of the newest generated text, prompt included, without empty ones."""
    samples = run.events_of("sample")
    if not samples:
        return []
    text = "".join(str(samples[-1].fields.get(key) or "") for key in ("prompt", "text"))[:20_000]
    lines = [line for line in text.expandtabs(4).splitlines() if line.strip()]
    return [_plain(line)[:SAMPLE_COLUMNS] for line in lines[:SAMPLE_LINES]]


def _draw_sample(figure: Figure, lines: list[str], foot: float, height: float) -> None:
    """Write generated text into the lowest `foot` inches of a figure `height` inches high."""
    figure.text(
        0.06, (foot - 0.3) / height, "Generated text", fontsize=11, fontweight="bold", color=TEXT, va="baseline"
    )
    for index, line in enumerate(lines):
        y = (foot - 0.52 - LINE_HEIGHT * index) / height
        figure.text(0.06, y, line, fontsize=8.5, color=TEXT, family="monospace", va="baseline", parse_math=False)


def _draw_panel(axes: Axes, panel: Panel, resumes: list[int]) -> None:
    _frame(axes, panel.title)
    axes.set_xlabel("step", fontsize=8.5, color=MUTED)
    axes.set_ylabel(panel.y_axis, fontsize=8.5, color=MUTED)
    stack = [trace for trace in panel.traces if trace.style is Style.STACK]
    if stack:
        axes.stackplot(
            stack[0].x,
            [trace.y for trace in stack],
            labels=[trace.name for trace in stack],
            colors=[COLORS[trace.color] for trace in stack],
            linewidth=0,
        )
    for trace in panel.traces:
        if trace.style is not Style.STACK and not trace.right:
            _draw_trace(axes, trace)
    if panel.log:
        axes.set_yscale("log")
    for step in resumes:
        axes.axvline(step, color=COLORS["resume"], linewidth=1.2, linestyle=":")
    if panel.from_zero and not panel.log:
        axes.set_ylim(0, panel.y_max or axes.get_ylim()[1] * 1.04)
    if len(panel.traces) - sum(trace.right for trace in panel.traces) > 1:
        axes.legend(
            fontsize=7.5, frameon=False, labelcolor=TEXT, loc="lower right", bbox_to_anchor=(1.01, 0.98), ncols=6
        )
    for trace in panel.traces:
        if trace.right:
            _right_axis(axes, panel, trace)


def _draw_trace(axes: Axes, trace: Trace) -> None:
    color = COLORS[trace.color]
    marks = {
        Style.FAINT: {"linewidth": 0.8, "alpha": 0.35},
        Style.LINE: {"linewidth": 1.6, "marker": "o" if len(trace.x) == 1 else ""},
        Style.DASHED: {"linewidth": 1.3, "linestyle": "--"},
        Style.POINTS: {"linewidth": 1.6, "marker": "o", "markersize": 3.5 if len(trace.x) <= 100 else 0},
        Style.DIAMOND: {"linestyle": "", "marker": "D", "markersize": 4.5},
        Style.CROSS: {"linestyle": "", "marker": "x", "markersize": 6},
    }
    axes.plot(trace.x, trace.y, color=color, label=trace.name, **marks[trace.style])


def _right_axis(axes: Axes, panel: Panel, trace: Trace) -> None:
    """Add the right axis, scaled so that its curve would lie exactly on the left one: both are proportional."""
    peak = float(np.nanmax(panel.traces[0].y))
    right = axes.twinx()
    right.set_ylabel(panel.right_axis, fontsize=8.5, color=MUTED)
    right.tick_params(labelsize=8, colors=MUTED)
    for side in ("top", "right", "left", "bottom"):
        right.spines[side].set_visible(False)
    if peak > 0:
        right.set_ylim(0, axes.get_ylim()[1] * float(np.nanmax(trace.y)) / peak)


def _draw_shares(axes: Axes, shares: Shares) -> None:
    _frame(axes, shares.title)
    total = sum(seconds for _, seconds, _ in shares.parts) or 1.0
    names = [name for name, _, _ in shares.parts][::-1]
    percents = [100 * seconds / total for _, seconds, _ in shares.parts][::-1]
    bars = axes.barh(names, percents, color=[COLORS[color] for _, _, color in shares.parts][::-1], height=0.6)
    labels = [f"{words.percent(percent)}  {words.duration(percent * total / 100)}" for percent in percents]
    axes.bar_label(bars, labels, padding=4, fontsize=8, color=TEXT)
    axes.set_xlim(0, max(percents + [1.0]) * 1.3)
    axes.set_xlabel("% of the recorded time", fontsize=8.5, color=MUTED)
    axes.grid(visible=False, axis="y")


def _frame(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=TEXT)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=MUTED)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#d7dde6")


__all__ = ["render_png"]
