"""Fingerprints: which artifact a stage would make, known before anything runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 22


class FingerprintError(ValueError):
    """A value in a stage's identity that has no stable serialisation."""


def canonical_json(value: Any) -> str:
    """Serialise plain data so that equal values give equal text, in every process and Python version.

    Raises:
        FingerprintError: sets, paths, enums, NaN, NumPy scalars and the like, with the path of the value.
    """
    return json.dumps(_plain(value, "identity"), sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _plain(value: Any, where: str) -> Any:
    # Exact types: a NumPy float or a string enum is a subclass whose text may change with its library.
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        if not math.isfinite(value):
            raise FingerprintError(f"{where}={value!r}: not a finite number, so it has no JSON form; use null")
        return value
    if kind in (list, tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise FingerprintError(f"{where}: key {key!r} is {type(key).__name__}, expected str")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    raise FingerprintError(
        f"{where}={value!r}: {kind.__name__} has no stable serialisation; "
        "pass plain data (model_dump(mode='json'), sorted lists, str)"
    )


def fingerprint(*, stage: str, format_version: int, identity: Mapping[str, Any], parents: Mapping[str, str]) -> str:
    """Sha256 (64 hex digits) of what decides a stage's files; parents enter by their own fingerprints."""
    payload = {
        "stage": stage,
        "format_version": format_version,
        "identity": identity,
        "parents": dict(parents),
    }
    return hashlib.sha256(canonical_json(payload).encode()).hexdigest()


def changed_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Describe each leaf that differs as `field section.name changed: old -> new`."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    lines = []
    for field in sorted(before.keys() | after.keys()):
        if field not in before:
            lines.append(f"field {field} added: {_show(after[field])}")
        elif field not in after:
            lines.append(f"field {field} removed: was {_show(before[field])}")
        elif canonical_json(before[field]) != canonical_json(after[field]):
            lines.append(f"field {field} changed: {_show(before[field])} -> {_show(after[field])}")
    return lines


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _leaves(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _show(value: Any, limit: int = 48) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def file_sha256(path: Path) -> str:
    """Sha256 of a file's content, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


class DigestCache:
    """Remembers sha256 sums by (path, size, mtime), so that unchanged gigabytes are read once.

    Kept in SQLite because several runs may use one working folder at a time.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        with self._open() as db:
            db.execute(
                "create table if not exists digests"
                " (path text primary key, size integer, mtime_ns integer, sha256 text)"
            )

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self._file, timeout=60)) as db, db:
            yield db

    def known(self, path: Path) -> str | None:
        """The remembered sum, or None when the file is new or was touched since."""
        stat = path.stat()
        with self._open() as db:
            row = db.execute(
                "select sha256 from digests where path = ? and size = ? and mtime_ns = ?",
                (os.path.abspath(path), stat.st_size, stat.st_mtime_ns),
            ).fetchone()
        return None if row is None else str(row[0])

    def remember(self, sums: Mapping[Path, str]) -> None:
        """Record sums of files as they are on disk now."""
        rows = []
        for path, sha256 in sums.items():
            stat = path.stat()
            rows.append((os.path.abspath(path), stat.st_size, stat.st_mtime_ns, sha256))
        with self._open() as db:
            db.executemany("insert or replace into digests values (?, ?, ?, ?)", rows)

    def sha256(self, path: Path) -> str:
        """The file's sum, read only if it is not remembered."""
        found = self.known(path)
        if found is None:
            found = file_sha256(path)
            self.remember({path: found})
        return found
