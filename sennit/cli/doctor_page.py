"""The page that `sennit doctor` prints for people."""

from __future__ import annotations

import shutil
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sennit.cli.output import gib


def print_page(document: dict[str, Any]) -> None:
    """Print the document of `doctor.examine` as tables on stdout."""
    console = Console(file=sys.stdout, width=max(shutil.get_terminal_size((110, 24)).columns, 60), highlight=False)
    console.print(Text(f"sennit {document['sennit']}, Python {document['python']}, {document['platform']}"))
    console.print(Text(", ".join(f"{name} {number}" for name, number in document["versions"].items()), style="dim"))
    console.print(Text(f"cache: {document['cache_dir']}", style="dim"))
    if document["problem"]:
        console.print(Text(document["problem"], style="bold red"))
    _print_table(console, "Devices", device_rows(document))
    _print_table(console, "Operators", operator_rows(document["operators"], document["default_device"]))
    cores, off = document["start_up"]["cores"], document["start_up"]["switched_off"]
    title = f"Start-up settings of one rank on {cores} cores" + (" (switched off by SENNIT_STARTED)" if off else "")
    _print_table(console, title, start_up_rows(document))
    _print_table(console, "Optional packages", optional_rows(document["optional"]))


def device_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, facts) of each device."""
    rows = []
    for name, facts in document["devices"].items():
        if not facts["usable"]:
            rows.append((name, f"missing: {facts['why']}"))
            continue
        rates = [f"{dtype} {rate / 1e12:.2f} TFLOP/s" for dtype, rate in facts["peak_flops"].items() if rate]
        backend = facts["backend"] + ("" if facts["backend_why"] is None else f" missing: {facts['backend_why']}")
        parts = [
            f"{facts['count']} x {facts['model']}",
            gib(facts["memory_bytes"]),
            f"fast at {', '.join(facts['fast_dtypes'])} (auto = {facts['auto_dtype']})",
            f"backend {backend}",
            *([f"peak {', '.join(rates)}"] if rates else []),
        ]
        rows.append((f"{name} (default)" if name == document["default_device"] else name, ", ".join(parts)))
    return rows


def operator_rows(operators: dict[str, list[dict[str, Any]]], device: str) -> list[tuple[str, str]]:
    """Return (operator, providers) with the reason beside each provider that `device` cannot use."""
    rows = []
    for name, providers in operators.items():
        usable = [row["provider"] for row in providers if row["usable"]]
        unusable = [f"{row['provider']} ({row['why']})" for row in providers if not row["usable"]]
        text = ", then ".join(usable) if usable else f"no provider on {device}"
        rows.append((name, text + (f"; not {', '.join(unusable)}" if unusable else "")))
    return rows


def start_up_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (setting, value and reason)."""
    settings = document["start_up"]["settings"]
    return [(s["name"], f"{s['value']}, set by {s['set_by']}: {s['reason']}") for s in settings]


def optional_rows(optional: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (package, version or missing, and what it is for)."""
    return [(name, f"{facts['version'] or 'missing'}: {facts['for']}") for name, facts in optional.items()]


def _print_table(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    console.print(Text(f"\n{title}", style="bold"))
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=True)
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(ratio=1)
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    console.print(table)


__all__ = ["device_rows", "operator_rows", "optional_rows", "print_page", "start_up_rows"]
