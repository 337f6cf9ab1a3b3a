"""Batches of a step for one data rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sennit.data.samples import Sample
from sennit.errors import DataError

IGNORED = -100
"""Label of a token that does not count in the loss."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A microbatch. tokens, labels, positions: int64 [b, s]; labels of -100 do not count.

    `documents`: lengths of the documents in each row, which add up to s; None if attention ignores their borders.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: list[list[int]] | None

    def num_loss_tokens(self) -> int:
        """Return how many labels count."""
        return int((self.labels != IGNORED).sum())

    def num_bytes(self, byte_lengths: Tensor) -> int:
        """Return how many bytes of text the counted labels stand for; `byte_lengths` [vocab]."""
        return int(byte_lengths[self.labels[self.labels != IGNORED]].sum())


def padded(batch: Batch, multiple: int) -> Batch:
    """Return `batch` with its rows filled up to a multiple of tokens; what is added is a document of its own, and does
    not count."""
    missing = -batch.tokens.shape[1] % multiple
    if missing == 0:
        return batch
    documents = batch.documents or [[batch.tokens.shape[1]]] * batch.tokens.shape[0]
    extra = batch.tokens.new_zeros((batch.tokens.shape[0], missing))
    return Batch(
        torch.cat((batch.tokens, extra), 1),
        torch.cat((batch.labels, extra + IGNORED), 1),
        torch.cat((batch.positions, torch.arange(missing).expand_as(extra)), 1),
        [[*lengths, missing] for lengths in documents],
    )


class Samples(Protocol):
    """A source of samples by number."""

    samples_per_epoch: int

    def __getitem__(self, number: int) -> Sample: ...


class Loader:
    """Hands each data rank its part of every global batch: samples step * global_batch .. + global_batch - 1 in rank
    order, so that another number of ranks or another micro batch size sees the same samples in the same steps."""

    def __init__(
        self,
        samples: Samples,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        vocab_size: int,
        mask_documents: bool,
    ) -> None:
        self.samples = samples
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self.vocab_size, self.mask_documents = vocab_size, mask_documents

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every sample was seen, the last one possibly in part."""
        return -(-self.samples.samples_per_epoch // self.global_batch_size)

    def microbatches(self, step: int, rank: int, size: int) -> list[Batch]:
        """Return the microbatches of `step` for data rank `rank` of `size`.

        The global batch must divide by `size`, and each share by the micro batch. Raises DataError, with the file, for
        a token id outside the vocabulary.
        """
        share = self.global_batch_size // size
        first = step * self.global_batch_size + rank * share
        return [
            self._batch([self.samples[first + offset + row] for row in range(self.micro_batch_size)], first + offset)
            for offset in range(0, share, self.micro_batch_size)
        ]

    def _batch(self, samples: list[Sample], first: int) -> Batch:
        window = np.stack([sample.tokens for sample in samples])
        if int(window.max()) >= self.vocab_size or int(window.min()) < -1:
            wrong, at = next(
                (int(sample.tokens[bad.argmax()]), sample.origin)
                for sample in samples
                if (bad := (sample.tokens >= self.vocab_size) | (sample.tokens < -1)).any()
            )
            raise DataError(
                f"Token id {wrong} in {at or 'the data'} (one of the samples from number {first} on) is outside the "
                f"vocabulary of {self.vocab_size:,} tokens. The file was built with another tokenizer or is "
                f"damaged: build it again with `sennit data`, or correct data.tokenizer or model.vocab_size."
            )
        tokens, labels = window[:, :-1].copy(), window[:, 1:].copy()
        labels[(labels < 0) | (tokens < 0)] = IGNORED
        tokens[tokens < 0] = 0
        length = tokens.shape[1]
        positions = np.broadcast_to(np.arange(length), tokens.shape).copy()
        documents = None
        if self.mask_documents:
            documents = [sample.document_lengths for sample in samples]
            for row, lengths in enumerate(documents):
                end = 0
                for size in lengths:
                    positions[row, end : end + size] = np.arange(size)
                    end += size
                    if end < length:  # the next token begins another document and does not follow from this one
                        labels[row, end - 1] = IGNORED
            self._mask_last(samples, labels)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(positions), documents)

    def _mask_last(self, samples: list[Sample], labels: np.ndarray) -> None:
        """The label of a row's last token is its window's last token: of another document if one ends right there."""
        for row, sample in enumerate(samples):
            if sample.ends_with_border:
                labels[row, -1] = IGNORED


__all__ = ["IGNORED", "Batch", "Loader", "Samples", "padded"]
