"""Token files in the format of Megatron-LM: PREFIX.bin holds the tokens, PREFIX.idx says where documents begin.

Layout of the index (little endian): magic "MMIDIDX\\0\\0", uint64 version 1, uint8 dtype code, uint64 sequences,
uint64 document borders, int32 length of each sequence, int64 byte offset of each sequence, int64 borders of the
documents in sequences (first 0, last = sequences). A trailing int8 per sequence (modes of multimodal data) is allowed.
"""

from __future__ import annotations

import struct
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from sennit.data.files import write_atomic
from sennit.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
_CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
_HEADER = struct.Struct("<9sQBQQ")


def as_prefix(path: str | Path) -> Path:
    """Return the prefix of a pair of files, given with or without one of the two suffixes."""
    path = Path(path).expanduser()
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest dtype that Megatron-LM uses for a vocabulary."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def index_bytes(lengths: np.ndarray, documents: np.ndarray, dtype: np.dtype) -> bytes:
    """Return the content of an .idx file: lengths of sequences in tokens, borders of documents in sequences."""
    lengths = np.ascontiguousarray(lengths, np.int32)
    offsets = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1].astype(np.int64) * dtype.itemsize, out=offsets[1:])
    header = _HEADER.pack(MAGIC, 1, _CODES[np.dtype(dtype)], len(lengths), len(documents))
    return header + lengths.tobytes() + offsets.tobytes() + np.ascontiguousarray(documents, np.int64).tobytes()


class IndexedDataset:
    """A read-only token file, mapped into memory. `starts`, `lengths`: the documents, in tokens.

    Raises DataError naming the file and what is wrong with it if the pair is missing, truncated or inconsistent.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = as_prefix(prefix)
        self.bin, self.idx = Path(f"{self.prefix}.bin"), Path(f"{self.prefix}.idx")
        for path in (self.bin, self.idx):
            if not path.is_file():
                raise DataError(
                    f"There is no file {path}. A dataset is a pair PREFIX.bin and PREFIX.idx; build one with "
                    f"`sennit data`, or correct the path in data.source or data.blend."
                )
        try:
            raw, size = self.idx.read_bytes(), self.bin.stat().st_size
            self._read_index(raw)
            if size == 0:
                raise self._bad(self.bin, "is empty")
            if self._end != size:
                what = "is truncated" if size < self._end else "does not belong to its index"
                raise self._bad(self.bin, f"{what}: the index accounts for {self._end:,} bytes, the file has {size:,}")
            self.tokens = np.memmap(self.bin, dtype=self.dtype, mode="r", shape=(size // self.dtype.itemsize,))
        except OSError as error:
            raise DataError(
                f"{self.prefix}.bin and .idx cannot be read: {error}. Check the disk and the permissions."
            ) from None

    @cached_property
    def fingerprint(self) -> str:
        """Name of the content: a hash of the index and of 64 stretches spread over the tokens."""
        digest = xxhash.xxh3_128(self._index_hash)
        block = 4096
        for start in np.linspace(0, max(len(self.tokens) - block, 0), 64).astype(np.int64):
            digest.update(self.tokens[start : start + block].tobytes())
        return digest.hexdigest()

    def _bad(self, path: Path, what: str) -> DataError:
        return DataError(f"{path} {what}. Build it again with `sennit data`, or copy it again from its source.")

    def _read_index(self, raw: bytes) -> None:
        if len(raw) < _HEADER.size:
            raise self._bad(self.idx, f"is truncated: {len(raw)} bytes are less than its header")
        magic, version, code, sequences, borders = _HEADER.unpack_from(raw)
        if magic != MAGIC:
            raise self._bad(self.idx, "is not an index of Megatron-LM: it does not begin with MMIDIDX")
        if version != 1:
            raise self._bad(self.idx, f"has version {version}; only version 1 can be read")
        if code not in DTYPES or not np.issubdtype(DTYPES[code], np.integer):
            raise self._bad(self.idx, f"has dtype code {code}, which is no integer type")
        self.dtype = np.dtype(DTYPES[code])
        need = _HEADER.size + sequences * 12 + borders * 8
        if len(raw) not in (need, need + sequences):
            raise self._bad(
                self.idx, f"has {len(raw):,} bytes; {sequences:,} sequences and {borders:,} borders need {need:,}"
            )
        where = _HEADER.size
        lengths = np.frombuffer(raw, "<i4", sequences, where)
        offsets = np.frombuffer(raw, "<i8", sequences, where + 4 * sequences)
        edges = np.frombuffer(raw, "<i8", borders, where + 12 * sequences)
        self._check(lengths, offsets, edges)
        self._index_hash = xxhash.xxh3_128_digest(raw)

    def _check(self, lengths: np.ndarray, offsets: np.ndarray, edges: np.ndarray) -> None:
        size = self.dtype.itemsize
        if len(lengths) == 0 or len(edges) < 2:
            raise self._bad(self.idx, "holds no document")
        if (lengths < 0).any() or (offsets < 0).any() or (offsets % size).any() or (offsets > 2**62).any():
            raise self._bad(self.idx, "is corrupt: a sequence has a negative length or an impossible offset")
        if edges[0] != 0 or edges[-1] != len(lengths) or (np.diff(edges) < 0).any():
            raise self._bad(self.idx, "is corrupt: its document borders do not run from 0 to the number of sequences")
        ends = offsets + lengths.astype(np.int64) * size
        if (offsets[1:] != ends[:-1]).any():
            raise self._bad(self.idx, "is corrupt: its sequences do not follow each other in the .bin file")
        edges = edges[np.concatenate(([True], np.diff(edges) > 0))]  # documents without any sequence
        self._end = int(ends[-1])
        first = offsets // size
        bounds = np.concatenate((first, [ends[-1] // size]))[edges]
        starts, stops = bounds[:-1], bounds[1:]
        kept = stops > starts
        self.starts, self.lengths = starts[kept].astype(np.int64), (stops - starts)[kept].astype(np.int64)
        if len(self.starts) == 0:
            raise self._bad(self.idx, "holds no token")

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of a document."""
        start = int(self.starts[index])
        return self.tokens[start : start + int(self.lengths[index])]


def write_dataset(prefix: str | Path, documents: list[np.ndarray], dtype: np.dtype) -> None:
    """Write documents held in memory as a pair of files, each atomically, the index last."""
    lengths = np.array([len(document) for document in documents], np.int32)
    data = np.concatenate(documents).astype(dtype).tobytes() if documents else b""
    for suffix, content in ((".bin", data), (".idx", index_bytes(lengths, np.arange(len(lengths) + 1), dtype))):
        write_atomic(Path(f"{prefix}{suffix}"), content)


__all__ = ["IndexedDataset", "as_prefix", "index_bytes", "token_dtype", "write_dataset"]
