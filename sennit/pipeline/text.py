"""Schedules as text: the notation that PyTorch's pipelines read and write, and a picture for a terminal.

A CSV file has a line for each rank and a cell for each item: `3F0` is the forward of microbatch 0 on virtual stage 3,
B, I and W its backwards, `3UNSHARD` an action, `(0F7;7B3)OVERLAP_F_B` a pair; empty cells are idle time. It holds the
orders and nothing else, so only chains of virtual stages can be read back without help.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from sennit.errors import ConfigError
from sennit.pipeline.schedule import COMPUTE, Item, Op, Pair, Schedule, chain, ops_of
from sennit.pipeline.simulate import Event, simulate

_COMPUTE_CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_ACTION_CELL = re.compile(r"(\d{1,9})(UNSHARD|RESHARD|REDUCE_GRAD)")
_PAIR_CELL = re.compile(r"\((\d{1,9})F(\d{1,9});(\d{1,9})B(\d{1,9})\)OVERLAP_F_B")
_COMMUNICATION_CELL = re.compile(r"\d{1,9}(SEND|RECV)_[FB]\d{1,9}")


def to_csv(schedule: Schedule) -> str:
    """Return the orders of `schedule`, one line a rank, in PyTorch's `compute_only` notation."""
    return "".join((",".join(map(str, items)) or ",") + "\n" for items in schedule.order)


def from_csv(
    text: str,
    *,
    placement: Literal["infer"] | Sequence[int] = "infer",
    name: str = "csv",
    template: Schedule | None = None,
) -> Schedule:
    """Return the schedule whose orders are in `text`, the inverse of `to_csv`. Blank lines are skipped.

    `placement`: the rank of each virtual stage; "infer" takes the rank on whose line it stands. Virtual stages follow
    each other by number, and all microbatches visit all of them. For other pipelines `template` is a schedule with the
    same virtual stages, which gives everything but the orders.

    Raises ConfigError, which names line and cell, for what is no cell or stands on the wrong rank. Whether the schedule
    can run is for `verify` to say.
    """
    rows = _read(text)
    cells = [cell for row in rows for cell in row]
    if not cells:
        raise ConfigError("The text holds no schedule: it needs a line for each rank with cells such as 0F0,0B0.")
    _check_numbers(cells)
    order = [[cell.item for cell in row] for row in rows]
    if template is not None:
        if len(rows) != template.num_ranks:
            raise ConfigError(f"The text has {len(rows)} ranks and the template {template.name} {template.num_ranks}.")
        _check_ranks(cells, template.rank_of)
        return template.with_order(order, name)
    rank_of = _infer(cells) if placement == "infer" else [int(rank) for rank in placement]
    _check_ranks(cells, rank_of)
    last = max(op.microbatch for cell in cells for op in ops_of(cell.item))
    return chain(name, rank_of, last + 1, order)


class _Cell(NamedTuple):
    """An item, the rank whose line it is on, and where that is in the text."""

    item: Item
    rank: int
    where: str


def _read(text: str) -> list[list[_Cell]]:
    """Return the cells of each rank."""
    reader = csv.reader(io.StringIO(text))
    lines = [(reader.line_num, row) for row in reader if len(row) > 1 or any(cell.strip() for cell in row)]
    rows = []
    for rank, (line, row) in enumerate(lines):
        named = [(f"line {line}, cell {number}", cell.strip()) for number, cell in enumerate(row, 1)]
        rows.append([_Cell(_item(cell, where), rank, where) for where, cell in named if cell not in ("", "None")])
    return rows


def _item(cell: str, where: str) -> Item:
    if match := _COMPUTE_CELL.fullmatch(cell):
        return Op(match[2], int(match[1]), int(match[3]))
    if match := _ACTION_CELL.fullmatch(cell):
        return Op(match[2], int(match[1]))
    if match := _PAIR_CELL.fullmatch(cell):
        stage_f, microbatch_f, stage_b, microbatch_b = map(int, match.groups())
        return Pair(Op("F", stage_f, microbatch_f), Op("B", stage_b, microbatch_b))
    if _COMMUNICATION_CELL.fullmatch(cell):
        hint = "sends and receives follow from the order of the computations, so write the compute_only form"
    else:
        hint = "write stage, operation and microbatch such as 3F0, 3B0, 3I0 or 3W0, 3UNSHARD, or (0F7;7B3)OVERLAP_F_B"
    raise ConfigError(f"{where}: {cell!r} is no item of a schedule; {hint}.")


