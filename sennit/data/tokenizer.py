"""Tokenizers: any `tokenizer.json`, plain bytes, or a byte-level BPE trained on the text at hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from sennit.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """Text to token ids and back. `eos_id` ends every document.

    Special tokens that happen to be spelled out in a text are encoded as ordinary text, never as themselves.
    """

    def __init__(self, backend: Backend, eos: str | None = None) -> None:
        self.backend = backend
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos = eos or _guess_eos(backend)
        self.eos_id = backend.token_to_id(self.eos)
        if self.eos_id is None:
            raise DataError(f"The tokenizer has no token {self.eos!r}, which its configuration names as end of text.")
        self.fingerprint = xxhash.xxh3_128_hexdigest(self._canonical().encode())

    def _canonical(self) -> str:
        return json.dumps([json.loads(self.backend.to_str()), self.eos], sort_keys=True)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without any special token."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text; uses all cores."""
        return [e.ids for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; special tokens are left out."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def byte_lengths(self) -> torch.Tensor:
        """Return how many bytes of text each token stands for, int64 [vocab]; special tokens stand for none."""
        lengths = torch.zeros(self.vocab_size, dtype=torch.int64)
        special = {i for i, token in self.backend.get_added_tokens_decoder().items() if token.special}
        byte_level = '"ByteLevel"' in json.dumps(json.loads(self.backend.to_str()).get("decoder"))
        for token, index in self.backend.get_vocab(with_added_tokens=True).items():
            if index in special:
                continue
            if byte_level:
                lengths[index] = len(token)  # one character of the byte alphabet a byte
            elif len(token) == 6 and token.startswith("<0x"):
                lengths[index] = 1
            else:
                lengths[index] = len(token.replace("\u2581", " ").encode())
        return lengths

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `transformers` loads too."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eos, "add_bos_token": False}
        for name, text in (
            ("tokenizer.json", self.backend.to_str(pretty=True)),
            ("tokenizer_config.json", json.dumps(config, indent=1)),
        ):
            temporary = folder / f"{name}.tmp"
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(folder / name)


def _guess_eos(backend: Backend) -> str:
    for name in (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>"):
        if backend.token_to_id(name) is not None:
            return name
    raise DataError(
        "The tokenizer does not say which token ends a text. Put a tokenizer_config.json with eos_token beside its "
        "tokenizer.json."
    )


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer whose tokens are the 256 bytes and the end of text."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return Tokenizer(backend, END_OF_TEXT)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens; the same texts give the same tokenizer."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, END_OF_TEXT)


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Return the tokenizer that `spec` names: "bytes", a tokenizer.json, or a folder that has one.

    Raises DataError if the file is missing or no tokenizer.
    """
    if str(spec) == "bytes":
        return byte_tokenizer()
    from tokenizers import Tokenizer as Backend

    path = Path(spec).expanduser()
    folder = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"data.tokenizer: there is no file {file}. Give a tokenizer.json, a folder that has one, bytes, or bpe:N."
        )
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:
        raise DataError(f"data.tokenizer: {file} is not a tokenizer of the tokenizers library: {error}.") from None
    return Tokenizer(backend, _configured_eos(folder))


def _configured_eos(folder: Path) -> str | None:
    try:
        value: Any = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError):
        return None
    return value.get("content") if isinstance(value, dict) else value


__all__ = ["END_OF_TEXT", "Tokenizer", "byte_tokenizer", "load_tokenizer", "train_bpe"]
