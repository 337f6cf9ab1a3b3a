"""The only places Sennit writes to: a run's directory and the cache directory."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir(configured: str = "") -> Path:
    """Return the cache directory: `configured` (data.cache_dir), else $SENNIT_CACHE, else ~/.cache/sennit."""
    text = configured or os.environ.get("SENNIT_CACHE", "")
    return Path(text).expanduser() if text else Path.home() / ".cache" / "sennit"


__all__ = ["cache_dir"]
