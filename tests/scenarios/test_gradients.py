"""What went wrong with losses and gradients elsewhere, named by the symptom. Further scenarios of sections A and B run
on every layout in tests/parity: initial weights I-07, dropout I-09, norm I-15, decay I-20, smoothing I-58, norms I-59."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sennit import ops
from sennit.data import Batch
from sennit.errors import ConfigError
from sennit.mesh import Mesh
from sennit.recipe import check_run, load_recipe
from sennit.train.gradients import local_data
from tests.parity.cases import check, errors_by_world, reference, run_cases
from tests.parity.runs import VOCAB, Case, Errors, Trace, mesh_of, new_trainer, recording, trace
from tests.ranks import run_ranks

LONG = [Case(layout, optimizer="adamw", steps=20) for layout in ("tp2-sp", "tp4")]
long_runs = errors_by_world(LONG)


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.layout)
def test_a_vocabulary_that_does_not_divide_drifts_away_over_many_steps(case: Case) -> None:
    """I-01: 20 steps of a vocabulary of 131 over tp 2 and 4, label 130 included, against one process."""
    check(case, long_runs(case))


def padding_of(case: Case) -> tuple[float, float, float]:
    """Return the largest padding entry of the initial tables, of their gradients and of the trained tables."""
    run = trace(case)
    tables = ("embedding.weight", "head.weight")

    def largest(tensors: dict[str, Tensor]) -> float:
        return max(float(tensors[name][VOCAB:].abs().max()) for name in tables)

    return largest(run.initial), max(largest(step) for step in run.gradients), largest(run.final)


@pytest.mark.parametrize(("layout", "world"), [("one", 1), ("tp4-sp", 4), ("fsdp2", 2)])
def test_padding_rows_of_the_vocabulary_get_gradients(layout: str, world: int) -> None:
    """I-01: rows 131 to 255 are nobody's target, not in the softmax and never move."""
    case = Case(layout, optimizer="adamw", options=(("train.label_smoothing", "0.1"), ("train.z_loss", "0.01")))
    assert run_ranks(padding_of, world, case) == [(0.0, 0.0, 0.0)] * world


def test_heads_that_do_not_divide_by_tp_die_in_the_first_forward() -> None:
    """I-03: 6 heads over tp 4 are refused before anything is built; fewer kv heads than tp are right in tests/parity."""
    sizes = {"model.num_heads": "6", "model.num_kv_heads": "2", "model.hidden_size": "48", "parallel.tp": "4"}
    with pytest.raises(ConfigError, match=r"num_heads") as error:
        check_run(load_recipe("tiny", sizes), 4)
    assert "6" in str(error.value) and "tp" in str(error.value)


COUNTED = (31, 3, 17, 1)


@dataclass
class FourRows:
    """Four sequences of 32 tokens with 31, 3, 17 and 1 counted labels, in microbatches of `size` rows."""

    size: int

    def microbatches(self, step: int, rank: int, ranks: int) -> list[Batch]:
        stream = torch.randint(0, VOCAB, (4, 33), generator=torch.Generator().manual_seed(step))
        tokens, labels = stream[:, :-1].clone(), stream[:, 1:].clone()
        for row, counted in enumerate(COUNTED):
            labels[row, counted:] = -100
        positions = torch.arange(32).expand(4, 32)
        share = 4 // ranks
        starts = range(rank * share, (rank + 1) * share, self.size)
        parts = [slice(i, i + self.size) for i in starts]
        return [Batch(tokens[rows], labels[rows], positions[rows], None) for rows in parts]


def unequal(layout: str, size: int) -> tuple[float, dict[str, Tensor], int]:
    """Return loss, gradients and counted tokens of one step in microbatches of `size` rows."""
    shape = (("train.seq_len", "32"), ("train.global_batch_size", "4"), ("train.micro_batch_size", str(size)))
    trainer = new_trainer(Case(layout, options=shape), Mesh() if layout == "one" else mesh_of(layout))
    trainer.train_loader = FourRows(size)  # type: ignore[assignment]
    gradients: list[dict[str, Tensor]] = []
    with recording(trainer, gradients):
        record = trainer.train_step()
    return record.loss, gradients[0], record.tokens


@pytest.mark.parametrize(
    ("layout", "world", "size"), [("one", 1, 1), ("one", 1, 2), ("dp2", 2, 1), ("fsdp2", 2, 1), ("dp4", 4, 1)]
)
def test_mean_of_microbatch_means_is_not_the_mean_over_tokens(layout: str, world: int, size: int) -> None:
    """I-10: 52 counted tokens, however they are spread over microbatches and ranks, weigh the same."""
    loss, gradients, counted = unequal("one", 4)
    assert counted == sum(COUNTED) == 52
    for mine, found, tokens in run_ranks(unequal, world, layout, size):
        assert tokens == 52 and mine == pytest.approx(loss, rel=1e-12)
        for name, wanted in gradients.items():
            assert float((found[name] - wanted).norm()) <= 1e-12 * float(wanted.norm()), name


def idle_with(provider: str, cases: list[Case], references: dict[Case, Trace]) -> dict[Case, Errors]:
    with ops.force({"linear_cross_entropy": provider}):
        return run_cases(cases, references)


@pytest.mark.parametrize("provider", ["reference", "chunked"])
def test_a_rank_without_a_counted_label_turns_the_loss_to_nan(provider: str) -> None:
    """I-13, first part: rank 1 has only ignored labels; with either loss, whole or split over the vocabulary, with
    and without FSDP, the step is that of one process."""
    cases = [Case(layout, data="idle", steps=1) for layout in ("dp4", "fsdp4", "dp2-tp2-sp")]
    references = {case.alone(): reference(case.alone()) for case in cases}
    for case, errors in run_ranks(idle_with, 4, provider, cases, references)[0].items():
        check(case, errors)


def accumulated(layout: str) -> list[tuple[str, float]]:
    """Return the error of each accumulated gradient against the float64 sum of the microbatches' bf16 gradients."""
    case = Case(layout, accumulate=8 // mesh_of(layout).data.size, options=(("precision.dtype", "bf16"),))
    trainer = new_trainer(case, mesh_of(layout))
    sums = [torch.zeros_like(local_data(slot.parameter), dtype=torch.float64) for slot in trainer.slots]
    for slot, total in zip(trainer.slots, sums, strict=True):

        def add(grad: Tensor, total: Tensor = total) -> None:
            assert grad.dtype == torch.bfloat16
            total.add_(local_data(grad))

        slot.parameter.register_hook(add)
    kept: list[dict[str, Tensor]] = []
    with recording(trainer, kept):
        trainer.train_step()
    if trainer.mesh.data.size > 1:
        for total in sums:
            torch.distributed.all_reduce(total)
    named = zip(trainer.slots, sums, strict=True)
    return [(slot.name, float((kept[0][slot.name] - total).norm() / total.norm())) for slot, total in named]


@pytest.mark.parametrize(("layout", "world"), [("one", 1), ("dp2", 2)])
def test_gradients_are_lost_when_microbatches_add_up_in_bf16(layout: str, world: int) -> None:
    """I-18: eight microbatches of bf16 gradients lose nothing but float32 roundings; a bf16 sum would lose 2^-9."""
    for errors in run_ranks(accumulated, world, layout):
        for name, error in errors:
            assert error < 1e-6, name
