"""Free arguments of a command that takes a recipe: its name and `--section.field value` overrides."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sennit.errors import ConfigError

_OPTION = re.compile(r"--(?P<name>[A-Za-z_][\w.-]*)(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RecipeArguments:
    """A recipe as it was named on the command line: preset, file or None, and overrides by dotted path."""

    recipe: str | None
    overrides: dict[str, str]


def read_recipe_arguments(args: Sequence[str], options: Sequence[str] = ()) -> RecipeArguments:
    """Return the recipe's name and the overrides in `args`.

    `--a.b value`, `--a.b=value`, and `--a.b` alone for a yes-no field. options: the command's own options, for the hint
    when a name is wrong. Raises ConfigError for a second recipe, an option without a dot, or a missing value.
    """
    names: list[str] = []
    overrides: dict[str, str] = {}
    rest = list(args)
    while rest:
        word = rest.pop(0)
        match = _OPTION.fullmatch(word)
        if match is None:
            if word.startswith("-") and len(word) > 1:
                raise ConfigError(f"There is no option {word}; `--help` lists all.")
            names.append(word)
            continue
        path = match["name"].replace("-", "_")
        if "." not in path:
            raise ConfigError(_unknown_option(match["name"], options))
        if match["value"] is not None:
            overrides[path] = match["value"]
        elif rest and _OPTION.fullmatch(rest[0]) is None:
            overrides[path] = rest.pop(0)
        else:
            overrides[path] = _bare_value(path)
    if len(names) > 1:
        raise ConfigError(
            f"One run takes one recipe, but {len(names)} names are given: {', '.join(names)}. A field is set with "
            f"--section.field value."
        )
    return RecipeArguments(names[0] if names else None, overrides)


def _bare_value(path: str) -> str:
    """Return the value of an option that stands alone: true for a yes-no field."""
    from sennit.recipe.fields import recipe_fields

    field = recipe_fields().get(path)
    if field is not None and field.annotation is not bool:
        raise ConfigError(f"--{path} needs a value ({field.type_name}): --{path} VALUE.")
    return "true"  # an unknown field is refused, with the nearest name, where the recipe is loaded


def _unknown_option(name: str, options: Sequence[str]) -> str:
    from sennit.recipe.fields import nearest_field, recipe_fields

    near = difflib.get_close_matches(name, options, n=1, cutoff=0.7)
    path = None if near else nearest_field(name.replace("-", "_"))
    guess = near[0] if near else path
    hint = f" The nearest is --{guess}." if guess else ""
    sections = dict.fromkeys(field.partition(".")[0] for field in recipe_fields())
    return (
        f"There is no option --{name}.{hint} Recipe fields are written --section.field; the sections are "
        f"{', '.join(sections)}; `sennit train --help` lists all fields."
    )


__all__ = ["RecipeArguments", "read_recipe_arguments"]
