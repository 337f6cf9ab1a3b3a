"""What may be drawn, how often, and how text grows from tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sennit.data.tokenizer import byte_tokenizer, train_bpe
from sennit.generate import Sampler, TextStream, candidates, decode_after

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0, -4.0]])


def test_candidates_are_cut_and_ordered() -> None:
    full = LOGITS.double().softmax(-1)[0]
    probabilities, tokens = candidates(LOGITS, temperature=1.0, top_k=0, top_p=1.0)
    assert tokens.tolist() == [[1, 3, 2, 0, 4]] and torch.allclose(probabilities[0], full[tokens[0]])
    _, tokens = candidates(LOGITS, temperature=1.0, top_k=2, top_p=1.0)
    assert tokens.tolist() == [[1, 3]]
    # 0.64 < 0.7 <= 0.64 + 0.24: the fewest tokens that reach top_p are two
    probabilities, _ = candidates(LOGITS, temperature=1.0, top_k=0, top_p=0.7)
    assert (probabilities > 0).tolist() == [[True, True, False, False, False]]
    hot, _ = candidates(LOGITS, temperature=2.0, top_k=0, top_p=1.0)
    assert hot[0, 0] == pytest.approx(float((LOGITS.double() / 2).softmax(-1)[0, 1]))


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.9), (2, 0.8)])
def test_tokens_are_drawn_as_often_as_they_should(top_k: int, top_p: float) -> None:
    rows = 4000
    sampler = Sampler(rows, seed=5, temperature=1.0, top_k=top_k, top_p=top_p)
    drawn = Counter(sampler(LOGITS.expand(rows, -1)).tolist())
    probabilities, tokens = candidates(LOGITS, temperature=1.0, top_k=top_k, top_p=top_p)
    probabilities = probabilities[0] / probabilities.sum()
    for token, probability in zip(tokens[0].tolist(), probabilities.tolist(), strict=True):
        sigma = (probability * (1 - probability) / rows) ** 0.5
        assert abs(drawn.pop(token, 0) / rows - probability) <= 4 * sigma
    assert not drawn


def test_a_row_draws_alone() -> None:
    def draws(rows: int) -> list[list[int]]:
        sampler = Sampler(rows, seed=1, temperature=1.0, top_k=0, top_p=1.0)
        return torch.stack([sampler(LOGITS.expand(rows, -1)) for _ in range(20)]).T.tolist()

    assert draws(3)[0] == draws(1)[0] and draws(3)[:2] == draws(2)


def test_rounding_never_reaches_impossible_tokens() -> None:
    sampler = Sampler(500, seed=2, temperature=1.0, top_k=0, top_p=1.0)
    logits = torch.full((500, 50), float("-inf"))
    logits[:, 7] = 0.0
    assert sampler(logits).unique().tolist() == [7]


@given(st.text(max_size=30), st.integers(0, 30))
def test_pieces_add_up_to_the_text(text: str, cut: int) -> None:
    tokenizer = byte_tokenizer()
    cut = min(cut, len(text))
    prompt, rest = tokenizer.encode(text[:cut]), tokenizer.encode(text[cut:])
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.put(token) for token in rest]
    whole = "".join(pieces)
    assert text[cut:].startswith(whole) and whole + stream.flush() == text[cut:]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces), "half a character was shown"


def test_broken_bytes_come_out_in_the_end() -> None:
    tokenizer = train_bpe(["a b c d"], 300)
    ids = tokenizer.encode("\u20ac")
    assert decode_after(tokenizer, tokenizer.encode("x"), ids) == "\u20ac"
    assert decode_after(tokenizer, tokenizer.encode("x"), [*ids[:2], *tokenizer.encode("a")]) == "\ufffda"
    assert decode_after(tokenizer, [], ids[:2]) == "\ufffd"
