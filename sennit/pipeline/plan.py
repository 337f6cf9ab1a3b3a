"""From a recipe to a schedule and the parts of the model that its virtual stages run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sennit.models import Part
from sennit.nn import DecoderConfig
from sennit.pipeline.balance import balanced_layers, layer_ranges
from sennit.pipeline.catalog import make
from sennit.pipeline.schedule import Pair, Schedule
from sennit.recipe.schedules import even_layers

if TYPE_CHECKING:
    from sennit.recipe import Recipe


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A schedule, and the part of the model behind each of its `param_of` numbers."""

    schedule: Schedule
    parts: tuple[Part, ...]

    def parts_of(self, rank: int) -> list[int]:
        """Return the numbers of the parts that `rank` holds, in model order."""
        return sorted({self.schedule.param_of[stage] for stage in self.schedule.stages_of(rank)})

    @property
    def fused(self) -> bool:
        """Whether the schedule has pairs of a forward and a backward."""
        return any(isinstance(item, Pair) for items in self.schedule.order for item in items)

    def describe(self) -> str:
        """Return the layers of each rank in one line, for example `0: 0-3, 1: 4-6`."""
        texts = []
        for rank in range(self.schedule.num_ranks):
            parts = [self.parts[number] for number in self.parts_of(rank)]
            spans = [f"{part.start}-{part.stop - 1}" if part.stop > part.start else "none" for part in parts]
            texts.append(f"{rank}: {' and '.join(spans)}")
        return ", ".join(texts)


def plan_pipeline(recipe: Recipe, config: DecoderConfig, microbatches: int) -> PipelinePlan:
    """Return the plan of `recipe.parallel` for `microbatches` a step on each data rank.

    Raises ConfigError for a schedule that does not take these numbers.
    """
    parallel = recipe.parallel
    schedule = make(
        str(parallel.schedule), parallel.pp, microbatches, parallel.virtual_stages, pairs=parallel.overlap
    )
    sizes = list(parallel.layers_per_stage)
    if not sizes:
        sizes = stage_layers(config, schedule, recipe.train.seq_len, even=parallel.stage_balance == "even")
    count = schedule.num_parts
    parts = tuple(
        Part(start, stop, embeds=number == 0, ends=number == count - 1)
        for number, (start, stop) in enumerate(layer_ranges(sizes))
    )
    return PipelinePlan(schedule, parts)


def stage_layers(config: DecoderConfig, schedule: Schedule, seq_len: int, *, even: bool = False) -> list[int]:
    """Return the layers of each part: equally many, or so that ranks take equally long, the head counted."""
    if even or config.num_layers < schedule.num_parts:
        return even_layers(config.num_layers, schedule.num_parts)
    head = 6.0 * config.vocab_size * config.hidden_size
    layer = (config.flops_per_token(seq_len) - head) / config.num_layers
    owner = [schedule.rank_of[schedule.param_of.index(part)] for part in range(schedule.num_parts)]
    # A bidirectional pipeline runs every part on two ranks, which share its work.
    shared = len(set(schedule.param_of)) < schedule.num_stages
    if shared:
        owner = [min(rank, schedule.num_ranks - 1 - rank) for rank in owner]
    return balanced_layers(config.num_layers, schedule.num_parts, layer=layer, last=head, groups=owner)


__all__ = ["PipelinePlan", "plan_pipeline", "stage_layers"]
