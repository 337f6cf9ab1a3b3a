"""Initial weights: a function of (seed, name, row) alone. Layouts are compared in tests/parity."""

from __future__ import annotations

import torch
from torch import nn

from sennit.mesh import Mesh
from sennit.nn import Init, initialise, new_parameter, parameter_inits
from sennit.nn.parameter import INIT_BLOCK_ROWS


def made(rows: int, *, live_rows: int = -1, seed: int = 1, name: str = "weight", std: float = 0.5) -> torch.Tensor:
    module = nn.Module()
    module.register_parameter(name, new_parameter(Mesh(), (rows, 8), Init("normal", std, live_rows)))
    inits = parameter_inits(module)
    module.to_empty(device="cpu")
    initialise(module, inits, seed=seed)
    return module.get_parameter(name).detach()


def test_rows_do_not_depend_on_how_many_follow() -> None:
    long = made(3 * INIT_BLOCK_ROWS + 5)
    assert torch.equal(long[: 2 * INIT_BLOCK_ROWS], made(2 * INIT_BLOCK_ROWS))


def test_seed_and_name_choose_the_values() -> None:
    assert torch.equal(made(70), made(70))
    assert not torch.equal(made(70), made(70, seed=2))
    assert not torch.equal(made(70), made(70, name="other"))


def test_rows_that_pad_the_vocabulary_start_at_zero() -> None:
    padded = made(2 * INIT_BLOCK_ROWS, live_rows=70)
    assert torch.equal(padded[:70], made(2 * INIT_BLOCK_ROWS)[:70])
    assert not padded[70:].any() and padded[:70].any(1).all()


def test_blocks_differ_and_have_the_standard_deviation_asked_for() -> None:
    values = made(40 * INIT_BLOCK_ROWS)
    assert not torch.equal(values[:INIT_BLOCK_ROWS], values[INIT_BLOCK_ROWS : 2 * INIT_BLOCK_ROWS])
    assert abs(float(values.std()) - 0.5) < 0.01 and abs(float(values.mean())) < 0.01


def test_norms_start_at_one_and_biases_at_zero() -> None:
    module = nn.Module()
    module.register_parameter("norm", new_parameter(Mesh(), (8,), Init("ones")))
    module.register_parameter("bias", new_parameter(Mesh(), (8,), Init("zeros")))
    inits = parameter_inits(module)
    module.to_empty(device="cpu")
    initialise(module, inits, seed=0)
    assert torch.equal(module.get_parameter("norm").detach(), torch.ones(8))
    assert torch.equal(module.get_parameter("bias").detach(), torch.zeros(8))
