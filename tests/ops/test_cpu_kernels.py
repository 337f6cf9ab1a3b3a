"""The C++ operators against the references in float64: odd sizes, strides, special values, any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from sennit import ops
from sennit.ops import DocumentMask, cpu

pytestmark = pytest.mark.skipif(cpu.missing() is not None, reason=f"C++ operators: {cpu.missing()}")

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


def results(fn: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return outputs and input gradients of `fn` for fixed output gradients."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    found = fn(*inputs)
    outputs = found if isinstance(found, tuple) else (found,)
    total = torch.zeros((), dtype=torch.float64)
    for number, output in enumerate(outputs):
        generator = torch.Generator().manual_seed(number)
        weight = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        total = total + (output * weight.to(output.dtype)).sum().double()
    total.backward()
    return [output.detach() for output in outputs] + [x.grad for x in inputs if x.grad is not None]


def compare(
    fn: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor], dtype: torch.dtype, *names: str
) -> None:
    """Assert that `fn` with the C++ providers of `names` equals the references in float64 on the same inputs."""
    rounded = [x.to(dtype) for x in inputs]
    with ops.force(dict.fromkeys(names, "reference")):
        expected = results(fn, [x.double() for x in rounded])
    actual = results(fn, rounded)
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        scale = other.norm().clamp_min(0.2 * other.numel() ** 0.5)  # a true gradient may be zero
        assert (one.double() - other).norm() / scale < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 5, 64), (7, 255), (33, 16)])
def test_norm_and_swiglu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y, w = torch.randn(shape), torch.randn(shape), torch.rand(shape[-1]) + 0.5
    compare(lambda a, b: ops.rms_norm(a, b, 1e-5), [x, w], dtype, "rms_norm")
    compare(lambda a, b, c: ops.add_rms_norm(a, b, c, 1e-5), [x, y, w], dtype, "add_rms_norm")
    compare(ops.swiglu, [x, y], dtype, "swiglu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(6, 40), torch.rand(20)
    compare(lambda a, b: ops.rms_norm(a[:, ::2], b, 1e-5), [x, w], dtype, "rms_norm")
    compare(lambda a: ops.swiglu(a[:, :20], a[:, 20:]), [x], dtype, "swiglu")


ATTENTION = {
    "odd": (2, 33, 4, 2, 10, 0, None),
    "several blocks": (1, 600, 4, 1, 16, 0, None),
    "window": (2, 65, 4, 4, 32, 7, None),
    "documents": (2, 40, 6, 2, 64, 0, [[10, 30], [1, 2, 37]]),
    "recomputed": (1, 1100, 2, 1, 8, 0, [[300, 800]]),
    "one token": (3, 1, 2, 2, 4, 0, None),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ATTENTION.values(), ids=ATTENTION.keys())
def test_attention(case: tuple[int, int, int, int, int, int, list[list[int]] | None], dtype: torch.dtype) -> None:
    b, s, n, g, d, window, lengths = case
    torch.manual_seed(0)
    q, k, v = torch.randn(b, s, n, d), torch.randn(b, s, g, d), torch.randn(b, s, g, d)
    angles = torch.rand(s, d // 2)
    documents = None if lengths is None else DocumentMask.from_lengths(lengths)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kind = torch.promote_types(q.dtype, torch.float32)
        cos, sin = angles.cos().to(kind), angles.sin().to(kind)
        return ops.rope_attention(q, k, v, cos, sin, documents=documents, window=window)

    compare(attend, [q, k, v], dtype, "rope_attention")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("smoothing", "z_loss", "chunk"), [(0.0, 0.0, 0), (0.1, 1e-2, 7)])
def test_loss(smoothing: float, z_loss: float, chunk: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w, labels = torch.randn(50, 16), torch.randn(40, 16), torch.randint(0, 37, (50,))
    labels[::3] = -100
    options = dict(vocab_size=37, label_smoothing=smoothing, z_loss=z_loss, scale=0.3, chunk=chunk)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return ops.linear_cross_entropy(a, b, labels, **options)  # type: ignore[arg-type]

    compare(loss, [x, w], dtype, "linear_cross_entropy")


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_maps_of_one_input(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(3, 7, 16), torch.randn(24, 16), torch.randn(40, 16), torch.randn(24), torch.randn(40)]
    compare(lambda x, a, b, c, d: ops.linears(x, (a, b), (c, d)), inputs, dtype, "linears")
    compare(ops.linear, [torch.randn(9, 32), torch.randn(5, 32)], dtype, "linear")
    compare(ops.swiglu_linear, [torch.randn(9, 32), torch.randn(9, 32), torch.randn(5, 32)], dtype, "swiglu_linear")


def update(provider: str, gradient: torch.dtype, kind: torch.dtype) -> list[Tensor]:
    """Three updates of three tensors; returns everything that changed."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(size, generator=generator).to(kind) for size in (1, 17, 70_000)]
    grads = [torch.randn(p.shape, generator=generator).to(gradient) for p in params]
    m, v = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    shadows: list[Tensor | None] = [p.bfloat16() for p in params]
    with ops.force({"adamw_": provider}):
        for step in (1, 2, 3):
            ops.adamw_(
                params,
                grads,
                m,
                v,
                shadows,
                lr=1e-2,
                beta1=0.9,
                beta2=0.95,
                eps=1e-8,
                weight_decays=[0.0, 0.1, 0.1],
                step=step,
                grad_scale=0.7,
            )
    return [*params, *m, *v, *(s for s in shadows if s is not None)]


