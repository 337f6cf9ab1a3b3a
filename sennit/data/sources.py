"""From the recipe's data section to token files: what is built, where it is kept, which documents are held out."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from sennit.data.build import build_dataset
from sennit.data.corpus import stdlib_corpus
from sennit.data.files import FULL
from sennit.data.indexed import IndexedDataset, token_dtype, write_dataset
from sennit.data.order import mixed
from sennit.data.reading import SUFFIXES, find_files, read_pieces
from sennit.data.samples import Spans
from sennit.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from sennit.errors import ConfigError, DataError
from sennit.paths import cache_dir

if TYPE_CHECKING:
    from sennit.recipe import Recipe

logger = logging.getLogger(__name__)

STDLIB = "stdlib"
"""Name of the embedded corpus as a source."""

TOKENIZER_TEXT = 64 << 20
"""Characters of the text on which a BPE is trained at most."""

NO_ACCESS = FULL | {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENOENT}


@dataclass(frozen=True, slots=True)
class Part:
    """What one source gives: tokens for training, tokens held out, its share of the blend, and its name and hash."""

    tokens: np.ndarray
    train: Spans
    held_tokens: np.ndarray
    held_out: Spans
    weight: float
    origin: str
    fingerprint: str


def prepare(recipe: Recipe, *, build: bool = True) -> tuple[Tokenizer, list[Part]]:
    """Return the tokenizer and the token files of a recipe, building in the cache directory what is not there yet.

    Raises DataError or ConfigError for anything that cannot be used, and, without `build`, for what is not built.
    """
    data = recipe.data
    root = cache_dir(data.cache_dir)
    if data.blend:
        entries = [(entry.path, entry.weight) for entry in data.blend]
    else:
        entries = [(path, 0.0) for path in ([data.source] if isinstance(data.source, str) else data.source)]
    try:
        tokenizer = _tokenizer(data.tokenizer, root, [path for path, _ in entries if not is_prefix(path)], build)
        return tokenizer, [
            _part(path, weight, root, tokenizer, data.validation_fraction, build) for path, weight in entries
        ]
    except OSError as error:
        if error.errno not in NO_ACCESS:
            raise
        raise DataError(
            f"The cache directory {root} cannot be written: {error.strerror}. Free some space, or name another "
            f"directory in data.cache_dir or the environment variable SENNIT_CACHE."
        ) from None


def _part(path: str, weight: float, root: Path, tokenizer: Tokenizer, fraction: float, build: bool) -> Part:
    if path == STDLIB:
        train, held = _stdlib(root, tokenizer, build)
        spans, held_out = Spans(train.starts, train.lengths), Spans(held.starts, held.lengths)
        if fraction == 0:
            held_out = held_out.pick(np.empty(0, np.int64))
        hashes = train.fingerprint + held.fingerprint
    else:
        train = held = IndexedDataset(path) if is_prefix(path) else _built(path, root, tokenizer, build)
        spans, held_out = split(Spans(train.starts, train.lengths), fraction)
        hashes = train.fingerprint
        if fraction > 0 and not len(held_out.starts):
            logger.warning("%s is too small to hold any of it out for evaluation", train.bin)
    weight = weight or float(spans.num_tokens)
    return Part(train.tokens, spans, held.tokens, held_out, weight, str(train.bin), hashes)


def is_prefix(path: str) -> bool:
    """Whether `path` names a pair PREFIX.bin, PREFIX.idx rather than text or the embedded corpus."""
    target = Path(path).expanduser()
    if path == STDLIB:
        return False
    if target.suffix in (".bin", ".idx") or Path(f"{target}.idx").exists() or Path(f"{target}.bin").exists():
        return True
    return not target.exists() and target.suffix not in SUFFIXES


def split(documents: Spans, fraction: float) -> tuple[Spans, Spans]:
    """Return (training, held-out) documents: those with the smallest hashes of their number are held out.

    At least one is held out if `fraction` > 0. Of a single document, the end is held out instead.
    """
    count = len(documents.starts)
    none = documents.pick(np.empty(0, np.int64))
    if fraction == 0:
        return documents, none
    if count == 1:
        start, length = int(documents.starts[0]), int(documents.lengths[0])
        held = round(length * fraction)
        if held < 2:
            return documents, none
        cut = length - held
        return Spans(documents.starts, np.array([cut])), Spans(np.array([start + cut]), np.array([held]))
    held = min(max(round(count * fraction), 1), count - 1)
    order = np.argsort(mixed(np.arange(count, dtype=np.uint64), 0), kind="stable")
    return documents.pick(np.sort(order[held:])), documents.pick(np.sort(order[:held]))


def _stdlib(root: Path, tokenizer: Tokenizer, build: bool) -> tuple[IndexedDataset, IndexedDataset]:
    corpus = stdlib_corpus()

    def opened(name: str, texts: tuple[str, ...]) -> IndexedDataset:
        def write() -> None:
            rows = [np.array([*ids, tokenizer.eos_id]) for ids in tokenizer.encode_batch(texts)]
            write_dataset(prefix, rows, token_dtype(tokenizer.vocab_size))

        prefix = root / STDLIB / f"{name}-{_key(corpus.fingerprint, tokenizer.fingerprint)}"
        return _cached(prefix, build, write)

    return opened("train", corpus.train), opened("held-out", corpus.held_out)


def _built(path: str, root: Path, tokenizer: Tokenizer, build: bool) -> IndexedDataset:
    def write() -> None:
        logger.info("building %s.bin from %s", prefix, path)
        build_dataset([path], prefix, tokenizer, wait=True)

    prefix = root / "built" / f"{Path(path).stem}-{_key(_input_key([path]), tokenizer.fingerprint)}"
    return _cached(prefix, build, write)


def _cached(prefix: Path, build: bool, write: Callable[[], None]) -> IndexedDataset:
    """Open the token file at `prefix` of the cache; with `build`, write it first if it is missing or damaged."""
    try:
        return IndexedDataset(prefix)
    except DataError:
        if not build:
            raise _not_built(prefix) from None
    write()
    return IndexedDataset(prefix)


def _not_built(path: Path) -> DataError:
    return DataError(
        f"{path} is not there on this rank: the main rank could not prepare the data (its message says why), or it "
        f"wrote to a directory that this machine does not share. Name a shared directory in data.cache_dir."
    )


def _tokenizer(spec: str, root: Path, inputs: list[str], build: bool) -> Tokenizer:
    """Return the tokenizer that `spec` names; bpe:N is trained on the text of `inputs` and kept in the cache."""
    if not spec.startswith("bpe:"):
        return load_tokenizer(spec)
    if not inputs:
        raise ConfigError(
            f"data.tokenizer={spec} trains a tokenizer on text, but the sources are only token files. Name the "
            f"tokenizer that they were built with."
        )
    size = int(spec.removeprefix("bpe:"))
    folder = root / "tokenizers" / f"bpe-{size}-{_content_key(inputs)}"
    if (folder / "tokenizer_config.json").exists():
        try:
            return load_tokenizer(folder)
        except DataError:
            if not build:
                raise
    if not build:
        raise _not_built(folder)
    train_bpe(training_texts(inputs), size).save(folder)
    return load_tokenizer(folder)


def training_texts(inputs: list[str], key: str = "text") -> list[str]:
    """Return texts of `inputs` to train a tokenizer on, from their beginning. Raises DataError if there are none."""
    texts, size = [], 0
    for source in inputs:
        found = stdlib_corpus().train if source == STDLIB else _texts(source, key)
        for text in found:
            texts.append(text)
            size += len(text)
            if size >= TOKENIZER_TEXT:
                return texts
    if not size:
        raise DataError(f"There is no text in {', '.join(inputs)} to train a tokenizer on. Name files that hold text.")
    return texts


def _texts(source: str, key: str) -> Iterator[str]:
    for path in find_files([source]):
        yield from (piece.text for piece in read_pieces(path, 0, key))


def _content_key(inputs: list[str]) -> str:
    return _key(*(stdlib_corpus().fingerprint if path == STDLIB else _input_key([path]) for path in inputs))


def _input_key(inputs: list[str]) -> str:
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in find_files(inputs)]
    return _key(json.dumps(facts))


def _key(*parts: str) -> str:
    return xxhash.xxh3_64_hexdigest("\0".join(parts).encode())


__all__ = ["STDLIB", "Part", "is_prefix", "prepare", "split", "training_texts"]
