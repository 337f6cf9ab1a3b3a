"""A part of a decoder as the executor's stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sennit.models import Decoder
from sennit.nn import Context, Segment, State, run_segments
from sennit.pipeline.channels import TensorSpec


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What every stage needs of a microbatch: tokens and labels [b, s] on the device, the layers' context, and the loss
    (`Decoder.forward`). `length`: positions that this rank holds of the activations between layers."""

    tokens: Tensor
    labels: Tensor
    context: Context
    loss: Callable[..., Tensor]
    length: int


class DecoderStage:
    """Virtual stage `model` (a part of a decoder). `microbatch(i)` returns microbatch i of the step that runs."""

    def __init__(self, model: Decoder, microbatch: Callable[[int], Microbatch], *, dtype: torch.dtype) -> None:
        self.model, self.microbatch, self.dtype = model, microbatch, dtype

    def segments(self, microbatch: int) -> list[Segment]:
        """Return the part as segments (`Decoder.segments`)."""
        batch = self.microbatch(microbatch)
        return self.model.segments(batch.tokens, batch.context, batch.labels, batch.loss)

    def forward(self, microbatch: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """(x [b, s, h],) or () -> (x [b, s, h],) or (loss,).

        Runs the segments themselves, past FSDP's hooks: in a pipeline the schedule says when parameters are gathered.
        """
        state: State = run_segments(self.segments(microbatch), inputs)
        return tuple(x for x in state if x is not None)

    def input_specs(self, microbatch: int) -> tuple[TensorSpec, ...]:
        """The residual stream, [b, s, h] in the run's dtype."""
        return () if self.model.part.embeds else (self._spec(microbatch),)

    def output_specs(self, microbatch: int) -> tuple[TensorSpec, ...]:
        """The residual stream, [b, s, h] in the run's dtype."""
        return () if self.model.part.ends else (self._spec(microbatch),)

    def _spec(self, microbatch: int) -> TensorSpec:
        batch = self.microbatch(microbatch)
        return TensorSpec((batch.tokens.shape[0], batch.length, self.model.config.hidden_size), self.dtype)


__all__ = ["DecoderStage", "Microbatch"]
