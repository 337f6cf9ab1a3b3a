"""What went wrong with steps, schedules and restarts elsewhere, named by the symptom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from sennit.mesh import Mesh
from sennit.nn import leaf_of
from sennit.train.gradients import local_data
from sennit.train.trainer import MAX_BAD_STEPS, Trainer, TrainingError
from tests.parity.runs import Case, mesh_of, new_trainer, weights
from tests.ranks import run_ranks


def numbers(trainer: Trainer, steps: int) -> list[tuple[Any, ...]]:
    records = [trainer.train_step() for _ in range(steps)]
    return [(r.step, r.loss, r.grad_norm, r.lr, r.tokens) for r in records]


def copy_of(trainer: Trainer, case: Case) -> Trainer:
    """Return a new trainer that has taken over the state of `trainer`, as a checkpoint does, and nothing else."""
    other = new_trainer(case, trainer.mesh)
    state = trainer.state()
    target = other.state()
    for name, master in state["model"].items():
        local_data(target["model"][name]).copy_(local_data(master))
    for name, tensors in state["optimizer"].items():
        for key, tensor in tensors.items():
            local_data(target["optimizer"][name][key]).copy_(local_data(tensor))
    other.restore(trainer.progress(), state["random"]["cpu"])
    return other


def restarts(layout: str, kind: str) -> None:
    case = Case(layout, optimizer=kind, accumulate=2, dropout=0.5, options=(("precision.dtype", "bf16"),))
    mesh = Mesh() if layout == "one" else mesh_of(layout)
    through = new_trainer(case, mesh)
    numbers(through, 3)
    resumed = copy_of(through, case)
    for slot in resumed.slots:
        shadow = slot.shadow
        if shadow is not None:
            assert torch.equal(shadow, local_data(slot.master).bfloat16()), "right after the load"
    assert numbers(resumed, 3) == numbers(through, 3)
    for mine, theirs in zip(resumed.slots, through.slots, strict=True):
        assert torch.equal(local_data(mine.master), local_data(theirs.master)), mine.name


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_the_loss_jumps_after_resume(kind: str) -> None:
    """I-50, and I-09 for dropout: a bf16 run that is taken up again goes on bit for bit, on one process and sharded."""
    restarts("one", kind)
    run_ranks(restarts, 2, "fsdp2", kind)


SCHEDULE = (("lr.schedule", "cosine"), ("lr.warmup_steps", "5"), ("train.steps", "20"))


def test_warm_up_starts_again_after_resume() -> None:
    """I-47: the same rates as without the stop; with another total, those of a run that always had it; a new run that
    takes over weights only starts its own schedule."""
    case = Case("one", options=SCHEDULE)
    trainer = new_trainer(case, Mesh())
    rates = [trainer.rate(step) for step in range(20)]
    numbers(trainer, 8)
    assert [record[3] for record in numbers(copy_of(trainer, case), 12)] == rates[8:]
    longer = Case("one", options=(*SCHEDULE, ("lr.total_steps", "40")))
    expected = [new_trainer(longer, Mesh()).rate(step) for step in range(8, 12)]
    assert [record[3] for record in numbers(copy_of(trainer, longer), 4)] == expected
    assert expected[0] > rates[8], "a longer cosine is higher at the same step"
    weights_only = new_trainer(case, Mesh())
    for mine, theirs in zip(weights_only.slots, trainer.slots, strict=True):
        mine.master.copy_(theirs.master)
    assert numbers(weights_only, 1)[0][3] == rates[0]


def broken_on_the_last_rank(layout: str) -> tuple[bool, bool, int]:
    """Return (skipped, weights unchanged, updates) of a step in which the last rank alone makes a NaN."""
    trainer = new_trainer(Case(layout, optimizer="adamw"), mesh_of(layout))
    trainer.train_step()
    before = weights(trainer)
    if dist.get_rank() == dist.get_world_size() - 1:
        slot = next(slot for slot in trainer.slots if slot.name == "layers.0.mlp.up.weight")
        handle = leaf_of(slot.parameter).register_hook(lambda grad: grad * float("nan"))
        record = trainer.train_step()
        handle.remove()
    else:
        record = trainer.train_step()
    after = weights(trainer)
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    later = trainer.train_step()
    assert not later.skipped
    return record.skipped, unchanged, trainer.updates


@pytest.mark.parametrize("layout", ["dp2", "tp2-sp"])
def test_a_nan_on_one_rank_makes_the_copies_drift_apart(layout: str) -> None:
    """Every rank skips the step, the optimizer does not count it, and the next one is a good one."""
    assert run_ranks(broken_on_the_last_rank, 2, layout) == [(True, True, 2)] * 2


def test_a_run_of_nan_losses_goes_on_for_ever() -> None:
    trainer = new_trainer(Case("one"), Mesh())
    slot = trainer.slots[0]
    good = slot.master.clone()
    slot.master.fill_(float("nan"))
    for _ in range(MAX_BAD_STEPS - 1):
        assert trainer.train_step().skipped
    slot.master.copy_(good)
    assert not trainer.train_step().skipped, "a good step starts the count again"
    slot.master.fill_(float("nan"))
    for _ in range(MAX_BAD_STEPS - 1):
        assert trainer.train_step().skipped
    with pytest.raises(TrainingError, match=f"not finite for {MAX_BAD_STEPS} steps in a row") as error:
        trainer.train_step()
    assert "lr.peak" in str(error.value) and error.value.exit_code == 3
