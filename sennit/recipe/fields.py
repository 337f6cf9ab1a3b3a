"""The fields of a recipe as a flat table, for overrides, error messages and help."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sennit.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Field:
    """One field: dotted path, type, default (None when `required`), range in words and one-line description."""

    path: str
    annotation: Any
    default: Any
    required: bool
    bounds: str
    description: str

    @property
    def type_name(self) -> str:
        """The type as a user writes it: int, float, bool, str, a|b|c, list of int, ..."""
        return type_name(self.annotation)


@cache
def recipe_fields() -> dict[str, Field]:
    """Return all fields of a recipe by dotted path, in the order of the sections."""
    return {field.path: field for field in _walk(Recipe, "")}


def section_names() -> tuple[str, ...]:
    """Return the names of the sections in order."""
    return tuple(Recipe.model_fields)


def nearest(name: str, names: list[str] | tuple[str, ...]) -> str | None:
    """Return the one of `names` that `name` was probably meant to be, or None."""
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return found[0] if found else None


def nearest_field(path: str) -> str | None:
    """Return the field path that `path` was probably meant to be: the same name elsewhere, or a similar one."""
    fields = list(recipe_fields())
    section, _, last = path.partition(".")
    same_section = [field for field in fields if field.startswith(f"{section}.")]
    leaf = path.rpartition(".")[2]
    same_leaf = [field for field in fields if field.rpartition(".")[2] == leaf]
    if len(same_leaf) == 1:
        return same_leaf[0]
    inside = nearest(last, [field.partition(".")[2] for field in same_section])
    if inside:
        return f"{section}.{inside}"
    close = nearest(path, fields)
    if close:
        return close
    similar = nearest(leaf, [field.rpartition(".")[2] for field in fields])
    return next((field for field in fields if field.rpartition(".")[2] == similar), None) if similar else None


def strip_annotated(annotation: Any) -> Any:
    """Return the type inside Annotated[...]."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def type_name(annotation: Any) -> str:
    """Return a type in words."""
    annotation = strip_annotated(annotation)
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return " or ".join(type_name(part) for part in get_args(annotation))
    if origin is tuple:
        inner = get_args(annotation)[0]
        return f"list of {type_name(inner)}"
    if origin is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return "|".join(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "{" + ", ".join(annotation.model_fields) + "}"
    return {"str": "text"}.get(annotation.__name__, annotation.__name__)


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Field]:
    for name, info in model.model_fields.items():
        annotation = strip_annotated(info.annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _walk(annotation, f"{prefix}{name}.")
            continue
        yield Field(
            path=prefix + name,
            annotation=annotation,
            default=None if info.is_required() else info.get_default(call_default_factory=True),
            required=info.is_required() or info.default is PydanticUndefined and info.default_factory is None,
            bounds=_bounds(info),
            description=info.description or "",
        )


def _bounds(info: FieldInfo) -> str:
    words = []
    for constraint in info.metadata:
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            limit = getattr(constraint, attribute, None)
            if limit is not None:
                words.append(f"{sign} {limit:g}" if limit < 2**53 else f"{sign} 2^{limit.bit_length() - 1}")
    return ", ".join(words)


__all__ = ["Field", "nearest", "nearest_field", "recipe_fields", "section_names", "strip_annotated", "type_name"]
