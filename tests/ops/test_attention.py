"""Attention in blocks, and PyTorch's fused one, against the dense reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sennit import ops
from sennit.ops import blocked_attention, fused_torch, reference
from sennit.ops.documents import DocumentMask

Draw = st.DrawFn


@contextmanager
def blocks(rows: int, kept_keys: int) -> Iterator[None]:
    """Let small shapes be cut into several blocks, or have their probabilities computed again in the backward pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked_attention, "BLOCK_ROWS", rows)
        patch.setattr(blocked_attention, "SHORT_KEYS", kept_keys)
        yield


def tensors(b: int, queries: int, keys: int, groups: int, repeat: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(b + 10 * queries + 100 * keys + groups + repeat + d)
    shapes = (b, queries, groups * repeat, d), (b, keys, groups, d), (b, keys, groups, d)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


def value_and_gradients(fn: Any, inputs: tuple[Tensor, ...], *others: Tensor, **options: Any) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = fn(*leaves, *others, **options)
    weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).cos()
    return out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)


def assert_same(mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@st.composite
def lengths(draw: Draw, total: int) -> list[int]:
    """Document lengths that add up to `total`."""
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), max_size=4))) if total > 1 else []
    edges = [0, *cuts, total]
    return [b - a for a, b in zip(edges, edges[1:], strict=False)]


@st.composite
def calls(draw: Draw) -> dict[str, Any]:
    b, keys = draw(st.integers(1, 3)), draw(st.integers(1, 23))
    queries = draw(st.sampled_from([keys, keys, keys, 1, max(keys // 2, 1)]))
    causal = draw(st.integers(0, 4)) > 0
    packed = causal and draw(st.booleans())
    return dict(
        shape=(b, queries, keys, draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 5))),
        causal=causal,
        window=draw(st.sampled_from([0, 0, 1, 2, 5, 40])) if causal else 0,
        scale=draw(st.sampled_from([None, 0.3])),
        documents=[draw(lengths(keys)) for _ in range(b)] if packed else None,
        rows=draw(st.sampled_from([1, 4, 7, 256])),
        kept_keys=draw(st.sampled_from([0, 1024])),
    )


@settings(max_examples=120, deadline=None)
@given(calls())
@example(dict(shape=(2, 300, 300, 1, 2, 4), causal=True, window=0, scale=None, documents=[[299, 1], [1, 299]], rows=256,
              kept_keys=0))  # fmt: skip
def test_blocked_attention_is_the_dense_one(call: dict[str, Any]) -> None:
    q, k, v = tensors(*call["shape"])
    documents = None if call["documents"] is None else DocumentMask.from_lengths(call["documents"])
    options = dict(causal=call["causal"], window=call["window"], scale=call["scale"], documents=documents)
    with blocks(call["rows"], call["kept_keys"]):
        mine = value_and_gradients(blocked_attention.attention, (q, k, v), **options)
    assert_same(mine, value_and_gradients(reference.attention, (q, k, v), **options))


def tables(s: int, d: int, rows: int | None) -> tuple[Tensor, Tensor]:
    """Return cos, sin [s, d/2], or [rows, s, d/2] with other positions in each row."""
    positions = torch.arange(s).double()
    if rows is not None:
        positions = (positions[None] + torch.arange(rows)[:, None] * 3) % 7
    angles = positions[..., None] / 3.0 ** torch.arange(d // 2)
    return angles.cos(), angles.sin()


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 17), st.integers(1, 3), st.integers(1, 2), st.booleans(), st.sampled_from([0, 3]))
def test_blocked_attention_rotates_like_the_reference(
    data: st.DataObject, s: int, groups: int, repeat: int, own_positions: bool, window: int
) -> None:
    inputs = tensors(2, s, s, groups, repeat, 6)
    documents = DocumentMask.from_lengths([data.draw(lengths(s)) for _ in range(2)])
    options = dict(documents=documents, window=window)
    cos, sin = tables(s, 6, 2 if own_positions else None)
    with blocks(5, data.draw(st.sampled_from([0, 1024]))):
        mine = value_and_gradients(blocked_attention.rope_attention, inputs, cos, sin, **options)
    assert_same(mine, value_and_gradients(reference.rope_attention, inputs, cos, sin, **options))


@settings(max_examples=60, deadline=None)
@given(calls())
def test_fused_attention_serves_only_what_it_computes_right(call: dict[str, Any]) -> None:
    q, k, v = tensors(*call["shape"])
    documents = None if call["documents"] is None else DocumentMask.from_lengths(call["documents"])
    options = dict(causal=call["causal"], window=call["window"], scale=call["scale"], documents=documents)
    if fused_torch.plain_causal(q, k, v, **options):
        mine = value_and_gradients(fused_torch.attention, (q, k, v), **options)
        assert_same(mine, value_and_gradients(reference.attention, (q, k, v), **options))
    else:
        assert call["window"] or call["documents"] or q.shape[1] != k.shape[1], "plain causal calls are accepted"


@pytest.mark.parametrize("kept_keys", [0, 1024])
def test_gradients_of_blocked_attention_are_derivatives(kept_keys: int) -> None:
    inputs = [x.requires_grad_() for x in tensors(1, 5, 5, 1, 2, 2)]
    documents = DocumentMask.from_lengths([[2, 3]])
    with blocks(4, kept_keys):
        assert torch.autograd.gradcheck(lambda *x: blocked_attention.attention(*x, documents=documents), inputs)


def test_a_long_sequence_keeps_nothing_of_its_length_squared() -> None:
    """At 4096 tokens no saved tensor has s x s elements, all together they grow with s, and so does each block."""
    s, d = 4096, 8
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = max(x.untyped_storage().nbytes() // x.element_size(), x.numel())
        return x

    q, k, v = (x.float().requires_grad_() for x in tensors(1, s, s, 1, 2, d))
    cos, sin = (table.float() for table in tables(s, d, None))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), ops.force({"rope_attention": "blocked"}):
        out = ops.rope_attention(q, k, v, cos, sin)
    assert sum(saved.values()) <= s * (d * (2 * 2 + 2 + 2) + 2 * d), "q, k, v, output, their sums and the tables"
    assert max(saved.values()) < s * s // 64
    out.sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v))