@pytest.mark.parametrize("provider", ["cpu", "torch"])
@pytest.mark.parametrize("gradient", DTYPES)
def test_adamw(gradient: torch.dtype, provider: str) -> None:
    for one, other in zip(
        update(provider, gradient, torch.float32), update("reference", gradient, torch.float64), strict=True
    ):
        tolerance = 4e-3 if one.dtype == torch.bfloat16 else 1e-6
        assert (one.double() - other.double()).norm() <= tolerance * other.double().norm()


def test_updates_and_norms_do_not_depend_on_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, norm = update("cpu", torch.bfloat16, torch.float32), ops.sum_of_squares([torch.arange(100_000.0)])
        torch.set_num_threads(2)
        two, other = update("cpu", torch.bfloat16, torch.float32), ops.sum_of_squares([torch.arange(100_000.0)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert norm == other


def test_sum_of_squares() -> None:
    tensors = [torch.randn(7), torch.randn(300, 301), torch.randn(5).bfloat16(), torch.tensor([3e25])]
    expected = sum(float(x.double().square().sum()) for x in tensors)
    assert float(ops.sum_of_squares(tensors)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("shape", [(64, 96), (33, 70), (1, 5), (2048, 31)])
def test_transposition(shape: tuple[int, int]) -> None:
    from sennit.ops.cpu.passes import transposed

    x = torch.randn(shape).bfloat16()
    assert torch.equal(transposed(x), x.t())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_are_not_hidden(value: float, dtype: torch.dtype) -> None:
    """What is NaN in the reference is NaN here: bad numbers must reach the loss."""
    x = torch.ones(2, 20, dtype=dtype)
    x[0, 3] = value
    w, head = torch.ones(20, dtype=dtype), torch.eye(20, dtype=dtype)
    for op, fn in (
        ("rms_norm", lambda: ops.rms_norm(x, w, 1e-5)),
        ("swiglu", lambda: ops.swiglu(x, x)),
        ("linear_cross_entropy", lambda: ops.linear_cross_entropy(x, head, torch.zeros(2).long(), vocab_size=20)),
    ):
        with ops.force({op: "reference"}):
            expected = fn()
        assert torch.equal(fn().isnan(), expected.isnan()), op


def test_one_openmp_runtime_is_loaded() -> None:
    """Two thread pools would fight over the cores."""
    ops.sum_of_squares([torch.ones(10)])
    with open("/proc/self/maps") as maps:
        names = {line.split()[-1] for line in maps if any(part in line for part in ("libgomp", "libomp", "libiomp"))}
    assert len(names) == 1
