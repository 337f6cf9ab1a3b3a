"""Tiny runs on any layout, traced so that they can be compared with the same run in one process.

A `Case` names a layout, a family, an optimizer and the shape of the data. `trace` trains it for a few steps and keeps
losses, norms, full gradients and full weights; `compare` gives the relative error of one trace against another.
All data are made in memory from the step number, so a case is the same run in every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sennit.data import Batch
from sennit.device import get_device
from sennit.mesh import Mesh, build_mesh
from sennit.recipe import Recipe, check_run, load_recipe
from sennit.train import trainer as trainer_module
from sennit.train.gradients import local_data
from sennit.train.optimizer import _like
from sennit.train.trainer import StepRecord, Trainer

ROWS, LENGTH, VOCAB, STEPS = 8, 16, 131, 3
TOLERANCE = 1e-10
"""Relative; float64 sums in another order differ by about 1e-15."""


@dataclass(frozen=True)
class Layout:
    """How a case's ranks are arranged; the world size is the product."""

    name: str
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    sequence_parallel: bool = True
    reshard: bool = True
    schedule: str = "1f1b"
    cp_kind: str = "ring"
    options: tuple[tuple[str, str], ...] = ()

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    def overrides(self) -> dict[str, str]:
        return {
            "parallel.pp": str(self.pp),
            "parallel.schedule": self.schedule,
            "parallel.cp": str(self.cp),
            "parallel.cp_kind": self.cp_kind,
            "parallel.dp_replicate": str(self.dp_replicate),
            "parallel.dp_shard": str(self.dp_shard),
            "parallel.tp": str(self.tp),
            "parallel.sequence_parallel": str(self.sequence_parallel).lower(),
            "parallel.reshard_after_forward": str(self.reshard).lower(),
            **dict(self.options),
        }


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("one"),
        Layout("dp2", dp_replicate=2),
        Layout("dp4", dp_replicate=4),
        Layout("fsdp2", dp_shard=2),
        Layout("fsdp2-keep", dp_shard=2, reshard=False),
        Layout("fsdp4", dp_shard=4),
        Layout("fsdp4-keep", dp_shard=4, reshard=False),
        Layout("hsdp2x2", dp_replicate=2, dp_shard=2),
        Layout("tp2", tp=2, sequence_parallel=False),
        Layout("tp2-sp", tp=2),
        Layout("tp4", tp=4, sequence_parallel=False),
        Layout("tp4-sp", tp=4),
        Layout("dp2-tp2", dp_replicate=2, tp=2, sequence_parallel=False),
        Layout("dp2-tp2-sp", dp_replicate=2, tp=2),
        Layout("fsdp2-tp2", dp_shard=2, tp=2, sequence_parallel=False),
        Layout("fsdp2-tp2-sp", dp_shard=2, tp=2),
        Layout("hsdp2x2-tp2-sp", dp_replicate=2, dp_shard=2, tp=2),
        Layout("cp2", cp=2),
        Layout("cp2-ulysses", cp=2, cp_kind="ulysses"),
        Layout("cp4", cp=4),
        Layout("cp4-ulysses", cp=4, cp_kind="ulysses"),
        Layout("cp4-both", cp=4, cp_kind="both"),
        Layout("cp2-tp2-sp", cp=2, tp=2),
        Layout("cp2-ulysses-tp2", cp=2, tp=2, cp_kind="ulysses", sequence_parallel=False),
        Layout("cp2-dp2", cp=2, dp_replicate=2),
        Layout("cp2-fsdp2", cp=2, dp_shard=2),
        Layout("cp2-hsdp2x2", cp=2, dp_shard=2, dp_replicate=2),
        Layout("pp2-cp2", pp=2, cp=2, schedule="zb-h1"),
        Layout("pp2-fsdp2-cp2-tp2", pp=2, dp_shard=2, cp=2, tp=2, schedule="zb-v"),
        Layout("pp2-cp2-tp2-dualpipe", pp=2, cp=2, tp=2, schedule="dualpipe"),
        Layout("pp2-tp2-overlap", pp=2, tp=2, schedule="dualpipev", options=(("parallel.overlap", "true"),)),
        Layout("pp2", pp=2),
        Layout("pp2-interleaved", pp=2, schedule="interleaved"),
        Layout("pp2-zb-v", pp=2, schedule="zb-v"),
        Layout("pp2-dualpipe", pp=2, schedule="dualpipe"),
        Layout("pp2-fsdp2", pp=2, dp_shard=2, schedule="zb-h1"),
        Layout("pp2-fsdp2-interleaved", pp=2, dp_shard=2, schedule="interleaved"),
        Layout("pp2-fsdp2-dualpipev-tied", pp=2, dp_shard=2, schedule="dualpipev"),
        Layout("pp2-dp2-dualpipe", pp=2, dp_replicate=2, schedule="dualpipe"),
        Layout("pp2-tp2-sp", pp=2, tp=2, schedule="zb-h1"),
        Layout("pp2-hsdp2x2", pp=2, dp_replicate=2, dp_shard=2, schedule="zb-h2"),
        Layout("pp2-fsdp2-tp2-sp-zb-v", pp=2, dp_shard=2, tp=2, schedule="zb-v"),
    )
}

