"""All data of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor

from sennit.data.corpus import stdlib_corpus
from sennit.data.loader import Loader, Samples
from sennit.data.order import seed_of
from sennit.data.samples import Blend, Chain, PackedSamples, RandomSamples
from sennit.data.sources import STDLIB, Part, prepare
from sennit.data.tokenizer import Tokenizer
from sennit.errors import ConfigError

if TYPE_CHECKING:
    from sennit.recipe import Recipe


@dataclass(frozen=True, slots=True)
class DataBundle:
    """What a run reads. `tokenizer` is None for random tokens, `validation` None if nothing is held out.

    `vocab_size`: rows that may be predicted. `fingerprint` names the token files, the split and their order.
    `heldout_gzip_bits_per_byte`: of `gzip -9` on the held-out text; the embedded corpus only, on the main rank only.
    `byte_lengths` int64 [vocab]: bytes of text of each token.
    """

    train: Loader
    validation: Loader | None
    tokenizer: Tokenizer | None
    vocab_size: int
    heldout_gzip_bits_per_byte: float | None
    fingerprint: str
    byte_lengths: Tensor | None


def build_loaders(recipe: Recipe, *, main_rank: bool, barrier: Callable[[], None]) -> DataBundle:
    """Return the data of `recipe`. Collective: the main rank builds what is missing while the others wait in `barrier`.

    Raises DataError or ConfigError, on every rank, if something cannot be used.
    """
    if recipe.data.source == "random":
        return _random(recipe)
    failure: Exception | None = None
    if main_rank:
        try:
            prepare(recipe)
        except Exception as error:  # raised below: the other ranks must not wait for this one
            failure = error
    barrier()
    if failure is not None:
        raise failure
    tokenizer, parts = prepare(recipe, build=False)
    vocab_size = recipe.model.vocab_size or tokenizer.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"The tokenizer has {tokenizer.vocab_size:,} tokens, more than model.vocab_size={vocab_size:,}. Set "
            f"model.vocab_size to 0 (the tokenizer's) or at least {tokenizer.vocab_size}, or use the model's own "
            f"tokenizer."
        )
    held_out = _held_out(recipe, parts)
    only_stdlib = not recipe.data.blend and recipe.data.source in (STDLIB, (STDLIB,))
    return DataBundle(
        train=_loader(recipe, _train(recipe, parts), vocab_size),
        validation=None if held_out is None else _loader(recipe, held_out, vocab_size),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        heldout_gzip_bits_per_byte=stdlib_corpus().gzip_bits_per_byte() if main_rank and only_stdlib else None,
        fingerprint=_fingerprint(recipe, parts, tokenizer),
        byte_lengths=_padded(tokenizer.byte_lengths(), vocab_size),
    )


def _random(recipe: Recipe) -> DataBundle:
    vocab_size = recipe.model.vocab_size
    if not vocab_size:
        raise ConfigError(
            "data.source=random has no tokenizer; set model.vocab_size to the number of tokens to draw from."
        )
    samples = RandomSamples(vocab_size, recipe.train.seq_len, recipe.run.seed)
    name = f"random/{vocab_size}"
    return DataBundle(_loader(recipe, samples, vocab_size), None, None, vocab_size, None, name, None)


def _train(recipe: Recipe, parts: list[Part]) -> Samples:
    seq_len, seed = recipe.train.seq_len, recipe.run.seed
    sources = [
        PackedSamples(part.tokens, part.train, seq_len, seed_of(seed, number), origin=part.origin)
        for number, part in enumerate(parts)
    ]
    return sources[0] if len(sources) == 1 else Blend(sources, [part.weight for part in parts], seed)


def _held_out(recipe: Recipe, parts: list[Part]) -> Samples | None:
    sources = [
        PackedSamples(part.held_tokens, part.held_out, recipe.train.seq_len, 0, ordered=True, origin=part.origin)
        for part in parts
        if part.held_out.num_tokens > 1
    ]
    if not sources:
        return None
    return sources[0] if len(sources) == 1 else Chain(sources)


def _loader(recipe: Recipe, samples: Samples, vocab_size: int) -> Loader:
    return Loader(
        samples,
        micro_batch_size=recipe.train.micro_batch_size,
        global_batch_size=recipe.train.global_batch_size,
        vocab_size=vocab_size,
        mask_documents=recipe.data.mask_documents and recipe.data.source != "random",
    )


def _padded(lengths: Tensor, vocab_size: int) -> Tensor:
    """Return `lengths` with zeros for ids that no token has."""
    return torch.nn.functional.pad(lengths, (0, max(vocab_size - len(lengths), 0)))


def _fingerprint(recipe: Recipe, parts: list[Part], tokenizer: Tokenizer) -> str:
    facts = [(part.fingerprint, part.train.num_tokens, part.held_out.num_tokens, part.weight) for part in parts]
    return xxhash.xxh3_128_hexdigest(json.dumps([tokenizer.fingerprint, facts, recipe.data.mask_documents]).encode())


__all__ = ["DataBundle", "build_loaders"]
