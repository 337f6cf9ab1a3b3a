"""`sennit report`: pictures of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory, for example runs/tiny.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="PATH", help="A file ending in .html, or a folder [default: the run directory]."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document with the paths.")] = False,
) -> None:
    """Draw a run: one HTML page that works offline, and one PNG.

    Works while the run is going on, and on one that was interrupted.
    """
    from sennit.report import build_report

    files = build_report(run, out)
    if json_output:
        json.dump({"run_dir": str(run), "html": str(files.html), "png": str(files.png)}, sys.stdout)
        sys.stdout.write("\n")
    else:
        print(f"report:  {files.html}\npicture: {files.png}", file=sys.stderr)


__all__ = ["report"]
