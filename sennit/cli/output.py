"""What all commands print alike: one JSON document, one paragraph for an error, sizes in GiB."""

from __future__ import annotations

import json
import sys
from typing import Any


def print_json(document: Any) -> None:
    """Print `document` as the one JSON document on stdout."""
    json.dump(document, sys.stdout, indent=1, default=str)
    sys.stdout.write("\n")
    sys.stdout.flush()


def print_error(kind: str, message: str, exit_code: int, *, as_json: bool, **details: Any) -> None:
    """Print one paragraph on stderr and, for `--json`, the document {"error": {...}} on stdout."""
    paragraph = " ".join(message.split())
    sys.stderr.write(f"error: {paragraph}\n")
    if as_json:
        print_json({"error": {"kind": kind, "message": paragraph, "exit_code": exit_code, **details}})


def gib(size_bytes: float) -> str:
    """Return a size in GiB, in words."""
    return f"{size_bytes / 2**30:.1f} GiB"


__all__ = ["gib", "print_error", "print_json"]
