"""Folding segments, with and without recomputation."""

from __future__ import annotations

import torch
from torch import Tensor

from sennit.nn import Recompute, Segment, run_segments


def counted(names: str) -> tuple[list[Segment], list[str]]:
    """Return segments that each multiply by the sine of their input, and the list of calls they append to."""
    calls: list[str] = []

    def segment(name: str) -> Segment:
        def fn(x: Tensor) -> tuple[Tensor]:
            calls.append(name)
            return (x * x.sin(),)

        return Segment(name, "compute", fn, ("replicated",))

    return [segment(name) for name in names], calls


def run(recompute: Recompute) -> tuple[Tensor, Tensor, list[str]]:
    segments, calls = counted("abcd")
    x = torch.linspace(0.1, 2.0, 16).requires_grad_()
    (y,) = run_segments(segments, (x,), recompute)
    assert y is not None
    forward = len(calls)
    y.sum().backward()
    assert x.grad is not None and calls[:forward] == list("abcd")
    return y.detach(), x.grad, calls[forward:]


def test_recomputed_segments_run_again_and_nothing_changes() -> None:
    plain = run(Recompute())
    assert plain[2] == []
    for recompute, again in (
        (Recompute("full"), ["a", "b", "c", "d"]),
        (Recompute("selective", frozenset("bc")), ["b", "c"]),
        (Recompute("selective", frozenset("ad")), ["d", "a"]),  # two regions, the later one first
    ):
        y, grad, calls = run(recompute)
        assert calls == again
        assert torch.equal(y, plain[0]) and torch.equal(grad, plain[1])


def test_nothing_is_recomputed_without_gradients() -> None:
    segments, calls = counted("ab")
    with torch.no_grad():
        run_segments(segments, (torch.ones(3),), Recompute("full"))
    assert calls == ["a", "b"]


def test_random_numbers_are_the_same_when_a_region_runs_again() -> None:
    def noisy(x: Tensor) -> tuple[Tensor]:
        return (x * torch.rand_like(x),)

    grads = []
    for recompute in (Recompute(), Recompute("full")):
        torch.manual_seed(3)
        x = torch.ones(8, requires_grad=True)
        (y,) = run_segments([Segment("noise", "compute", noisy)] * 2, (x,), recompute)
        assert y is not None
        y.sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])
