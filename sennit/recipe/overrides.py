"""Values given as text on the command line, read with the type of the field they replace."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from enum import StrEnum
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from sennit.errors import ConfigError
from sennit.recipe.fields import nearest_field, recipe_fields, strip_annotated, type_name

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def apply_overrides(document: dict[str, Any], overrides: Mapping[str, str]) -> dict[str, Any]:
    """Return a copy of `document` with each dotted path of `overrides` set to its text read with the field's type.

    Raises ConfigError that lists every unknown path and every text that is not of the field's type.
    """
    result = _copied(document)
    problems = []
    for path, text in overrides.items():
        try:
            keys, value = read_override(path, text)
        except ConfigError as error:
            problems.append(str(error))
            continue
        target = result
        for key in keys[:-1]:
            target = target.setdefault(key, {})
        target[keys[-1]] = value
    if problems:
        raise ConfigError(" ".join(problems))
    return result


def read_override(path: str, text: str) -> tuple[tuple[str, ...], Any]:
    """Return (keys, value) of `--path text`. Raises ConfigError for an unknown path or text of another type."""
    fields = recipe_fields()
    keys = tuple(path.split("."))
    if path in fields:
        return keys, parse_text(path, fields[path].annotation, text)
    for table, field in fields.items():  # an entry of a table: --ops.provider.rms_norm torch
        if get_origin(field.annotation) is dict and path.startswith(f"{table}."):
            return (*table.split("."), path.removeprefix(f"{table}.")), text
    raise ConfigError(unknown_field(path))


def unknown_field(path: str) -> str:
    """Return the sentence for a field that does not exist (`data.blend[0].x` is a field of a list's entry)."""
    parent, bracket, rest = path.partition("[")
    if bracket and parent in recipe_fields():
        entry = strip_annotated(get_args(recipe_fields()[parent].annotation)[0])
        names, wrong = " and ".join(entry.model_fields), rest.partition(".")[2]
        return f"There is no field {path}; an entry of {parent} has {names}, not {wrong!r}."
    guess = nearest_field(path)
    section = path.partition(".")[0]
    inside = [field.partition(".")[2] for field in recipe_fields() if field.startswith(f"{section}.")]
    hint = f"section {section} has {', '.join(inside)}" if inside else "`sennit train --help` lists all fields"
    hint = f"the nearest field is {guess}" if guess else hint
    return f"There is no recipe field {path}; {hint}."


def parse_text(path: str, annotation: Any, text: str) -> Any:
    """Return `text` as a value of `annotation`. Raises ConfigError naming the field and the type it wants.

    Lists are `[1, 2]` or `1,2`; tables are TOML inline tables; booleans are true/false, yes/no, on/off or 1/0.
    """
    annotation = strip_annotated(annotation)
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        parts = [strip_annotated(part) for part in get_args(annotation)]
        lists = [part for part in parts if get_origin(part) is tuple]
        return parse_text(path, lists[0] if text.lstrip().startswith("[") and lists else parts[0], text)
    if origin is tuple:
        return _parse_list(path, annotation, text)
    if origin is dict:
        return _parse_toml(path, annotation, text)
    if annotation is bool:
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise _wrong(path, annotation, text)
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            raise _wrong(path, annotation, text) from None
    return text


def _parse_list(path: str, annotation: Any, text: str) -> list[Any]:
    inner = strip_annotated(get_args(annotation)[0])
    if text.lstrip().startswith("["):
        value = _parse_toml(path, annotation, text)
        if isinstance(value, list):
            return value
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        raise _wrong(path, annotation, text)
    if not text.strip():
        return []
    return [parse_text(path, inner, part.strip()) for part in text.split(",")]


def _parse_toml(path: str, annotation: Any, text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        raise _wrong(path, annotation, text) from None


def _wrong(path: str, annotation: Any, text: str) -> ConfigError:
    return ConfigError(f"{path}={text!r} is not {_article(type_name(annotation))}; give {example(annotation)}.")


def example(annotation: Any) -> str:
    """Return an example of a value of `annotation`, as a user would write it."""
    annotation = strip_annotated(annotation)
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return "one of " + ", ".join(annotation)
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return " or ".join(example(part) for part in get_args(annotation))
    if origin is tuple:
        inner = strip_annotated(get_args(annotation)[0])
        return {int: "a list such as [10, 12]", str: 'a list such as ["a", "b"]'}.get(inner, "a list of tables")
    if origin is dict:
        return 'a table such as {rms_norm = "torch"}'
    examples = {int: "a whole number", float: "a number such as 3e-4", bool: "true or false", str: "text in quotes"}
    return examples.get(annotation, f"a value of type {type_name(annotation)}")


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _copied(document: dict[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in document.items()}


__all__ = ["apply_overrides", "example", "parse_text", "read_override", "unknown_field"]
