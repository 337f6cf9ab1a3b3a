"""The embedded corpus: the Python standard library of the running interpreter. Real text, always there, offline."""

from __future__ import annotations

import gzip
import hashlib
import os
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import xxhash

from sennit.errors import DataError

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
"""Folders left out: tests are repetitive, installed packages are not the standard library."""

HELD_OUT_EVERY = 40
"""One file in this many, chosen by the hash of its path, is held out for evaluation."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts in a fixed order. `fingerprint` names their content and split."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    fingerprint: str

    def gzip_bits_per_byte(self) -> float:
        """Return what `gzip -9` needs for the held-out text, bits a byte."""
        data = "".join(self.held_out).encode()
        return 8 * len(gzip.compress(data, 9)) / len(data)


@cache
def stdlib_corpus() -> Corpus:
    """Return the sources of the standard library, split into training and held-out files.

    The same for the same installation; files that are not UTF-8 are left out. Raises DataError if there are none.
    """
    root = Path(sysconfig.get_path("stdlib"))
    train, held_out, seen, digest = [], [], set(), xxhash.xxh3_128()
    for path in _sources(root):
        relative = path.relative_to(root)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if not text.strip() or text in seen:  # a copy in the other half would leak held-out text
            continue
        seen.add(text)
        name = relative.as_posix()
        held = int(hashlib.md5(name.encode()).hexdigest(), 16) % HELD_OUT_EVERY == 0
        (held_out if held else train).append(text)
        digest.update(f"{name}\0{held}\0{len(text)}\0".encode())
        digest.update(text.encode())
    if not train or not held_out:
        raise DataError(
            f"The sources of the Python standard library are not installed in {root}, so that there is no embedded "
            f"corpus. Install them, or name text files in data.source."
        )
    return Corpus(tuple(train), tuple(held_out), digest.hexdigest())


def _sources(root: Path) -> list[Path]:
    """Return the .py files under `root` in a fixed order."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


__all__ = ["Corpus", "stdlib_corpus"]
