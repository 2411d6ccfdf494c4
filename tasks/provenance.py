"""Where an artifact came from: versions, commit and time, for manifests and model cards."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parent.parent
_DISTRIBUTIONS = ("dspark-pipeline", "torch", "transformers", "safetensors", "numpy", "datasets", "prefect")


@functools.cache
def software_versions() -> dict[str, str]:
    """Versions of Python and of the installed distributions that shape artifacts."""
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@functools.cache
def git_sha() -> str | None:
    """Commit of this checkout, with `-dirty` when tracked files differ; None outside a checkout."""
    try:
        sha = _git("rev-parse", "HEAD")
        return f"{sha}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else sha
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*args: str) -> str:
    command = ["git", "-C", str(REPO_ROOT), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()


def utc_now() -> str:
    """The present moment in UTC, ISO 8601; sorts as text."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