def test_documents_of_one_row_cost_nothing() -> None:
    single = DocumentMask.from_lengths([[8], [8]])
    assert single.single and not DocumentMask.from_lengths([[8], [3, 5]]).single
    q, k, v = tensors(2, 8, 8, 1, 1, 4)
    cos, sin = tables(8, 4, None)
    assert torch.equal(ops.rope_attention(q, k, v, cos, sin, documents=single), ops.rope_attention(q, k, v, cos, sin))


@pytest.mark.parametrize("rows", [[[3, 5], [4]], [[3, 0, 5]], [[9, -1]]])
def test_documents_that_do_not_fill_their_rows_are_refused(rows: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="document lengths must be positive and add up to one row length"):
        DocumentMask.from_lengths(rows)


def test_borders_of_documents() -> None:
    mask = DocumentMask.from_lengths([[3, 5], [8]])
    assert mask.starts.tolist() == [[0, 0, 0, 3, 3, 3, 3, 3], [0] * 8]
    assert mask.cu_seqlens.tolist() == [0, 3, 8, 16]
    assert (mask.row_length, mask.max_length) == (8, 8)


def test_the_reference_is_softmax_of_scaled_products() -> None:
    """By loops over queries, heads and visible keys."""
    q, k, v = tensors(1, 6, 6, 2, 2, 4)
    out = reference.attention(q, k, v, documents=DocumentMask.from_lengths([[2, 4]]), window=3)
    for i in range(6):
        keys = [j for j in range(6) if j <= i and j > i - 3 and (j >= 2) == (i >= 2)]
        for head in range(4):
            scores = [math.exp(float(q[0, i, head] @ k[0, j, head // 2]) / 2) for j in keys]
            wanted = sum(score * v[0, j, head // 2] for score, j in zip(scores, keys, strict=True)) / sum(scores)
            torch.testing.assert_close(out[0, i, head], wanted, rtol=1e-12, atol=1e-14)
