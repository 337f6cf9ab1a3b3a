"""Recipe sections `run`, `checkpoint` and `log`: where a run lives and what it leaves."""

from __future__ import annotations

from pydantic import Field

from sennit.recipe.base import Integers, Section


class RunSection(Section):
    """Identity of a run (`run`)."""

    name: str = Field("run", min_length=1, description="name of the run")
    dir: str = Field("", description="directory of the run; empty = runs/<name>")
    seed: int = Field(42, ge=0, lt=2**63, description="seed of weights, data order and dropout")


class CheckpointSection(Section):
    """Checkpoints (`checkpoint`)."""

    every: int = Field(0, ge=0, description="steps between checkpoints; 0 = only at the end")
    keep: int = Field(2, ge=1, description="checkpoints kept; the newest verified one never goes")
    resume: str = Field(
        "auto", min_length=1, description="auto (if the run has a checkpoint), latest (must have one), none, or a path"
    )


class LogSection(Section):
    """Metrics and samples (`log`)."""

    every: int = Field(1, ge=1, description="steps between lines of metrics.jsonl")
    tensorboard: bool = Field(True, description="write TensorBoard events")
    profile_steps: Integers = Field((), description="first and last step to profile, counted from 1; empty = never")
    sample_tokens: int = Field(120, ge=0, description="tokens of the sample generated at the end; 0 = none")
    sample_prompt: str = Field("def", description="text the sample continues")


__all__ = ["CheckpointSection", "LogSection", "RunSection"]
