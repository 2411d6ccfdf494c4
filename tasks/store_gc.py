"""What a store and its working folder can do without: old artifacts, unfinished uploads, abandoned work."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tasks.lease import SUFFIX
from tasks.lock import is_held
from tasks.manifest import MANIFEST_NAME, Manifest
from tasks.store import ArtifactStore

DAY_SECONDS = 86400.0
# An upload that is still going on writes something more often than that.
STALE_UPLOAD_SECONDS = DAY_SECONDS
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
# Folders of the working folder whose entries belong to no single artifact.
_SHARED_WORK = ("spool", "states")


@dataclass(frozen=True)
class Garbage:
    """Something that may go.

    Attributes:
        what: an artifact, unfinished upload or piece of work, for people.
        reason: why nobody needs it.
        size: bytes.
        place: path inside the store (`inside`), or a local path.
        inside: whether it is in the store.
    """

    what: str
    reason: str
    size: int
    place: str
    inside: bool


def find_garbage(store: ArtifactStore, *, keep: int, older_than_days: float, abandoned_days: float) -> list[Garbage]:
    """List what `collect` would remove, oldest artifacts first.

    Kept are, for every recipe and stage, the newest `keep` artifacts and all that they were made from.

    Args:
        store: whose garbage.
        keep: artifacts per recipe and stage.
        older_than_days: younger artifacts stay, whatever they are.
        abandoned_days: unfinished work that nobody touched for so long may go.
    """
    stages = store.stages()
    manifests = [manifest for stage in stages for manifest in store.manifests(stage)]
    needed = _needed(manifests, keep)
    now = time.time()
    old = [made for made in manifests if (made.stage, made.fingerprint) not in needed]
    found = [
        Garbage(
            f"artifact {made.stage} {made.fingerprint[:8]} of {made.recipe}, {made.created[:10]}",
            f"not among the newest {keep} of its recipe, nor needed by one",
            made.total_bytes,
            f"{made.stage}/{made.fingerprint}",
            inside=True,
        )
        for made in sorted(old, key=lambda made: made.created)
        if now - _seconds(made.created) >= older_than_days * DAY_SECONDS
    ]
    whole = {(made.stage, made.fingerprint) for made in manifests}
    found += _unfinished(store, stages, whole, now)
    going = {garbage.place for garbage in found if garbage.inside}
    return found + list(_work(store, whole, going, now, abandoned_days * DAY_SECONDS))


def collect(store: ArtifactStore, garbage: Garbage) -> None:
    """Remove one find."""
    if garbage.inside:
        stage, fingerprint = garbage.place.split("/", 1)
        if fingerprint.endswith(SUFFIX):
            store.remove_file(garbage.place)
        else:
            store.delete(store.ref(stage, fingerprint))
        return
    path = Path(garbage.place)
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _needed(manifests: list[Manifest], keep: int) -> set[tuple[str, str]]:
    groups: dict[tuple[str, str], list[Manifest]] = {}
    for made in manifests:
        groups.setdefault((made.recipe, made.stage), []).append(made)
    needed: set[tuple[str, str]] = set()
    for group in groups.values():
        for made in sorted(group, key=lambda made: made.created, reverse=True)[:keep]:
            needed |= {(made.stage, made.fingerprint), *made.fingerprints.items()}
    return needed


def _unfinished(store: ArtifactStore, stages: list[str], whole: set[tuple[str, str]], now: float) -> Iterator[Garbage]:
    for stage in stages:
        for name, size, changed in store.entries(stage):
            idle = now - changed
            if name.endswith(SUFFIX) and _FINGERPRINT.fullmatch(name.removesuffix(SUFFIX)):
                if idle > STALE_UPLOAD_SECONDS:
                    yield Garbage(
                        f"lease {stage} {name[:8]}", "its holder is gone", size, f"{stage}/{name}", inside=True
                    )
            elif _FINGERPRINT.fullmatch(name) and (stage, name) not in whole and idle > STALE_UPLOAD_SECONDS:
                reason = f"no {MANIFEST_NAME}, and nothing was written for a day"
                yield Garbage(f"unfinished {stage} {name[:8]}", reason, size, f"{stage}/{name}", inside=True)


def _work(
    store: ArtifactStore, whole: set[tuple[str, str]], going: set[str], now: float, abandoned_seconds: float
) -> Iterator[Garbage]:
    """Rooms, downloads and shared pieces of the local working folder."""
    if not store.work.is_dir():
        return
    for folder in sorted(path for path in store.work.iterdir() if path.is_dir()):
        if folder.name in _SHARED_WORK:
            yield from _idle(folder.iterdir(), f"{folder.name} of hidden states", now, abandoned_seconds)
        elif folder.name == "downloads":
            for copy in sorted(folder.glob("*/*")):
                place = f"{copy.parent.name}/{copy.name}"
                gone = (copy.parent.name, copy.name) not in whole or place in going
                if copy.is_dir() and _FINGERPRINT.fullmatch(copy.name) and gone:
                    yield _local(copy, f"download {place[:32]}", "its artifact is gone")
        else:
            rooms = [path for path in folder.iterdir() if path.is_dir() and _FINGERPRINT.fullmatch(path.name)]
            free = [path for path in rooms if not is_held(path.with_suffix(".lock"))]
            done = [path for path in free if (folder.name, path.name) in whole]
            for path in done:
                yield _local(path, f"work on {folder.name} {path.name[:8]}", "its artifact is finished")
            rest = [path for path in free if path not in done]
            yield from _idle(rest, f"work on {folder.name}", now, abandoned_seconds)


def _idle(paths: Iterator[Path] | list[Path], what: str, now: float, abandoned_seconds: float) -> Iterator[Garbage]:
    for path in sorted(paths):
        newest = max((inner.stat().st_mtime for inner in (path, *path.rglob("*"))), default=now)
        if now - newest > abandoned_seconds:
            days = (now - newest) / DAY_SECONDS
            yield _local(path, f"{what} {path.name[:8]}", f"nobody touched it for {days:.0f} days")


def _local(path: Path, what: str, reason: str) -> Garbage:
    files = [path] if path.is_file() else [inner for inner in path.rglob("*") if inner.is_file()]
    return Garbage(what, reason, sum(file.stat().st_size for file in files), str(path), inside=False)


def _seconds(created: str) -> float:
    moment = datetime.fromisoformat(created)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
