"""From a recipe to loaders: the cache, the corpus, several ranks and processes, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from sennit.cli.data import build as build_command
from sennit.data import DataBundle, build_loaders, sources
from sennit.data.corpus import Corpus, stdlib_corpus
from sennit.data.indexed import IndexedDataset
from sennit.data.samples import Blend, PackedSamples
from sennit.errors import ConfigError, DataError
from sennit.recipe import Recipe, load_recipe

SMALL = Corpus(
    tuple(f"def f{i}(x):\n    return x + {i}\n" * 5 for i in range(30)), ("class A:\n    pass\n" * 40,), "small"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own, and a small corpus in place of the standard library."""
    monkeypatch.setenv("SENNIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "stdlib_corpus", lambda: SMALL)
    return tmp_path / "cache"


def recipe(**fields: str) -> Recipe:
    settings = {
        "data.tokenizer": "bpe:280",
        "train.seq_len": "16",
        "train.micro_batch_size": "2",
        "train.global_batch_size": "4",
    }
    return load_recipe("tiny", settings | {name.replace("__", "."): value for name, value in fields.items()})


def bundle(chosen: Recipe, *, main_rank: bool = True) -> DataBundle:
    return build_loaders(chosen, main_rank=main_rank, barrier=lambda: None)


def tokens(loader, steps: int = 3) -> list:
    return [batch.tokens.tolist() for step in range(steps) for batch in loader.microbatches(step, 0, 1)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "texts"
    made.mkdir()
    (made / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"text number {i} of many\n"}) + "\n" for i in range(200))
    )
    return made


def test_the_corpus_is_split_by_file_and_fixed() -> None:
    corpus = stdlib_corpus()
    assert not set(corpus.train) & set(corpus.held_out)
    assert len(corpus.train) > 300 and len(corpus.held_out) >= 5
    assert sum(map(len, corpus.train)) > 5_000_000
    stdlib_corpus.cache_clear()
    assert stdlib_corpus().fingerprint == corpus.fingerprint
    assert 1.5 < corpus.gzip_bits_per_byte() < 2.5


def test_stdlib_loaders() -> None:
    made = bundle(recipe())
    assert made.tokenizer is not None and made.validation is not None and made.byte_lengths is not None
    assert made.vocab_size == made.tokenizer.vocab_size == len(made.byte_lengths)
    train = made.train.microbatches(0, 0, 1)
    assert [batch.tokens.shape for batch in train] == [(2, 16), (2, 16)]
    rows = [row for step in range(made.validation.steps_per_epoch) for row in _rows(made.validation, step)]
    text = made.tokenizer.decode([token for row in rows for token in row])
    assert text.startswith(SMALL.held_out[0])
    counted = sum(
        batch.num_bytes(made.byte_lengths)
        for step in range(made.validation.steps_per_epoch)
        for batch in made.validation.microbatches(step, 0, 1)
    )
    first = len(made.tokenizer.decode(rows[0][:1]).encode())
    assert counted == len(SMALL.held_out[0].encode()) - first
    assert bundle(recipe(data__validation_fraction="0")).validation is None


def _rows(loader, step: int) -> list[list[int]]:
    return [row for batch in loader.microbatches(step, 0, 1) for row in batch.tokens.tolist()]


def test_other_ranks_open_what_the_main_rank_built() -> None:
    with pytest.raises(DataError, match="main rank could not prepare"):
        bundle(recipe(), main_rank=False)
    main, other = bundle(recipe()), bundle(recipe(), main_rank=False)
    assert main.fingerprint == other.fingerprint
    assert tokens(main.train) == tokens(other.train)


