"""The references against independent definitions, and every other provider against them, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sennit import ops
from sennit.ops import fused_torch, joined_linear, reference


def drawn(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def outputs_and_gradients(fn: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of `fn`, then the gradient of each of `tensors` of one sum over all outputs."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = fn(*leaves)
    outs = [out] if isinstance(out, Tensor) else list(out)
    total = sum((y * torch.arange(1, y.numel() + 1).reshape(y.shape).sin()).sum() for y in outs)
    return [*outs, *torch.autograd.grad(total, leaves)]  # type: ignore[arg-type]


def assert_same(mine: Callable[..., Any], theirs: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
    pairs = zip(outputs_and_gradients(mine, tensors), outputs_and_gradients(theirs, tensors), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x, weight = drawn((2, 3, 5), (5,))
    for row, y in zip(x.flatten(0, 1), reference.rms_norm(x, weight, 0.5).flatten(0, 1), strict=True):
        root = (sum(float(value) ** 2 for value in row) / 5 + 0.5) ** 0.5
        torch.testing.assert_close(y, row / root * weight, rtol=1e-14, atol=0)


def test_swiglu_is_silu_times_the_other_half() -> None:
    gate, up = drawn((7,), (7,))
    torch.testing.assert_close(reference.swiglu(gate, up), gate / (1 + (-gate).exp()) * up, rtol=1e-14, atol=0)


def test_rope_turns_each_pair_by_its_angle() -> None:
    """Feature i and i + d/2 are the real and imaginary part of a number that is multiplied by exp(i angle)."""
    (x,) = drawn((2, 5, 3, 8))
    angles = torch.outer(torch.arange(5).double(), 0.5 ** torch.arange(4))
    turned = reference.apply_rope(x, angles.cos(), angles.sin())
    numbers = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)[None, :, None]
    torch.testing.assert_close(turned, torch.cat((numbers.real, numbers.imag), -1), rtol=1e-13, atol=1e-14)


def test_scores_of_rotated_queries_depend_on_the_distance_only() -> None:
    q, k = drawn((1, 1, 1, 8), (1, 1, 1, 8))
    angles = torch.outer(torch.arange(9).double(), 0.5 ** torch.arange(4))
    cos, sin = angles.cos(), angles.sin()

    def score(i: int, j: int) -> float:
        a, b = (reference.apply_rope(x, cos[at : at + 1], sin[at : at + 1]) for x, at in ((q, i), (k, j)))
        return float((a * b).sum())

    assert score(5, 2) == pytest.approx(score(8, 5), rel=1e-12)
    assert score(5, 2) != pytest.approx(score(5, 3), rel=1e-3)


def test_adamw_and_its_fused_provider_take_the_steps_of_torch() -> None:
    start = drawn((4, 3), (5,), (2, 2))
    decays, scale = [0.1, 0.0, 0.1], 0.25
    theirs = [torch.nn.Parameter(x.clone()) for x in start]
    groups = [{"params": [p], "weight_decay": decay} for p, decay in zip(theirs, decays, strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-6)
    runs = {}
    for fn in (reference.adamw_, fused_torch.adamw_, ops.adamw_):
        runs[fn] = [x.clone() for x in start], [torch.zeros_like(x) for x in start], [torch.zeros_like(x) for x in start]
    shadows: list[Tensor | None] = [torch.empty_like(start[0], dtype=torch.bfloat16), None, None]
    for step in range(1, 12):
        gradients = drawn(*(tuple(x.shape) for x in start), seed=step)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient * scale
        optimizer.step()
        for fn, (params, means, squares) in runs.items():
            fn(params, [g.clone() for g in gradients], means, squares, shadows, lr=0.01, beta1=0.8, beta2=0.9, eps=1e-6,
               weight_decays=decays, step=step, grad_scale=scale)  # fmt: skip
            assert shadows[0] is not None and torch.equal(shadows[0], params[0].bfloat16())
    for params, *_ in runs.values():
        for mine, parameter in zip(params, theirs, strict=True):
            torch.testing.assert_close(mine, parameter.detach(), rtol=1e-12, atol=1e-14)


def test_sum_of_squares_is_added_up_in_float64() -> None:
    many = [torch.full((1000,), 1.5, dtype=torch.bfloat16), torch.full((100_000,), 1e-3)]
    wanted = 2250 + 100_000 * float(torch.tensor(1e-3)) ** 2
    for fn in (ops.sum_of_squares, reference.sum_of_squares):
        assert fn(many).dtype == torch.float64
        assert float(fn(many)) == pytest.approx(wanted, rel=1e-7)
        assert float(fn([])) == 0.0
    assert float(reference.sum_of_squares([torch.full((3,), 1e30)])) == pytest.approx(3e60, rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=2), st.integers(1, 9), st.floats(0.0, 0.5))
def test_fused_norms_are_the_reference(lead: list[int], h: int, eps: float) -> None:
    x, delta, weight = drawn((*lead, 2, h), (*lead, 2, h), (h,))
    eps += 1e-6
    for name, tensors in (("rms_norm", (x, weight)), ("add_rms_norm", (x, delta, weight))):
        assert_same(partial(getattr(fused_torch, name), eps=eps), partial(getattr(reference, name), eps=eps), tensors)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 7),
    st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=3),
)
def test_joined_linear_maps_are_the_reference(lead: list[int], i: int, maps: list[tuple[int, bool]]) -> None:
    x, *weights = drawn((*lead, i), *((o, i) for o, _ in maps))
    biases = drawn(*((o,) for o, _ in maps), seed=1)
    biased = [index for index, (_, bias) in enumerate(maps) if bias]

    def call(linears: Callable[..., Any]) -> Callable[..., Any]:
        def fn(x: Tensor, *parts: Tensor) -> Any:
            given = dict(zip(biased, parts[len(maps) :], strict=True))
            return linears(x, parts[: len(maps)], [given.get(index) for index in range(len(maps))])

        return fn

    tensors = [x, *weights, *(biases[index] for index in biased)]
    assert_same(call(joined_linear.linears), call(reference.linears), tensors)


def test_joined_linear_makes_only_the_gradients_that_are_wanted() -> None:
    x, frozen, trained = drawn((3, 4), (5, 4), (2, 4))
    trained.requires_grad_()
    a, b = joined_linear.linears(x, (frozen, trained), (None, None))
    (a.sum() + b.sum()).backward()
    assert x.grad is None and frozen.grad is None
    assert trained.grad is not None
    torch.testing.assert_close(trained.grad, x.sum(0).expand(2, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_half_precision_are_float32(dtype: torch.dtype) -> None:
    """Norms, gates and losses of rounded inputs differ from the float64 ones by one rounding of the result."""
    x, weight = (t.to(dtype) for t in drawn((64, 512), (512,)))
    for mine, wanted in (
        (reference.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5)),
        (reference.swiglu(x, x.flip(0)), reference.swiglu(x.double(), x.flip(0).double())),
    ):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), wanted, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-6)
    labels = torch.zeros(64, dtype=torch.int64)
    loss = reference.linear_cross_entropy(x, x[:10], labels, vocab_size=10)
    assert loss.dtype == torch.float32
