"""A run starts from the weights of another, on any layout, and of nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sennit.errors import CheckpointError, ConfigError
from sennit.mesh import build_mesh
from sennit.models.hf import init_weights
from sennit.nn.parameter import local_part
from tests.models.runs import make_run, tiny_recipe, tiny_trainer, weights_of
from tests.ranks import run_ranks

LAYOUTS = ({"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2})


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_weights_come_over_on_every_layout(layout: Any, tmp_path: Path) -> None:
    whole = weights_of(make_run(tmp_path / "run"))
    world = 4 if len(layout) == 2 else 2
    fields = {f"parallel__{name}": str(size) for name, size in layout.items()}

    def rank() -> None:
        recipe = tiny_recipe(world, run__seed="9", precision__dtype="bf16", **fields)
        trainer = tiny_trainer(recipe, build_mesh(**layout))
        init_weights(trainer, tmp_path / "run")
        for slot in trainer.slots:
            part, start = local_part(slot.master)
            index = tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))
            assert torch.equal(part, whole[slot.name][index]), slot.name
            if slot.shadow is not None:
                assert torch.equal(slot.shadow, part.bfloat16()), slot.name
        assert trainer.step == 0 and not any(local_part(s.state["exp_avg"])[0].any() for s in trainer.slots)

    run_ranks(rank, world)


def test_another_model_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="model.ffn_size is 64 here and 48 there"):
        init_weights(tiny_trainer(tiny_recipe(model__ffn_size="64")), tmp_path / "run")
    with pytest.raises(ConfigError, match="model.vocab_multiple"):
        init_weights(tiny_trainer(tiny_recipe(model__vocab_multiple="512")), tmp_path / "run")


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "step-0"
    largest = max((path for path in step.iterdir()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    trainer = tiny_trainer(tiny_recipe(run__seed="9"))
    before = {name: master.clone() for name, master in weights_of(trainer).items()}
    with pytest.raises(CheckpointError, match=largest.name):
        init_weights(trainer, step)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        init_weights(trainer, tmp_path / "run")
    assert all(torch.equal(before[name], master) for name, master in weights_of(trainer).items())
