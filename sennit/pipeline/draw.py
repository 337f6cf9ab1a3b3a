"""Pictures of schedules: what each rank does when, and what it holds meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sennit.pipeline.schedule import COMPUTE, Schedule, ops_of
from sennit.pipeline.simulate import Timeline, activation_curve

COLOURS = {"F": "#4477aa", "B": "#228833", "I": "#66ccee", "W": "#ccbb44"}
"""Forward, backward, backward for inputs, for weights: Paul Tol's bright palette, distinct for colour-blind readers."""
NAMES = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}


class Box(NamedTuple):
    """A rectangle of the picture: rank, time span, half (0 whole, 1 upper, 2 lower), and what it shows."""

    rank: int
    start: float
    end: float
    half: int
    kind: str
    stage: int
    microbatch: int
    chunk: int


def boxes(schedule: Schedule, timeline: Timeline) -> list[Box]:
    """Return the rectangles of a timeline; the operations of a pair lie one above the other."""
    found = []
    for rank, events in enumerate(timeline.events):
        stages = schedule.stages_of(rank)
        for event in events:
            ops = [op for op in ops_of(event.item) if op.kind in COMPUTE]
            for place, op in enumerate(ops):
                half = place + 1 if len(ops) > 1 else 0
                chunk = stages.index(op.stage)
                found.append(Box(rank, event.start, event.end, half, op.kind, op.stage, op.microbatch, chunk))
    return found


def draw_png(path: str | Path, schedule: Schedule, timelines: Mapping[str, Timeline]) -> None:
    """Write a PNG with one panel for each named timeline and one for the activations that each rank holds."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    p, count = schedule.num_ranks, len(timelines)
    longest = max(timeline.makespan for timeline in timelines.values())
    figure = Figure(figsize=(min(max(12.0, 0.16 * schedule.num_microbatches * 3), 40.0), count * (0.42 * p + 1.2) + 2.6))
    axes = figure.subplots(count + 1, 1, squeeze=False, height_ratios=[0.42 * p + 0.6] * count + [2.0])[:, 0]
    for axis, (name, timeline) in zip(axes, timelines.items(), strict=False):
        _panel(axis, schedule, timeline, longest)
        axis.set_title(
            f"{schedule.name}, {name}: makespan {timeline.makespan:g}, bubble {100 * timeline.bubble:.1f} %",
            loc="left",
            fontsize=10,
        )
    share = (schedule.share,) * schedule.num_stages
    timeline = next(iter(timelines.values()))
    for rank in range(p):
        curve = activation_curve(schedule, rank, whole=share, after_input=share)
        ends = [event.end for event in timeline.events[rank]]
        axes[-1].step(ends, curve[: len(ends)], where="post", label=f"rank {rank}", linewidth=1.2)
    axes[-1].set_xlim(0, longest)
    axes[-1].set_ylabel("activations\n(L/p x microbatches)", fontsize=8)
    axes[-1].set_xlabel("time")
    axes[-1].legend(fontsize=7, ncols=min(p, 8), loc="upper right")
    used = {box.kind for box in boxes(schedule, timeline)}
    handles = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in COMPUTE if kind in used]
    figure.legend(handles=handles, loc="upper right", ncols=len(handles), fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _panel(axis: Any, schedule: Schedule, timeline: Timeline, longest: float) -> None:
    from matplotlib.colors import to_rgb

    for box in boxes(schedule, timeline):
        bottom, height = box.rank - 0.45 + (0.45 if box.half == 2 else 0.0), 0.9 if box.half == 0 else 0.45
        light = min(0.35 * box.chunk, 0.7)
        colour = tuple(c + (1 - c) * light for c in to_rgb(COLOURS[box.kind]))
        axis.broken_barh(
            [(box.start, box.end - box.start)], (bottom, height), facecolor=colour, edgecolor="white", linewidth=0.4
        )
        if (box.end - box.start) / longest > 0.011:
            axis.text(
                (box.start + box.end) / 2, bottom + height / 2, str(box.microbatch), ha="center", va="center", fontsize=6
            )
    axis.set_ylim(schedule.num_ranks - 0.4, -0.6)
    axis.set_xlim(0, longest)
    axis.set_yticks(range(schedule.num_ranks), [f"rank {rank}" for rank in range(schedule.num_ranks)], fontsize=8)


def draw_html(path: str | Path, schedule: Schedule, timelines: Mapping[str, Timeline]) -> None:
    """Write the same as one HTML page that works offline; boxes say what they are when pointed at."""
    import plotly.graph_objects as graph
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=len(timelines), cols=1, shared_xaxes=True, subplot_titles=list(timelines))
    for row, timeline in enumerate(timelines.values(), 1):
        every = boxes(schedule, timeline)
        for kind in COMPUTE:
            mine = [box for box in every if box.kind == kind]
            if not mine:
                continue
            figure.add_trace(
                graph.Bar(
                    base=[box.start for box in mine],
                    x=[box.end - box.start for box in mine],
                    y=[box.rank + (0 if box.half == 0 else -0.2 if box.half == 1 else 0.2) for box in mine],
                    width=[0.85 if box.half == 0 else 0.4 for box in mine],
                    orientation="h",
                    name=NAMES[kind],
                    legendgroup=kind,
                    showlegend=row == 1,
                    marker={"color": COLOURS[kind], "line": {"color": "white", "width": 0.5}},
                    text=[str(box.microbatch) for box in mine],
                    textposition="inside",
                    customdata=[[box.stage, box.microbatch] for box in mine],
                    hovertemplate="stage %{customdata[0]}, microbatch %{customdata[1]}<br>%{base:.3g} to %{x:.3g}",
                ),
                row=row,
                col=1,
            )
        figure.update_yaxes(
            tickvals=list(range(schedule.num_ranks)),
            ticktext=[f"rank {rank}" for rank in range(schedule.num_ranks)],
            autorange="reversed",
            row=row,
            col=1,
        )
    figure.update_layout(barmode="overlay", title=schedule.name, template="plotly_white", height=180 + 60 * schedule.num_ranks)
    figure.write_html(path, include_plotlyjs=True, full_html=True)


__all__ = ["COLOURS", "Box", "boxes", "draw_html", "draw_png"]
