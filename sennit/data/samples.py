"""Training samples as a pure function of (seed, sample number)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sennit.data.indexed import IndexedDataset
from sennit.data.order import permutation, seed_of
from sennit.errors import DataError


@dataclass(frozen=True, slots=True)
class Sample:
    """`tokens` [s + 1] (-1 beyond the end of the text); `document_lengths`: parts of the first s of them.

    `ends_with_border`: the last token begins another document than the one before it.
    """

    tokens: np.ndarray
    document_lengths: list[int]
    ends_with_border: bool = False


class PackedSamples:
    """Documents of a token file packed into windows of seq_len + 1 tokens.

    An epoch strings all documents together, in an order drawn from (seed, epoch), and cuts the string into windows
    that overlap in one token, so that every token but the first is predicted once; the windows are then visited in
    an order drawn from (seed, epoch) too. The remainder of an epoch, less than a window, is dropped.
    With `ordered` nothing is shuffled, there is one epoch, and its last window is filled up with -1.
    """

    def __init__(
        self, dataset: IndexedDataset, documents: np.ndarray, seq_len: int, seed: int, *, ordered: bool = False
    ) -> None:
        self.dataset, self.documents, self.seq_len, self.seed, self.ordered = dataset, documents, seq_len, seed, ordered
        self.num_tokens = int(dataset.lengths[documents].sum())
        whole, rest = divmod(max(self.num_tokens - 1, 0), seq_len)
        self.samples_per_epoch = whole + (1 if ordered and rest else 0)
        if self.samples_per_epoch == 0:
            raise DataError(
                f"{dataset.prefix}.bin holds {self.num_tokens:,} tokens, fewer than the {seq_len + 1:,} of one sample. Use "
                f"more text or a smaller train.seq_len."
            )
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return (documents in order, where each begins in the string [documents + 1], order of the windows)."""
        order = self.documents
        windows = None
        if not self.ordered:
            order = order[permutation(len(order), seed_of(self.seed, epoch, 0))]
            windows = permutation(self.samples_per_epoch, seed_of(self.seed, epoch, 1))
        begins = np.zeros(len(order) + 1, np.int64)
        np.cumsum(self.dataset.lengths[order], out=begins[1:])
        return order, begins, windows

    def __getitem__(self, number: int) -> Sample:
        epoch, place = divmod(number, self.samples_per_epoch)
        if self.ordered and epoch:
            return Sample(np.full(self.seq_len + 1, -1, np.int64), [self.seq_len])
        order, begins, windows = self._epoch(epoch)
        first = (place if windows is None else int(windows[place])) * self.seq_len
        stop = min(first + self.seq_len + 1, self.num_tokens)
        tokens = np.full(self.seq_len + 1, -1, np.int64)
        lengths, index = [], int(np.searchsorted(begins, first, side="right")) - 1
        at = first
        while at < stop:
            end = min(int(begins[index + 1]), stop)
            start = int(self.dataset.starts[order[index]]) + at - int(begins[index])
            tokens[at - first : end - first] = self.dataset.tokens[start : start + end - at]
            lengths.append(end - at)
            at, index = end, index + 1
        return Sample(tokens, _cut(lengths, self.seq_len), sum(lengths[:-1]) == self.seq_len)


def _cut(lengths: list[int], total: int) -> list[int]:
    """Return lengths that add up to `total`: the last ones shortened, or a filler appended."""
    result, room = [], total
    for length in lengths:
        if room == 0:
            break
        result.append(min(length, room))
        room -= result[-1]
    return [*result, room] if room else result


class RandomSamples:
    """Uniform random tokens, for benchmarks: nothing to read and nothing to learn."""

    samples_per_epoch = 1 << 40

    def __init__(self, vocab_size: int, seq_len: int, seed: int) -> None:
        self.vocab_size, self.seq_len, self.seed = vocab_size, seq_len, seed

    def __getitem__(self, number: int) -> Sample:
        generator = np.random.Generator(np.random.Philox(key=seed_of(self.seed, number)))
        return Sample(generator.integers(0, self.vocab_size, self.seq_len + 1, np.int64), [self.seq_len])


class Blend:
    """Samples of several sources in given proportions.

    Which source serves sample i follows a low-discrepancy sequence: after any number of samples each source has
    served its share to within a few. The samples of one source come in its own order, none is skipped.
    """

    BLOCK = 1 << 16
    GOLDEN = 0.6180339887498949

    def __init__(self, sources: list[PackedSamples], weights: list[float]) -> None:
        self.sources = sources
        self._edges = np.cumsum(weights)[:-1] / sum(weights)
        self._before = [np.zeros(len(sources), np.int64)]
        self.samples_per_epoch = sum(source.samples_per_epoch for source in sources)
        self._block = lru_cache(maxsize=2)(self._make_block)

    def _make_block(self, block: int) -> np.ndarray:
        """Return the source of each sample of a block."""
        number = np.arange(block * self.BLOCK, (block + 1) * self.BLOCK, dtype=np.float64)
        return np.searchsorted(self._edges, (number * self.GOLDEN + 0.5) % 1.0, side="right")

    def place(self, number: int) -> tuple[int, int]:
        """Return (source, sample number within it) of global sample `number`."""
        block, offset = divmod(number, self.BLOCK)
        while len(self._before) <= block:
            counts = np.bincount(self._block(len(self._before) - 1), minlength=len(self.sources))
            self._before.append(self._before[-1] + counts)
        chosen = self._block(block)
        source = int(chosen[offset])
        return source, int(self._before[block][source]) + int(np.count_nonzero(chosen[:offset] == source))

    def __getitem__(self, number: int) -> Sample:
        source, inner = self.place(number)
        return self.sources[source][inner]


__all__ = ["Blend", "PackedSamples", "RandomSamples", "Sample"]