def _check_numbers(cells: Sequence[_Cell]) -> None:
    """Check that no number is larger than all operations could use up: one slip must not make a huge schedule."""
    most = sum(len(ops_of(cell.item)) for cell in cells)
    for cell in cells:
        for op in ops_of(cell.item):
            if max(op.stage, op.microbatch) >= most:
                raise ConfigError(
                    f"{cell.where}: {op} has a number too large for the {most} operations of the text; number virtual "
                    f"stages and microbatches from 0 without gaps."
                )


def _infer(cells: Sequence[_Cell]) -> list[int]:
    """Return the rank of each virtual stage: that of the first cell it is in."""
    rank_of: dict[int, int] = {}
    for cell in cells:
        for op in ops_of(cell.item):
            rank_of.setdefault(op.stage, cell.rank)
    missing = sorted(set(range(max(rank_of))) - rank_of.keys())
    if missing:
        raise ConfigError(f"Virtual stage {max(rank_of)} has operations, but {missing} have none; leave no gaps.")
    return [rank_of[stage] for stage in range(len(rank_of))]


def _check_ranks(cells: Sequence[_Cell], rank_of: Sequence[int]) -> None:
    """Check that every operation is on the line of the rank that holds its virtual stage."""
    for cell in cells:
        for op in ops_of(cell.item):
            if op.stage >= len(rank_of):
                last = len(rank_of) - 1
                raise ConfigError(f"{cell.where}: {op} is of virtual stage {op.stage}; they are 0 to {last}.")
            if rank_of[op.stage] != cell.rank:
                raise ConfigError(
                    f"{cell.where}: {op} is on the line of rank {cell.rank}, but virtual stage {op.stage} is on rank "
                    f"{rank_of[op.stage]}; a virtual stage is on one rank."
                )


def to_text(schedule: Schedule, *, width: int = 120) -> str:
    """Return a picture of `schedule` in ASCII, a line for each rank, time to the right, F = I = W = 1 for its layers.

    An operation stands in the column where it starts and is drawn on with `-` while it lasts, `&` joins a pair, `.` is
    a wait. Lines longer than `width` characters go on below. Raises simulate.Deadlock if the schedule cannot run.
    """
    timeline = simulate(schedule)
    names = (str(op) for rank in range(schedule.num_ranks) for op in schedule.compute(rank))
    cell = max(map(len, names), default=1) + 1
    columns = round(timeline.makespan / schedule.share)
    rows = [_drawn(events, cell, columns, schedule.share) for events in timeline.events]
    label = len(f"rank {schedule.num_ranks - 1}") + 1
    per_panel = max((width - label) // cell, 1) * cell
    panels = [
        "".join(f"{f'rank {rank}':{label}}{row[at : at + per_panel]}".rstrip() + "\n" for rank, row in enumerate(rows))
        for at in range(0, columns * cell, per_panel)
    ]
    return "\n".join(panels)


def _drawn(events: Sequence[Event], cell: int, columns: int, unit: float) -> str:
    """Return the line of a rank: `cell` characters for each `unit` of time."""
    row = list(".".ljust(cell) * columns)
    for event in events:
        at = round(event.start / unit) * cell
        ops = [op for op in ops_of(event.item) if op.kind in COMPUTE]
        for op in ops:
            size = 2 * cell if op.kind == "B" else cell
            end = " " if op is ops[-1] else "&"
            row[at : at + size] = str(op).ljust(size - 1, "-" if op.kind == "B" else " ") + end
            at += size
    return "".join(row)


__all__ = ["from_csv", "to_csv", "to_text"]
