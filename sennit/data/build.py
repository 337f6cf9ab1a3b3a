"""Building a token file from text, so that a crash at any moment costs at most the batch in flight.

Tokens and lengths are appended to PREFIX.bin.partial and PREFIX.lengths.partial. After each batch both are synced and
a line of PREFIX.journal records their sizes and the position in the input. A new start truncates the partial files to
the last recorded sizes and goes on from there; the result is the same, byte for byte. At the end the index is written
and both files get their names, the index last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from sennit.data.files import FULL, locked, sync, sync_folder
from sennit.data.indexed import index_bytes, token_dtype
from sennit.data.reading import Piece, ReadFailure, find_files, read_pieces
from sennit.data.tokenizer import Tokenizer
from sennit.errors import DataError

BATCH_BYTES = 4 << 20
BATCH_PIECES = 4096


@dataclass(slots=True)
class Progress:
    """How far a build is. `file`, `position`: where reading goes on; the rest counts what is safely on disk.

    A sequence is a document or, for a long text file, a part of one; `text_bytes` counts UTF-8.
    """

    file: int = 0
    position: int = 0
    sequences: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    renaming: bool = False


Report = Callable[[Progress, int, int], None]
"""Called after each batch with (progress, input bytes read, input bytes in all)."""


def build_dataset(
    inputs: list[str],
    prefix: Path,
    tokenizer: Tokenizer,
    *,
    key: str = "text",
    report: Report | None = None,
    wait: bool = False,
) -> Progress:
    """Tokenize the documents of `inputs` into PREFIX.bin and PREFIX.idx, each followed by the end-of-text token.

    An interrupted build of the same inputs and tokenizer goes on where it was. If another process builds the same
    prefix, `wait` says whether to wait for it or to give up.
    Raises DataError for a full disk or a file that cannot be read now, where the same command goes on later; for text
    that is not valid or not there, where nothing stays; and if another build of the same prefix is under way.
    """
    files = find_files(inputs)
    sizes = [path.stat().st_size for path in files]
    signature = _signature(files, tokenizer, key)
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with locked(Path(f"{prefix}.lock"), wait=wait), _Journal(prefix, signature, tokenizer) as journal:
            if not journal.progress.renaming:
                _tokenize(journal, files, sizes, key, report)
            journal.finish()
            return journal.progress
    except OSError as error:
        if error.errno in FULL:
            raise DataError(
                f"The disk is full: {prefix}.bin cannot grow. What was built so far is kept in "
                f"{prefix}.bin.partial; free some space and run the same command again, and it goes on from there."
            ) from None
        raise DataError(f"{prefix}.bin cannot be written: {error}. Name another place with --out.") from None


def _tokenize(journal: _Journal, files: list[Path], sizes: list[int], key: str, report: Report | None) -> None:
    """Append what is left of `files` to the partial files."""
    try:
        for reads, file, position in _batches(files, journal.progress, key):
            journal.append(reads, file, position)
            if report is not None:
                report(journal.progress, sum(sizes[: reads[-1].file]) + reads[-1].piece.done, sum(sizes))
        if journal.progress.text_bytes == 0:
            raise DataError(
                f"There is no text in {', '.join(map(str, files[:3]))}: nothing to build. Name files that hold text."
            )
    except ReadFailure:
        raise
    except DataError:  # the files must change, and then nothing of this build can be used
        journal.discard()
        raise


def _signature(files: list[Path], tokenizer: Tokenizer, key: str) -> str:
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return xxhash.xxh3_128_hexdigest(json.dumps([facts, tokenizer.fingerprint, key]).encode())


@dataclass(frozen=True, slots=True)
class _Read:
    """A piece and the number of its file."""

    piece: Piece
    file: int


def _batches(files: list[Path], start: Progress, key: str) -> Iterator[tuple[list[_Read], int, int]]:
    """Yield (pieces, file, position in it where the next batch begins)."""
    pieces: list[_Read] = []
    size, position = 0, start.position
    for index in range(start.file, len(files)):
        for piece in read_pieces(files[index], position, key):
            pieces.append(_Read(piece, index))
            size += piece.size
            if size >= BATCH_BYTES or len(pieces) >= BATCH_PIECES:
                yield pieces, index, piece.next_position
                pieces, size = [], 0
        position = 0
    if pieces:
        yield pieces, len(files), 0


class _Journal:
    """The partial files of a build and the record of what in them is complete."""

    def __init__(self, prefix: Path, signature: str, tokenizer: Tokenizer) -> None:
        self.prefix, self.tokenizer = prefix, tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)
        self._bin, self._lengths = Path(f"{prefix}.bin.partial"), Path(f"{prefix}.lengths.partial")
        self._index, self._path = Path(f"{prefix}.idx.partial"), Path(f"{prefix}.journal")
        self.progress = self._recorded(signature)
        if not self._holds(self.progress):
            self.progress = Progress()
        if self.progress == Progress():
            for path in (self._bin, self._lengths, self._index):
                path.unlink(missing_ok=True)
            self._path.write_text(json.dumps({"signature": signature}) + "\n")

    def _recorded(self, signature: str) -> Progress:
        """Return the last record; a torn line is ignored."""
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
            if json.loads(lines[0])["signature"] != signature:
                return Progress()
        except (OSError, ValueError, IndexError, KeyError, TypeError):
            return Progress()
        for line in reversed(lines[1:]):
            try:
                return Progress(**json.loads(line))
            except (ValueError, TypeError):
                continue
        return Progress()

    def _holds(self, progress: Progress) -> bool:
        """Whether the files that `progress` speaks of are there and at least as long as recorded."""
        if progress.renaming:
            pairs = (self._bin, Path(f"{self.prefix}.bin")), (self._index, Path(f"{self.prefix}.idx"))
            return all(partial.is_file() or final.is_file() for partial, final in pairs)
        try:
            sizes = self._bin.stat().st_size, self._lengths.stat().st_size
        except OSError:
            return progress == Progress()
        return sizes[0] >= progress.tokens * self.dtype.itemsize and sizes[1] >= progress.sequences * 4

    def __enter__(self) -> _Journal:
        self._journal_file = self._path.open("ab")
        if not self.progress.renaming:
            self._tokens_file, self._lengths_file = self._open(self._bin), self._open(self._lengths)
        return self

    @staticmethod
    def _open(path: Path) -> BinaryIO:
        path.touch()
        return path.open("r+b")

    def __exit__(self, *_: object) -> None:
        for name in ("_tokens_file", "_lengths_file", "_journal_file"):
            try:
                if hasattr(self, name):
                    getattr(self, name).close()
            except OSError:  # a full disk: what could not be flushed is not recorded either
                continue

    def append(self, reads: list[_Read], file: int, position: int) -> None:
        """Add `reads`, sync, and record that the input is done up to (file, position)."""
        pieces = [read.piece for read in reads]
        encoded = self.tokenizer.encode_batch([piece.text for piece in pieces])
        rows = [
            ids + [self.tokenizer.eos_id] if piece.ends else ids for ids, piece in zip(encoded, pieces, strict=True)
        ]
        data = np.concatenate([np.asarray(row, np.int64) for row in rows])
        if len(data) and not 0 <= int(data.min()) <= int(data.max()) < self.tokenizer.vocab_size:
            raise DataError(
                f"The tokenizer gave a token id outside its {self.tokenizer.vocab_size} tokens. Its tokenizer.json "
                f"is damaged; copy it again from its source."
            )
        p = self.progress
        _write(self._tokens_file, p.tokens * self.dtype.itemsize, data.astype(self.dtype).tobytes())
        lengths = [len(row) if piece.ends else ~len(row) for row, piece in zip(rows, pieces, strict=True)]
        _write(self._lengths_file, p.sequences * 4, np.array(lengths, "<i4").tobytes())
        done = Progress(
            file,
            position,
            p.sequences + len(rows),
            p.documents + sum(piece.ends for piece in pieces),
            p.tokens + len(data),
            p.text_bytes + sum(piece.size for piece in pieces),
        )
        self._record(done)

    def _record(self, progress: Progress) -> None:
        self._journal_file.write(f"\n{json.dumps(asdict(progress))}\n".encode())
        sync(self._journal_file)
        self.progress = progress

    def finish(self) -> None:
        """Write the index and give both files their names."""
        if not self.progress.renaming:
            self._tokens_file.truncate(self.progress.tokens * self.dtype.itemsize)
            sync(self._tokens_file)
            lengths = np.fromfile(self._lengths, "<i4", self.progress.sequences)
            borders = np.concatenate(([0], np.flatnonzero(lengths >= 0) + 1))
            with self._index.open("wb") as file:
                file.write(index_bytes(np.where(lengths < 0, ~lengths, lengths), borders, self.dtype))
                sync(file)
            self.progress.renaming = True
            self._record(self.progress)
        if self._bin.exists():
            Path(f"{self.prefix}.idx").unlink(missing_ok=True)  # of an older build, whose tokens go now
            self._bin.replace(f"{self.prefix}.bin")
        if self._index.exists():
            self._index.replace(f"{self.prefix}.idx")
        sync_folder(self.prefix.parent)
        for path in (self._lengths, self._path):
            path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the partial files."""
        for path in (self._bin, self._lengths, self._path):
            path.unlink(missing_ok=True)


def _write(file: BinaryIO, offset: int, data: bytes) -> None:
    file.seek(offset)
    file.truncate()
    file.write(data)
    sync(file)


__all__ = ["Progress", "Report", "build_dataset"]