FAMILIES: dict[str, dict[str, str]] = {
    "llama": {},
    "llama-tied": {"model.tie_embeddings": "true"},
    "qwen2": {"model.family": "qwen2", "model.qkv_bias": "true"},
    "qwen3": {"model.family": "qwen3", "model.qk_norm": "true", "model.head_size": "16"},
    "mistral": {"model.family": "mistral", "model.sliding_window": "5"},
}

OPTIMIZERS: dict[str, dict[str, str]] = {
    "sgd": {"optimizer.kind": "sgd", "optimizer.clip_norm": "0", "optimizer.momentum": "0.5", "lr.peak": "0.1"},
    "adamw": {"optimizer.kind": "adamw", "optimizer.clip_norm": "0.05", "lr.peak": "0.01"},
    "muon": {"optimizer.kind": "muon", "optimizer.clip_norm": "0.05", "lr.peak": "0.01"},
}

BASE = {
    "model.hidden_size": "32",
    "model.num_layers": "4",
    "model.num_heads": "4",
    "model.num_kv_heads": "2",
    "model.ffn_size": "48",
    "model.vocab_multiple": "128",
    "model.init_std": "0.2",
    "train.steps": "10",
    "train.seq_len": str(LENGTH),
    "train.global_batch_size": str(ROWS),
    "precision.dtype": "fp64",
    "lr.schedule": "linear",
    "lr.warmup_steps": "2",
    "run.seed": "7",
}


