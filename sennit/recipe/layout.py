"""Recipe sections `parallel`, `precision`, `recompute` and `ops`: how the same numbers are computed."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from sennit.recipe.base import Integers, Section, Strings, choice
from sennit.recipe.schedules import PipelineSchedule


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


class StageBalance(StrEnum):
    """How layers are dealt out to pipeline stages."""

    COST = "cost"
    EVEN = "even"


class ContextKind(StrEnum):
    """What context-parallel ranks exchange."""

    RING = "ring"
    ULYSSES = "ulysses"
    BOTH = "both"


class ParallelSection(Section):
    """Sizes of the mesh dimensions (`parallel`); their product is the world size."""

    pp: int = Field(1, ge=1, description="pipeline ranks")
    schedule: PipelineSchedule = choice(
        PipelineSchedule.ONE_F_ONE_B,
        "pipeline schedule: 1f1b, interleaved, zb-h1, zb-h2, zb-v, v-half, v-min, dualpipe, dualpipev or gpipe",
    )
    virtual_stages: int = Field(
        0, ge=0, description="chunks of layers a pipeline rank has; 0 = the schedule's (interleaved: 2)"
    )
    layers_per_stage: Integers = Field(
        (), description="layers of each stage along the model, pp x virtual_stages numbers; empty = by stage_balance"
    )
    stage_balance: StageBalance = choice(StageBalance.COST, "layers per stage: cost (the head counts too) or even")
    overlap: bool = Field(
        False, description="run forwards and backwards in pairs that hide each other's communication, where they occur"
    )
    dp_replicate: int = Field(1, ge=1, description="copies of the model (outer part of data parallelism)")
    dp_shard: int = Field(0, ge=0, description="ranks that share one copy (FSDP); 0 = all that remain")
    cp: int = Field(1, ge=1, description="parts of a sequence (context parallelism)")
    cp_kind: ContextKind = choice(
        ContextKind.RING, "ring (keys and values travel), ulysses (heads for sequence) or both (cp_ulysses x a ring)"
    )
    cp_ulysses: int = Field(0, ge=0, description="cp_kind both: ranks of a Ulysses group; 0 = as many as the heads allow")
    tp: int = Field(1, ge=1, description="ranks that share each matrix (tensor parallelism)")
    ep: int = Field(1, ge=1, description="ranks that share the experts")
    etp: int = Field(1, ge=1, description="tensor parallelism inside an expert")
    sequence_parallel: bool = Field(True, description="split activations between layers over tp")
    reshard_after_forward: bool = Field(True, description="free gathered weights after the forward pass (ZeRO-3)")


    @property
    def ulysses(self) -> int:
        """Ranks of a Ulysses group: cp, or a part of it, or 1."""
        if self.cp_kind == ContextKind.RING:
            return 1
        return self.cp if self.cp_kind == ContextKind.ULYSSES else max(self.cp_ulysses, 1)


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
    "ContextKind",
    "OpsSection",
    "ParallelSection",
    "Precision",
    "PrecisionSection",
    "RecomputeMode",
    "RecomputeSection",
    "StageBalance",
]
