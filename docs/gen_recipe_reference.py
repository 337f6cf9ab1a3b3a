"""The recipe's reference page, made from the recipe's types. A hook of MkDocs; as a script it prints the page.

Every field's type, default, range and description come from `sennit.recipe`, so the page cannot fall behind.
"""

from __future__ import annotations

import sys
import tomllib
import types
import typing
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

PAGE = "reference/recipe.md"

INTRODUCTION = """# Recipe

A recipe is one TOML file that decides a run. `sennit train` takes the name of a preset or the path of a file, and
`--section.field value` overrides any single field. What the run uses, with the format, shards and batch that were
inferred for it, is written to `recipe.toml` in the run directory. Unknown fields, values of another type and
contradictions are refused before anything starts, all of them in one message.

This page is made from the types in `sennit/recipe`. A field without a default has to be set; every preset does.
"""


def recipe_page() -> str:
    """Return the page as Markdown."""
    from sennit.recipe import Recipe

    parts = [INTRODUCTION]
    for name, info in Recipe.model_fields.items():
        section = _models(info.annotation)[0]
        parts += [f"## `{name}`\n", f"{info.description or section.__doc__}\n", _table(section)]
        for field, nested in section.model_fields.items():
            for model in _models(nested.annotation):
                parts += [f"### `{name}.{field}`\n", f"{model.__doc__}\n", _table(model)]
    parts.append(_presets())
    return "\n".join(parts)


def _table(section: type[BaseModel]) -> str:
    rows = ["| field | type | default | range | meaning |", "| --- | --- | --- | --- | --- |"]
    for name, info in section.model_fields.items():
        if _models(info.annotation) and not _is_list(info.annotation):
            continue
        cells = (f"`{name}`", _type(info.annotation), _default(info), _range(info), info.description or "")
        rows.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    """Return `text` for a cell of a table: a bar does not end it, and outside of code `<name>` is no element."""
    text = text.replace("|", "\\|")
    return text if text.startswith("`") else text.replace("<", "&lt;")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.default if info.default is not PydanticUndefined else info.get_default(call_default_factory=True)
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (tuple, list)) and not value:
        return "`[]`"
    if isinstance(value, (BaseModel, dict)):
        return "`{}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _range(info: FieldInfo) -> str:
    signs = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
    bounds = [f"{sign} {getattr(m, key)}" for m in info.metadata for key, sign in signs if hasattr(m, key)]
    bounds += ["not empty" for m in info.metadata if getattr(m, "min_length", None) == 1]
    return ", ".join(bounds)


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments if argument is not type(None))
    if origin in (tuple, list):
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"table of {_type(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{member.value}`" for member in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    names = {str: "string", int: "integer", float: "number", bool: "true or false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the section types inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in _models(argument)]


def _is_list(annotation: Any) -> bool:
    if typing.get_origin(annotation) is typing.Annotated:
        return _is_list(typing.get_args(annotation)[0])
    return typing.get_origin(annotation) in (tuple, list)


def _presets() -> str:
    folder = resources.files("sennit.recipe").joinpath("presets")
    rows = ["## Presets\n", "| name | family | layers | hidden | heads (kv) | tokens a sequence | sequences a step |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- |")
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if not file.name.endswith(".toml"):
            continue
        recipe = tomllib.loads(file.read_text(encoding="utf-8"))
        model, train = recipe.get("model", {}), recipe.get("train", {})
        cells = (
            f"`{file.name.removesuffix('.toml')}`",
            model.get("family", "llama"),
            model.get("num_layers", ""),
            model.get("hidden_size", ""),
            f"{model.get('num_heads', '')} ({model.get('num_kv_heads', '')})",
            train.get("seq_len", ""),
            train.get("global_batch_size", ""),
        )
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Add the page to the site (MkDocs calls this)."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=recipe_page()))
    return files


def on_config(config: Any) -> Any:
    """Make the checkout importable where the package is not installed (MkDocs calls this)."""
    root = str(Path(__file__).resolve().parent.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    return config


if __name__ == "__main__":
    on_config(None)
    print(recipe_page())
