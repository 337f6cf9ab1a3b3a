"""Tokenizers: any `tokenizer.json`, plain bytes, or a byte-level BPE trained on the text at hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from sennit.data.files import write_atomic
from sennit.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """Text to token ids and back, over the `tokenizers` library.

    `vocab_size`: one more than the largest id. `eos`, `eos_id`: the token that ends every document. `fingerprint`:
    the same for tokenizers that do the same. `config`: what tokenizer_config.json said, kept for `save`.
    Special tokens that happen to be spelled out in a text are encoded as ordinary text, never as themselves.
    Raises DataError if there is no token that ends a text.
    """

    def __init__(self, backend: Backend, eos: str | None = None, config: dict[str, Any] | None = None) -> None:
        self.backend, self.config = backend, config or {}
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos = eos or _guess_eos(backend)
        eos_id = backend.token_to_id(self.eos)
        if eos_id is None:
            raise DataError(
                f"The tokenizer has no token {self.eos!r}, which its tokenizer_config.json names as eos_token. "
                f"Correct the name there, or use the tokenizer.json that belongs to it."
            )
        self.eos_id: int = eos_id
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
        """Return how many bytes of text each token stands for, int64 [vocab]; special tokens and gaps stand for "
        "none."""
        lengths = torch.zeros(self.vocab_size, dtype=torch.int64)
        added = self.backend.get_added_tokens_decoder()
        byte_level = '"ByteLevel"' in json.dumps(json.loads(self.backend.to_str()).get("decoder"))
        for token, index in self.backend.get_vocab(with_added_tokens=True).items():
            if index in added:
                lengths[index] = 0 if added[index].special or index == self.eos_id else len(token.encode())
            elif byte_level:
                lengths[index] = len(token)  # one character of the byte alphabet a byte
            elif len(token) == 6 and token.startswith("<0x"):
                lengths[index] = 1
            else:
                lengths[index] = len(token.replace("\u2581", " ").encode())
        return lengths

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `transformers` loads too, each atomically."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            **{name: value for name, value in self.config.items() if name != "auto_map"},
            "eos_token": self.eos,
        }
        write_atomic(folder / "tokenizer.json", self.backend.to_str(pretty=True).encode())
        write_atomic(folder / "tokenizer_config.json", json.dumps(config, indent=1).encode())


def _guess_eos(backend: Backend) -> str:
    for name in (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>"):
        if backend.token_to_id(name) is not None:
            return name
    raise DataError(
        "The tokenizer does not say which token ends a text. Put a tokenizer_config.json with eos_token beside its "
        'tokenizer.json, for example {"eos_token": "</s>"}.'
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
        raise DataError(
            f"data.tokenizer: {file} is not a tokenizer of the tokenizers library: {error}. Copy it again from its "
            f"source, or give another."
        ) from None
    config = _read_object(folder / "tokenizer_config.json")
    return Tokenizer(backend, _configured_eos(folder, config, backend), config)


def _configured_eos(folder: Path, config: dict[str, Any], backend: Backend) -> str | None:
    """Return the end of text that the files beside a tokenizer.json name: eos_token, else the first eos_token_id."""
    value = config.get("eos_token")
    value = value.get("content") if isinstance(value, dict) else value
    if isinstance(value, str):
        return value
    for name in ("generation_config.json", "config.json"):
        ids = _read_object(folder / name).get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        token = backend.id_to_token(first) if isinstance(first, int) else None
        if token is not None:
            return token
    return None


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, empty if there is none. Raises DataError if the file is not JSON."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}. Copy it again from its source, or remove it.") from None
    return value if isinstance(value, dict) else {}


__all__ = ["END_OF_TEXT", "Tokenizer", "byte_tokenizer", "load_tokenizer", "train_bpe"]