@dataclass(frozen=True)
class Case:
    """One run. `data`: plain, packed (documents, uneven masks), idle (the second half of the batch has no counted
    token) or none (no counted token at all). `accumulate`: microbatches a step on every rank."""

    layout: str
    family: str = "llama"
    optimizer: str = "sgd"
    data: str = "packed"
    accumulate: int = 1
    options: tuple[tuple[str, str], ...] = ()
    dropout: float = 0.0
    steps: int = STEPS

    @property
    def id(self) -> str:
        parts = [self.layout, self.family, self.optimizer, self.data]
        parts += [f"accumulate{self.accumulate}"] if self.accumulate > 1 else []
        parts += [f"dropout{self.dropout}"] if self.dropout else []
        return "-".join(parts + [value for _, value in self.options])

    @property
    def world(self) -> int:
        return LAYOUTS[self.layout].world

    @property
    def accumulated(self) -> int:
        """Microbatches a step: as many as a pipeline needs, if that is more than `accumulate`."""
        layout = LAYOUTS[self.layout]
        return max(self.accumulate, min(4, ROWS // layout.data_ranks) if layout.pp > 1 else 1)

    def alone(self) -> Case:
        """Return the same run in one process and one microbatch, without recomputation."""
        options = tuple(option for option in self.options if not option[0].startswith("recompute."))
        return Case("one", self.family, self.optimizer, self.data, 1, options, self.dropout, self.steps)

    def recipe(self) -> Recipe:
        layout = LAYOUTS[self.layout]
        overrides = {
            **BASE,
            **FAMILIES[self.family],
            **OPTIMIZERS[self.optimizer],
            **layout.overrides(),
            "train.micro_batch_size": str(ROWS // layout.data_ranks // self.accumulated),
            **dict(self.options),
        }
        return check_run(load_recipe("tiny", overrides), layout.world)


@dataclass
class MemoryLoader:
    """Global batches made from the step number; a rank takes its rows of them."""

    data: str
    micro_batch_size: int

    def microbatches(self, step: int, rank: int, size: int) -> list[Batch]:
        tokens, labels, documents = global_batch(step, self.data)
        positions = [[i for length in row for i in range(length)] for row in documents]
        share = ROWS // size
        batches = []
        for first in range(rank * share, (rank + 1) * share, self.micro_batch_size):
            rows = slice(first, first + self.micro_batch_size)
            packed = None if self.data == "plain" else documents[rows]
            batches.append(Batch(tokens[rows], labels[rows], torch.tensor(positions[rows]), packed))
        return batches


def global_batch(step: int, data: str) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Return tokens [rows, s], labels [rows, s] and each row's document lengths. Token 130, the last one, occurs."""
    generator = torch.Generator().manual_seed(1000 + step)
    stream = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    stream[::2, 3] = VOCAB - 1
    tokens, labels = stream[:, :-1].clone(), stream[:, 1:].clone()
    if data == "plain":
        return tokens, labels, [[LENGTH]] * ROWS
    documents = [[5, 11], [16], [1, 2, 13], [8, 8], [7, 9], [3, 3, 10], [15, 1], [4, 12]]
    counted = {"packed": [16, 3, 9, 1, 14, 0, 7, 16], "idle": [16, 3, 9, 1, 0, 0, 0, 0], "none": [0] * ROWS}[data]
    for row, number in enumerate(counted):
        order = torch.randperm(LENGTH, generator=generator)
        labels[row, order[number:]] = -100
        labels[row, torch.tensor(documents[row]).cumsum(0) - 1] = -100
    return tokens, labels, documents


@dataclass
class Trace:
    """What a run did, as full tensors on every rank."""

    records: list[StepRecord] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)
    final: dict[str, Tensor] = field(default_factory=dict)
    disagreement: float = 0.0


def new_trainer(case: Case, mesh: Mesh) -> Trainer:
    recipe = case.recipe()
    with pytest.MonkeyPatch.context() as patch:
        if case.dropout:
            real = trainer_module.decoder_config
            from dataclasses import replace

            patch.setattr(trainer_module, "decoder_config", lambda *a: replace(real(*a), dropout=case.dropout))
        loader: Any = MemoryLoader(case.data, recipe.train.micro_batch_size)
        return Trainer(recipe, mesh, get_device("cpu"), train_loader=loader, vocab_size=VOCAB)


@cache
def mesh_of(layout: str) -> Mesh:
    """Return the mesh of `layout` over the ranks of this process; collective, once a process."""
    wanted = LAYOUTS[layout]
    parallel = Case(layout).recipe().parallel
    return build_mesh(
        pp=wanted.pp,
        dp_replicate=wanted.dp_replicate,
        dp_shard=wanted.dp_shard,
        cp=wanted.cp,
        tp=wanted.tp,
        ulysses=parallel.ulysses,
    )


def full(like: Tensor, local: Tensor) -> Tensor:
    """Return the full tensor of which this rank holds `local`, placed like the parameter `like`."""
    placed = _like(like, local)
    return placed.full_tensor() if hasattr(placed, "full_tensor") else placed  # type: ignore[attr-defined]


def trace(case: Case) -> Trace:
    """Train `case` on this rank's place in its layout. Collective."""
    trainer = new_trainer(case, mesh_of(case.layout))
    result = Trace(initial=weights(trainer))
    with recording(trainer, result.gradients):
        for _ in range(case.steps):
            result.records.append(trainer.train_step())
    result.final = weights(trainer)
    result.disagreement = disagreement(trainer)
    return result


def weights(trainer: Trainer) -> dict[str, Tensor]:
    mine = {slot.name: full(slot.master, local_data(slot.master)).clone() for slot in trainer.slots}
    return over_stages(trainer.mesh, mine)


def over_stages(mesh: Mesh, mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of all pipeline ranks by name. Collective. Copies must be bit-equal."""
    if mesh.pp.size == 1:
        return mine
    everyone: list[Any] = [None] * mesh.pp.size
    dist.all_gather_object(everyone, mine, group=mesh.pp.group)
    result: dict[str, Tensor] = {}
    for part in everyone:
        for name, tensor in part.items():
            assert name not in result or torch.equal(result[name], tensor), f"copies of {name} differ"
            result[name] = tensor
    return result


@contextmanager
def recording(trainer: Trainer, gradients: list[dict[str, Tensor]]) -> Iterator[None]:
    """Append each step's full gradients, as they leave the reduction, to `gradients`."""
    real = trainer.engine.gradients.collect

    def collect() -> list[Tensor]:
        collected = real()
        pairs = zip(trainer.slots, collected, strict=True)
        mine = {slot.name: full(slot.master, g.detach().clone()).clone() for slot, g in pairs}
        gradients.append(over_stages(trainer.mesh, mine))
        return collected

    trainer.engine.gradients.collect = collect  # type: ignore[method-assign]
    yield
    trainer.engine.gradients.collect = real  # type: ignore[method-assign]


def disagreement(trainer: Trainer) -> float:
    """Return the largest difference between copies of a weight that several ranks hold whole; 0.0 if bit-equal."""
    worst = 0.0
    mesh = trainer.mesh
    for axis in (mesh.dp_replicate, mesh.cp, mesh.tp):
        if axis.size == 1:
            continue
        copies = [local_data(slot.master).flatten() for slot in trainer.slots if not _split_over(slot.master, axis.name)]
        if not copies:
            continue
        mine = torch.cat(copies)
        everyone = [torch.empty_like(mine) for _ in range(axis.size)]
        dist.all_gather(everyone, mine, group=axis.group)
        worst = max(worst, *(float((other - mine).abs().max()) for other in everyone))
    return worst


def _split_over(parameter: Any, axis: str) -> bool:
    if not hasattr(parameter, "placements"):
        return False
    names = parameter.device_mesh.mesh_dim_names
    return any(
        (name == axis or (name == "dp_shard_cp" and axis in ("dp_shard", "cp"))) and not p.is_replicate()
        for name, p in zip(names, parameter.placements, strict=True)
    )


@dataclass
class Errors:
    """Relative errors against the reference; `where` names the worst gradient and the worst weight."""

    loss: float
    norm: float
    gradient: float
    weight: float
    disagreement: float
    where: str = ""

    @property
    def worst(self) -> float:
        return max(self.loss, self.norm, self.gradient, self.weight)


def relative(value: Tensor, reference: Tensor) -> float:
    """Return |value - reference| / |reference|, the plain norm if the reference is 0, infinity for NaN."""
    error = float((value - reference).norm())
    error = error / float(reference.norm()) if float(reference.norm()) > 0 else error
    return error if error == error else float("inf")


def compare(run: Trace, reference: Trace) -> Errors:
    """Return the largest relative errors of `run`, over all steps and tensors."""

    def scalars(name: str) -> float:
        pairs = zip(run.records, reference.records, strict=True)
        values = [(getattr(a, name), getattr(b, name)) for a, b in pairs]
        return max(relative(*torch.tensor(value, dtype=torch.float64)) for value in values)

    steps = zip(run.gradients, reference.gradients, strict=True)
    gradients = {
        f"gradient of {name} at step {step}": relative(mine[name], theirs[name])
        for step, (mine, theirs) in enumerate(steps)
        for name in theirs
    }
    final = {f"weight {name}": relative(run.final[name], reference.final[name]) for name in reference.final}
    worst = [max(errors, key=lambda name: errors[name]) for errors in (gradients, final)]
    where = ", ".join(f"{name}: {({**gradients, **final})[name]:.1e}" for name in worst)
    loss, norm = scalars("loss"), scalars("grad_norm")
    return Errors(loss, norm, gradients[worst[0]], final[worst[1]], run.disagreement, where)


def worst_over_ranks(errors: Errors) -> Errors:
    """Return the largest of each error over all ranks, with the place on the rank that has it."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, errors)
    worst = max(everyone, key=lambda one: one.worst)
    names = ("loss", "norm", "gradient", "weight", "disagreement")
    return Errors(*(max(getattr(one, name) for one in everyone) for name in names), where=worst.where)
