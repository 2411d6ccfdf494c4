"""Files of an artifact to and from remote storage: several at a time, continuing where an earlier attempt ended."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tasks.files import Files
from tasks.fingerprint import file_sha256
from tasks.manifest import FileEntry

# What an upload under way means to send; it is there only while no manifest is.
STAGING_NAME = "staging.json"
PARALLEL = 8
TELL_SECONDS = 10.0
_LOG = logging.getLogger("dspark.store")


class DamagedFileError(RuntimeError):
    """A remote file is missing or has other content than the manifest says; (path, what is wrong)."""

    def __init__(self, path: str, fault: str) -> None:
        self.path, self.fault = path, fault
        super().__init__(f"{path}: {fault}")


def send(files: Files, folder: Path, place: str, entries: Sequence[FileEntry]) -> None:
    """Upload files below `place`, except those that an interrupted upload of the same content has sent.

    What else is there is removed first; then the plan is stored, so that whatever lies beside it is part of it.
    """
    planned = _read_plan(files, place)
    sizes = files.sizes(place)
    sent = {
        entry.path
        for entry in entries
        if [entry.path, entry.size, entry.sha256] in planned and sizes.get(entry.path) == entry.size
    }
    for path in sizes.keys() - sent:
        files.remove(f"{place}/{path}")
    plan = json.dumps([[entry.path, entry.size, entry.sha256] for entry in entries])
    files.write(f"{place}/{STAGING_NAME}", plan.encode())
    waiting = [entry for entry in entries if entry.path not in sent]
    if sent:
        _LOG.info("%d of %d files were uploaded by an earlier attempt", len(sent), len(entries))
    _each(waiting, lambda entry: files.upload(folder / entry.path, f"{place}/{entry.path}"), "uploaded")


def end_staging(files: Files, place: str) -> None:
    """Forget the plan of an upload that is complete."""
    files.remove(f"{place}/{STAGING_NAME}")


def fetch(files: Files, place: str, entries: Sequence[FileEntry], target: Path) -> None:
    """Download files that are not in `target` yet.

    Raises:
        DamagedFileError: a file is missing, or its content is not what the manifest says.
    """

    def one(entry: FileEntry) -> None:
        path = target / entry.path
        if path.is_file() and path.stat().st_size == entry.size and file_sha256(path) == entry.sha256:
            return
        incoming = path.with_name(f"{path.name}.incoming")
        try:
            files.download(f"{place}/{entry.path}", incoming)
        except FileNotFoundError:
            raise DamagedFileError(entry.path, "missing") from None
        if file_sha256(incoming) != entry.sha256:
            incoming.unlink()
            raise DamagedFileError(entry.path, "content differs from its sha256")
        incoming.replace(path)

    _each(entries, one, "downloaded")


def check_sums(entries: Sequence[FileEntry], sum_of: Callable[[FileEntry], str]) -> None:
    """Compare contents with the manifest.

    Raises:
        DamagedFileError: the first file, by name, that differs.
    """

    def one(entry: FileEntry) -> None:
        if sum_of(entry) != entry.sha256:
            raise DamagedFileError(entry.path, "content differs from its sha256")

    _each(entries, one, "verified")


def _read_plan(files: Files, place: str) -> list[list[str | int]]:
    try:
        plan: list[list[str | int]] = json.loads(files.read(f"{place}/{STAGING_NAME}"))
    except (FileNotFoundError, ValueError):
        return []
    return plan


def _each(entries: Iterable[FileEntry], work: Callable[[FileEntry], None], done: str) -> None:
    """Do something with each file, several at a time; tell how far at intervals; the first error ends it."""
    waiting = list(entries)
    total = sum(entry.size for entry in waiting)
    lock, finished = threading.Lock(), 0
    started = last = time.monotonic()

    def one(entry: FileEntry) -> None:
        nonlocal finished, last
        work(entry)
        with lock:
            finished += entry.size
            now = time.monotonic()
            if now - last >= TELL_SECONDS:
                last = now
                rate = finished / (now - started) / 2**20
                _LOG.info("%s %.0f of %.0f MiB, %.1f MiB/s", done, finished / 2**20, total / 2**20, rate)

    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="transfer") as threads:
        results = [threads.submit(one, entry) for entry in waiting]
        try:
            for result in results:
                result.result()
        except BaseException:
            threads.shutdown(wait=True, cancel_futures=True)
            raise
