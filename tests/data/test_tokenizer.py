"""Tokenizers: any text round-trips, bytes are counted right, other tools load what is saved."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.data.tokenizer import END_OF_TEXT, Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from sennit.errors import DataError

TEXTS = [
    "def f(x):\n    return x + 1\n\n\n" * 20,
    "Gr\u00fc\u00dfe, \u043c\u0438\u0440! \u4f60\u597d <|endoftext|>\r\n\tend",
    "class A:\n    pass\n" * 9,
]


@cache
def tokenizers() -> dict[str, Tokenizer]:
    return {"bytes": byte_tokenizer(), "bpe": train_bpe(TEXTS, 400)}


@pytest.mark.parametrize("name", ["bytes", "bpe"])
@settings(max_examples=60, deadline=None)
@given(text=st.one_of(st.text(), st.text(alphabet="ab \n\t<|endoftext|>\u00e9\u4f60")))
def test_any_text_round_trips(name: str, text: str) -> None:
    tokenizer = tokenizers()[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer.encode_batch([text])[0]
    assert tokenizer.eos_id not in ids  # not even if the text spells it out
    assert int(tokenizer.byte_lengths()[ids].sum()) == len(text.encode())
    if name == "bytes":
        assert len(ids) == len(text.encode())


def test_sizes_and_end_of_text() -> None:
    assert byte_tokenizer().vocab_size == 257
    for tokenizer in tokenizers().values():
        assert tokenizer.byte_lengths().shape == (tokenizer.vocab_size,)
        assert int(tokenizer.byte_lengths()[tokenizer.eos_id]) == 0
        assert tokenizer.decode([tokenizer.eos_id]) == ""


def test_training_is_deterministic_and_names_itself() -> None:
    assert train_bpe(TEXTS, 400).fingerprint == tokenizers()["bpe"].fingerprint
    assert train_bpe(TEXTS, 280).fingerprint != tokenizers()["bpe"].fingerprint


def test_save_and_load(tmp_path: Path) -> None:
    saved = tokenizers()["bpe"]
    saved.save(tmp_path / "t")
    for path in (tmp_path / "t", tmp_path / "t" / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert (loaded.fingerprint, loaded.eos_id, loaded.vocab_size) == (
            saved.fingerprint,
            saved.eos_id,
            saved.vocab_size,
        )
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_transformers_loads_what_is_saved(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers()[name].save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token == END_OF_TEXT
    assert theirs.eos_token_id == tokenizers()[name].eos_id
    assert len(theirs) == tokenizers()[name].vocab_size
    text = "def g(y):\n    return y , \u00fc \u4f60 's"
    assert theirs(text)["input_ids"] == tokenizers()[name].encode(text)
    assert theirs.decode(theirs(text)["input_ids"]) == text


def test_end_of_text_comes_from_the_files_beside_it(tmp_path: Path) -> None:
    tokenizer = tokenizers()["bpe"]
    (tmp_path / "tokenizer.json").write_text(tokenizer.backend.to_str())
    other = tokenizer.backend.id_to_token(17)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [17, 3]}))
    assert load_tokenizer(tmp_path).eos_id == 17
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END_OF_TEXT}, "chat": "x"}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.eos_id == tokenizer.eos_id
    loaded.save(tmp_path / "copy")
    config = json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text())
    assert (config["chat"], config["eos_token"]) == ("x", END_OF_TEXT)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": f"{other}nowhere"}))
    with pytest.raises(DataError, match="nowhere"):
        load_tokenizer(tmp_path)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)
