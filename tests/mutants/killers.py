"""Checks that raise AssertionError when a communication is missing; small cases of the tests of parity and mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from tests.parity.cases import check, errors_of
from tests.parity.runs import Case, mesh_of, new_trainer
from tests.ranks import run_ranks


def layout_equals_one_process(case: Case) -> Callable[[], None]:
    """Return the check of tests/parity/test_layouts.py for `case`, one step of it."""
    short = replace(case, steps=1)

    def killer() -> None:
        check(short, errors_of([short])[short])

    return killer


def on_ranks(checks: Callable[[], None]) -> Callable[[], None]:
    """Return `checks` on two ranks."""

    def killer() -> None:
        run_ranks(checks, 2)

    return killer


def random_states() -> torch.Tensor:
    torch.manual_seed(dist.get_rank())
    trainer = new_trainer(Case("dp2"), mesh_of("dp2"))
    return trainer.state()["random"]["cpu"]


def random_state_is_that_of_rank_zero() -> None:
    """One random state serves every rank of a checkpoint."""
    first, second = run_ranks(random_states, 2)
    assert torch.equal(first, second)


__all__ = ["layout_equals_one_process", "on_ranks", "random_state_is_that_of_rank_zero"]
