"""Recipe sections `train`, `optimizer` and `lr`: how long, how fast, by which rule."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from sennit.recipe.base import Section, choice


class OptimizerKind(StrEnum):
    """Update rules."""

    ADAMW = "adamw"
    MUON = "muon"
    SGD = "sgd"


class Schedule(StrEnum):
    """Shapes of the learning rate after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"


class TrainSection(Section):
    """Length and batch (`train`)."""

    steps: int = Field(ge=1, description="optimizer updates of the whole run")
    micro_batch_size: int = Field(
        0, ge=0, description="sequences of one forward pass on one data rank; 0 = a whole step's, without accumulation"
    )
    global_batch_size: int = Field(ge=1, description="sequences of one step over all ranks")
    seq_len: int = Field(ge=1, description="tokens of a sequence")
    eval_every: int = Field(0, ge=0, description="steps between evaluations; 0 = only at the end")
    eval_batches: int = Field(8, ge=1, description="global batches of an evaluation during the run")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="probability spread over all tokens in the target")
    z_loss: float = Field(0.0, ge=0, description="weight of the squared log-sum-exp of the logits")


class OptimizerSection(Section):
    """Update rule (`optimizer`)."""

    kind: OptimizerKind = choice(OptimizerKind.ADAMW, "adamw, muon (matrices; AdamW for the rest) or sgd")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment (AdamW)")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment (AdamW)")
    eps: float = Field(1e-8, gt=0, description="epsilon of AdamW")
    weight_decay: float = Field(0.1, ge=0, description="decoupled decay of matrices; norms and biases have none")
    clip_norm: float = Field(1.0, ge=0, description="largest norm of all gradients together; 0 = off")
    momentum: float = Field(0.95, ge=0, lt=1, description="momentum of muon and sgd")
    ns_steps: int = Field(5, ge=1, le=20, description="Newton-Schulz iterations of muon")


class LrSection(Section):
    """Learning rate (`lr`)."""

    peak: float = Field(gt=0, description="highest learning rate")
    schedule: Schedule = choice(Schedule.COSINE, "after warm-up: constant, linear, cosine or wsd")
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")
    min_ratio: float = Field(0.1, ge=0, le=1, description="last rate / peak")
    decay_fraction: float = Field(0.2, ge=0, le=1, description="wsd: share of the steps in the final decay")
    total_steps: int = Field(0, ge=0, description="steps the schedule spans; 0 = train.steps")


__all__ = ["LrSection", "OptimizerKind", "OptimizerSection", "Schedule", "TrainSection"]
