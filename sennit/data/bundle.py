"""All data of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor

from sennit.data.corpus import stdlib_corpus
from sennit.data.loader import Loader, Samples
from sennit.data.samples import Blend, PackedSamples, RandomSamples, Sample
from sennit.data.sources import Part, prepare
from sennit.data.tokenizer import Tokenizer
from sennit.errors import ConfigError, SennitError

if TYPE_CHECKING:
    from sennit.recipe import Recipe


@dataclass(frozen=True, slots=True)
class DataBundle:
    """What a run reads. `tokenizer` is None for random tokens, `validation` None if nothing is held out.

    `fingerprint` names the token files, the split and their order; `byte_lengths` [vocab] bytes of each token.
    """

    train: Loader
    validation: Loader | None
    tokenizer: Tokenizer | None
    vocab_size: int
    heldout_gzip_bits_per_byte: float | None
    fingerprint: str
    byte_lengths: Tensor | None


def build_loaders(recipe: Recipe, *, main_rank: bool, barrier: Callable[[], None]) -> DataBundle:
    """Return the data of `recipe`. Collective: the main rank builds what is missing while the others wait.

    Raises DataError or ConfigError, on every rank, if something cannot be used.
    """
    if recipe.data.source == "random":
        return _random(recipe)
    failure: SennitError | None = None
    if main_rank:
        try:
            prepare(recipe)
        except SennitError as error:
            failure = error
    barrier()
    if failure is not None:
        raise failure
    tokenizer, parts = prepare(recipe)
    vocab_size = recipe.model.vocab_size or tokenizer.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"The tokenizer has {tokenizer.vocab_size:,} tokens, more than model.vocab_size={vocab_size:,}. Set "
            f"model.vocab_size to 0 (the tokenizer's) or at least {tokenizer.vocab_size}, or use the model's own tokenizer."
        )
    gzip = stdlib_corpus().gzip_bits_per_byte() if main_rank and recipe.data.source == "stdlib" else None
    held_out = _samples(recipe, parts, held_out=True)
    return DataBundle(
        train=_loader(recipe, _samples(recipe, parts, held_out=False), vocab_size),
        validation=None if held_out is None else _loader(recipe, held_out, vocab_size),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        heldout_gzip_bits_per_byte=gzip,
        fingerprint=_fingerprint(recipe, parts, tokenizer),
        byte_lengths=_padded(tokenizer.byte_lengths(), vocab_size),
    )


def _random(recipe: Recipe) -> DataBundle:
    vocab_size = recipe.model.vocab_size
    if not vocab_size:
        raise ConfigError("data.source=random has no tokenizer; set model.vocab_size to the number of tokens to draw from.")
    samples = RandomSamples(vocab_size, recipe.train.seq_len, recipe.run.seed)
    name = f"random/{vocab_size}/{recipe.train.seq_len}/{recipe.run.seed}"
    return DataBundle(_loader(recipe, samples, vocab_size), None, None, vocab_size, None, name, None)


def _samples(recipe: Recipe, parts: list[Part], *, held_out: bool) -> Samples | None:
    seq_len, seed = recipe.train.seq_len, recipe.run.seed
    found, weights = [], []
    for number, part in enumerate(parts):
        documents = part.held_out if held_out else part.train
        if len(documents):
            found.append(PackedSamples(part.dataset, documents, seq_len, seed + number, ordered=held_out))
            weights.append(part.weight)
    if not found:
        return None
    if held_out:
        return found[0] if len(found) == 1 else _Chain(found)
    return found[0] if len(found) == 1 else Blend(found, weights)


class _Chain:
    """Held-out samples of several sources, one source after the other."""

    def __init__(self, sources: list[PackedSamples]) -> None:
        self.sources = sources
        self.samples_per_epoch = sum(source.samples_per_epoch for source in sources)

    def __getitem__(self, number: int) -> Sample:
        for source in self.sources:
            if number < source.samples_per_epoch:
                return source[number]
            number -= source.samples_per_epoch
        return self.sources[-1][self.sources[-1].samples_per_epoch]


def _loader(recipe: Recipe, samples: Samples | None, vocab_size: int) -> Loader:
    if samples is None:
        raise ConfigError(
            f"data.validation_fraction={recipe.data.validation_fraction} leaves no document to train on; lower it."
        )
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
    digest = xxhash.xxh3_128(tokenizer.fingerprint.encode())
    for part in parts:
        digest.update(f"{part.dataset.fingerprint}/{len(part.train)}/{len(part.held_out)}/{part.weight!r}".encode())
    digest.update(f"{recipe.train.seq_len}/{recipe.run.seed}".encode())
    return digest.hexdigest()


__all__ = ["DataBundle", "build_loaders"]
