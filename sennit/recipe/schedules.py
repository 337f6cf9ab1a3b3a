"""Which pipeline schedules exist, and which numbers of ranks, microbatches and virtual stages each of them takes."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import StrEnum


class PipelineSchedule(StrEnum):
    """Pipeline schedules by the names of the field."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZB_H2 = "zb-h2"
    ZB_V = "zb-v"
    V_HALF = "v-half"
    V_MIN = "v-min"
    DUALPIPE = "dualpipe"
    DUALPIPE_V = "dualpipev"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a schedule takes. `chunks`: virtual stages a rank (0: any number from 2). `parts`: parts of the model a rank
    owns alone, in chunks (DualPipe's second chunk is a copy). `least(p)`: fewest microbatches, `multiple(p)`: of what."""

    chunks: int = 1
    least: tuple[int, int] = (0, 1)
    multiple_of_ranks: bool = False
    even: bool = False

    def fewest(self, p: int) -> int:
        """Fewest microbatches on p ranks."""
        slope, offset = self.least
        return max(slope * p + offset, 1)

    def multiple(self, p: int) -> int:
        """The number of microbatches is a multiple of this on p ranks."""
        return p if self.multiple_of_ranks else 2 if self.even else 1


SHAPES = {
    PipelineSchedule.GPIPE: Shape(),
    PipelineSchedule.ONE_F_ONE_B: Shape(),
    PipelineSchedule.INTERLEAVED: Shape(chunks=0, multiple_of_ranks=True),
    PipelineSchedule.ZB_H1: Shape(),
    PipelineSchedule.ZB_H2: Shape(),
    PipelineSchedule.ZB_V: Shape(chunks=2, least=(2, -1)),
    PipelineSchedule.V_HALF: Shape(chunks=2),
    PipelineSchedule.V_MIN: Shape(chunks=2),
    PipelineSchedule.DUALPIPE: Shape(chunks=1, least=(2, 0), even=True),
    PipelineSchedule.DUALPIPE_V: Shape(chunks=2, least=(2, 0)),
}


def nearest_schedule(name: str) -> str:
    """Return a sentence that offers the nearest known name and lists all of them."""
    names = [str(kind) for kind in PipelineSchedule]
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return (f"Did you mean {near[0]}? " if near else "") + f"Schedules: {', '.join(names)}."


def default_virtual_stages(name: str, asked: int) -> int:
    """Return the virtual stages a rank for `asked` (0: the schedule's own number, 2 for interleaved)."""
    return asked or SHAPES[PipelineSchedule(name)].chunks or 2


def model_parts(name: str, ranks: int, virtual_stages: int = 0) -> int:
    """Return into how many parts the layers are cut."""
    return ranks * default_virtual_stages(name, virtual_stages)


def schedule_problems(name: str, ranks: int, microbatches: int, virtual_stages: int = 0) -> list[str]:
    """Return what is wrong with a schedule of these sizes, each as "values: rule; fix"; empty if it can be made."""
    shape, problems = SHAPES[PipelineSchedule(name)], []
    if shape.chunks and virtual_stages not in (0, shape.chunks):
        problems.append(
            f"virtual_stages={virtual_stages} with schedule {name}: it has {shape.chunks} a rank; leave virtual_stages "
            f"at 0 or use schedule interleaved."
        )
    if shape.chunks == 0 and virtual_stages == 1:
        problems.append(
            f"virtual_stages=1 with schedule {name}: with one chunk a rank there is nothing to interleave; use "
            f"virtual_stages=2 or schedule 1f1b."
        )
    if shape.even and ranks % 2:
        problems.append(
            f"pp={ranks} with schedule {name}: the two directions meet in the middle, so the number of pipeline ranks is "
            f"even; use pp={_around(ranks, 2, 2)}, or schedule dualpipev, which takes any number."
        )
    elif (count := _nearest_count(shape, ranks, microbatches)) != str(microbatches):
        rule = []
        if shape.fewest(ranks) > 1:
            rule.append(f"at least {shape.fewest(ranks)} ({_formula(shape)})")
        if shape.multiple(ranks) > 1:
            rule.append(f"a multiple of {'pp = ' if shape.multiple_of_ranks else ''}{shape.multiple(ranks)}")
        problems.append(
            f"{microbatches} microbatches with schedule {name} on pp={ranks}: their number must be {' and '.join(rule)}; "
            f"use {count}, or schedule 1f1b, which takes any number."
        )
    return problems


def even_layers(num_layers: int, parts: int) -> list[int]:
    """Return layers by part, sizes that differ by at most one; the first and last part, which also hold the embedding
    and the head, are among the smaller ones."""
    base, rest = divmod(num_layers, parts)
    sizes = [base] * parts
    inner = [*range(1, parts - 1), 0, parts - 1] if parts > 1 else [0]
    for part in inner[:rest]:
        sizes[part] += 1
    return sizes


def _formula(shape: Shape) -> str:
    slope, offset = shape.least
    return f"{slope} pp" + (f" - {-offset}" if offset < 0 else "")


def _around(number: int, multiple: int, least: int) -> str:
    below = number // multiple * multiple
    values = [value for value in (below, below + multiple) if value >= least]
    return " or ".join(map(str, values or [least]))


def _nearest_count(shape: Shape, ranks: int, microbatches: int) -> str:
    multiple, least = shape.multiple(ranks), shape.fewest(ranks)
    least = -(-least // multiple) * multiple
    if microbatches >= least and microbatches % multiple == 0:
        return str(microbatches)
    return _around(microbatches, multiple, least)


__all__ = [
    "SHAPES",
    "PipelineSchedule",
    "Shape",
    "default_virtual_stages",
    "even_layers",
    "model_parts",
    "nearest_schedule",
    "schedule_problems",
]
