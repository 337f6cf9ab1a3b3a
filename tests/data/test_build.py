"""Building token files: the same bytes whatever interrupts it, and every bad input refused with its place."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
from pathlib import Path

import pytest

from sennit.data import build as build_module
from sennit.data import files as files_module
from sennit.data import reading
from sennit.data.build import Progress, build_dataset
from sennit.data.indexed import IndexedDataset
from sennit.data.reading import find_files, line_at, read_pieces
from sennit.data.tokenizer import Tokenizer, byte_tokenizer, train_bpe
from sennit.errors import DataError


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches and many pieces out of little text."""
    monkeypatch.setattr(build_module, "BATCH_BYTES", 120)
    monkeypatch.setattr(build_module, "BATCH_PIECES", 3)
    monkeypatch.setattr(reading, "PIECE", 64)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["the cat sat on the mat; the dog did not\n" * 50], 300)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with a text file of several pieces, JSONL and parquet."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("the cat sat\n" * 30 + "\u4f60\u597d" * 40)
    lines = [json.dumps({"text": f"line {i} " * (i % 5), "id": i}) for i in range(25)]
    (folder / "b.jsonl").write_text("\n".join(lines))
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": [f"row {i} of the table" if i % 4 else None for i in range(20)]})
    pyarrow.parquet.write_table(table, folder / "c.parquet", row_group_size=6)
    return folder


