"""`sennit export`: from a checkpoint to a Hugging Face model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sennit.cli.output import print_json


class ExportDtype(StrEnum):
    """Number formats of exported weights."""

    BF16 = "bf16"
    FP32 = "fp32"


def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run (its newest checkpoint) or a checkpoint.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to write; it must not exist yet.")],
    dtype: Annotated[ExportDtype, typer.Option("--dtype", help="Number format of the weights.")] = ExportDtype.BF16,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder, which transformers and inference servers load.

    Runs in one process, whatever the layout of the training was. fp32 keeps the master weights exactly.
    """
    summary = export_checkpoint(source, out, str(dtype))
    if json_output:
        print_json(summary)
        return
    print(f"{summary['checkpoint']}: {summary['family']}, {summary['parameters']:,} parameters, {summary['dtype']}")
    print(f"model: {summary['out']}  ({summary['bytes'] / 1e6:,.1f} MB)")


def export_checkpoint(source: Path, out: Path, dtype: str) -> dict[str, Any]:
    """Export the checkpoint that `source` names to Hugging Face folder `out` and return the facts about it.

    Raises CheckpointError if there is none, it is damaged or `out` is in use; DataError without the tokenizer.
    """
    from sennit import checkpoint
    from sennit.generate.load import find_tokenizer
    from sennit.models import decoder_config
    from sennit.models.hf import check_free, hf_family, write_hf
    from sennit.recipe import parse_recipe

    check_free(out)
    path = checkpoint.resolve(source)
    meta = checkpoint.read_meta(path)
    recipe = parse_recipe(meta["recipe"], str(path))
    config = decoder_config(recipe, int(meta["vocab_size"]))
    tokenizer = find_tokenizer(path, recipe.data.tokenizer)
    weights = checkpoint.load_full(path)
    size = write_hf(out, weights, config, tokenizer=tokenizer, dtype=dtype)
    return {
        "checkpoint": str(path),
        "out": str(out),
        "family": hf_family(config),
        "parameters": config.num_parameters,
        "dtype": dtype,
        "bytes": size,
        "step": meta["progress"]["step"],
    }


__all__ = ["ExportDtype", "export", "export_checkpoint"]
