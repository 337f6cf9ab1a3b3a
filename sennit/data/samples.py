"""Training samples as a pure function of (seed, sample number)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sennit.data.order import permutation, seed_of
from sennit.errors import DataError


@dataclass(frozen=True, slots=True)
class Spans:
    """Stretches of tokens of a file, each one document or a part of one. starts, lengths: int64 [n], in tokens."""

    starts: np.ndarray
    lengths: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Tokens of all stretches."""
        return int(self.lengths.sum())

    def pick(self, which: np.ndarray) -> Spans:
        """Return the stretches numbered `which` [m], in that order."""
        return Spans(self.starts[which], self.lengths[which])


@dataclass(frozen=True, slots=True)
class Sample:
    """`tokens` int64 [s + 1] (-1 beyond the end of the text); `document_lengths`: parts of the first s, adding up to s.

    `ends_with_border`: the last token begins another document than the one before it. `origin`: the file.
    """

    tokens: np.ndarray
    document_lengths: list[int]
    ends_with_border: bool = False
    origin: str = ""


class PackedSamples:
    """Documents of a token file packed into windows of seq_len + 1 tokens.

    An epoch strings all documents together, in an order drawn from (seed, epoch), and cuts the string into windows
    that overlap in one token, so that every token but the first is predicted once; the windows are then visited in
    an order drawn from (seed, epoch) too. The remainder of an epoch, less than a window, is dropped; it is another
    one in each epoch. With `ordered` nothing is shuffled, there is one epoch, and its last window is filled up with -1.
    Raises DataError if there are fewer tokens than one sample needs.
    """

    def __init__(
        self, tokens: np.ndarray, spans: Spans, seq_len: int, seed: int, *, ordered: bool = False, origin: str = ""
    ) -> None:
        self.tokens, self.spans, self.seq_len, self.seed = tokens, spans, seq_len, seed
        self.ordered, self.origin = ordered, origin
        self.num_tokens = spans.num_tokens
        whole, rest = divmod(max(self.num_tokens - 1, 0), seq_len)
        self.samples_per_epoch = whole + (1 if ordered and rest else 0)
        if self.samples_per_epoch == 0:
            raise DataError(
                f"{origin or 'The data'} has {self.num_tokens:,} tokens to sample from, fewer than the "
                f"{seq_len + 1:,} of one sample. Use more text, a smaller train.seq_len or data.validation_fraction."
            )
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return (starts of the documents in order, their starts in the string [n + 1], order of the windows)."""
        spans, windows = self.spans, None
        if not self.ordered:
            spans = spans.pick(permutation(len(spans.starts), seed_of(self.seed, epoch, 0)))
            windows = permutation(self.samples_per_epoch, seed_of(self.seed, epoch, 1))
        begins = np.zeros(len(spans.starts) + 1, np.int64)
        np.cumsum(spans.lengths, out=begins[1:])
        return spans.starts, begins, windows

    def window(self, number: int) -> int:
        """Return which window of its epoch sample `number` is."""
        epoch, place = divmod(number, self.samples_per_epoch)
        windows = self._epoch(epoch)[2]
        return place if windows is None else int(windows[place])

    def __getitem__(self, number: int) -> Sample:
        epoch = number // self.samples_per_epoch
        tokens = np.full(self.seq_len + 1, -1, np.int64)
        if self.ordered and epoch:
            return Sample(tokens, [self.seq_len], origin=self.origin)
        starts, begins, _ = self._epoch(epoch)
        first = self.window(number) * self.seq_len
        stop = min(first + self.seq_len + 1, self.num_tokens)
        lengths, index, at = [], int(np.searchsorted(begins, first, side="right")) - 1, first
        while at < stop:
            end = min(int(begins[index + 1]), stop)
            start = int(starts[index]) + at - int(begins[index])
            tokens[at - first : end - first] = self.tokens[start : start + end - at]
            lengths.append(end - at)
            at, index = end, index + 1
        return Sample(tokens, _cut(lengths, self.seq_len), sum(lengths[:-1]) == self.seq_len, self.origin)


class Chain:
    """Held-out samples of several sources, one source after the other, once."""

    def __init__(self, sources: list[PackedSamples]) -> None:
        self.sources = sources
        self.samples_per_epoch = sum(source.samples_per_epoch for source in sources)

    def __getitem__(self, number: int) -> Sample:
        for source in self.sources:
            if number < source.samples_per_epoch:
                return source[number]
            number -= source.samples_per_epoch
        return self.sources[-1][self.sources[-1].samples_per_epoch]  # beyond the end: nothing to predict


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

    Which source serves sample i is a function of (seed, i): a point of the golden-ratio sequence, which visits every
    stretch of [0, 1) in proportion to its length. After n samples each source has served its share to within about
    log(n) / 2 samples, for any n. The samples of one source come in its own order, none is skipped.
    """

    BLOCK = 1 << 16
    GOLDEN = 0.6180339887498949

    def __init__(self, sources: list[PackedSamples], weights: list[float], seed: int = 0) -> None:
        self.sources = sources
        self.samples_per_epoch = sum(source.samples_per_epoch for source in sources)
        self._edges = np.cumsum(weights)[:-1] / sum(weights)
        self._offset = seed_of(seed, 2) / 2**64
        self._before = [np.zeros(len(sources), np.int64)]  # samples of each source before each block
        self._block = lru_cache(maxsize=2)(self._make_block)

    def _make_block(self, block: int) -> np.ndarray:
        """Return the source of each sample of a block [BLOCK]."""
        number = np.arange(block * self.BLOCK, (block + 1) * self.BLOCK, dtype=np.float64)
        return np.searchsorted(self._edges, (number * self.GOLDEN + self._offset) % 1.0, side="right")

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


__all__ = ["Blend", "Chain", "PackedSamples", "RandomSamples", "Sample", "Spans"]
