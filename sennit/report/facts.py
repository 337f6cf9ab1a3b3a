"""The headline figures of a run and the facts around it, as words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from sennit.report import words
from sennit.report.run_data import Array, RunData, number


@dataclass(frozen=True, slots=True)
class Figure:
    """One headline figure: what it is, its value, and a line that puts it into proportion."""

    label: str
    value: str
    detail: str = ""


def headline(run: RunData) -> list[Figure]:
    """Return the headline figures; what is not known is left out."""
    figures = [
        Figure("Parameters", words.count(parameters(run)), _model_words(run)),
        Figure("Tokens seen", words.count(last(run.steps["tokens"])), _steps_words(run)),
        Figure("Final loss", words.significant(final_loss(run), 4), "nats a token, training"),
        _compression(run),
        Figure("Throughput", words.count(throughput(run)), "tokens/s over all steps"),
        Figure("MFU", _percent(mfu(run)), mfu_words(run, percent=False)),
        Figure("Peak memory", words.gibibytes(peak_memory(run)), "rank 0"),
        Figure("Time", words.duration(_summary(run, "train_seconds")), "from the last start to the end"),
    ]
    return [figure for figure in figures if figure.value != words.ABSENT]


def status(run: RunData) -> tuple[str, str]:
    """Return (kind, words): finished, stopped or empty, and how far the run got."""
    wanted = run.setting("train.steps")
    if run.num_steps == 0:
        return "empty", "no step recorded yet"
    done = int(run.steps["step"][-1])
    if isinstance(wanted, int) and done < wanted:
        return "stopped", f"{done:,} of {wanted:,} steps"
    return "finished", f"{done:,} steps"


def parameters(run: RunData) -> float:
    """Return the number of parameters, or NaN."""
    value = _summary(run, "parameters")
    return number(run.environment.get("parameters")) if math.isnan(value) else value


def final_loss(run: RunData) -> float:
    """Return the training loss of the last step, nats a token."""
    value = last(run.steps["loss"])
    return _summary(run, "loss_last") if math.isnan(value) else value


def held_out_bits(run: RunData) -> float:
    """Return bits per byte on held-out text: of the whole of it at the end of the run, else of the last evaluation."""
    value = last(run.evals["bits_per_byte"])
    return _summary(run, "bits_per_byte") if math.isnan(value) else value


def throughput(run: RunData) -> float:
    """Return the tokens/s over all steps but the first of the process, which warms up."""
    value = _summary(run, "tokens_per_second")
    return _mean_rate(run.steps["tokens_per_second"]) if math.isnan(value) else value


def mfu(run: RunData) -> float:
    """Return the MFU over all steps, a fraction."""
    value = _summary(run, "mfu")
    return _mean_rate(run.steps["mfu"]) if math.isnan(value) else value


def peak_memory(run: RunData) -> float:
    """Return the peak memory of rank 0, bytes."""
    values = run.steps["peak_memory_bytes"]
    finite = values[np.isfinite(values)]
    known = [float(finite.max())] if finite.size else []
    value = _summary(run, "peak_memory_bytes")
    return max(known + ([] if math.isnan(value) else [value]), default=math.nan)


def mfu_denominator(run: RunData) -> float | None:
    """Return the peak rate behind the MFU, FLOP/s of all ranks together: recorded, else tflops divided by mfu."""
    value = _summary(run, "mfu_denominator_flops")
    if math.isnan(value):
        with np.errstate(divide="ignore", invalid="ignore"):
            value = _median(run.steps["tflops"] * 1e12 / run.steps["mfu"])
    return value if math.isfinite(value) and value > 0 else None


def mfu_words(run: RunData, *, percent: bool = True) -> str:
    """Return what the MFU is a fraction of: `% of 2.41 TFLOP/s (bf16)`."""
    denominator = mfu_denominator(run)
    if denominator is None:
        return "peak rate of this device unknown"
    dtype = run.setting("precision.dtype")
    suffix = f" ({dtype})" if dtype in ("bf16", "fp32", "fp64") else ""
    return f"{'% ' if percent else ''}of {words.rate_flops(denominator)}{suffix}"


def subtitle(run: RunData) -> list[str]:
    """Return the few facts that identify a run: family, device, ranks, layout, dtype, date."""
    environment = run.environment
    facts = [run.setting("model.family"), _device_words(environment), _layout_words(run)]
    facts.append(run.setting("precision.dtype"))
    started = run.steps["time"][np.isfinite(run.steps["time"])]
    if started.size:
        try:
            facts.append(datetime.fromtimestamp(float(started[0])).strftime("%Y-%m-%d %H:%M"))
        except (OverflowError, ValueError, OSError):
            pass
    return [str(fact) for fact in facts if fact]


def environment_rows(run: RunData) -> list[tuple[str, str]]:
    """Return the environment as (name, value), nested tables flattened with dots."""
    return list(_flat(run.environment))


def timeline(run: RunData) -> list[tuple[str, str, str]]:
    """Return checkpoints, resumes and other events as (step, what, detail), the newest first."""
    rows = []
    for event in reversed(run.events):
        if event.kind == "sample":
            continue
        fields = event.fields
        detail = fields.get("path") or fields.get("from") or ""
        if event.kind == "checkpoint":
            size, seconds = number(fields.get("bytes")), number(fields.get("seconds"))
            detail = ", ".join(
                part
                for part in (str(detail), words.gibibytes(size), words.duration(seconds))
                if part and part != words.ABSENT
            )
        rows.append((f"{event.step:,}", event.kind, str(detail)))
    return rows


def last(values: Array) -> float:
    """Return the last finite value, or NaN."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if finite.size else math.nan


