"""`sennit import`: from a Hugging Face model to a recipe that trains it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sennit.cli.output import print_json

MAX_SEQ_LEN = 2048


def import_(
    hf_dir: Annotated[Path, typer.Argument(metavar="HF_DIR", help="A model folder: config.json, *.safetensors.")],
    out: Annotated[Path, typer.Option("--out", metavar="PATH", help="The recipe to write: a .toml file, or a folder.")],
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Write a recipe that trains a Hugging Face model further, and check that its weights can be read.

    The weights stay where they are; the recipe points at them. Start the training with `sennit train OUT.toml`.
    """
    from sennit.models.hf import HFWeights, check_weights, config_from_hf, load_hf_json, parameter_shapes

    folder = hf_dir.expanduser().resolve()
    config = config_from_hf(load_hf_json(folder), where=str(folder / "config.json"))
    with HFWeights(folder) as weights:
        shapes = parameter_shapes(config)
        check_weights(weights, shapes, config.vocab_size)
        files = len({weights.file_of(name) for name in weights.names})
    recipe = out if out.suffix == ".toml" else out / "recipe.toml"
    write_recipe(recipe, folder, config)
    summary = {
        "recipe": str(recipe),
        "model": str(folder),
        "family": config.family,
        "parameters": config.num_parameters,
        "tensors": len(shapes),
        "files": files,
    }
    if json_output:
        print_json(summary)
        return
    print(f"{config.family}, {config.num_parameters:,} parameters, {len(shapes)} tensors: all readable")
    print(f"recipe: {recipe}")
    print(f"next:   sennit train {recipe} --data.source FILES")


def write_recipe(path: Path, folder: Path, config: Any) -> None:
    """Write a recipe that starts from Hugging Face `folder`, whose decoder is `config`. Raises ConfigError."""
    from sennit.errors import CheckpointError
    from sennit.models.hf import model_section
    from sennit.recipe import parse_recipe
    from sennit.recipe.toml import dump_toml

    if path.exists():
        raise CheckpointError(f"{path} exists already and is left untouched. Give another --out, or remove it first.")
    document: dict[str, Any] = {
        "run": {"name": f"{folder.name or config.family}-continued"},
        "model": model_section(config, init_from=str(folder)),
        "data": {"source": "stdlib"},
        "train": {
            "steps": 100,
            "micro_batch_size": 1,
            "global_batch_size": 8,
            "seq_len": min(config.max_position, MAX_SEQ_LEN),
        },
        "optimizer": {"kind": "adamw", "weight_decay": 0.0},
        "lr": {"peak": 1e-5, "schedule": "cosine", "warmup_steps": 10},
    }
    document["data"]["tokenizer"] = str(folder) if (folder / "tokenizer.json").is_file() else "bytes"
    text = (
        f"# Trains the Hugging Face model in {folder.name} further. Set data.source to your own text.\n\n"
        + dump_toml(document)
    )
    parse_recipe(text, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    if document["data"]["tokenizer"] == "bytes":
        print(f"warning: {folder} has no tokenizer.json; set data.tokenizer in {path}", file=sys.stderr)


__all__ = ["import_", "write_recipe"]
