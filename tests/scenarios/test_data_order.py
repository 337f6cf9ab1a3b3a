"""What users of other frameworks saw go wrong with batches and the order of data, as small scenarios."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sennit.data.loader import IGNORED, Loader
from sennit.data.samples import PackedSamples, Spans
from sennit.errors import ConfigError
from sennit.recipe import check_run, load_recipe


def packed(documents: list[list[int]], seq_len: int, *, seed: int = 0, ordered: bool = False) -> PackedSamples:
    lengths = np.array([len(document) for document in documents])
    spans = Spans(np.cumsum(lengths) - lengths, lengths)
    return PackedSamples(np.concatenate([np.array(d) for d in documents]), spans, seq_len, seed, ordered=ordered)


def loader(samples: PackedSamples, *, global_batch_size: int = 1, micro_batch_size: int = 1) -> Loader:
    return Loader(
        samples,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        vocab_size=1000,
        mask_documents=True,
    )


def test_the_last_token_of_a_document_predicts_the_first_of_the_next() -> None:
    """Scenario I-14."""
    samples = packed([[1, 2, 3], [4, 5], [6, 7, 8, 9]], 8, ordered=True)
    (batch,) = loader(samples).microbatches(0, 0, 1)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch.labels.tolist() == [[2, 3, IGNORED, 5, IGNORED, 7, 8, 9]]
    assert batch.num_loss_tokens() == 6
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch.documents == [[3, 2, 3]]


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "fits"), [(10, 2, 2, "8 or 12"), (8, 16, 1, "16"), (10, 0, 4, "8 or 12")]
)
def test_a_batch_size_other_than_the_one_asked_for(batch: int, micro: int, ranks: int, fits: str) -> None:
    """A size that does not divide is refused with those that would, never rounded. Scenario I-19."""
    overrides = {"train.global_batch_size": str(batch), "train.micro_batch_size": str(micro)}
    with pytest.raises(ConfigError, match=fits):
        check_run(load_recipe("tiny", overrides), ranks, fast_dtypes=())


def test_the_shuffle_of_the_running_epoch_is_lost_on_resume() -> None:
    """64 samples, batch 4: stopped after 3 batches of the second epoch and gone on with other ranks. Scenario I-48."""
    stream = np.arange(64 * 4 + 1) % 997

    def ids(steps: range, ranks: int) -> list[list[int]]:
        """First tokens of the samples of each step; a new loader, as after a restart."""
        fresh = loader(packed([stream.tolist()], 4, seed=5), global_batch_size=4)
        found = []
        for step in steps:
            parts = [batch for rank in range(ranks) for batch in fresh.microbatches(step, rank, ranks)]
            found.append(torch.cat([part.tokens for part in parts])[:, 0].tolist())
        return found

    whole = ids(range(48), 2)
    resumed = ids(range(19), 2) + ids(range(19, 30), 4) + ids(range(30, 48), 1)
    assert resumed == whole
    for epoch in range(3):
        seen = sorted(sum(whole[16 * epoch : 16 * (epoch + 1)], []))
        assert seen == sorted(stream[:-1:4].tolist()), f"epoch {epoch}"
    assert whole[:16] != whole[16:32]
