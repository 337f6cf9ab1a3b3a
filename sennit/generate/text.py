"""Token ids to text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"


class Decodes(Protocol):
    """What generation needs of a tokenizer."""

    eos_id: int

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        ...


class TextStream:
    """Turns a growing list of tokens into pieces of text that add up to the decoding of the whole.

    A character whose bytes span several tokens is held back until it is complete. The last tokens before each piece
    are decoded with it, because decoders treat the beginning of a text in their own way (a dropped space).
    """

    def __init__(self, tokenizer: Decodes, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt)[-8:]
        self._read = len(self._ids)
        self._begin = 0

    def put(self, token: int) -> str:
        """Add a token and return the text that has become certain."""
        self._ids.append(token)
        before, text = self._texts()
        if len(text) <= len(before) or text.endswith(REPLACEMENT):
            return ""
        return self._take(before, text)

    def flush(self) -> str:
        """Return what is still held back; bytes that are no text come out as replacement characters."""
        return self._take(*self._texts())

    def _texts(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        return decode(self._ids[self._begin : self._read]), decode(self._ids[self._begin :])

    def _take(self, before: str, text: str) -> str:
        self._begin, self._read = self._read, len(self._ids)
        return text[len(before) :]


def decode_after(tokenizer: Decodes, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text of `tokens` as a continuation of `prompt`."""
    stream = TextStream(tokenizer, prompt)
    return "".join([*map(stream.put, tokens), stream.flush()])


__all__ = ["Decodes", "TextStream", "decode_after"]