def built(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def test_documents_and_their_ends(texts: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    seen: list[tuple[int, int]] = []
    progress = build_dataset(
        [str(texts)], tmp_path / "d", tokenizer, report=lambda _, done, total: seen.append((done, total))
    )
    dataset = IndexedDataset(tmp_path / "d")
    found = [tokenizer.decode(dataset.document(i).tolist()) for i in range(len(dataset))]
    expected = [(texts / "a.txt").read_text()]
    expected += [f"line {i} " * (i % 5) for i in range(25) if i % 5]
    expected += [f"row {i} of the table" for i in range(20) if i % 4]
    assert found == expected
    assert all(dataset.document(i)[-1] == tokenizer.eos_id for i in range(len(dataset)))
    assert all((dataset.document(i)[:-1] != tokenizer.eos_id).all() for i in range(len(dataset)))
    assert (progress.documents, progress.tokens) == (len(expected), dataset.num_tokens)
    assert progress.text_bytes == sum(len(text.encode()) for text in expected)
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] == sum(p.stat().st_size for p in texts.iterdir())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.bin", "d.idx", "texts"]


def killed_after(syncs: int, prefix: Path, texts: Path, tokenizer: Tokenizer, *, early: bool) -> bool:
    """Build in a child that dies, without cleaning up, at sync number `syncs`; return whether it finished before."""
    child = os.fork()
    if child == 0:
        count, fsync = 0, os.fsync

        def dying(handle: int) -> None:
            nonlocal count
            count += 1
            if count > syncs:
                if not early:
                    fsync(handle)
                os._exit(9)
            fsync(handle)

        files_module.os.fsync = dying  # type: ignore[assignment]
        try:
            build_dataset([str(texts)], prefix, tokenizer)
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 0


def test_a_build_killed_again_and_again_ends_with_the_same_bytes(
    texts: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    build_dataset([str(texts)], tmp_path / "whole", tokenizer)
    chance = random.Random(7)
    for trial in range(6):
        prefix, kills = tmp_path / f"killed-{trial}", 0
        while not killed_after(chance.randint(0, 12), prefix, texts, tokenizer, early=chance.random() < 0.5):
            kills += 1
            for name in ("bin.partial", "lengths.partial", "journal"):  # what the disk makes of a write cut off
                path = Path(f"{prefix}.{name}")
                if path.exists() and chance.random() < 0.5:
                    with path.open("ab") as file:
                        file.write(chance.randbytes(chance.randint(1, 9)))
            assert kills < 500
        assert built(prefix) == built(tmp_path / "whole"), f"trial {trial} after {kills} kills"
        assert not list(tmp_path.glob(f"killed-{trial}.*partial")) and not Path(f"{prefix}.journal").exists()


def test_a_kill_at_any_sync_resumes(
    texts: Path, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs, fsync = [], os.fsync
    with monkeypatch.context() as patch:
        patch.setattr(files_module.os, "fsync", lambda handle: syncs.append(fsync(handle)))
        build_dataset([str(texts)], tmp_path / "whole", tokenizer)
    last = len(syncs)
    for number in [*range(0, last - 8, 7), *range(last - 8, last + 1)]:
        prefix = tmp_path / "every"
        done = killed_after(number, prefix, texts, tokenizer, early=False)
        seen: list[Progress] = []
        build_dataset([str(texts)], prefix, tokenizer, report=lambda p, *_: seen.append(p))  # noqa: B023
        assert built(prefix) == built(tmp_path / "whole")
        if seen and not done:  # three syncs a batch: it went on behind the batches that were complete
            assert seen[0].sequences > number // 3
        for path in tmp_path.glob("every.*"):
            path.unlink()
        assert done == (number == last)


def test_other_inputs_start_again(texts: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    killed_after(9, tmp_path / "o", texts, tokenizer, early=False)
    assert Path(f"{tmp_path / 'o'}.journal").exists()
    (texts / "b.jsonl").write_text('{"text": "only this"}\n')
    build_dataset([str(texts / "b.jsonl")], tmp_path / "o", tokenizer)
    dataset = IndexedDataset(tmp_path / "o")
    assert [tokenizer.decode(dataset.document(0).tolist()), len(dataset)] == ["only this", 1]


def test_a_full_disk_keeps_what_is_there(texts: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    build_dataset([str(texts)], tmp_path / "whole", tokenizer)
    prefix = tmp_path / "full"
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, resource.RLIM_INFINITY))
        try:
            build_dataset([str(texts)], prefix, tokenizer)
        except DataError as error:
            os._exit(42 if "disk is full" in str(error) and "goes on" in str(error) else 2)
        except BaseException:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert not Path(f"{prefix}.bin").exists() and not Path(f"{prefix}.idx").exists()
    build_dataset([str(texts)], prefix, tokenizer)
    assert built(prefix) == built(tmp_path / "whole")


def test_two_builders_at_once(texts: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    def nested(*_: object) -> None:
        with pytest.raises(DataError, match="Another process"):
            build_dataset([str(texts)], tmp_path / "two", tokenizer)

    build_dataset([str(texts)], tmp_path / "two", tokenizer, report=nested)
    build_dataset([str(texts)], tmp_path / "one", tokenizer)
    assert built(tmp_path / "one") == built(tmp_path / "two")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("latin.txt", b"ok\n" * 40 + b"caf\xe9\n", ["latin.txt", "not UTF-8", "0xe9", "byte offset 123", "line 41"]),
        ("latin.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', ["latin.jsonl", "byte offset 24", "line 2"]),
        ("cut.jsonl", b'{"text": "a"}\n\n{"text": "b\n', ["cut.jsonl, line 3", "not JSON"]),
        ("deep.jsonl", b"[" * 100_000, ["deep.jsonl, line 1", "not JSON"]),
        ("key.jsonl", b'{"body": "a", "id": 1}\n', ["line 1", "'text'", "body, id", "--json-key"]),
        ("list.jsonl", b"[1]\n", ["line 1", "it has: list"]),
        ("half.jsonl", b'{"text": "a\\ud800"}\n', ["line 1", "surrogate"]),
        ("empty.txt", b"", ["no text"]),
        ("blank.jsonl", b"\n\n", ["no text"]),
        ("packed.jsonl.gz", b"\x1f\x8b", ["compressed", "Unpack"]),
        ("broken.parquet", b"PAR1....PAR1", ["not a parquet file"]),
    ],
)
def test_bad_input_names_its_place(
    tmp_path: Path, tokenizer: Tokenizer, name: str, content: bytes, words: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        build_dataset([str(tmp_path / name)], tmp_path / "out", tokenizer)
    for word in words:
        assert word in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]  # nothing is written


def test_missing_input(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="There is no file or folder"):
        build_dataset([str(tmp_path / "nothing")], tmp_path / "out", tokenizer)
    with pytest.raises(DataError, match="holds no file"):
        find_files([str(tmp_path)])


def test_pieces_cut_inside_no_character(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("\ufeff" + "\U0001f40d" * 100)
    pieces = list(read_pieces(path, 0, "text"))
    assert "".join(piece.text for piece in pieces) == "\U0001f40d" * 100 and len(pieces) > 5
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    again = list(read_pieces(path, pieces[2].next_position, "text"))
    assert again == pieces[3:]
    path.write_text("a\nb\nc")
    assert [line_at(path, offset) for offset in (0, 1, 2, 4)] == [1, 1, 2, 3]


def test_byte_tokens_are_the_text(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abc")
    tokenizer = byte_tokenizer()
    build_dataset([str(tmp_path / "t.txt")], tmp_path / "t", tokenizer)
    tokens = IndexedDataset(tmp_path / "t").document(0).tolist()
    assert [tokenizer.backend.id_to_token(token) for token in tokens] == ["a", "b", "c", "<|endoftext|>"]
