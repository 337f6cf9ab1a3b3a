"""A run directory with one checkpoint, made without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

from sennit.data.tokenizer import byte_tokenizer
from sennit.device import get_device
from sennit.mesh import Mesh
from sennit.recipe import Recipe, check_run, load_recipe
from sennit.train.checkpointing import save_run
from sennit.train.trainer import Trainer

SIZES = {
    "model.hidden_size": "32",
    "model.num_layers": "2",
    "model.num_heads": "4",
    "model.num_kv_heads": "2",
    "model.ffn_size": "48",
    "model.init_std": "0.3",
    "data.tokenizer": "bytes",
    "train.seq_len": "64",
    "train.micro_batch_size": "1",
    "train.global_batch_size": "16",
    "precision.dtype": "fp32",
    "optimizer.kind": "adamw",
}


def tiny_recipe(world_size: int = 1, **overrides: str) -> Recipe:
    """Return the recipe of the smallest model of bytes; override names have __ for the dot."""
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return check_run(load_recipe("tiny", {**SIZES, **named}), world_size)


def tiny_trainer(recipe: Recipe, mesh: Mesh | None = None) -> Trainer:
    """Return a trainer without data."""
    return Trainer(recipe, mesh or Mesh(), get_device("cpu"), train_loader=cast(Any, None), vocab_size=257)


def make_run(folder: Path, **overrides: Any) -> Trainer:
    """Write run directory `folder` with checkpoints/step-0 and the tokenizer; return the trainer that was saved."""
    tokenizer = byte_tokenizer()
    trainer = tiny_trainer(tiny_recipe(**overrides))
    folder.mkdir(parents=True)
    tokenizer.save(folder / "tokenizer")
    save_run(trainer, folder, None, "no data", tokenizer)
    return trainer


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the masters by parameter name."""
    return {slot.name: slot.master for slot in trainer.slots}
