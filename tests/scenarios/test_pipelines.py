"""Pipelines and spread sequences: things that went wrong for others, by their symptom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from sennit import ops
from sennit.data import Batch
from sennit.device import get_device
from sennit.errors import ConfigError
from sennit.mesh import Mesh, build_mesh
from sennit.models import decoder_config
from sennit.nn import Segment
from sennit.pipeline.channels import TensorSpec
from sennit.pipeline.executor import Executor, PipelineError
from sennit.pipeline.fixed import zb_h1
from sennit.pipeline.plan import plan_pipeline
from sennit.recipe import Recipe, check_run, load_recipe
from sennit.train.trainer import Trainer
from tests.parity.runs import BASE, VOCAB, over_stages, relative
from tests.pipeline.runs import Rows, Run, gradients_of, new_trainer
from tests.ranks import run_ranks


def recipe_of(world: int, **options: str) -> Recipe:
    fields = {**BASE, "train.micro_batch_size": "1", **{name.replace("__", "."): value for name, value in options.items()}}
    return check_run(load_recipe("tiny", fields), world)


# -- I-04 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("balance", ["cost", "even"])
@pytest.mark.parametrize(
    ("layers", "pp", "schedule"), [(30, 4, "1f1b"), (5, 2, "1f1b"), (5, 4, "1f1b"), (7, 2, "interleaved"), (9, 4, "zb-v")]
)
def test_layers_not_divisible_by_pp_are_dropped_silently(layers: int, pp: int, schedule: str, balance: str) -> None:
    recipe = recipe_of(
        pp,
        model__num_layers=str(layers),
        parallel__pp=str(pp),
        parallel__schedule=schedule,
        parallel__stage_balance=balance,
    )
    plan = plan_pipeline(recipe, decoder_config(recipe, VOCAB), 8)
    assert [layer for part in plan.parts for layer in range(part.start, part.stop)] == list(range(layers))
    sizes = [part.stop - part.start for part in plan.parts]
    assert min(sizes) >= 1 and (balance == "cost" or max(sizes) - min(sizes) <= 1)
    assert [part.embeds for part in plan.parts].count(True) == [part.ends for part in plan.parts].count(True) == 1


def names_of(run: Run) -> list[str]:
    trainer = new_trainer(run, build_mesh(pp=run.p), alone=False)
    return sorted(over_stages(trainer.mesh, {slot.name: slot.master for slot in trainer.slots}))


def test_state_dict_keys_change_with_the_pipeline() -> None:
    run = Run("1f1b", 2, 2)
    alone = sorted(slot.name for slot in new_trainer(run, Mesh(), alone=True).slots)
    assert run_ranks(names_of, 2, run) == [alone] * 2


# -- I-05, I-26 ----------------------------------------------------------------------------------------------------------


def trained(run: Run, steps: int, *, alone: bool) -> tuple[list[float], list[float], dict[str, Tensor], int]:
    """Return losses, norms, the weights of all stages, and how many of this rank's parameters count here."""
    mesh = Mesh() if alone else build_mesh(pp=run.p)
    trainer = new_trainer(run, mesh, alone=alone)
    losses, norms = [], []
    for _ in range(steps):
        record = trainer.train_step()
        losses.append(record.loss)
        norms.append(record.grad_norm)
        every = over_stages(mesh, {slot.name: slot.master.clone() for slot in trainer.slots})  # copies must be equal
    return losses, norms, every, sum(trainer._owned)


@pytest.mark.parametrize(
    "run",
    [
        Run("1f1b", 2, 4, tied=True),
        Run("1f1b", 4, 4, tied=True),
        Run("zb-v", 2, 4, tied=True),
        Run("dualpipe", 2, 4, tied=True),
        Run("dualpipe", 4, 8),
    ],
    ids=lambda run: run.id,
)
def test_copies_of_a_weight_drift_apart(run: Run) -> None:
    """Tied ends (I-05) and DualPipe's two copies of each stage (I-26): equal after every step, counted once."""
    losses, norms, weights, count = trained(run, 10, alone=True)
    ranks = run_ranks(trained, run.p, run, 10, alone=False)
    for found_losses, found_norms, found, _ in ranks:
        assert found_losses == pytest.approx(losses, rel=1e-5) and found_norms == pytest.approx(norms, rel=1e-4)
        assert set(found) == set(weights)
        assert max(relative(found[name], weights[name]) for name in weights) < 1e-3
    assert sum(owned for *_, owned in ranks) == count, "every weight counts on exactly one rank"


# -- I-12, I-16 ----------------------------------------------------------------------------------------------------------


