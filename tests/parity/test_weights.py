"""Weights: where they start, which of them decay, and that copies stay equal."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from sennit.train.gradients import local_data
from tests.parity.cases import reference
from tests.parity.runs import LAYOUTS, Case, mesh_of, new_trainer, weights
from tests.ranks import run_ranks

Weights = dict[str, torch.Tensor]


def differing_starts(layouts: list[str], families: dict[str, Weights]) -> list[str]:
    """Return the weights that do not start, bit for bit, as in one process. Collective."""
    wrong = []
    for layout in layouts:
        for family, expected in families.items():
            trainer = new_trainer(Case(layout, family), mesh_of(layout))
            found = weights(trainer)
            wrong += [f"{layout} {family} {name}" for name in expected if not torch.equal(found[name], expected[name])]
            if trainer.mesh.pp.size > 1:
                continue  # other ranks hold other weights
            local = local_data(trainer.slots[0].master)
            shards = [torch.empty_like(local) for _ in range(dist.get_world_size())]
            dist.all_gather(shards, local.contiguous())
            split = trainer.mesh.tp.size * trainer.mesh.shard.size
            distinct = len({shard.numpy().tobytes() for shard in shards if shard.any()})
            wrong += [f"{layout} {family}: {distinct} distinct shards"] if distinct > split else []
            wrong += [f"{layout} {family}: shards repeat"] if distinct == 1 and split > 2 else []
    return wrong


@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_initial_weights_do_not_depend_on_the_layout(world: int) -> None:
    """Scenario I-07, for every layout, with biases, qk-norms, tied and untied heads and repeated kv heads."""
    families = {name: reference(Case("one", name)).initial for name in ("llama", "llama-tied", "qwen2", "qwen3")}
    layouts = [name for name, layout in LAYOUTS.items() if layout.world == world]
    for wrong in run_ranks(differing_starts, world, layouts, families):
        assert wrong == []


def not_decayed_right(layout: str, kind: str) -> list[str]:
    case = Case(layout, "qwen3", kind, options=(("model.qkv_bias", "true"),))
    trainer = new_trainer(case, mesh_of(layout))
    before = weights(trainer)
    zeros = [torch.zeros_like(local_data(slot.master)) for slot in trainer.slots]
    trainer.optimizer.step(zeros, rate=1.0, step=1, scale=1.0)
    after = weights(trainer)
    factor = {name: 0.9 if before[name].dim() == 2 else 1.0 for name in before}
    return [name for name in before if not torch.allclose(after[name], before[name] * factor[name], rtol=1e-12)]


@pytest.mark.parametrize("kind", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
def test_only_matrices_decay_in_every_layout(layout: str, kind: str) -> None:
    """Rate 1, decay 0.1, zero gradients, one step: flattened or split shards must not change what is a matrix. I-20."""
    for wrong in run_ranks(not_decayed_right, 2, layout, kind):
        assert wrong == []


def norm_weights(layout: str) -> Weights:
    trainer = new_trainer(Case(layout, "qwen3", "sgd"), mesh_of(layout))
    for _ in range(5):
        trainer.train_step()
    return {slot.name: local_data(slot.master).clone() for slot in trainer.slots if "norm" in slot.name}


@pytest.mark.parametrize("layout", ["tp2-sp", "tp2"])
def test_norm_weights_do_not_drift_apart_over_tp(layout: str) -> None:
    """Five steps with qk-norm, with and without sequence parallelism: bit-equal copies, and they did move. I-06, I-59."""
    first, second = run_ranks(norm_weights, 2, layout)
    assert len(first) == 17
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name
        assert not torch.equal(weight, torch.ones_like(weight)), name
