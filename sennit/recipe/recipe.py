"""The recipe: everything that decides a run, as one frozen value."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import Field

from sennit.recipe.base import Section, section
from sennit.recipe.layout import OpsSection, ParallelSection, PrecisionSection, RecomputeSection
from sennit.recipe.model import DataSection, ModelSection
from sennit.recipe.output import CheckpointSection, LogSection, RunSection
from sennit.recipe.toml import dump_toml
from sennit.recipe.training import LrSection, OptimizerSection, TrainSection


class Recipe(Section):
    """A run as data. Made by `load_recipe`, resolved by `check_run`, never changed afterwards (`replace` copies)."""

    run: RunSection = section(RunSection, "identity of the run")
    model: ModelSection = Field(description="the decoder")
    data: DataSection = section(DataSection, "text and tokenizer")
    train: TrainSection = Field(description="length and batch")
    parallel: ParallelSection = section(ParallelSection, "sizes of the mesh dimensions")
    precision: PrecisionSection = section(PrecisionSection, "number formats")
    recompute: RecomputeSection = section(RecomputeSection, "recomputation in the backward pass")
    optimizer: OptimizerSection = section(OptimizerSection, "update rule")
    lr: LrSection = Field(description="learning rate")
    checkpoint: CheckpointSection = section(CheckpointSection, "checkpoints")
    log: LogSection = section(LogSection, "metrics and samples")
    ops: OpsSection = section(OpsSection, "operators")

    def to_toml(self) -> str:
        """Return the recipe as TOML text; `parse_recipe` of it gives an equal recipe."""
        return dump_toml(self.model_dump(mode="json"))

    def replace(self, **fields: Any) -> Recipe:
        """Return a copy with fields changed, named `section__field` (`model__rope_scaling__kind` for nested ones).

        The copy is validated. Raises pydantic's ValidationError for values that no recipe may have.
        """
        plain = self.model_dump(mode="json")
        for name, value in fields.items():
            *parents, last = name.split("__")
            target = plain
            for parent in parents:
                target = target[parent]
            target[last] = value
        return Recipe.model_validate(plain)

    @property
    def run_dir(self) -> str:
        """Directory of the run, as given or runs/<name>."""
        return self.run.dir or f"runs/{self.run.name}"

    @property
    def model_hash(self) -> str:
        """Hex digest of what decides the names, shapes and function of the weights (not their initial values)."""
        return _digest(self.model.model_dump(mode="json", exclude={"init_from", "init_std", "dropout", "max_position"}))

    @property
    def data_order_hash(self) -> str:
        """Hex digest of what decides which tokens a step sees: data, seed, sequence length and global batch size."""
        return _digest(
            {
                "data": self.data.model_dump(mode="json", exclude={"cache_dir"}),
                "seed": self.run.seed,
                "seq_len": self.train.seq_len,
                "global_batch_size": self.train.global_batch_size,
            }
        )


def _digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


__all__ = ["Recipe"]
