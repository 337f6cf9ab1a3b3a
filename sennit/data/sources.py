"""From the recipe's data section to token files: what is built, where it is kept, which documents are held out."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from sennit.data.build import build_dataset
from sennit.data.corpus import stdlib_corpus
from sennit.data.indexed import IndexedDataset, token_dtype, write_dataset
from sennit.data.order import mixed
from sennit.data.reading import SUFFIXES, find_files, read_documents
from sennit.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from sennit.errors import ConfigError, DataError
from sennit.paths import cache_dir

if TYPE_CHECKING:
    from sennit.recipe import Recipe

logger = logging.getLogger(__name__)

TOKENIZER_TEXT = 64 << 20
"""Characters of the text on which a BPE is trained at most."""


@dataclass(frozen=True, slots=True)
class Part:
    """A token file with the documents used for training and those held out, and its share of the blend."""

    dataset: IndexedDataset
    train: np.ndarray
    held_out: np.ndarray
    weight: float = 1.0


def prepare(recipe: Recipe) -> tuple[Tokenizer, list[Part]]:
    """Return the tokenizer and the token files of a recipe, building in the cache directory what is not there yet.

    Raises DataError or ConfigError for anything that cannot be used.
    """
    try:
        return _stdlib(recipe) if recipe.data.source == "stdlib" and not recipe.data.blend else _files(recipe)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG):
            raise
        raise DataError(
            f"The cache directory {cache_dir(recipe.data.cache_dir)} cannot be written: {error.strerror}. Free some space, or "
            f"name another directory in data.cache_dir or the environment variable SENNIT_CACHE."
        ) from None


def _stdlib(recipe: Recipe) -> tuple[Tokenizer, list[Part]]:
    corpus = stdlib_corpus()
    root = cache_dir(recipe.data.cache_dir) / "stdlib"
    tokenizer = _tokenizer(recipe, root, corpus.fingerprint, lambda: list(corpus.train))
    parts = []
    for name, texts in (("train", corpus.train), ("held-out", corpus.held_out)):
        prefix = root / f"{name}-{_key(corpus.fingerprint, tokenizer.fingerprint)}"
        if not _complete(prefix):
            rows = [np.array([*ids, tokenizer.eos_id]) for ids in tokenizer.encode_batch(list(texts))]
            write_dataset(prefix, rows, token_dtype(tokenizer.vocab_size))
        parts.append(IndexedDataset(prefix))
    none = np.empty(0, np.int64)
    return tokenizer, [
        Part(parts[0], np.arange(len(parts[0])), none),
        Part(parts[1], none, np.arange(len(parts[1])), weight=0.0),
    ]


def _files(recipe: Recipe) -> tuple[Tokenizer, list[Part]]:
    data = recipe.data
    if data.blend:
        entries = [(entry.path, entry.weight) for entry in data.blend]
    else:
        entries = [(path, 0.0) for path in ([data.source] if isinstance(data.source, str) else data.source)]
    root = cache_dir(data.cache_dir) / "built"
    texts = [path for path, _ in entries if not is_prefix(path)]
    tokenizer = _tokenizer(recipe, root, _input_key(texts), lambda: _training_texts(texts))
    parts = []
    for path, weight in entries:
        dataset = IndexedDataset(_built(path, root, tokenizer) if not is_prefix(path) else path)
        train, held_out = split(dataset, data.validation_fraction)
        parts.append(Part(dataset, train, held_out, weight or float(dataset.lengths[train].sum())))
    return tokenizer, parts


def is_prefix(path: str) -> bool:
    """Whether `path` names a pair PREFIX.bin, PREFIX.idx rather than text."""
    target = Path(path).expanduser()
    if Path(f"{target}.idx").exists() or Path(f"{target}.bin").exists():
        return True
    return not target.exists() and target.suffix not in SUFFIXES


def split(dataset: IndexedDataset, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (training, held-out) documents: those with the smallest hashes of their number are held out.

    At least one is held out if `fraction` > 0 and there are two documents or more.
    """
    count = len(dataset)
    held = min(max(round(count * fraction), 1), count - 1) if fraction > 0 else 0
    if held == 0:
        if fraction > 0:
            logger.warning("%s has one document; nothing is held out for evaluation", dataset.prefix)
        return np.arange(count), np.empty(0, np.int64)
    order = np.argsort(mixed(np.arange(count, dtype=np.uint64), 0), kind="stable")
    return np.sort(order[held:]), np.sort(order[:held])


def _tokenizer(recipe: Recipe, root: Path, content: str, texts: Callable[[], list[str]]) -> Tokenizer:
    spec = recipe.data.tokenizer
    if not spec.startswith("bpe:"):
        return load_tokenizer(spec)
    folder = root / f"bpe-{spec.removeprefix('bpe:')}-{content}"
    if not (folder / "tokenizer_config.json").exists():
        found = texts()
        if not found:
            raise ConfigError(
                f"data.tokenizer={spec} trains a tokenizer on text, but data.source has only token files. Name the "
                f"tokenizer they were built with."
            )
        train_bpe(found, int(spec.removeprefix("bpe:"))).save(folder)
    return load_tokenizer(folder)


def _training_texts(inputs: list[str]) -> list[str]:
    texts, size = [], 0
    for path in find_files(inputs) if inputs else []:
        for document in read_documents(path, 0, "text"):
            texts.append(document.text)
            size += len(document.text)
            if size >= TOKENIZER_TEXT:
                return texts
    return texts


def _built(path: str, root: Path, tokenizer: Tokenizer) -> Path:
    prefix = root / f"{Path(path).stem}-{_key(_input_key([path]), tokenizer.fingerprint)}"
    if not _complete(prefix):
        logger.info("building %s.bin from %s", prefix, path)
        build_dataset([path], prefix, tokenizer)
    return prefix


def _input_key(inputs: list[str]) -> str:
    facts = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in (find_files(inputs) if inputs else [])]
    return _key(json.dumps(facts))


def _key(*parts: str) -> str:
    return xxhash.xxh3_64_hexdigest("\0".join(parts).encode())


def _complete(prefix: Path) -> bool:
    return os.path.exists(f"{prefix}.idx") and os.path.exists(f"{prefix}.bin")


__all__ = ["Part", "is_prefix", "prepare", "split"]
