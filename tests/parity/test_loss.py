"""What the loss is divided by, smoothed by and split over."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from sennit.mesh import Mesh
from sennit.ops.documents import DocumentMask
from tests.parity.cases import errors_by_world, reference
from tests.parity.runs import TOLERANCE, VOCAB, Case, Errors, global_batch, mesh_of, new_trainer, trace
from tests.ranks import run_ranks

SMOOTHING, Z_LOSS = ("train.label_smoothing", "0.1"), ("train.z_loss", "0.01")
SPLIT_VOCABULARY = [
    Case(layout, family, options=options)
    for layout in ("tp2", "tp4-sp")
    for family, options in (
        ("llama", (SMOOTHING,)),
        ("llama", (Z_LOSS,)),
        ("llama", (SMOOTHING, Z_LOSS)),
        ("llama-tied", (SMOOTHING, Z_LOSS)),
    )
]
split_vocabulary = errors_by_world(SPLIT_VOCABULARY)


@pytest.mark.parametrize("case", SPLIT_VOCABULARY, ids=lambda case: case.id)
def test_label_smoothing_and_z_loss_see_the_whole_vocabulary(case: Case) -> None:
    """Scenario I-58, with the padded vocabulary of I-01: 131 rows in shards of 128 or 64, so that one is all padding."""
    errors = split_vocabulary(case)
    assert errors.worst <= TOLERANCE, errors


def test_loss_is_the_sum_of_token_losses_over_the_counted_tokens() -> None:
    """The one-process reference against plain cross-entropy of plain logits. Scenario I-10."""
    case = Case("one", data="packed", steps=1)
    trainer = new_trainer(case, Mesh())
    tokens, labels, documents = global_batch(0, "packed")
    positions = torch.tensor([[i for length in row for i in range(length)] for row in documents])
    mask = DocumentMask.from_lengths(documents)
    context = trainer.model.context(tokens, dtype=torch.float64, positions=positions, documents=mask)
    logits = trainer.model(tokens, context)[..., :VOCAB]
    counted = int((labels != -100).sum())
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / counted
    record = reference(case).records[0]
    assert record.tokens == counted
    assert record.loss == pytest.approx(expected.item(), rel=1e-12)


def no_counted_token(case: Case) -> tuple[bool, float, float, int, bool]:
    run = trace(case)
    (record,) = run.records
    unchanged = all(torch.equal(run.initial[name], run.final[name]) for name in run.initial)
    zero = all(not gradient.any() for gradient in run.gradients[0].values())
    return record.skipped, record.loss, record.grad_norm, record.tokens, unchanged and zero


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2-sp"])
def test_a_batch_without_counted_tokens_changes_nothing(layout: str) -> None:
    """Loss 0, zero gradients, no update, never NaN, and no rank that skips a collective. Scenario I-13, second part."""
    case = Case(layout, optimizer="adamw", data="none", accumulate=2, steps=1)
    for result in run_ranks(no_counted_token, case.world, case):
        assert result == (True, 0.0, 0.0, 0, True)


CLIPPED = [
    Case(layout, family, options=(("optimizer.clip_norm", "0.3"),))
    for layout in ("tp2-sp", "fsdp2", "hsdp2x2", "fsdp2-tp2-sp", "tp4-sp")
    for family in ("llama-tied", "qwen3")
]
clipped = errors_by_world(CLIPPED)


@pytest.mark.parametrize("case", CLIPPED, ids=lambda case: case.id)
def test_clipping_by_the_norm_takes_the_same_step(case: Case) -> None:
    """Each parameter counts once in the norm however many ranks hold it; gradient descent shows the clipped scale,
    which Adam would hide. Scenario I-15, with the shared norm weights of I-59."""
    errors: Errors = clipped(case)
    assert all(record.grad_norm > 0.6 for record in reference(case.alone()).records), "clipping is active"
    assert errors.worst <= TOLERANCE, errors


def reports(case: Case) -> list[tuple[float, float, float, int]]:
    return [(r.loss, r.grad_norm, r.lr, r.tokens) for r in trace(case).records]


def test_every_rank_reports_the_same_numbers() -> None:
    case = Case("dp2-tp2-sp", optimizer="adamw")
    ranks = run_ranks(reports, case.world, case)
    assert all(rank == ranks[0] for rank in ranks) and len(ranks) == 4


def evaluations(layout: str) -> tuple[float, float]:
    case = Case(layout, options=(SMOOTHING, Z_LOSS))
    trainer = new_trainer(case, mesh_of(layout) if dist.is_initialized() else Mesh())
    trainer.validation_loader = trainer.train_loader
    trainer.train_step()
    nats, bits = trainer.evaluate(2)
    again, _ = trainer.evaluate(2)
    assert bits is None and nats == again and trainer.model.training
    return nats, trainer.train_step().loss


def test_evaluation_is_the_same_on_every_layout_and_without_smoothing() -> None:
    """Held-out loss is plain cross-entropy per counted token, and evaluating changes nothing."""
    alone = evaluations("one")
    for result in run_ranks(evaluations, 4, "fsdp2-tp2-sp"):
        assert result == pytest.approx(alone, rel=TOLERANCE)
    case = Case("one", options=(SMOOTHING, Z_LOSS))
    plain = new_trainer(Case("one"), Mesh())
    smooth = new_trainer(case, Mesh())
    for trainer in (plain, smooth):
        trainer.validation_loader = trainer.train_loader
    assert plain.evaluate(1) == smooth.evaluate(1)
