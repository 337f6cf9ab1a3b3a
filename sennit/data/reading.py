"""Documents out of text, JSONL and parquet files, with a position after each piece from which reading can go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sennit.errors import DataError

SUFFIXES = (".txt", ".md", ".py", ".rst", ".jsonl", ".json", ".parquet")
PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar")
PIECE = 4 << 20
"""Bytes of a text file that are handled at once; a longer one comes in pieces, cut after a line."""


class ReadFailure(DataError):
    """A file that could not be read this time, whatever it holds."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A document, or a part of one unless `ends`.

    `next_position`: where in the file (bytes; rows for parquet) reading goes on. `done`: bytes of the file read so far.
    `size`: bytes of `text` in UTF-8.
    """

    text: str
    size: int
    next_position: int
    done: int
    ends: bool = True


def find_files(inputs: list[str]) -> list[Path]:
    """Return the files that `inputs` (files or folders, searched recursively) name, in a fixed order.

    Raises DataError if an input is missing, or nothing can be read.
    """
    files: list[Path] = []
    for text in inputs:
        path = Path(text).expanduser()
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in SUFFIXES)
            if not found:
                raise DataError(
                    f"The folder {path} holds no file that ends in {', '.join(SUFFIXES)}. Name another folder, or "
                    "the files."
                )
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(
                f"There is no file or folder {path}. Name text, JSONL or parquet files, or a folder of them."
            )
    return files


def read_pieces(path: Path, position: int, key: str) -> Iterator[Piece]:
    """Yield the documents of `path` from `position` on. `key`: the field of JSONL records and parquet columns.

    A text file is one document (in pieces if it is long), a line of JSONL and a row of parquet is one each; empty
    ones are left out. Raises DataError with the file and the place for text that is not UTF-8, records without the
    field and files that cannot be read.
    """
    try:
        if path.suffix in PACKED:
            raise DataError(f"{path} is compressed, and only plain files can be read. Unpack it first.")
        if path.suffix in (".jsonl", ".json"):
            yield from _jsonl(path, position, key)
        elif path.suffix == ".parquet":
            yield from _parquet(path, position, key)
        else:
            yield from _text(path, position)
    except OSError as error:
        raise ReadFailure(f"{path} cannot be read: {error.strerror}. Check the disk and the permissions.") from None


def _text(path: Path, position: int) -> Iterator[Piece]:
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(position)
        while raw := file.read(PIECE):
            if position + len(raw) < size:
                raw = raw[: _cut(raw)]
                file.seek(position + len(raw))
            text, position = _decoded(raw, path, position), position + len(raw)
            yield Piece(text, len(raw), position, position, ends=position >= size)


def _cut(raw: bytes) -> int:
    """Return where to cut `raw`: after its last line, else before its last character."""
    line = raw.rfind(b"\n") + 1
    if line:
        return line
    end = len(raw) - 1
    while end > len(raw) - 4 and raw[end] & 0xC0 == 0x80:
        end -= 1
    return max(end, 1)


def _decoded(raw: bytes, path: Path, offset: int) -> str:
    try:
        return raw.decode("utf-8").removeprefix("\ufeff" if offset == 0 else "")
    except UnicodeDecodeError as error:
        place = offset + error.start
        raise DataError(
            f"{path} is not UTF-8: byte {raw[error.start]:#04x} at byte offset {place} (line "
            f"{line_at(path, place)}). Convert the file, for example with `iconv -f latin1 -t utf-8`, or leave it out."
        ) from None


def line_at(path: Path, offset: int) -> int:
    """Return the number, from 1, of the line that the byte at `offset` is in."""
    line = 1
    with path.open("rb") as file:
        while offset > 0 and (raw := file.read(min(offset, PIECE))):
            line, offset = line + raw.count(b"\n"), offset - len(raw)
    return line


def _jsonl(path: Path, position: int, key: str) -> Iterator[Piece]:
    with path.open("rb") as file:
        file.seek(position)
        for raw in _lines(file):
            here, position = position, position + len(raw)
            text = _decoded(raw, path, here)
            if text.strip():
                value = _field(text, path, here, key)
                if value:
                    yield Piece(value, len(_encoded(value, path, here)), position, position)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while raw := file.readline():
        yield raw


def _field(text: str, path: Path, here: int, key: str) -> str:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}, line {line_at(path, here)}: not JSON ({error}). Each line must be one JSON object with the "
            f"text under {key!r}."
        ) from None
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, str):
        fields = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise DataError(
            f"{path}, line {line_at(path, here)}: no text under {key!r} (it has: {fields}). Name the field with "
            "--json-key."
        )
    return value


def _encoded(value: str, path: Path, offset: int, row: int = 0) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        place = f"row {row}" if row else f"line {line_at(path, offset)}"
        raise DataError(
            f"{path}, {place}: character {error.start} is half of a surrogate pair, which no Unicode text has. "
            f"Correct or remove the record."
        ) from None


def _parquet(path: Path, position: int, key: str) -> Iterator[Piece]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(
            f"{path}: reading parquet needs the package pyarrow. Install it, or convert the file to JSONL."
        ) from None
    size = path.stat().st_size
    try:
        file = parquet.ParquetFile(path)
        names, rows = file.schema_arrow.names, file.metadata.num_rows
        groups = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
    except Exception as error:
        raise DataError(f"{path} is not a parquet file: {error}. Copy it again from its source.") from None
    if key not in names:
        raise DataError(f"{path} has no column {key!r} (it has: {', '.join(names)}). Name the column with --json-key.")
    row = 0
    while groups and row + groups[0] <= position:  # whole groups that are done need not be read
        row += groups.pop(0)
    left = range(file.num_row_groups - len(groups), file.num_row_groups)
    batches = file.iter_batches(batch_size=1024, row_groups=list(left), columns=[key])
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:
            raise DataError(f"{path} is damaged after row {row}: {error}. Copy it again from its source.") from None
        if batch is None:
            return
        for value in batch.column(0).to_pylist():
            row += 1
            if row <= position or not value:
                continue
            if not isinstance(value, str):
                raise DataError(
                    f"{path}, row {row}: column {key!r} holds {type(value).__name__}, not text. Name the column of "
                    f"the text with --json-key."
                )
            yield Piece(value, len(_encoded(value, path, 0, row)), row, size * row // rows)


__all__ = ["SUFFIXES", "Piece", "ReadFailure", "find_files", "line_at", "read_pieces"]
