"""From a run directory to the files of its report."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from sennit.errors import DataError
from sennit.report.page import render_page
from sennit.report.panels import build_panels, time_shares
from sennit.report.png import render_png
from sennit.report.run_data import load_run


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """The files of a report."""

    html: Path
    png: Path


def build_report(run_dir: Path, out: Path | None = None) -> ReportFiles:
    """Write the report of the run in `run_dir` and return its files; each replaces an older one in one move.

    `out`: a path ending in .html (the PNG goes beside it, with the same name), or a folder, made if it is missing.
    Without it, report.html and report.png in the run directory. A run that is unfinished, empty or partly damaged
    still gets its report. Raises DataError if there is no run at `run_dir` or the files cannot be written.
    """
    run_dir = Path(run_dir)
    files = report_paths(run_dir, out)
    run = load_run(run_dir)
    panels, shares = build_panels(run), time_shares(run)
    _write(files.html, render_page(run, panels, shares, png_name=files.png.name))
    _write(files.png, render_png(run, panels, shares))
    return files


def report_paths(run_dir: Path, out: Path | None) -> ReportFiles:
    """Return where the report of `run_dir` goes."""
    if out is not None and out.suffix.lower() in (".html", ".htm"):
        return ReportFiles(out, out.with_suffix(".png"))
    folder = run_dir if out is None else out
    return ReportFiles(folder / "report.html", folder / "report.png")


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise DataError(
            f"The report cannot be written to {path}: {error.strerror}. Give another place with --out PATH."
        ) from error


__all__ = ["ReportFiles", "build_report", "report_paths"]
