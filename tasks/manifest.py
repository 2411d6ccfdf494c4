"""The record that makes a folder an artifact: what it holds and what it was made from."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

MANIFEST_NAME = "manifest.json"


class ArtifactRef(BaseModel):
    """Points at a committed artifact; small enough to pass between tasks."""

    model_config = ConfigDict(frozen=True)

    stage: str
    fingerprint: str
    uri: str

    @property
    def short(self) -> str:
        """First digits of the fingerprint, for people."""
        return self.fingerprint[:8]


class FileEntry(BaseModel):
    """One file of an artifact; `path` is relative and uses forward slashes, `size` is in bytes."""

    model_config = ConfigDict(frozen=True)

    path: str
    size: int
    sha256: str


class ManifestFields(BaseModel):
    """What a builder knows about an artifact, beside its files."""

    model_config = ConfigDict(frozen=True)

    format_version: int
    identity: dict[str, Any]
    parents: dict[str, str]
    fingerprints: dict[str, str]
    recipe: str
    counts: dict[str, int | float | str]
    seconds: float


class Manifest(ManifestFields):
    """`manifest.json`, written last: an artifact either is whole or does not exist.

    `seconds` is building time in the attempt that finished; `fingerprints` covers its ancestors too.
    """

    schema_version: int = 1
    stage: str
    fingerprint: str
    files: tuple[FileEntry, ...]
    versions: dict[str, str]
    git_sha: str | None
    created: str

    @property
    def total_bytes(self) -> int:
        """Size of all files, without the manifest."""
        return sum(entry.size for entry in self.files)
