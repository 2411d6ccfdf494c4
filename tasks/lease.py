"""One builder per artifact over all machines that share an S3 store.

A lease is a small object that its holder renews. Waiting machines compare what they saw earlier with what is there:
one that did not change for `EXPIRES_SECONDS` of their own time is taken over, so that no two clocks are compared.
Writes are conditional (If-None-Match, If-Match), so that only one taker wins. On one machine a lock that dies with its
holder comes first (`tasks.lock`), so whoever finds a lease of its own place there need not wait.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tasks.files import Files

RENEW_SECONDS = 30.0
EXPIRES_SECONDS = 180.0
POLL_SECONDS = 5.0
SUFFIX = ".lease"


@dataclass
class Lease:
    """A lease that is held; `lost` says that another machine took it over meanwhile."""

    files: Files
    path: str
    tag: str
    place: str
    lost: bool = False
    _stop: threading.Event = field(default_factory=threading.Event)

    def keep(self, log: logging.Logger) -> None:
        """Renew until stopped; runs in a thread of its own."""
        while not self._stop.wait(RENEW_SECONDS):
            try:
                tag = self.files.replace(self.path, _content(self.place), self.tag)
            except Exception as error:
                log.warning("the lease %s could not be renewed (%s); trying again", self.path, error)
                continue
            if tag is None:
                self.lost = True
                log.warning("another machine took over the lease %s", self.path)
                return
            self.tag = tag

    def stop(self) -> None:
        """Stop renewing."""
        self._stop.set()


@contextlib.contextmanager
def leased(files: Files, path: str, place: str, log: logging.Logger, waiting: str) -> Iterator[Lease | None]:
    """Hold a lease while the block runs; None where the storage has no conditional writes.

    Args:
        files: of the store.
        path: of the lease object.
        place: the folder that the holder works in; the caller holds its lock.
        log: told who is waited for.
        waiting: what for.
    """
    if not files.has_conditional_writes:
        yield None
        return
    place = f"{socket.gethostname()} {_boot()} {place}"
    lease = Lease(files, path, _acquire(files, path, place, log, waiting), place)
    renewing = threading.Thread(target=lease.keep, args=(log,), name="lease", daemon=True)
    renewing.start()
    try:
        yield lease
    finally:
        lease.stop()
        renewing.join(timeout=RENEW_SECONDS)
        if not lease.lost and files.tag(path) == lease.tag:
            files.remove(path)


def _acquire(files: Files, path: str, place: str, log: logging.Logger, waiting: str) -> str:
    seen: str | None = None
    since = time.monotonic()
    while True:
        if (tag := files.create(path, _content(place))) is not None:
            return tag
        current = files.tag(path)
        if current is None:  # ended between two looks
            continue
        if current != seen:
            holder = _holder(files, path)
            if holder == place and (tag := files.replace(path, _content(place), current)) is not None:
                return tag  # of an earlier attempt here, which was killed
            if seen is None:
                log.info("waiting: %s (held by %s)", waiting, holder)
            seen, since = current, time.monotonic()
        elif time.monotonic() - since > EXPIRES_SECONDS:
            if (tag := files.replace(path, _content(place), current)) is not None:
                log.warning("took over the lease of %s, which was not renewed for %g s", path, EXPIRES_SECONDS)
                return tag
            seen = None
        time.sleep(POLL_SECONDS)


def _content(place: str) -> bytes:
    return json.dumps({"holder": place, "process": os.getpid(), "nonce": uuid.uuid4().hex}).encode()


def _holder(files: Files, path: str) -> str:
    try:
        return str(json.loads(files.read(path))["holder"])
    except (FileNotFoundError, ValueError, KeyError):
        return "an unknown machine"


def _boot() -> str:
    """Tells machines of one name apart, and a machine from itself before a restart."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.is_file() else hex(uuid.getnode())
