"""Text from a model whose parts lie on the ranks of a pipeline: the same as from one process."""

from __future__ import annotations

import pytest

from sennit.generate import generate
from sennit.mesh import Mesh, build_mesh
from tests.pipeline.runs import Run, new_trainer
from tests.ranks import run_ranks

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


def continued(run: Run, *, alone: bool) -> list[list[int]]:
    """Return the greedy continuation after one training step."""
    mesh = Mesh() if alone else build_mesh(pp=run.p)
    trainer = new_trainer(run, mesh, alone=alone)
    trainer.train_step()
    model = trainer.engine.inference_model()
    return generate(model, PROMPTS, max_new_tokens=8, temperature=0.0, seed=1)


def check_generation(run: Run) -> None:
    """Raise AssertionError unless every rank generates what one process does."""
    expected = continued(run, alone=True)
    for found in run_ranks(continued, run.p, run, alone=False):
        assert found == expected


@pytest.mark.parametrize("run", [Run("1f1b", 2, 4, tied=True), Run("zb-v", 2, 4)], ids=lambda run: run.id)
def test_a_pipeline_continues_text_as_one_process_does(run: Run) -> None:
    check_generation(run)
