"""Optimizers against torch's, masters and compute copies, and what decays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sennit.mesh import Mesh
from sennit.models import Decoder, hold_in
from sennit.nn import DecoderConfig
from sennit.train.optimizer import SGD, AdamW, Muon, Optimizer, Slot, make_slots, orthogonalise


def slots_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Slot]:
    generator = torch.Generator().manual_seed(0)
    slots = []
    for index, shape in enumerate(shapes):
        parameter = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        slots.append(Slot(f"w{index}", parameter, parameter.detach(), len(shape) >= 2, len(shape) == 2))
    return slots


def gradients_of(slots: list[Slot], step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(s.master.shape, generator=generator, dtype=torch.float64) for s in slots]


def test_adamw_equals_torch_with_decay_on_matrices_only() -> None:
    slots = slots_of((4, 3), (5,))
    copies = [nn.Parameter(slot.master.clone()) for slot in slots]
    groups = [{"params": copies[:1], "weight_decay": 0.1}, {"params": copies[1:], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    mine = AdamW(slots, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
    for step in range(1, 5):
        gradients = gradients_of(slots, step)
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient * 0.25
        theirs.step()
        mine.step(gradients, rate=0.01, step=step, scale=0.25)
    for slot, copy in zip(slots, copies, strict=True):
        torch.testing.assert_close(slot.master, copy.detach(), rtol=1e-12, atol=1e-14)


def test_sgd_equals_torch_without_decay() -> None:
    slots = slots_of((4, 3), (5,))
    copies = [nn.Parameter(slot.master.clone()) for slot in slots]
    theirs = torch.optim.SGD(copies, lr=0.1, momentum=0.9)
    mine = SGD(slots, weight_decay=0.0, momentum=0.9)
    for step in range(1, 4):
        gradients = gradients_of(slots, step)
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient.clone()
        theirs.step()
        mine.step(gradients, rate=0.1, step=step, scale=1.0)
    for slot, copy in zip(slots, copies, strict=True):
        torch.testing.assert_close(slot.master, copy.detach(), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_orthogonalise_brings_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    update = orthogonalise(matrix, steps=6)
    values = torch.linalg.svdvals(update)
    assert update.shape == shape and 0.6 < float(values.min()) and float(values.max()) < 1.3
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    aligned = u.mT @ update @ vh.mT
    assert float((aligned - torch.diag(aligned.diagonal())).norm()) < 1e-8, "the singular vectors stay"


def test_muon_moves_matrices_by_the_root_mean_square_of_adamw() -> None:
    """0.2 sqrt(max(rows, columns)) times a semi-orthogonal matrix has root mean square 0.2. arXiv 2502.16982, eq. 4."""
    slots = slots_of((32, 64))
    muon = Muon(
        slots,
        weight_decay=0.0,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        momentum=0.95,
        ns_steps=5,
        iterate_in=torch.float64,
    )
    before = slots[0].master.clone()
    muon.step(gradients_of(slots, 1), rate=0.5, step=1, scale=1.0)
    moved = (slots[0].master - before).square().mean().sqrt() / 0.5
    assert 0.15 < float(moved) < 0.25


CONFIG = DecoderConfig(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_size=8,
    ffn_size=16,
    vocab_size=12,
    padded_vocab_size=16,
    max_position=8,
    qkv_bias=True,
    qk_norm=True,
)


def new_model() -> Decoder:
    model = Decoder(Mesh(), CONFIG).to(torch.float32)
    model.materialise(torch.device("cpu"), seed=0)
    return model


def optimizers(slots: list[Slot]) -> list[Optimizer]:
    adam = dict(beta1=0.9, beta2=0.95, eps=1e-8)
    return [
        SGD(slots, weight_decay=0.1, momentum=0.0),
        AdamW(slots, weight_decay=0.1, **adam),
        Muon(slots, weight_decay=0.1, momentum=0.95, ns_steps=5, iterate_in=torch.float32, **adam),
    ]


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["sgd", "adamw", "muon"])
def test_norms_and_biases_do_not_decay(kind: int) -> None:
    """Rate 1, decay 0.1, zero gradients: matrices shrink by 0.1, nothing else moves. Scenario I-20, one process."""
    model = new_model()
    slots = make_slots(model, hold_in(model, torch.float32))
    before = {slot.name: slot.master.clone() for slot in slots}
    optimizers(slots)[kind].step([torch.zeros_like(s.master) for s in slots], rate=1.0, step=1, scale=1.0)
    for slot in slots:
        factor = 0.9 if slot.master.dim() == 2 else 1.0
        torch.testing.assert_close(slot.master, before[slot.name] * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["sgd", "adamw", "muon"])
def test_compute_copies_are_the_rounded_masters_after_every_step(kind: int) -> None:
    model = new_model()
    slots = make_slots(model, hold_in(model, torch.bfloat16))
    optimizer = optimizers(slots)[kind]
    for step in (1, 2):
        gradients = [torch.randn_like(slot.parameter.detach()) for slot in slots]
        optimizer.step(gradients, rate=1e-3, step=step, scale=0.5)
    for slot in slots:
        assert slot.master.dtype == torch.float32 and slot.parameter.dtype == torch.bfloat16
        assert all(state.dtype == torch.float32 for state in slot.state.values())
        assert torch.equal(slot.parameter.detach(), slot.master.to(torch.bfloat16))


def test_refresh_makes_compute_copies_from_loaded_masters() -> None:
    model = new_model()
    slots = make_slots(model, hold_in(model, torch.bfloat16))
    optimizer = optimizers(slots)[0]
    for slot in slots:
        slot.master.fill_(3.0)
    optimizer.refresh()
    assert all((parameter == 3.0).all() for parameter in model.parameters())