def test_a_failure_of_the_main_rank_passes_the_barrier_first(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(b"\xff\n")
    passed = []
    with pytest.raises(DataError, match="not UTF-8"):
        build_loaders(recipe(data__source=str(folder)), main_rank=True, barrier=lambda: passed.append(True))
    assert passed == [True]


def test_two_processes_fill_one_cache_at_once(folder: Path, own_cache: Path) -> None:
    chosen = recipe(data__source=str(folder))
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            try:
                bundle(chosen)
            except BaseException:
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    bundle(chosen, main_rank=False)
    assert not [path for path in own_cache.rglob("*") if path.suffix in (".tmp", ".partial", ".lock", ".journal")]


def test_a_damaged_cache_is_built_again(own_cache: Path) -> None:
    before = tokens(bundle(recipe()).train)
    for path in [*own_cache.rglob("*.bin"), *own_cache.rglob("tokenizer.json")]:
        path.write_bytes(path.read_bytes()[:-3])
    assert tokens(bundle(recipe()).train) == before


def test_files_prefixes_lists_and_blends(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("one long text of a single document\n" * 100)
    facts = build_command([str(folder)], tmp_path / "built", "bytes", "text")
    bytes_only = {"data__tokenizer": "bytes"}
    from_text = bundle(recipe(data__source=str(folder), **bytes_only))
    from_prefix = bundle(recipe(data__source=str(tmp_path / "built"), data__tokenizer=facts["tokenizer"]))
    assert tokens(from_text.train) == tokens(from_prefix.train)
    assert from_text.fingerprint == from_prefix.fingerprint
    assert tokens(from_text.train) != tokens(
        bundle(recipe(data__source=str(folder), run__seed="1", **bytes_only)).train
    )
    single = bundle(recipe(data__source=str(tmp_path / "long.txt"), **bytes_only))
    assert single.validation is not None  # the end of a single document is held out
    sources_ = json.dumps([str(folder), "stdlib", str(tmp_path / "long.txt")])
    listed = bundle(recipe(data__source=sources_, **bytes_only))
    parts = listed.train.samples
    assert isinstance(parts, Blend)
    assert listed.train.steps_per_epoch == -(-sum(part.samples_per_epoch for part in parts.sources) // 4)
    blend = f'[{{path = "{folder}", weight = 3}}, {{path = "{tmp_path / "long.txt"}", weight = 1}}]'
    blended = bundle(recipe(data__blend=blend, **bytes_only))
    assert isinstance(blended.train.samples, Blend)
    chosen = [blended.train.samples.place(number)[0] for number in range(400)]
    assert np.bincount(chosen)[0] == pytest.approx(300, abs=4)
    assert blended.heldout_gzip_bits_per_byte is None and len({listed.fingerprint, blended.fingerprint}) == 2


def test_training_and_held_out_documents_are_disjoint(folder: Path) -> None:
    made = bundle(recipe(data__source=str(folder), data__validation_fraction="0.2"))
    assert made.validation is not None
    one, other = made.train.samples, made.validation.samples
    assert isinstance(one, PackedSamples) and isinstance(other, PackedSamples)
    train, held = one.spans.starts, other.spans.starts
    assert len(held) == 40 and len(train) == 160 and not set(train.tolist()) & set(held.tolist())


def test_random_tokens_need_a_vocabulary() -> None:
    made = bundle(recipe(data__source="random", model__vocab_size="77"))
    assert (made.vocab_size, made.validation, made.tokenizer) == (77, None, None)
    assert made.train.microbatches(0, 0, 1)[0].documents is None
    with pytest.raises(ConfigError, match="model.vocab_size"):
        bundle(recipe(data__source="random"))


def test_refusals(folder: Path, tmp_path: Path) -> None:
    facts = build_command([str(folder)], tmp_path / "built", "bpe:300", "text")
    with pytest.raises(ConfigError, match="more than model.vocab_size"):
        bundle(recipe(model__vocab_size="270", data__tokenizer=facts["tokenizer"]))
    with pytest.raises(ConfigError, match="only token files"):
        bundle(recipe(data__source=str(tmp_path / "built")))
    with pytest.raises(DataError, match=r"Token id .* in .*built.bin"):
        made = bundle(recipe(data__source=str(tmp_path / "built"), data__tokenizer="bytes"))
        tokens(made.train, 50)
    with pytest.raises(DataError, match="There is no file .*nowhere.bin"):
        bundle(recipe(data__source=str(tmp_path / "nowhere"), data__tokenizer="bytes"))
    with pytest.raises(DataError, match="fewer than the 100,001 of one"):
        bundle(recipe(train__seq_len="100000", data__tokenizer="bytes"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="cache directory .* cannot be written"):
        bundle(recipe(data__cache_dir=str(tmp_path / "file" / "in")))


def test_the_command_says_what_it_built(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from sennit.cli.main import run

    assert run(["data", str(folder), "--out", str(tmp_path / "b"), "--tokenizer", "bpe:300", "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    dataset = IndexedDataset(tmp_path / "b")
    assert (facts["documents"], facts["tokens"]) == (200, dataset.num_tokens)
    assert facts["bytes"] == sum(len(f"text number {i} of many\n") for i in range(200))
    assert run(["data", str(tmp_path / "none"), "--out", str(tmp_path / "c"), "--json"]) == 2
    captured = capfd.readouterr()
    assert "There is no file or folder" in json.loads(captured.out)["error"]["message"]
    assert captured.err.startswith("error: ") and not list(tmp_path.glob("c.*"))
    assert run(["data", str(folder), "--out", str(tmp_path / "c"), "--tokenizer", "bpe:9"]) == 2
