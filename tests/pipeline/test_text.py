"""Schedules as text: both ways, PyTorch's notation, and what is refused."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import _Action

from sennit.errors import ConfigError
from sennit.pipeline.actions import with_reductions, with_sharding
from sennit.pipeline.fixed import dualpipe, dualpipe_v, interleaved, one_f_one_b, zb_h1, zb_v
from sennit.pipeline.schedule import Op, Schedule, fuse, ops_of
from sennit.pipeline.simulate import Deadlock
from sennit.pipeline.text import from_csv, to_csv, to_text

CHAINS = [
    one_f_one_b(4, 6),
    zb_h1(3, 12),
    zb_v(4, 8),
    dualpipe_v(3, 7),
    fuse(interleaved(4, 8, 3, extra_warmup=1)),
    with_sharding(with_reductions(dualpipe_v(2, 5)), keep=False),
]


def named(schedule: Schedule) -> str:
    return schedule.name


@pytest.mark.parametrize("schedule", CHAINS, ids=named)
def test_reading_undoes_writing(schedule: Schedule) -> None:
    assert from_csv(to_csv(schedule), name=schedule.name) == schedule


@pytest.mark.parametrize("schedule", [*CHAINS, dualpipe(4, 8)], ids=named)
def test_torch_reads_and_writes_the_same_cells(schedule: Schedule) -> None:
    cells = [cell for row in csv.reader(io.StringIO(to_csv(schedule))) for cell in row]
    items = [item for items in schedule.order for item in items]
    for cell, item in zip(cells, items, strict=True):
        read: Any = _Action.from_str(cell)
        assert str(read) == cell
        for action, op in zip(read.sub_actions or [read], ops_of(item), strict=True):
            microbatch = -1 if action.microbatch_index is None else action.microbatch_index
            assert (action.computation_type.value, action.stage_index, microbatch) == op


def test_a_template_gives_what_the_text_lacks() -> None:
    schedule = dualpipe(4, 8)
    assert from_csv(to_csv(schedule), template=schedule, name=schedule.name) == schedule
    # Without one, its two directions are read as one chain of twice the length, whose inner stages lack microbatches.
    assert from_csv(to_csv(schedule)).prev == (None, *range(7))


def test_idle_cells_blank_lines_and_spaces_are_skipped() -> None:
    text = "0F0, 0F1,None,,0B0,0B1\n\n,1F0,1B0,1F1,1B1,\n\n"
    read = from_csv(text)
    assert read.order[1] == (Op("F", 1, 0), Op("B", 1, 0), Op("F", 1, 1), Op("B", 1, 1))
    assert (read.num_ranks, read.num_microbatches, read.name) == (2, 2, "csv")


def test_a_rank_without_work_keeps_its_line() -> None:
    schedule = one_f_one_b(2, 1).with_order([[Op("F", 0, 0)], []])
    assert to_csv(schedule) == "0F0\n,\n"
    assert from_csv(to_csv(schedule), placement=[0, 1], name="1f1b") == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", "line 2, cell 2: '1X0' is no item of a schedule; write stage"),
        ("0F0,\n\n,1F\n", "line 3, cell 2: '1F' is no item"),
        ("0UNSHARD3,0F0", "line 1, cell 1: '0UNSHARD3' is no item"),
        ("(0B0;0F1)OVERLAP_F_B", "line 1, cell 1: '.*' is no item"),
        ("0F0,0SEND_F0\n", "line 1, cell 2: '0SEND_F0' .* write the compute_only form"),
        ("0F0\n1F0,0B0\n", "line 2, cell 2: 0B0 is on the line of rank 1, but virtual stage 0 is on rank 0"),
        ("0F0,2F0,2B0\n", r"Virtual stage 2 has operations, but \[1\] have none"),
        ("0F0,0F999999999\n", "line 1, cell 2: 0F999999999 has a number too large"),
        ("\n,\n", "holds no schedule"),
        ("", "holds no schedule"),
    ],
)
def test_what_is_no_schedule_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_csv(text)


def test_a_placement_is_checked() -> None:
    text = to_csv(one_f_one_b(2, 2))
    assert from_csv(text, placement=[0, 1]) == from_csv(text)
    with pytest.raises(ConfigError, match="cell 1: 0F0 is on the line of rank 0, but virtual stage 0 is on rank 1"):
        from_csv(text, placement=[1, 0])
    with pytest.raises(ConfigError, match="line 2, cell 1: 1F0 is of virtual stage 1; they are 0 to 0"):
        from_csv(text, placement=[0])


def test_a_template_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 2 ranks and the template 1f1b 3"):
        from_csv(to_csv(one_f_one_b(2, 2)), template=one_f_one_b(3, 2))


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_picture_of_1f1b() -> None:
    assert to_text(one_f_one_b(2, 3)) == (
        "rank 0 0F0 0F1 .   .   0B0---- 0F2 0B1---- .   0B2----\nrank 1 .   1F0 1B0---- 1F1 1B1---- 1F2 1B2---- .   .\n"
    )


def test_picture_of_pairs_and_split_backwards() -> None:
    """Columns are half as long where a rank has two virtual stages; actions take no time and are not drawn."""
    lines = to_text(with_sharding(dualpipe_v(2, 4), keep=True), width=1000).splitlines()
    drawn = "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1---- .   3F2&0B0---- 3B2---- .   3F3&0B1---- 3B3---- 0I2 0W2 0I3 0W3"
    assert lines[0] == f"rank 0 {drawn}"


def test_long_pictures_go_on_below() -> None:
    schedule = one_f_one_b(2, 8)
    whole = to_text(schedule, width=1000).splitlines()
    panels = [panel.splitlines() for panel in to_text(schedule, width=50).split("\n\n")]
    assert len(panels) > 1 and max(len(line) for panel in panels for line in panel) <= 50
    for rank, line in enumerate(whole):
        # Every panel but the last is full: its lines are cut where a column of 4 characters ends.
        drawn = "".join(panel[rank].removeprefix(f"rank {rank} ").ljust(40) for panel in panels)
        assert drawn.rstrip() == line.removeprefix(f"rank {rank} ")


def test_a_deadlock_has_no_picture() -> None:
    schedule = one_f_one_b(2, 1).with_order([[Op("B", 0, 0), Op("F", 0, 0)], [Op("F", 1, 0), Op("B", 1, 0)]])
    with pytest.raises(Deadlock):
        to_text(schedule)
