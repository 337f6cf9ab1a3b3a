"""Autoregressive generation with key/value caches, on any layout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sennit import ops
from sennit.errors import ConfigError
from sennit.generate.sampling import Sampler
from sennit.generate.text import Decodes, decode_after
from sennit.mesh import collectives
from sennit.models import Decoder, StagedDecoder
from sennit.nn import LayerCache
from sennit.nn.parameter import local

logger = logging.getLogger(__name__)


@torch.no_grad()
def generate(
    model: Decoder | StagedDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    seed: int = 0,
    eos_id: int | Sequence[int] | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Return up to `max_new_tokens` new tokens for each prompt; a row ends before `eos_id` (one, several or none).

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off. An empty prompt starts from (the first) `eos_id`.
    `on_token(row, token)` is called for every new token as it appears. Prompts of different length are padded on the
    left and masked, so that a row gets what it would get alone. Rows that pad the vocabulary are never drawn.
    Equal arguments give equal tokens. The model keeps its train/eval mode.

    Collective: every rank of the model's mesh calls it with equal arguments and gets the same tokens.
    Raises ConfigError for settings out of range, tokens outside the vocabulary, or an empty prompt without `eos_id`.
    """
    stops = _stops(eos_id)
    _check_settings(max_new_tokens, temperature, top_k, top_p)
    rows = _checked_prompts(prompts, stops, model.config.vocab_size)
    if not rows or max_new_tokens == 0:
        return [[] for _ in rows]
    longest = max(map(len, rows)) + max_new_tokens
    if longest > model.config.max_position:
        logger.warning(
            "prompt and new tokens reach position %d, beyond the %d the model was made for; the text may get worse",
            longest,
            model.config.max_position,
        )
    sampler = Sampler(len(rows), seed=seed, temperature=temperature, top_k=top_k, top_p=top_p)
    out: list[list[int]] = [[] for _ in rows]
    active = set(range(len(rows)))
    with _eval_mode(model):
        decoding = _Decoding(model, rows, longest)
        logits = decoding.prefill()
        while True:
            tokens = _agree(sampler(logits), model)
            for row in sorted(active):
                token = int(tokens[row])
                if token in stops:
                    active.discard(row)
                    continue
                out[row].append(token)
                if on_token is not None:
                    on_token(row, token)
            if not active or max(map(len, out)) == max_new_tokens:
                return out
            logits = decoding.step(tokens)


def sample_text(
    model: Decoder | StagedDecoder,
    tokenizer: Decodes,
    prompt: str,
    *,
    max_new_tokens: int,
    seed: int,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
) -> str:
    """Return a continuation of `prompt`, which itself is not repeated. Collective like `generate`, same errors."""
    ids = tokenizer.encode(prompt)
    new = generate(
        model,
        [ids],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eos_id=tokenizer.eos_id,
    )
    return decode_after(tokenizer, ids, new[0])


class _Decoding:
    """Caches, positions and mask of a batch of prompts."""

    def __init__(self, model: Decoder | StagedDecoder, rows: list[list[int]], max_length: int) -> None:
        self.model = model
        self.device = local(next(model.parameters())).device
        self.dtype = compute_dtype(model)
        lengths = torch.tensor([len(row) for row in rows])
        width = int(lengths.max())
        self.pads = (width - lengths).to(self.device)
        self.tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=self.device)
        self.key_mask: Tensor | None = None
        if bool((self.pads > 0).any()):
            self.key_mask = torch.arange(max_length, device=self.device)[None, :] >= self.pads[:, None]
        self.caches = _new_caches(model, len(rows), max_length, self.dtype)

    def prefill(self) -> Tensor:
        """Run the prompts and return the logits [rows, v] (real tokens only) after their last tokens."""
        return self._logits(self.tokens)

    def step(self, tokens: Tensor) -> Tensor:
        """Run one more token a row, `tokens` [rows], and return the logits [rows, v] after it."""
        return self._logits(tokens.to(self.device)[:, None])

    def _logits(self, tokens: Tensor) -> Tensor:
        model, start = self.model, next(iter(self.caches.values())).length
        positions = None
        if self.key_mask is not None:
            columns = torch.arange(start, start + tokens.shape[1], device=self.device)
            positions = (columns[None, :] - self.pads[:, None]).clamp(min=0)
        context = model.context(
            tokens,
            dtype=self.dtype,
            positions=positions,
            start=start,
            caches=self.caches,
            key_mask=self.key_mask,
        )
        batch = tokens.shape[0]

        def last_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            return ops.linear(hidden.unflatten(0, (batch, -1))[:, -1], weight)

        # Through `forward`, so that wrappers around the model (FSDP) see it; only the last position meets the head.
        mine = model(tokens, context, tokens, last_logits)
        return collectives.gather_last(mine, model.mesh.tp)[:, : model.config.vocab_size]


def compute_dtype(model: Decoder | StagedDecoder) -> torch.dtype:
    """Return the dtype of activations: the parameters', or the one that FSDP's mixed precision converts them to."""
    part = next(iter(model.parts.values())) if isinstance(model, StagedDecoder) else model
    state = getattr(part, "_get_fsdp_state", None)
    policy = None if state is None else getattr(state(), "_mp_policy", None)
    return getattr(policy, "param_dtype", None) or local(next(model.parameters())).dtype


def _new_caches(model: Decoder | StagedDecoder, batch: int, max_length: int, dtype: torch.dtype) -> dict[int, LayerCache]:
    caches = model.new_caches(batch, max_length)
    for cache in caches.values():
        cache.k, cache.v = cache.k.to(dtype), cache.v.to(dtype)
    return caches


def _agree(tokens: Tensor, model: Decoder | StagedDecoder) -> Tensor:
    """Return rank 0's tokens: ranks that differed in a last bit must not go different ways, one would wait for ever."""
    world: Any = model.mesh.world
    if world.size == 1:
        return tokens
    shared = tokens.to(local(next(model.parameters())).device)
    dist.broadcast(shared, 0, group=world.group)
    return shared.cpu()


@contextmanager
def _eval_mode(model: Decoder | StagedDecoder) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _stops(eos_id: int | Sequence[int] | None) -> list[int]:
    if eos_id is None:
        return []
    return [eos_id] if isinstance(eos_id, int) else list(eos_id)


def _check_settings(max_new_tokens: int, temperature: float, top_k: int, top_p: float) -> None:
    problems = []
    if max_new_tokens < 0:
        problems.append(f"max_new_tokens={max_new_tokens} must be at least 0")
    if not 0 <= temperature < float("inf"):
        problems.append(f"temperature={temperature} must be at least 0 (0 always takes the most probable token)")
    if top_k < 0:
        problems.append(f"top_k={top_k} must be at least 0 (0 is off)")
    if not 0 < top_p <= 1:
        problems.append(f"top_p={top_p} must be above 0 and at most 1 (1 is off)")
    if problems:
        raise ConfigError(f"Generation settings are out of range: {'; '.join(problems)}.")


def _checked_prompts(prompts: Sequence[Sequence[int]], stops: list[int], vocab_size: int) -> list[list[int]]:
    rows = [list(prompt) or stops[:1] for prompt in prompts]
    for index, row in enumerate(rows):
        if not row:
            raise ConfigError(f"Prompt {index} is empty and there is no end-of-text token to start from; give text.")
        wrong = next((token for token in row if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ConfigError(
                f"Prompt {index} has token {wrong}, but the model knows tokens 0 to {vocab_size - 1}: the tokenizer is "
                f"not the one that the model was trained with."
            )
    return rows


__all__ = ["compute_dtype", "generate", "sample_text"]
