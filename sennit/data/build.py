"""Building a token file from text, so that a crash at any moment costs at most the batch in flight.

Tokens and lengths are appended to PREFIX.bin.partial and PREFIX.lengths.partial. After each batch both are synced and
a line of PREFIX.journal records their sizes and the position in the input. A new start truncates the partial files to
the last recorded sizes and goes on from there; the result is the same, byte for byte. At the end the index is written
and both files get their names, the index last.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash

from sennit.data.indexed import index_bytes, token_dtype
from sennit.data.reading import find_files, read_documents
from sennit.data.tokenizer import Tokenizer
from sennit.errors import DataError

BATCH_CHARACTERS = 4 << 20
BATCH_DOCUMENTS = 4096


@dataclass(slots=True)
class Progress:
    """How far a build is. `file`, `position`: where reading goes on; the rest counts what is safely on disk."""

    file: int = 0
    position: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0


def build_dataset(
    inputs: list[str],
    prefix: Path,
    tokenizer: Tokenizer,
    *,
    key: str = "text",
    report: Callable[[Progress, int], None] | None = None,
) -> Progress:
    """Tokenize the documents of `inputs` into PREFIX.bin and PREFIX.idx, each followed by the end-of-text token.

    An interrupted build of the same inputs and tokenizer goes on where it was. `report(progress, total input bytes)`
    is called after each batch. Raises DataError for unreadable input, no text at all, or a full disk; what was
    written so far stays, and the same command goes on from there.
    """
    files = find_files(inputs)
    total = sum(path.stat().st_size for path in files)
    signature = _signature(files, tokenizer, key)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with _disk_errors(prefix):
        journal = _Journal(prefix, signature)
        with journal:
            for texts, file, position in _batches(files, journal.progress, key):
                journal.append(tokenizer, texts, file, position)
                if report is not None:
                    report(journal.progress, total)
            if journal.progress.documents == 0:
                journal.discard()
                raise DataError(f"There is no text in {', '.join(inputs)}: nothing to build.")
            journal.finish(tokenizer)
        return journal.progress


def _signature(files: list[Path], tokenizer: Tokenizer, key: str) -> str:
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return xxhash.xxh3_128_hexdigest(json.dumps([facts, tokenizer.fingerprint, key]).encode())


def _batches(files: list[Path], start: Progress, key: str) -> Iterator[tuple[list[str], int, int]]:
    """Yield (texts, file, position in it where the next batch begins)."""
    texts: list[str] = []
    size, first, position = 0, start.file, start.position
    for index in range(first, len(files)):
        for document in read_documents(files[index], position, key):
            texts.append(document.text)
            size += len(document.text)
            if size >= BATCH_CHARACTERS or len(texts) >= BATCH_DOCUMENTS:
                yield texts, index, document.next_position
                texts, size = [], 0
        position = 0
    if texts:
        yield texts, len(files), 0


class _Journal:
    """The partial files of a build and the record of what in them is complete."""

    def __init__(self, prefix: Path, signature: str) -> None:
        self.prefix = prefix
        self._bin, self._lengths = Path(f"{prefix}.bin.partial"), Path(f"{prefix}.lengths.partial")
        self._path = Path(f"{prefix}.journal")
        self.progress = self._recorded(signature)
        if not self._holds(self.progress):
            self.progress = Progress()
        fresh = self.progress.documents == 0
        if fresh:
            for path in (self._bin, self._lengths):
                path.unlink(missing_ok=True)
            self._path.write_text(json.dumps({"signature": signature}) + "\n")

    def _recorded(self, signature: str) -> Progress:
        """Return the last record whose bytes are all there; a torn last line is ignored."""
        try:
            lines = self._path.read_text().splitlines()
            if json.loads(lines[0])["signature"] != signature:
                return Progress()
        except (OSError, ValueError, IndexError, KeyError):
            return Progress()
        for line in reversed(lines[1:]):
            try:
                return Progress(**json.loads(line))
            except (ValueError, TypeError):
                continue
        return Progress()

    def _holds(self, progress: Progress) -> bool:
        """Whether the partial files are at least as long as recorded."""
        try:
            sizes = self._bin.stat().st_size, self._lengths.stat().st_size
        except OSError:
            return False
        return sizes[0] >= 2 * progress.tokens and sizes[1] >= 4 * progress.documents

    def __enter__(self) -> _Journal:
        self._tokens_file = self._open(self._bin)
        self._lengths_file = self._open(self._lengths)
        self._journal_file = self._path.open("a")
        return self

    @staticmethod
    def _open(path: Path):  # noqa: ANN205
        path.touch()
        return path.open("r+b")

    def __exit__(self, *_: object) -> None:
        for file in (self._tokens_file, self._lengths_file, self._journal_file):
            try:
                file.close()
            except OSError:  # a full disk: what could not be flushed is not recorded either
                continue

    def append(self, tokenizer: Tokenizer, texts: list[str], file: int, position: int) -> None:
        """Add the documents `texts`, sync, and record that the input is done up to (file, position)."""
        dtype = token_dtype(tokenizer.vocab_size)
        eos = [tokenizer.eos_id]
        rows = [np.asarray(ids + eos, dtype) for ids in tokenizer.encode_batch(texts)]
        data = np.concatenate(rows)
        self._write(self._tokens_file, self.progress.tokens * dtype.itemsize, data.tobytes())
        lengths = np.array([len(row) for row in rows], np.int32)
        self._write(self._lengths_file, self.progress.documents * 4, lengths.tobytes())
        p = self.progress
        size = sum(len(text.encode()) for text in texts)
        done = Progress(file, position, p.documents + len(rows), p.tokens + len(data), p.text_bytes + size)
        self._journal_file.write("\n" + json.dumps(asdict(done)) + "\n")
        self._journal_file.flush()
        os.fsync(self._journal_file.fileno())
        self.progress = done

    @staticmethod
    def _write(file, offset: int, data: bytes) -> None:  # noqa: ANN001
        file.seek(offset)
        file.truncate()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

    def finish(self, tokenizer: Tokenizer) -> None:
        """Write the index and give both files their names."""
        dtype = token_dtype(tokenizer.vocab_size)
        for file, size in (
            (self._tokens_file, self.progress.tokens * dtype.itemsize),
            (self._lengths_file, self.progress.documents * 4),
        ):
            file.truncate(size)
        lengths = np.fromfile(self._lengths, np.int32)
        index = Path(f"{self.prefix}.idx.partial")
        with index.open("wb") as file:
            file.write(index_bytes(lengths, np.arange(len(lengths) + 1), dtype))
            file.flush()
            os.fsync(file.fileno())
        self._bin.replace(f"{self.prefix}.bin")
        index.replace(f"{self.prefix}.idx")
        for path in (self._lengths, self._path):
            path.unlink()

    def discard(self) -> None:
        """Remove the partial files."""
        for path in (self._bin, self._lengths, self._path):
            path.unlink(missing_ok=True)


@contextmanager
def _disk_errors(prefix: Path) -> Iterator[None]:
    """Turn a full disk into a DataError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DataError(
            f"The disk is full: {prefix}.bin cannot grow. What was built so far is kept in {prefix}.bin.partial; free some "
            f"space and run the same command again, and it goes on from there."
        ) from None


__all__ = ["Progress", "build_dataset"]
