"""Choosing the next token from logits."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


class Sampler:
    """Draws one token a row: greedy at temperature 0, otherwise from softmax(logits / temperature) cut to the `top_k`
    most probable tokens (0: all) and of these to the fewest whose probability reaches `top_p` (arXiv 1904.09751).

    Row r draws from a generator seeded from (seed, r) alone: what a row gets does not depend on its neighbours, on the
    device or on the layout.
    """

    def __init__(self, rows: int, *, seed: int, temperature: float, top_k: int, top_p: float) -> None:
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self._generators = [_generator(seed, row) for row in range(rows)]

    @torch.no_grad()
    def __call__(self, logits: Tensor) -> Tensor:
        """[rows, v] -> token ids [rows] int64 on the CPU."""
        if self.temperature == 0:
            return logits.argmax(dim=-1).cpu()
        probabilities, tokens = candidates(logits, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        cumulative = probabilities.cumsum(dim=-1)
        uniform = torch.stack([torch.rand((), dtype=torch.float64, generator=g) for g in self._generators])
        place = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)
        # Rounding must not reach into the tail of zeros: the last token that has any probability is the limit.
        last = (probabilities > 0).sum(dim=-1, keepdim=True) - 1
        return tokens.gather(1, torch.minimum(place, last))[:, 0]


def candidates(logits: Tensor, *, temperature: float, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Return (probabilities [rows, n] float64, descending; their token ids [rows, n]) for logits [rows, v], on the CPU.

    Tokens outside `top_k` are absent, those outside `top_p` have probability 0; the rest is not renormalised.
    """
    scores = logits.detach().to("cpu", torch.float64) / temperature
    count = scores.shape[-1] if top_k <= 0 else min(top_k, scores.shape[-1])
    scores, tokens = scores.topk(count, dim=-1)
    probabilities = scores.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    keep = before < top_p
    keep[:, 0] = True
    return probabilities * keep, tokens


def _generator(seed: int, row: int) -> torch.Generator:
    digest = hashlib.blake2b(f"sample/{seed}/{row}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


__all__ = ["Sampler", "candidates"]
