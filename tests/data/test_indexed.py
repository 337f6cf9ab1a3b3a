"""The token file format: golden bytes, round trips, and every kind of damage."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sennit.data.indexed import IndexedDataset, index_bytes, token_dtype, write_dataset
from sennit.errors import DataError

PAGES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# Three sequences of 3, 0 and 2 tokens in two documents of uint16, written down by hand from the format.
GOLDEN_TOKENS = struct.pack("<5H", 7, 8, 9, 1, 2)
GOLDEN_INDEX = (
    b"MMIDIDX\x00\x00"
    + struct.pack("<QBQQ", 1, 8, 3, 3)
    + struct.pack("<3i", 3, 0, 2)
    + struct.pack("<3q", 0, 6, 6)
    + struct.pack("<3q", 0, 2, 3)
)


def write(prefix: Path, tokens: bytes = GOLDEN_TOKENS, index: bytes = GOLDEN_INDEX) -> Path:
    Path(f"{prefix}.bin").write_bytes(tokens)
    Path(f"{prefix}.idx").write_bytes(index)
    return prefix


def test_golden_bytes(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "a.v1"))
    assert [dataset.document(i).tolist() for i in range(len(dataset))] == [[7, 8, 9], [1, 2]]
    assert IndexedDataset(tmp_path / "a.v1.bin").num_tokens == 5
    made = index_bytes(np.array([3, 0, 2]), np.array([0, 2, 3]), np.dtype(np.uint16))
    assert made == GOLDEN_INDEX
    # one byte a sequence more, as multimodal data has it
    assert len(IndexedDataset(write(tmp_path / "modes", index=GOLDEN_INDEX + b"\0\0\0"))) == 2


def test_dtype_follows_the_vocabulary() -> None:
    assert [token_dtype(size) for size in (257, 65499, 65500, 128256)] == [np.uint16, np.uint16, np.int32, np.int32]


@PAGES
@given(
    documents=st.lists(st.lists(st.integers(0, 60000), min_size=1, max_size=9), min_size=1, max_size=9),
    dtype=st.sampled_from([np.uint16, np.int32, np.int64]),
)
def test_round_trip(tmp_path: Path, documents: list[list[int]], dtype: type) -> None:
    write_dataset(tmp_path / "r", [np.array(document) for document in documents], np.dtype(dtype))
    dataset = IndexedDataset(tmp_path / "r")
    assert dataset.dtype == dtype
    assert [dataset.document(i).tolist() for i in range(len(dataset))] == documents
    assert list(tmp_path.glob("*.tmp")) == []


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_truncated_anywhere(tmp_path: Path, suffix: str) -> None:
    content = GOLDEN_TOKENS if suffix == ".bin" else GOLDEN_INDEX
    for size in range(len(content)):
        prefix = write(tmp_path / "t")
        Path(f"{prefix}{suffix}").write_bytes(content[:size])
        with pytest.raises(DataError, match=f"t{suffix}"):
            IndexedDataset(prefix)


@PAGES
@given(place=st.integers(0, len(GOLDEN_INDEX) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_stays_in_bounds(tmp_path: Path, place: int, bit: int) -> None:
    damaged = bytearray(GOLDEN_INDEX)
    damaged[place] ^= 1 << bit
    try:
        dataset = IndexedDataset(write(tmp_path / "f", index=bytes(damaged)))
    except DataError as error:
        assert "f.idx" in str(error) or "f.bin" in str(error)
        return
    assert sum(len(dataset.document(i)) for i in range(len(dataset))) == dataset.num_tokens <= len(dataset.tokens)


@pytest.mark.parametrize(
    ("index", "what"),
    [
        (b"TORCHIDX\x00" + GOLDEN_INDEX[9:], "MMIDIDX"),
        (GOLDEN_INDEX[:9] + struct.pack("<Q", 2) + GOLDEN_INDEX[17:], "version 2"),
        (GOLDEN_INDEX[:17] + b"\x07" + GOLDEN_INDEX[18:], "dtype code 7"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 0, 0), "holds no document"),
        (GOLDEN_INDEX[:-24] + struct.pack("<3q", 0, 9, 3), "borders"),
        (GOLDEN_INDEX[:-48] + struct.pack("<3q", 0, 4, 6) + GOLDEN_INDEX[-24:], "follow each other"),
    ],
)
def test_refusals_say_why(tmp_path: Path, index: bytes, what: str) -> None:
    with pytest.raises(DataError, match=what):
        IndexedDataset(write(tmp_path / "w", index=index))


def test_a_pair_that_does_not_belong_together(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not belong"):
        IndexedDataset(write(tmp_path / "x", tokens=GOLDEN_TOKENS + b"\0\0"))
    with pytest.raises(DataError, match="is empty"):
        IndexedDataset(write(tmp_path / "e", tokens=b""))
    with pytest.raises(DataError, match="There is no file"):
        IndexedDataset(tmp_path / "nothing")


def test_fingerprint_sees_the_tokens(tmp_path: Path) -> None:
    one = IndexedDataset(write(tmp_path / "one"))
    other = IndexedDataset(write(tmp_path / "other", tokens=struct.pack("<5H", 7, 8, 9, 1, 3)))
    assert one.fingerprint != other.fingerprint
    assert one.fingerprint == IndexedDataset(write(tmp_path / "same")).fingerprint
