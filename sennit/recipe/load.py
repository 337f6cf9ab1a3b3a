"""From a preset, a file and overrides to a recipe."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sennit.errors import ConfigError
from sennit.recipe.fields import nearest, recipe_fields
from sennit.recipe.overrides import apply_overrides, example, unknown_field
from sennit.recipe.recipe import Recipe

DEFAULT_PRESET = "tiny"


def preset_names() -> tuple[str, ...]:
    """Return the names of the recipes that come with the package, sorted."""
    folder = resources.files("sennit.recipe") / "presets"
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml")))


def preset_text(name: str) -> str:
    """Return the TOML text of preset `name`. Raises ConfigError with the nearest name if there is none."""
    if name not in preset_names():
        guess = nearest(name, preset_names())
        hint = f"did you mean {guess}? " if guess else ""
        raise ConfigError(
            f"There is no preset or file {name!r}; {hint}Presets: {', '.join(preset_names())}. A file is named with its "
            f"path and ends in .toml."
        )
    return (resources.files("sennit.recipe") / "presets" / f"{name}.toml").read_text(encoding="utf-8")


def load_recipe(preset_or_path: str | None = None, overrides: Mapping[str, str] | None = None) -> Recipe:
    """Return the recipe of a preset (by name; None = tiny) or a TOML file, with dotted-path overrides applied.

    A file may begin with `base = "preset or file"`: fields it does not set come from there (a path is relative to the
    file). Raises ConfigError for a missing file, bad TOML, an unknown field, a wrong type or a value out of range;
    all problems are reported at once, each with the field's path. Rules between fields are `check_run`'s.
    """
    name = preset_or_path or DEFAULT_PRESET
    document = apply_overrides(_load_document(name, ()), overrides or {})
    return _validate(document, where=name)


def parse_recipe(text: str, where: str = "recipe") -> Recipe:
    """Return the recipe written in TOML `text`, complete as `Recipe.to_toml` writes it. Raises ConfigError."""
    return _validate(_parse_toml(text, where), where=where)


def _load_document(name: str, seen: tuple[str, ...]) -> dict[str, Any]:
    path = Path(name).expanduser()
    is_file = name.endswith(".toml") or "/" in name
    if is_file:
        text, key = _read_file(path), str(path.resolve())
    else:
        text, key = preset_text(name), name
    if key in seen:
        raise ConfigError(f"{name}: `base` leads back to the file itself; remove it from one of: {', '.join(seen)}.")
    document = _parse_toml(text, name)
    base = document.pop("base", None)
    if base is None:
        return document
    if not isinstance(base, str):
        raise ConfigError(f"{name}: base={base!r} is not text; give the name of a preset or the path of a file.")
    if is_file and (base.endswith(".toml") or "/" in base):
        base = str(path.parent / base)
    try:
        below = _load_document(base, (*seen, key))
    except ConfigError as error:
        raise ConfigError(f"{name}, base: {error}") from None
    return _merged(below, document)


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"There is no recipe file {path}; presets are {', '.join(preset_names())}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The recipe file {path} cannot be read: {error}. Give a TOML file in UTF-8.") from None


def _parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}. Correct that line.") from None


def _merged(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in top.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _validate(document: dict[str, Any], *, where: str) -> Recipe:
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        sentences = list(dict.fromkeys(_sentence(problem, document) for problem in error.errors()))
    raise ConfigError(f"{where}: {' '.join(sentences)}")


def _sentence(problem: Any, document: dict[str, Any]) -> str:
    """Return one problem that pydantic found as a sentence with the field's path, the value and the fix."""
    location = [part for part in problem["loc"] if isinstance(part, int) or not part.startswith(("str", "tuple["))]
    if len(location) > 2 and ".".join(map(str, location[:2])) == "data.source":  # one sentence for both of its types
        location, problem = location[:2], {**problem, "input": document["data"]["source"]}
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    kind, value = problem["type"], problem["input"]
    if kind == "extra_forbidden":
        return unknown_field(path)
    if kind == "missing":
        if path in Recipe.model_fields:
            needed = [field for field, info in recipe_fields().items() if info.required and field.startswith(f"{path}.")]
            return f"Section [{path}] is missing; it needs {', '.join(needed)}, or begin the file with base = \"tiny\"."
        if "[" in path:
            return f"{path} is missing; every entry needs it."
        return f'{path} is missing; set it, or begin the file with base = "tiny" to take it from there.'
    field = recipe_fields().get(path.partition("[")[0])
    if field is None:
        return f"{path}={value!r} is wrong: {problem['msg']}; give a table of fields."
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        return f"{path}={value!r} is out of range; it must be {field.bounds}."
    if kind == "string_too_short":
        return f"{path} is empty; {field.description}."
    if kind == "finite_number":
        return f"{path}={value!r} is not finite; give an ordinary number."
    if kind in ("enum", "int_type", "float_type", "bool_type", "string_type", "tuple_type", "dict_type", "int_from_float"):
        return f"{path}={value!r} has the wrong type; it must be {field.type_name}: give {example(field.annotation)}."
    return f"{path}={value!r} is wrong: {problem['msg']}."


__all__ = ["DEFAULT_PRESET", "load_recipe", "parse_recipe", "preset_names", "preset_text"]