def in_three_calls(run: Run) -> dict[str, Tensor]:
    """Return the gradients of 12 microbatches, added up over three runs of a schedule of 4."""
    from functools import partial

    from sennit.train.engine import Stopwatch

    trainer = new_trainer(Run(run.schedule, run.p, 4), build_mesh(pp=run.p), alone=False)
    batches = Rows(12, varying=False).microbatches(0, 0, 1)
    scale = 1.0 / sum(batch.num_loss_tokens() for batch in batches)
    total: dict[str, Tensor] = {}
    for first in range(0, 12, 4):
        made = [partial(trainer._microbatch, batch, scale) for batch in batches[first : first + 4]]
        trainer.engine.train(made, Stopwatch(trainer.device))
        for slot, g in zip(trainer.slots, trainer.engine.gradients.collect(), strict=True):
            total[slot.name] = total[slot.name] + g if slot.name in total else g.clone()
    return over_stages(trainer.mesh, total)


def test_gradients_shrink_with_every_call_of_the_schedule() -> None:
    _, expected = gradients_of(new_trainer(Run("1f1b", 2, 12), Mesh(), alone=True))
    for found in run_ranks(in_three_calls, 2, Run("1f1b", 2, 12)):
        assert max(relative(found[name], expected[name]) for name in expected) < 1e-5


def test_clipping_uses_only_the_local_stage() -> None:
    options = (("optimizer.clip_norm", "0.1"), ("optimizer.kind", "sgd"))
    run = Run("1f1b", 4, 4, options=options)

    def one(alone: bool) -> tuple[float, dict[str, Tensor]]:
        mesh = Mesh() if alone else build_mesh(pp=4)
        trainer = new_trainer(run, mesh, alone=alone)
        for slot in trainer.slots:
            if slot.name == "head.weight":
                slot.master.mul_(10.0)
        norm = trainer.train_step().grad_norm
        return norm, over_stages(mesh, {slot.name: slot.master.clone() for slot in trainer.slots})

    norm, weights = one(True)
    assert norm > 0.1
    for found_norm, found in run_ranks(one, 4, False):
        assert found_norm == pytest.approx(norm, rel=1e-5)
        assert max(relative(found[name], weights[name]) for name in weights) < 1e-5


# -- I-22, I-23 ----------------------------------------------------------------------------------------------------------


