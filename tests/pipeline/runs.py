"""Float32 steps of a tiny decoder, through a pipeline and in one process, that must agree bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sennit.data import Batch
from sennit.device import get_device
from sennit.mesh import Mesh, build_mesh
from sennit.recipe import Recipe, check_run, load_recipe
from sennit.recipe.schedules import PipelineSchedule, schedule_problems
from sennit.train.engine import Pipeline, Stopwatch
from sennit.train.trainer import Trainer
from tests.parity.runs import BASE, VOCAB, over_stages

LENGTHS = (16, 9, 12, 5)
"""Sequence lengths of the microbatches, in turn, where they vary."""

TWO_CHUNKS = {"interleaved", "zb-v", "v-half", "v-min", "dualpipev"}


@dataclass(frozen=True)
class Run:
    """A training step: `m` microbatches of one row each over `p` pipeline ranks. `options`: recipe fields."""

    schedule: str
    p: int
    m: int
    tied: bool = False
    varying: bool = False
    options: tuple[tuple[str, str], ...] = ()

    @property
    def id(self) -> str:
        parts = [self.schedule, f"p{self.p}", f"m{self.m}"]
        parts += ["tied"] if self.tied else []
        parts += ["varying"] if self.varying else []
        return "-".join(parts + [value for _, value in self.options])

    def recipe(self, *, alone: bool) -> Recipe:
        """Return the recipe of the run, or of the same step in one process."""
        fields = {
            **BASE,
            "model.num_layers": "9" if self.schedule in TWO_CHUNKS and self.p == 4 else "5",
            "model.tie_embeddings": str(self.tied).lower(),
            "precision.dtype": "fp32",
            "train.global_batch_size": str(self.m),
            "train.micro_batch_size": "1",
        }
        layout = {"parallel.pp": str(self.p), "parallel.schedule": self.schedule, "parallel.stage_balance": "even"}
        options = dict(self.options)
        if alone:
            options = {name: value for name, value in options.items() if not name.startswith("parallel.")}
        return check_run(load_recipe("tiny", {**fields, **({} if alone else layout), **options}), 1 if alone else self.p)


class Rows:
    """A loader whose microbatches are made from the step number; one row each, of varying length on request."""

    def __init__(self, m: int, *, varying: bool) -> None:
        self.m, self.varying = m, varying

    def microbatches(self, step: int, rank: int, size: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(100 + step)
        batches = []
        for index in range(self.m):
            length = LENGTHS[(index + step) % len(LENGTHS)] if self.varying else LENGTHS[0]
            stream = torch.randint(0, VOCAB, (1, length + 1), generator=generator)
            labels = stream[:, 1:].clone()
            labels[0, index % length] = -100
            batches.append(Batch(stream[:, :-1].clone(), labels, torch.arange(length)[None], None))
        return batches


def new_trainer(run: Run, mesh: Mesh, *, alone: bool) -> Trainer:
    """Return the trainer of `run` on this rank, or alone in one process."""
    loader: Any = Rows(run.m, varying=run.varying)
    return Trainer(run.recipe(alone=alone), mesh, get_device("cpu"), train_loader=loader, vocab_size=VOCAB)


def gradients_of(trainer: Trainer) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients by name of the first step, before clipping."""
    kept: dict[str, Tensor] = {}
    real = trainer.engine.gradients.collect

    def collect() -> list[Tensor]:
        found = real()
        kept.update((slot.name, g.clone()) for slot, g in zip(trainer.slots, found, strict=True))
        return found

    trainer.engine.gradients.collect = collect  # type: ignore[method-assign]
    record = trainer.train_step()
    return record.loss, kept


def reference(run: Run) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and gradients of one process; for DualPipe the sum of those of its two halves."""
    trainer = new_trainer(run, Mesh(), alone=True)
    if run.schedule != "dualpipe":
        return gradients_of(trainer)
    batches = trainer.train_loader.microbatches(0, 0, 1)
    scale = 1.0 / sum(batch.num_loss_tokens() for batch in batches)
    (loss_a, a), (loss_b, b) = (half_of(trainer, half, scale) for half in (batches[: run.m // 2], batches[run.m // 2 :]))
    total = {}
    for name, uses in a.items():
        # A rank that embeds one half has the head of the other.
        crossed = [first + second for first, second in zip(uses, reversed(b[name]), strict=True)]
        total[name] = uses[0] + b[name][0] if len(uses) == 1 else crossed[0] + crossed[1]
    return loss_a + loss_b, total


def half_of(trainer: Trainer, batches: list[Batch], scale: float) -> tuple[float, dict[str, list[Tensor]]]:
    """Return the loss of `batches`, and their gradients by name for each use of the weight."""
    made = [partial(trainer._microbatch, batch, scale) for batch in batches]
    reducer: Any = trainer.engine.gradients
    reducer.begin(len(made))
    real, reducer.begin = reducer.begin, lambda count: setattr(reducer, "_keep_native", False)  # sums, also of one
    loss = float(trainer.engine.train(made, Stopwatch(trainer.device)))
    reducer.begin = real
    kept = {}
    for index, slot in enumerate(trainer.slots):
        uses = sorted(use for place, use in reducer._sums if place == index)
        kept[slot.name] = [reducer._sums[index, use].clone() for use in uses]
    return loss, kept


def differences(runs: list[Run], references: dict[Run, tuple[float, dict[str, Tensor]]]) -> dict[Run, list[str]]:
    """Return, by run, what is not bitwise equal to its reference. Collective."""
    mesh = build_mesh(pp=runs[0].p)
    found: dict[Run, list[str]] = {}
    for run in runs:
        trainer = new_trainer(run, mesh, alone=False)
        assert isinstance(trainer.engine, Pipeline)
        loss, mine = gradients_of(trainer)
        every = over_stages(mesh, mine)
        expected_loss, expected = references[run]
        wrong = [] if loss == expected_loss else [f"loss {loss} instead of {expected_loss}"]
        wrong += [f"{name} missing" for name in expected if name not in every]
        wrong += [
            f"{name} off by {float((every[name] - expected[name]).abs().max())}"
            for name in expected
            if name in every and not torch.equal(every[name], expected[name])
        ]
        found[run] = wrong
    return found


def legal_counts(schedule: str, p: int) -> list[int]:
    """Return every number of microbatches up to 4 p that the schedule takes."""
    return [m for m in range(1, 4 * p + 1) if not schedule_problems(schedule, p, m)]


SCHEDULES = tuple(str(name) for name in PipelineSchedule)

__all__ = ["LENGTHS", "SCHEDULES", "Run", "differences", "legal_counts", "new_trainer", "reference"]
