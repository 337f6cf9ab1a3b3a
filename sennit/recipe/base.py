"""What all sections of a recipe have in common."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T", bound=StrEnum)

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


__all__ = ["Integers", "Section", "Strings", "choice"]