class OneStage:
    """A stage made of a function of the weights; its input is made up by itself, without a gradient."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def forward(self, microbatch: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self._forward(microbatch),)

    def input_specs(self, microbatch: int) -> tuple[TensorSpec, ...]:
        return ()

    def output_specs(self, microbatch: int) -> tuple[TensorSpec, ...]:
        return ()

    def segments(self, microbatch: int) -> list[Segment]:
        return [Segment("all", "compute", lambda *inputs: self.forward(microbatch, inputs))]


@pytest.mark.parametrize("split", [(6, 6), (4, 8)])
def test_gradients_of_a_split_output_all_go_to_its_first_part(split: tuple[int, int]) -> None:
    """A gated MLP cut by chunk or an uneven split, under a zero-bubble schedule on one rank, from inputs that need no
    gradient (I-23)."""
    torch.manual_seed(0)
    first = torch.randn(12, 5, requires_grad=True)
    second = torch.randn(3, min(split), requires_grad=True)
    x = torch.randn(4, 7, 5)

    def loss(microbatch: int) -> Tensor:
        a, b = ops.linear(x[microbatch], first).split(list(split), -1)
        a, b = a[..., : min(split)], b[..., : min(split)]
        return ops.linear(a * functional.silu(b), second).square().sum()

    Executor(zb_h1(1, 4), 0, {0: OneStage(loss)}, None).step()
    found = [first.grad, second.grad]
    first.grad = second.grad = None
    for microbatch in range(4):
        loss(microbatch).backward()
    for mine, weight in zip(found, (first, second), strict=True):
        assert mine is not None and weight.grad is not None
        torch.testing.assert_close(mine, weight.grad)


def test_a_frozen_stage_makes_weight_work() -> None:
    frozen = torch.randn(3, 5)
    x = torch.randn(2, 7, 5, requires_grad=True)
    stage = OneStage(lambda i: ops.linear(x[i], frozen).sum())
    Executor(zb_h1(1, 2), 0, {0: stage}, None).step()
    assert x.grad is not None and frozen.grad is None


# -- I-24, I-25 ----------------------------------------------------------------------------------------------------------


def test_uneven_microbatches_fail_on_shapes() -> None:
    with pytest.raises(ConfigError, match=r"train.global_batch_size=8 is not a multiple .* 3 x 1 = 3"):
        recipe_of(3, parallel__pp="3", train__global_batch_size="8", train__micro_batch_size="3")


def losses_of_varying_lengths(schedule: str, pp: int, tp: int) -> list[float]:
    mesh = build_mesh(pp=pp, tp=tp)
    recipe = recipe_of(
        pp * tp,
        model__num_layers="8",
        parallel__pp=str(pp),
        parallel__tp=str(tp),
        parallel__schedule=schedule,
        train__global_batch_size="8",
    )
    loader: Any = Rows(8, varying=True)
    trainer = Trainer(recipe, mesh, get_device("cpu"), train_loader=loader, vocab_size=VOCAB)
    return [trainer.train_step().loss for _ in range(5)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_another_sequence_length_hangs_or_is_cut(schedule: str) -> None:
    """Lengths that change from microbatch to microbatch and from step to step, pp = 4 and tp = 2."""
    recipe = recipe_of(1, model__num_layers="8", train__global_batch_size="8")
    loader: Any = Rows(8, varying=True)
    trainer = Trainer(recipe, Mesh(), get_device("cpu"), train_loader=loader, vocab_size=VOCAB)
    expected = [trainer.train_step().loss for _ in range(5)]
    for found in run_ranks(losses_of_varying_lengths, 8, schedule, 4, 2, timeout=100):
        assert found == pytest.approx(expected, rel=1e-9)


# -- I-41, I-43 ----------------------------------------------------------------------------------------------------------


class TwoDocuments:
    """One row of two documents of 10 and 22 tokens, of which only the second counts; `shift` changes the first."""

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def microbatches(self, step: int, rank: int, size: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(5)
        stream = torch.randint(0, VOCAB - 1, (1, 33), generator=generator)
        tokens, labels = stream[:, :-1].clone(), stream[:, 1:].clone()
        tokens[:, :10] += self.shift
        labels[:, :10] = -100
        positions = torch.tensor([[*range(10), *range(22)]])
        return [Batch(tokens, labels, positions, [[10, 22]])]


def loss_of_second(shift: int, layout: dict[str, Any]) -> float:
    mesh = build_mesh(**layout) if layout else Mesh()
    options = {f"parallel__{name}": str(size) for name, size in layout.items()}
    world = layout.get("pp", 1) * layout.get("cp", 1)
    recipe = recipe_of(world, train__seq_len="32", train__global_batch_size="1", **options)
    loader: Any = TwoDocuments(shift)
    return Trainer(recipe, mesh, get_device("cpu"), train_loader=loader, vocab_size=VOCAB).train_step().loss


@pytest.mark.parametrize("layout", [{"cp": 2}, {"pp": 2}, {"cp": 4}], ids=str)
def test_a_packed_document_sees_the_one_before_it(layout: dict[str, int]) -> None:
    world = next(iter(layout.values()))
    alone = loss_of_second(0, {})
    for shift in (0, 1):
        for found in run_ranks(loss_of_second, world, shift, layout):
            assert found == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize(("length", "cp", "nearest"), [(30, 4, "24 or 32"), (2999, 4, "2992 or 3000"), (6, 4, "8")])
def test_a_length_not_divisible_by_twice_cp_fails_in_backward(length: int, cp: int, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_of(cp, parallel__cp=str(cp), train__seq_len=str(length))
    for word in (f"train.seq_len={length}", f"parallel.cp={cp}", "2 x 4 pieces", nearest):
        assert word in str(caught.value)


def losses_of_odd_lengths(cp: int, kind: str) -> list[float]:
    mesh = build_mesh(cp=cp, ulysses={"ring": 1, "ulysses": cp, "both": 2}[kind]) if cp > 1 else Mesh()
    recipe = recipe_of(cp, parallel__cp=str(cp), parallel__cp_kind=kind, train__global_batch_size="4")
    loader: Any = Rows(4, varying=True)
    trainer = Trainer(recipe, mesh, get_device("cpu"), train_loader=loader, vocab_size=VOCAB)
    return [value for _ in range(3) for value in (trainer.train_step().loss,)]


@pytest.mark.parametrize(("cp", "kind"), [(2, "ring"), (4, "ring"), (2, "ulysses"), (4, "ulysses"), (4, "both")])
def test_odd_lengths_are_filled_up_without_changing_the_loss(cp: int, kind: str) -> None:
    expected = losses_of_odd_lengths(1, "ring")
    for found in run_ranks(losses_of_odd_lengths, cp, cp, kind):
        assert found == pytest.approx(expected, rel=1e-10)


# -- failures ------------------------------------------------------------------------------------------------------------


def fails_on_the_last_rank() -> str:
    run = Run("1f1b", 2, 4)
    trainer = new_trainer(run, build_mesh(pp=2), alone=False)
    if trainer.mesh.pp.rank == 1:
        def broken(*_: Any) -> Any:
            raise FloatingPointError("no more numbers")

        trainer.engine.stages[1].forward = broken  # type: ignore[attr-defined]
    with pytest.raises(PipelineError) as caught:
        trainer.train_step()
    if trainer.mesh.pp.rank == 0:
        return str(caught.value)
    raise caught.value


def test_one_rank_fails_and_the_others_wait_for_ever() -> None:
    """The rank that failed says where in the schedule; the others end within seconds."""
    with pytest.raises(AssertionError) as caught:
        run_ranks(fails_on_the_last_rank, 2, timeout=30)
    assert "Pipeline rank 1 of 2 failed in schedule 1f1b at 1F0 (item 1 of 9)" in str(caught.value)
    assert "FloatingPointError: no more numbers" in str(caught.value) and "no end after" not in str(caught.value)
