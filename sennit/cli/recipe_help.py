"""The recipe's fields as help on the terminal."""

from __future__ import annotations

import shutil
import sys
from collections import defaultdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sennit.recipe import DEFAULT_PRESET, Recipe, preset_names
from sennit.recipe.fields import Field, recipe_fields


def print_recipe_help() -> None:
    """Print presets and all fields, grouped by section, on stdout."""
    width = max(shutil.get_terminal_size((110, 24)).columns, 60)
    console = Console(file=sys.stdout, width=width, highlight=False)
    names = ", ".join(f"{name} (default)" if name == DEFAULT_PRESET else name for name in preset_names())
    console.print(Text(f"Presets: {names}\n"))
    sections: dict[str, list[Field]] = defaultdict(list)
    for path, field in recipe_fields().items():
        sections[path.partition(".")[0]].append(field)
    for section, fields in sections.items():
        console.print(Text(f"[{section}]  {Recipe.model_fields[section].description or ''}", style="bold"))
        table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=True)
        table.add_column(no_wrap=True, style="cyan")
        table.add_column(overflow="fold", style="dim", max_width=24)
        table.add_column(ratio=1)
        for field in fields:
            table.add_row(Text(f"--{field.path}"), Text(field.type_name), Text(describe(field)))
        console.print(table)
        console.print()


def describe(field: Field) -> str:
    """Return what a field means, its range and its default, in one line."""
    facts = [field.bounds] if field.bounds else []
    if not field.required:
        facts.append(f"default {_plain(field.default)}")
    return f"{field.description} [{'; '.join(facts)}]" if facts else field.description


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"' if value == "" or value != value.strip() else str(value)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return "{}" if value == {} else str(value)


__all__ = ["describe", "print_recipe_help"]
