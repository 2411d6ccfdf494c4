"""Files that a recipe names outside the store: their content sums, remembered between runs."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from tasks.fingerprint import DigestCache


def source_sha256(path: Path) -> str:
    """Sha256 of a file's content in hex; an unchanged file (path, size, mtime) is read only once per user."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return _digests(root).sha256(path.resolve())


@cache
def _digests(root: Path) -> DigestCache:
    return DigestCache(root / "dspark-pipeline" / "source-digests.sqlite")
