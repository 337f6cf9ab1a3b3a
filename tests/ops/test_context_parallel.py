"""Attention over a sequence spread over ranks equals attention in one process, and every rank has equal work."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sennit import ops
from sennit.mesh import build_mesh
from sennit.ops.context_parallel import ContextShards, context_attention
from sennit.ops.documents import DocumentMask
from sennit.ops.sharding import causal_work, shard_sequence
from tests.ranks import run_ranks

HEADS, KV_HEADS, SIZE = 4, 2, 8
DOCUMENTS = {
    "one": [[48], [48]],
    "packed": [[5, 19, 24], [48]],
    "short": [[1, 2, 3, 1, 1, 40], [7, 7, 7, 7, 20]],
    "long": [[480], [200, 280]],
}


class Layout(NamedTuple):
    """A ring of Ulysses groups."""

    ring: int
    ulysses: int


LAYOUTS = [Layout(2, 1), Layout(4, 1), Layout(1, 2), Layout(1, 4), Layout(2, 2)]


def inputs(lengths: list[list[int]], kv_heads: int) -> list[Tensor]:
    """Return q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    b, s = len(lengths), sum(lengths[0])
    return [
        torch.randn(b, s, heads, SIZE, dtype=torch.float64, generator=generator)
        for heads in (HEADS, kv_heads, kv_heads, HEADS)
    ]


def expected(lengths: list[list[int]], kv_heads: int, window: int) -> list[Tensor]:
    """Return output and gradients of the reference in one process."""
    q, k, v, grad = inputs(lengths, kv_heads)
    qkv = [x.requires_grad_() for x in (q, k, v)]
    with ops.force({"attention": "reference"}):
        out = ops.attention(q, k, v, documents=DocumentMask.from_lengths(lengths), window=window)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


def errors(layout: Layout, name: str, kv_heads: int, window: int, wanted: list[Tensor]) -> float:
    """Return the largest difference of this rank's output and gradients. Collective."""
    mesh = build_mesh(cp=layout.ring * layout.ulysses, ulysses=layout.ulysses)
    lengths = DOCUMENTS[name]
    shards = ContextShards.of(lengths, cp=mesh.cp, ring=mesh.ring, ulysses=mesh.ulysses)

    def mine(x: Tensor) -> Tensor:
        return torch.stack([row[index] for row, index in zip(x, shards.index, strict=True)])

    q, k, v, grad = map(mine, inputs(lengths, kv_heads))
    qkv = [x.requires_grad_() for x in (q, k, v)]
    out = context_attention(q, k, v, shards, window=window)
    found = [out.detach(), *torch.autograd.grad(out, qkv, grad)]
    worst = [float((a - mine(b)).abs().max()) for a, b in zip(found, wanted, strict=True)]
    return max(error if error == error else float("inf") for error in worst)


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_spread_attention_equals_the_reference(layout: Layout, name: str, kv_heads: int, window: int) -> None:
    """Also where whole blocks are masked (other documents, later tokens): no NaN. Scenarios I-41 and I-43."""
    assert run_errors(layout)[name, kv_heads, window] < 1e-12


@cache
def run_errors(layout: Layout) -> dict[tuple[str, int, int], float]:
    keys = [(name, kv, window) for name in DOCUMENTS for kv in (1, 2, 4) for window in (0, 7)]
    wanted = {key: expected(DOCUMENTS[key[0]], *key[1:]) for key in keys}

    def every() -> dict[tuple[str, int, int], float]:
        return {key: errors(layout, *key, wanted[key]) for key in keys}

    ranks = run_ranks(every, layout.ring * layout.ulysses, timeout=120)
    return {key: max(found[key] for found in ranks) for key in keys}


@pytest.mark.parametrize("ring", [2, 4, 8])
@pytest.mark.parametrize("lengths", [[[4096]], [[1000, 96, 3000]], [[333] * 12 + [100]]], ids=["one", "three", "many"])
def test_every_rank_has_equal_work(ring: int, lengths: list[list[int]]) -> None:
    """Within 5 % for causal attention, one document or several; and equally many tokens exactly."""
    index = shard_sequence(lengths, ring=ring)
    assert index.shape == (ring, 1, 4096 // ring)
    assert sorted(index.flatten().tolist()) == list(range(4096)), "every token on exactly one rank"
    assert bool((index.diff(dim=-1) > 0).all())
    work = causal_work(index, lengths).double()
    assert float(work.max() / work.min()) < 1.05


def test_a_plain_cut_would_not_be_balanced() -> None:
    plain = torch.arange(4096).view(4, 1, 1024)
    work = causal_work(plain, [[4096]]).double()
    assert float(work.max() / work.min()) > 6


def test_a_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="30 tokens does not divide over ring 4"):
        shard_sequence([[30]], ring=4)


def saved_bytes(cp: int) -> int:
    """Return the bytes that attention keeps for its backward pass on this rank. Collective."""
    mesh = build_mesh(cp=cp)
    shards = ContextShards.of([[512]], cp=mesh.cp, ring=mesh.ring, ulysses=mesh.ulysses)
    q, k, v = (torch.randn(1, 512 // cp, heads, SIZE, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        context_attention(q, k, v, shards)
    return sum(storages.values())


def test_memory_falls_with_the_number_of_ranks() -> None:
    one, two, four = (max(run_ranks(saved_bytes, cp, cp)) for cp in (1, 2, 4))
    assert two / one == pytest.approx(1 / 2, rel=0.05)
    assert four / one == pytest.approx(1 / 4, rel=0.05)
