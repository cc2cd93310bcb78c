"""Where things are kept between processes: compiled kernels, and what was measured on the user's cards."""

from __future__ import annotations

import os
import re
from pathlib import Path


def cache_dir() -> Path:
    """``CUTE_FA_CACHE_DIR``, else ``$XDG_CACHE_HOME/cute_fa``, else ``~/.cache/cute_fa``."""
    if directory := os.environ.get("CUTE_FA_CACHE_DIR"):
        return Path(directory)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cute_fa"


def slug(name: str) -> str:
    """A device's name as a file's or a folder's: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
