"""Every named collective and its transpose, against sums and slices of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sennit.mesh import Axis, collectives
from tests.ranks import run_ranks

Expected = Callable[[list[Tensor], int, int], Tensor]


def total(tensors: list[Tensor], rank: int, dim: int) -> Tensor:
    return torch.stack(tensors).sum(0)


def own(tensors: list[Tensor], rank: int, dim: int) -> Tensor:
    return tensors[rank]


def joined(tensors: list[Tensor], rank: int, dim: int) -> Tensor:
    return torch.cat(tensors, dim)


def own_part(tensors: list[Tensor], rank: int, dim: int) -> Tensor:
    return tensors[rank].chunk(len(tensors), dim)[rank]


def part_of_total(tensors: list[Tensor], rank: int, dim: int) -> Tensor:
    return total(tensors, rank, dim).chunk(len(tensors), dim)[rank]


PAIRS: dict[str, tuple[Expected, Expected]] = {
    "copy_to": (own, total),
    "replicated_weight": (own, total),
    "reduce_from": (total, own),
    "gather_sequence": (joined, part_of_total),
    "scatter_sequence": (part_of_total, joined),
    "split_sequence": (own_part, joined),
}
"""name: (what the forward returns, what the backward returns)"""


def whole_numbers(shape: torch.Size | tuple[int, ...], rank: int, salt: int) -> Tensor:
    """Return a float64 tensor of small integers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(100 * salt + rank)
    return torch.randint(-9, 10, shape, generator=generator).double()


def check_pairs() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    axis = Axis("tp", world, rank, dist.group.WORLD)
    for (name, (forward, backward)), dim, strided in product(PAIRS.items(), (0, 1, -1), (False, True)):
        takes_dim = name.endswith("sequence")
        function = getattr(collectives, name)
        function = partial(function, dim=dim) if takes_dim else function
        shape = (2 * world, 3 * world, world)
        inputs = [whole_numbers(shape, r, 1) for r in range(world)]
        if strided:
            inputs = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in inputs]
        x = inputs[rank].clone(memory_format=torch.preserve_format).requires_grad_()
        out = function(x, axis)
        assert torch.equal(out, forward(inputs, rank, dim)), (name, dim)
        grads = [whole_numbers(out.shape, r, 2) for r in range(world)]
        grad = grads[rank]
        if strided:
            grad = grad.transpose(0, 2).contiguous().transpose(0, 2)
        out.backward(grad)
        assert x.grad is not None and torch.equal(x.grad, backward(grads, rank, dim)), (name, dim)


def check_without_gradient() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    axis = Axis("tp", world, rank, dist.group.WORLD)
    inputs = [whole_numbers((2, 3), r, 3) for r in range(world)]
    x = inputs[rank].clone().requires_grad_()
    assert torch.equal(collectives.gather_last(x, axis), torch.cat(inputs, -1))
    assert torch.equal(collectives.all_reduce_sum(x, axis), torch.stack(inputs).sum(0))
    assert torch.equal(collectives.all_reduce_max(x, axis), torch.stack(inputs).amax(0))
    assert not any(f(x, axis).requires_grad for f in (collectives.gather_last, collectives.all_reduce_sum))
    assert torch.equal(x, inputs[rank]), "the input is left alone"


def check_all() -> None:
    check_pairs()
    check_without_gradient()


@pytest.mark.parametrize("world", [2, 3])
def test_each_collective_is_the_transpose_of_its_backward(world: int) -> None:
    run_ranks(check_all, world)


def test_an_axis_of_size_one_needs_no_group() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    for name in (*PAIRS, "gather_last", "all_reduce_sum", "all_reduce_max"):
        assert getattr(collectives, name)(x, Axis("tp")) is x
