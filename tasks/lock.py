"""One builder at a time per artifact, on one machine."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_SECONDS = 0.5


@contextlib.contextmanager
def exclusive(file: Path, log: logging.Logger, waiting: str) -> Iterator[None]:
    """Hold an flock on `file`; the kernel drops it when the holder dies, even by kill -9.

    Args:
        file: lock file, created if absent and left in place.
        log: told once, when somebody else holds the lock.
        waiting: what is being waited for.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as handle:
        told = False
        # Polling instead of a blocking call: signals and cancellation get through.
        while not _try(handle.fileno()):
            if not told:
                log.info("waiting: %s", waiting)
                told = True
            time.sleep(_POLL_SECONDS)
        yield


def is_held(file: Path) -> bool:
    """Whether some process holds the lock."""
    if not file.is_file():
        return False
    with file.open("w") as handle:
        return not _try(handle.fileno())


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
