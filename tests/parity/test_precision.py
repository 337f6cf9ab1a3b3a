"""bf16 runs sum their gradients in float32, over microbatches and over ranks."""

from __future__ import annotations

import pytest
import torch

from tests.parity.cases import reference
from tests.parity.runs import Case, Trace, trace
from tests.ranks import run_ranks

BF16 = (("precision.dtype", "bf16"),)


def traced(case: Case) -> Trace:
    return trace(case)


def error(run: Trace, truth: Trace) -> float:
    """Return the relative error of all gradients of the first step together."""
    pairs = [(run.gradients[0][name].double(), wanted) for name, wanted in truth.gradients[0].items()]
    off = sum(float((mine - wanted).square().sum()) for mine, wanted in pairs)
    return (off / sum(float(wanted.square().sum()) for _, wanted in pairs)) ** 0.5


@pytest.mark.parametrize(("layout", "accumulate"), [("one", 8), ("dp2", 4), ("fsdp2", 4), ("tp2-sp", 8)])
def test_gradients_are_accumulated_and_reduced_in_float32(layout: str, accumulate: int) -> None:
    """Many microbatches and ranks are as exact as one batch: nothing is lost in the sums. Scenario I-18."""
    truth = reference(Case("one", steps=1))
    case = Case(layout, accumulate=accumulate, options=BF16, steps=1)
    single = error(reference(Case("one", options=BF16, steps=1)), truth)
    assert single < 0.03, "about six times the rounding of bf16, 2^-8, after four layers"
    for run in run_ranks(traced, case.world, case):
        assert all(gradient.dtype == torch.float32 for gradient in run.gradients[0].values())
        assert error(run, truth) < 1.1 * single
        assert all(weight.dtype == torch.float32 for weight in run.final.values()), "masters"
