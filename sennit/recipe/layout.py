"""Recipe sections `parallel`, `precision`, `recompute` and `ops`: how the same numbers are computed."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from sennit.recipe.base import Section, Strings, choice


class Precision(StrEnum):
    """Number format of activations and compute weights; master weights are fp32 (fp64 for fp64)."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP64 = "fp64"


class RecomputeMode(StrEnum):
    """What the backward pass computes again instead of keeping it."""

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"


class ParallelSection(Section):
    """Sizes of the mesh dimensions (`parallel`); their product is the world size."""

    pp: int = Field(1, ge=1, description="pipeline stages")
    dp_replicate: int = Field(1, ge=1, description="copies of the model (outer part of data parallelism)")
    dp_shard: int = Field(0, ge=0, description="ranks that share one copy (FSDP); 0 = all that remain")
    cp: int = Field(1, ge=1, description="parts of a sequence (context parallelism)")
    tp: int = Field(1, ge=1, description="ranks that share each matrix (tensor parallelism)")
    ep: int = Field(1, ge=1, description="ranks that share the experts")
    etp: int = Field(1, ge=1, description="tensor parallelism inside an expert")
    sequence_parallel: bool = Field(True, description="split activations between layers over tp")
    reshard_after_forward: bool = Field(True, description="free gathered weights after the forward pass (ZeRO-3)")


class PrecisionSection(Section):
    """Number formats (`precision`)."""

    dtype: Precision = choice(Precision.AUTO, "auto (bf16 where the device is fast at it, else fp32), fp32, bf16 or fp64")


class RecomputeSection(Section):
    """Recomputation (`recompute`)."""

    mode: RecomputeMode = choice(RecomputeMode.NONE, "none, full (every layer) or selective (named segments)")
    segments: Strings = Field((), description="segments to recompute: attention_norm, attention, mlp_norm, mlp")


class OpsSection(Section):
    """Operators (`ops`)."""

    provider: dict[str, str] = Field(
        default_factory=dict, description="operator -> provider to use whatever the table says: --ops.provider.NAME P"
    )


__all__ = [
    "OpsSection",
    "ParallelSection",
    "Precision",
    "PrecisionSection",
    "RecomputeMode",
    "RecomputeSection",
]
