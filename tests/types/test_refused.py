"""The checker refuses a layer from which any one collective has been left out, and says where."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import spmd_types as spmd

from sennit.mesh import Axis, collectives
from sennit.nn import RMSNorm
from tests.types.checker import (
    FAMILIES,
    check_segments,
    checking,
    fake_mesh,
    new_inputs,
    new_model,
    vocab_parallel_loss,
)

pytestmark = pytest.mark.apart


def left_out(x: Any, *_: Any, **__: Any) -> Any:
    return x


def sliced(x: Any, axis: Axis, dim: int = 1) -> Any:
    """The rank's part without the sum: what leaving out a reduce-scatter means for the shape."""
    return x.unflatten(dim, (axis.size, -1)).select(dim, axis.rank)


def forgets_sequence(self: RMSNorm, x: Any, delta: Any, *, sequence: bool = False, real: Any = RMSNorm.add) -> Any:
    return real(self, x, delta, sequence=False)


MISTAKES: dict[str, tuple[Any, str, Callable[..., Any], str, bool]] = {
    "copy_to left out": (collectives, "copy_to", left_out, "llama", False),
    "reduce_from left out": (collectives, "reduce_from", left_out, "llama", False),
    "gather_sequence left out": (collectives, "gather_sequence", left_out, "llama", True),
    "scatter_sequence left out": (collectives, "scatter_sequence", sliced, "llama", True),
    "norm weight without replicated_weight": (collectives, "replicated_weight", left_out, "llama", True),
    "qk-norm weight without replicated_weight": (collectives, "replicated_weight", left_out, "qwen3", False),
    "kv heads without replicated_weight": (collectives, "replicated_weight", left_out, "few-kv-heads", False),
    "norm does not know of the split sequence": (RMSNorm, "add", forgets_sequence, "llama", True),
    "reduce_from in place of scatter_sequence": (
        collectives,
        "scatter_sequence",
        collectives.reduce_from,
        "llama",
        True,
    ),
    "copy_to in place of gather_sequence": (collectives, "gather_sequence", collectives.copy_to, "llama", True),
    "sequence gathered along the batch": (
        collectives,
        "gather_sequence",
        partial(collectives.gather_sequence, dim=0),
        "llama",
        True,
    ),
    "sequence scattered along the batch": (
        collectives,
        "scatter_sequence",
        partial(collectives.scatter_sequence, dim=0),
        "llama",
        True,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_layer_without_its_collective_is_refused(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement, family, sequence_parallel = MISTAKES[mistake]
    with fake_mesh(dp_shard=16, tp=2) as mesh:
        model = new_model(mesh, FAMILIES[family], fsdp=False)
        with checking(mesh):
            _, x, context = new_inputs(mesh, model, sequence_parallel=sequence_parallel)
            monkeypatch.setattr(owner, name, replacement)
            with pytest.raises(spmd.SpmdTypeError):
                check_segments(mesh, model, x, context)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no-sp"])
@pytest.mark.parametrize("method", ["embed", "final"])
def test_embedding_and_head_need_their_collectives(
    method: str, sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistakes = {
        "embed": {"scatter_sequence": sliced, "reduce_from": left_out},
        "final": {"gather_sequence": left_out, "copy_to": left_out},
    }
    with fake_mesh(dp_shard=16, tp=2) as mesh:
        model = new_model(mesh, FAMILIES["llama"], fsdp=False)
        real = getattr(model, method)

        def without(*args: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                for name, mistake in mistakes[method].items():
                    patch.setattr(collectives, name, mistake)
                return real(*args)

        with checking(mesh):
            tokens, _, context = new_inputs(mesh, model, sequence_parallel=sequence_parallel)
            monkeypatch.setattr(model, method, without)
            with pytest.raises(spmd.SpmdTypeError):
                model(tokens, context, tokens, vocab_parallel_loss(mesh))
