"""The hand-made schedules: all of them are proven, and their orders and costs are those that others have found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from sennit.pipeline.actions import with_reductions, with_sharding
from sennit.pipeline.fixed import FIXED, dualpipe_v, interleaved, zb_v
from sennit.pipeline.schedule import Op, Pair, Schedule, fuse, unfuse
from sennit.pipeline.simulate import peak_activations, simulate
from sennit.pipeline.verify import required_window, verify
from sennit.recipe.schedules import schedule_problems

NAMES = (*FIXED, "interleaved")
RANKS = range(1, 9)
CASES = (*((name, False) for name in NAMES), *((name, True) for name in ("interleaved", "dualpipe", "dualpipev")))
"""(schedule, fused): with pairs only those that have any."""


def build(name: str, p: int, m: int, v: int = 2, *, fused: bool = False) -> Schedule:
    """Return a fixed schedule, with its pairs or without."""
    if name == "interleaved":
        made = interleaved(p, m, v, extra_warmup=int(fused))
        return fuse(made) if fused else made
    return FIXED[name](p, m) if fused else unfuse(FIXED[name](p, m))


def counts(name: str, p: int, *, fused: bool = False) -> Iterator[int]:
    """Yield every number of microbatches up to 4 p that a schedule takes."""
    for m in range(1, 4 * p + 1):
        # With m = p the first rank of a fused interleaved pipeline has no steady phase: there is nothing to pair.
        if not schedule_problems(name, p, m) and not (fused and name == "interleaved" and m == p):
            yield m


@pytest.mark.parametrize(("name", "fused"), CASES)
def test_every_fixed_schedule_is_proven(name: str, fused: bool) -> None:
    tried = 0
    for p in RANKS:
        for m in counts(name, p, fused=fused):
            schedule = build(name, p, m, fused=fused)
            proof = verify(schedule)
            assert proof.peak_activations == peak_activations(schedule)
            assert set(proof.parameter_copies) == {2.0 if name == "dualpipe" else 1.0}
            assert required_window(schedule) <= 2
            tried += 1
    assert tried >= 24


@pytest.mark.parametrize("v", [3, 4])
def test_interleaving_takes_any_number_of_chunks(v: int) -> None:
    for p in RANKS:
        for m in (p, 2 * p, 3 * p):
            verify(build("interleaved", p, m, v))


@pytest.mark.parametrize("keep", [False, True], ids=["free", "keep"])
@pytest.mark.parametrize("name", NAMES)
def test_schedules_with_actions_are_proven(name: str, keep: bool) -> None:
    schedule = build(name, 4, 8, fused=True)
    assert verify(with_sharding(with_reductions(schedule), keep=keep)) == verify(schedule)


TABLE = {
    "gpipe": ((9.0, 9.0, 9.0, 21.0, 21.0), (16, 16, 16, 16)),
    "1f1b": ((9.0, 9.0, 9.0, 21.0, 21.0), (4, 3, 2, 1)),
    "interleaved": ((4.5, 4.5, 4.5, 10.5, 10.5), (11, 9, 7, 5)),
    "zb-h1": ((3.0, 3.0, 3.0, 7.0, 7.0), (4, 3, 2, 1)),
    "zb-h2": ((3.0, 3.0, 3.0, 7.0, 7.0), (7, 5, 3, 1)),
    "dualpipe": ((1.0, 1.0, 1.0, 3.0, 3.0), (5, 5, 5, 5)),
    "dualpipev": ((1.5, 1.5, 1.5, 3.5, 3.5), (9, 9, 9, 9)),
    "zb-v": ((1.5, 1.5, 1.5, 3.5, 3.5), (8, 8, 8, 8)),
}
"""Measured on a virtual clock inside running pipelines of real processes, F = I = W = 1, without pairs: makespan - 3 m
for (p, m) in SIZES, and by rank the most forwards open at once for p = 4, m = 16."""

SIZES = ((4, 8), (4, 16), (4, 32), (8, 16), (8, 32))


@pytest.mark.parametrize("name", NAMES)
def test_costs_are_those_of_running_pipelines(name: str) -> None:
    excess, open_forwards = TABLE[name]
    assert tuple(simulate(build(name, p, m)).makespan - 3 * m for p, m in SIZES) == excess
    schedule = build(name, 4, 16)
    n = schedule.num_stages
    # A backward for inputs frees the graph of its forward, so nothing is open until W.
    assert verify(schedule, activation=[1] * n, after_input=[0] * n).peak_activations == open_forwards


# -- PyTorch's own orders ----------------------------------------------------------------------------------------------


def torch_order(kind: Callable[..., Any], p: int, m: int, v: int) -> list[list[str]]:
    """Return the order that a schedule of torch.distributed.pipelining makes, in its notation, without idle steps."""
    stages = [
        SimpleNamespace(num_stages=p * v, group_size=p, group_rank=0, stage_index=index, submod=None)
        for index in range(v)
    ]
    made = kind(stages, m, loss_fn=lambda output, target: output)
    return [[str(action) for action in made.pipeline_order[rank] if action is not None] for rank in range(p)]


def as_text(schedule: Schedule) -> list[list[str]]:
    return [[str(item) for item in items] for items in schedule.order]


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("p", RANKS)
def test_interleaved_equals_torch(p: int, v: int) -> None:
    for m in (p, 2 * p, 4 * p):
        theirs = torch_order(torch_schedules.ScheduleInterleaved1F1B, p, m, v)
        assert as_text(interleaved(p, m, v)) == theirs


@pytest.mark.parametrize("p", RANKS)
def test_zb_v_equals_torch(p: int) -> None:
    for m in counts("zb-v", p):
        assert as_text(zb_v(p, m)) == torch_order(torch_schedules.ScheduleZBVZeroBubble, p, m, 2)


@pytest.mark.parametrize("p", RANKS)
def test_dualpipe_v_equals_torch(p: int) -> None:
    for m in counts("dualpipev", p):
        assert as_text(dualpipe_v(p, m)) == torch_order(torch_schedules.ScheduleDualPipeV, p, m, 2)


# -- passes ------------------------------------------------------------------------------------------------------------


def test_unfuse_undoes_fuse() -> None:
    schedule = interleaved(4, 8, extra_warmup=1)
    fused = fuse(schedule)
    assert any(isinstance(item, Pair) for items in fused.order for item in items)
    assert unfuse(fused) == schedule


def test_fuse_pairs_only_different_microbatches() -> None:
    last = fuse(FIXED["1f1b"](2, 3)).order[1]
    assert last == tuple(Op(kind, 1, i) for i in range(3) for kind in "FB")


def test_digest_tells_orders_apart_and_not_names() -> None:
    schedule = FIXED["1f1b"](2, 4)
    assert schedule.with_order(schedule.order, "other").digest == schedule.digest
    assert FIXED["gpipe"](2, 4).digest != schedule.digest


__all__ = ["CASES", "NAMES", "RANKS", "build", "counts"]
