"""The loss in chunks, split over the vocabulary or not, against the reference that holds all logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sennit import ops
from sennit.mesh import Axis
from sennit.ops import chunked_loss, reference
from tests.ranks import run_ranks

HIDDEN = 6


def inputs(tokens: int, vocab: int, padded: int, ignored: set[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [t, h], weight [padded, h] whose padding rows are large, so that they show, and labels [t]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((tokens, HIDDEN), generator=generator, dtype=torch.float64)
    weight = torch.randn((padded, HIDDEN), generator=generator, dtype=torch.float64)
    weight[vocab:] *= 50
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    if tokens:
        labels[0] = vocab - 1
    labels[[i for i in ignored if i < tokens]] = -100
    return x, weight, labels


def loss_and_gradients(fn: Any, x: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Return (3 * loss, and the gradients of that with regard to x and weight)."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = fn(x, weight, labels, **options) * 3
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


def assert_same(mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.integers(1, 20),
    vocab=st.integers(1, 19),
    padding=st.integers(0, 9),
    ignored=st.sets(st.integers(0, 19), max_size=8),
    chunk=st.sampled_from([0, 1, 3, 7, 64]),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 1e-4, 0.5]),
    scale=st.sampled_from([1.0, 1 / 52]),
)
@example(tokens=3, vocab=2, padding=3, ignored={0, 1, 2}, chunk=2, label_smoothing=0.1, z_loss=0.5, scale=1.0)
def test_chunked_loss_is_the_reference(
    tokens: int, vocab: int, padding: int, ignored: set[int], chunk: int, **options: float
) -> None:
    x, weight, labels = inputs(tokens, vocab, vocab + padding, ignored)
    fn = partial(chunked_loss.linear_cross_entropy, chunk=chunk)
    mine = loss_and_gradients(fn, x, weight, labels, vocab_size=vocab, **options)
    assert_same(mine, loss_and_gradients(reference.linear_cross_entropy, x, weight, labels, vocab_size=vocab, **options))
    assert not mine[2][vocab:].any(), "padding has no gradient"


@pytest.mark.parametrize("fn", [reference.linear_cross_entropy, chunked_loss.linear_cross_entropy])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_the_loss_is_that_of_torch_on_the_real_classes(fn: Any, label_smoothing: float) -> None:
    x, weight, labels = inputs(11, 13, 16, {2, 5})
    mine = loss_and_gradients(fn, x, weight, labels, vocab_size=13, label_smoothing=label_smoothing, z_loss=0.25)

    def plain(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = x @ weight[:13].T
        entropy = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
        return entropy + 0.25 * logits.logsumexp(-1)[labels >= 0].square().sum()

    assert_same(mine, loss_and_gradients(plain, x, weight, labels))


@pytest.mark.parametrize("provider", ["reference", "chunked"])
def test_no_counted_token_gives_zero_not_nan(provider: str) -> None:
    """Scenario I-13: also without a single token, and with another number for labels that are not counted."""
    with ops.force({"linear_cross_entropy": provider}):
        for tokens in (5, 0):
            x, weight, labels = inputs(tokens, 7, 8, set(range(5)))
            options = dict(vocab_size=7, label_smoothing=0.1, z_loss=0.1)
            for result in loss_and_gradients(ops.linear_cross_entropy, x, weight, labels, **options):
                assert not result.any()
        x, weight, labels = inputs(5, 7, 8, set())
        ones = torch.ones_like(labels)
        assert float(ops.linear_cross_entropy(x, weight, ones, vocab_size=7, ignore_index=1)) == 0.0


def test_huge_logits_neither_overflow_nor_vanish() -> None:
    x, weight, labels = inputs(6, 7, 8, set())
    for result in loss_and_gradients(ops.linear_cross_entropy, x.float() * 1e4, weight.float(), labels, vocab_size=7):
        assert result.isfinite().all()


SHARDED: list[dict[str, Any]] = [
    dict(),
    dict(label_smoothing=0.1),
    dict(z_loss=1e-2),
    dict(label_smoothing=0.1, z_loss=1e-2, scale=0.125, chunk=4),
]


def sharded(vocab: int, padded: int) -> list[tuple[Tensor, ...]]:
    """Return this rank's (loss, dx, dweight) of every option and provider; the ranks hold parts of the rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    axis = Axis("tp", world, rank, dist.group.WORLD)
    x, weight, labels = inputs(11, vocab, padded, {2, 5})
    mine = weight.chunk(world)[rank]
    found = []
    for provider in (chunked_loss, reference):
        for options in SHARDED:
            fn = partial(provider.linear_cross_entropy, axis=axis)
            found.append(loss_and_gradients(fn, x, mine, labels, vocab_size=vocab, **options))
    return found


@pytest.mark.parametrize(("world", "vocab", "padded"), [(2, 13, 16), (4, 13, 16), (4, 5, 16), (2, 16, 16)])
def test_a_split_vocabulary_gives_the_same_loss_on_every_rank(world: int, vocab: int, padded: int) -> None:
    """Scenario I-58: also where whole ranks hold only padding. Gradients of x are partial sums, those of the rows parts."""
    x, weight, labels = inputs(11, vocab, padded, {2, 5})
    alone = [
        loss_and_gradients(reference.linear_cross_entropy, x, weight, labels, vocab_size=vocab, **options)
        for options in SHARDED
    ] * 2
    for index, parts in enumerate(zip(*run_ranks(sharded, world, vocab, padded), strict=True)):
        losses, dxs, dweights = zip(*parts, strict=True)
        assert all(torch.equal(loss, losses[0]) for loss in losses)
        assert_same((losses[0], torch.stack(dxs).sum(0), torch.cat(dweights)), alone[index])


class Largest(TorchDispatchMode):
    """Notes the largest number of elements of any result."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def test_all_logits_never_exist() -> None:
    tokens, vocab = 512, 1024
    x, weight, labels = inputs(tokens, vocab, vocab, set())
    saved: list[int] = []
    weight.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t), Largest() as seen:
        chunked_loss.linear_cross_entropy(x.requires_grad_(), weight, labels, vocab_size=vocab, chunk=32).backward()
    assert seen.elements <= 32 * vocab
    assert sorted(saved) == sorted([x.numel(), weight.numel()]), "the gradients are all that is kept"
