"""Order from hashes: permutations and splits that are pure functions of a seed, the same in every version of "
"NumPy."""

from __future__ import annotations

import numpy as np


def mixed(index: np.ndarray, seed: int) -> np.ndarray:
    """Return a 64-bit hash of each index (the finaliser of splitmix64, twice, with the seed in between)."""
    with np.errstate(over="ignore"):
        x = _finalise(index.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        return _finalise(x ^ np.uint64(seed & 0xFFFFFFFFFFFFFFFF))


def _finalise(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def seed_of(*parts: int) -> int:
    """Return one 64-bit seed made of several numbers."""
    value = np.zeros(1, np.uint64)
    for part in parts:
        value = mixed(value, int(part))
    return int(value[0])


def permutation(size: int, seed: int) -> np.ndarray:
    """Return a permutation of 0 .. size - 1, int64."""
    return np.argsort(mixed(np.arange(size, dtype=np.uint64), seed), kind="stable")


__all__ = ["mixed", "permutation", "seed_of"]