def _mean_rate(values: Array) -> float:
    """Return the rate over steps of equal work: the harmonic mean."""
    finite = values[np.isfinite(values) & (values > 0)]
    return float(len(finite) / (1.0 / finite).sum()) if finite.size else math.nan


def _median(values: Array) -> float:
    rest = values[1:] if len(values) > 1 else values
    finite = rest[np.isfinite(rest)]
    return float(np.median(finite)) if finite.size else math.nan


def _summary(run: RunData, key: str) -> float:
    return number(run.summary.get(key))


def _percent(value: float) -> str:
    return words.ABSENT if math.isnan(value) else f"{words.significant(100 * value)} %"


def _compression(run: RunData) -> Figure:
    bits, gzip = held_out_bits(run), _summary(run, "gzip_bits_per_byte")
    detail = "held-out text"
    if not math.isnan(gzip) and not math.isnan(bits) and gzip > 0:
        better = 100 * (1 - bits / gzip)
        word = "better" if better >= 0 else "worse"
        detail = f"gzip -9: {words.significant(gzip)} ({abs(better):.0f} % {word})"
    return Figure("Bits per byte", words.significant(bits), detail)


def _model_words(run: RunData) -> str:
    layers, hidden = run.setting("model.num_layers"), run.setting("model.hidden_size")
    return f"{layers} layers, hidden {hidden}" if layers and hidden else ""


def _steps_words(run: RunData) -> str:
    batch, seq = run.setting("train.global_batch_size"), run.setting("train.seq_len")
    return f"{batch} x {seq} a step" if batch and seq else ""


def _device_words(environment: dict[str, Any]) -> str:
    device, ranks = environment.get("device"), environment.get("world_size")
    if not device:
        return ""
    return f"{device}, {ranks} rank{'s' if ranks != 1 else ''}" if isinstance(ranks, int) else str(device)


def _layout_words(run: RunData) -> str:
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")
    sizes = [(name, run.setting(f"parallel.{name}")) for name in names]
    return " x ".join(f"{name} {size}" for name, size in sizes if isinstance(size, int) and size > 1)


def _flat(table: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for key, value in table.items():
        if isinstance(value, dict) and len(prefix) < 60:
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", str(value)))
    return rows


__all__ = [
    "Figure",
    "environment_rows",
    "final_loss",
    "headline",
    "held_out_bits",
    "mfu_denominator",
    "mfu_words",
    "status",
    "subtitle",
    "timeline",
]
