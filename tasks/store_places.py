"""Where a store and its working folder are, when nobody says so."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tasks.provenance import REPO_ROOT


def default_root() -> str:
    """$DSPARK_STORE, else `.dspark/store` in the checkout."""
    return os.environ.get("DSPARK_STORE") or str(REPO_ROOT / ".dspark" / "store")


def default_work(root: str, is_local: bool) -> Path:
    """Unfinished work and copies of remote artifacts: $DSPARK_WORK, else beside a local store or in the checkout."""
    base = os.environ.get("DSPARK_WORK")
    if base or not is_local:
        return Path(base or REPO_ROOT / ".dspark" / "remote") / re.sub(r"[^A-Za-z0-9._-]+", "-", root).strip("-")
    path = Path(root)
    return path.with_name("work") if path.name == "store" else path.with_name(f"{path.name}-work")
