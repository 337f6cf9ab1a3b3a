"""What all sections of a recipe have in common."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T", bound=StrEnum)
S = TypeVar("S", bound=BaseModel)

Strings = Annotated[tuple[str, ...], Field(strict=False)]
"""A list of strings; TOML arrays are accepted, the value is a tuple."""
Integers = Annotated[tuple[int, ...], Field(strict=False)]
"""A list of integers; TOML arrays are accepted, the value is a tuple."""


class Section(BaseModel):
    """A frozen group of fields. Unknown fields and values of another type are refused, never converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_enum_values=False)


def choice(default: T, description: str) -> T:
    """Return a field whose value is one of an enumeration, written as its string in TOML."""
    return Field(default, description=description, strict=False)


def section(kind: type[S], description: str) -> S:
    """Return a field that holds a section with its defaults."""
    make: Any = kind
    return Field(default_factory=make, description=description)


__all__ = ["Integers", "Section", "Strings", "choice", "section"]
