"""Documents out of text, JSONL and parquet files, with a position after each one from which reading can go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sennit.errors import DataError

SUFFIXES = (".txt", ".md", ".py", ".rst", ".jsonl", ".json", ".parquet")


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and the position in its file (bytes; rows for parquet) where the next one begins."""

    text: str
    next_position: int


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
                raise DataError(f"{path} holds no file that ends in {', '.join(SUFFIXES)}.")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"There is no file or folder {path}. Name text, JSONL or parquet files, or a folder of them.")
    return files


def read_documents(path: Path, position: int, key: str) -> Iterator[Document]:
    """Yield the documents of `path` from `position` on. `key`: the field of JSONL records and parquet columns.

    A text file is one document, a line of JSONL and a row of parquet is one each; empty ones are left out.
    Raises DataError with the file and the place for text that is not UTF-8 and records without the field.
    """
    if path.suffix in (".jsonl", ".json"):
        return _jsonl(path, position, key)
    if path.suffix == ".parquet":
        return _parquet(path, position, key)
    return _text(path, position)


def _text(path: Path, position: int) -> Iterator[Document]:
    raw = path.read_bytes()
    if position < len(raw):
        yield Document(_decoded(raw, path, 0, 1), len(raw))


def _decoded(raw: bytes, path: Path, offset: int, line: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line += raw.count(b"\n", 0, error.start)
        raise DataError(
            f"{path} is not UTF-8: byte {raw[error.start]:#04x} at offset {offset + error.start:,} (line {line:,}). Convert "
            f"the file, for example with `iconv -f latin1 -t utf-8`, or leave it out."
        ) from None


def _jsonl(path: Path, position: int, key: str) -> Iterator[Document]:
    with path.open("rb") as file:
        line = 1
        if position:
            line += sum(1 for _ in _lines_before(path, position))
            file.seek(position)
        for raw in file:
            here, position = position, position + len(raw)
            text = _decoded(raw, path, here, line)
            if text.strip():
                try:
                    record = json.loads(text)
                except ValueError as error:
                    raise DataError(f"{path}, line {line:,}: not JSON ({error}). Each line must be one object.") from None
                value = record.get(key) if isinstance(record, dict) else None
                if not isinstance(value, str):
                    fields = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                    raise DataError(
                        f"{path}, line {line:,}: no text under {key!r} (it has: {fields}). Name the field with --json-key."
                    )
                if value:
                    yield Document(value, position)
            line += 1


def _lines_before(path: Path, position: int) -> Iterator[None]:
    with path.open("rb") as file:
        while file.tell() < position and file.readline():
            yield None


def _parquet(path: Path, position: int, key: str) -> Iterator[Document]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(f"{path}: reading parquet needs the package pyarrow; install it, or convert to JSONL.") from None
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
    except Exception as error:
        raise DataError(f"{path} is not a parquet file: {error}. Copy it again from its source.") from None
    if key not in names:
        raise DataError(f"{path} has no column {key!r} (it has: {', '.join(names)}). Name the column with --json-key.")
    row = 0
    for batch in file.iter_batches(batch_size=1024, columns=[key]):
        if row + len(batch) <= position:
            row += len(batch)
            continue
        for value in batch.column(0).to_pylist():
            row += 1
            if row > position and value:
                yield Document(str(value), row)


__all__ = ["SUFFIXES", "Document", "find_files", "read_documents"]
