"""Files of a store through fsspec, with transient faults retried."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from tasks.faults import is_transient

T = TypeVar("T")
_LOG = logging.getLogger("dspark.store")
_BLOCK_BYTES = 1 << 23


class Files:
    """A file system seen from one root: every path here is relative to it, with forward slashes.

    Args:
        root: absolute folder, or a URL that fsspec knows.
    """

    def __init__(self, root: str) -> None:
        # No listing cache: other processes and machines write to the same place.
        options: dict[str, Any] = {"use_listings_cache": False} if "://" in root else {}
        self._fs, self._base = fsspec.core.url_to_fs(root, **options)

    def bucket_exists(self) -> bool:
        """Whether the first component of the root (an S3 bucket) can be seen."""
        return bool(self._retry(lambda: self._fs.exists(self._base.split("/", 1)[0])))

    def exists(self, path: str) -> bool:
        """Whether a file or folder is there."""
        return bool(self._retry(lambda: self._fs.exists(self._at(path))))

    def read(self, path: str) -> bytes:
        """Content of a small file.

        Raises:
            FileNotFoundError: no such file.
        """
        return self._retry(lambda: self._fs.cat_file(self._at(path)))

    def read_all(self, paths: list[str]) -> list[bytes]:
        """Contents of small files, fetched together; absent ones are left out."""
        if not paths:
            return []
        found = self._retry(lambda: self._fs.cat([self._at(path) for path in paths], on_error="omit"))
        return list(found.values())

    def sizes(self, folder: str) -> dict[str, int]:
        """Size in bytes of every file below a folder, by path relative to that folder."""
        base = self._at(folder)
        found = self._retry(lambda: self._fs.find(base, detail=True))
        return {path[len(base) :].lstrip("/"): info["size"] for path, info in found.items()}

    def names(self, folder: str) -> list[str]:
        """Names directly inside a folder; none if it is absent."""
        try:
            paths = self._retry(lambda: self._fs.ls(self._at(folder), detail=False))
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in paths]

    def sha256(self, path: str) -> str:
        """Sum of a file, streamed."""

        def stream() -> str:
            digest = hashlib.sha256()
            with self._fs.open(self._at(path), "rb", block_size=_BLOCK_BYTES) as file:
                while chunk := file.read(_BLOCK_BYTES):
                    digest.update(chunk)
            return digest.hexdigest()

        return self._retry(stream)

    def write(self, path: str, content: bytes) -> None:
        """Write a small file."""
        self._retry(lambda: self._fs.pipe_file(self._at(path), content))

    def details(self, folder: str) -> list[tuple[str, int, float]]:
        """Path relative to the folder, bytes and time of the last change (since 1970) of every file below it."""
        base = self._at(folder)
        found = self._retry(lambda: self._fs.find(base, detail=True))
        return [
            (
                path[len(base) :].lstrip("/"),
                info["size"],
                info["LastModified"].timestamp() if "LastModified" in info else info["mtime"],
            )
            for path, info in found.items()
        ]

    @property
    def has_conditional_writes(self) -> bool:
        """Whether the storage can write a file only if it is absent or unchanged (S3; a folder has locks instead)."""
        return "s3" in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,))

    def create(self, path: str, content: bytes) -> str | None:
        """Write a small file unless it is there; returns its entity tag, None if it is there.

        https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
        """
        return self._conditional(path, content, IfNoneMatch="*")

    def replace(self, path: str, content: bytes, tag: str) -> str | None:
        """Write a small file if its entity tag is still `tag`; returns the new one, None if it changed or is gone."""
        return self._conditional(path, content, IfMatch=tag)

    def tag(self, path: str) -> str | None:
        """A file's entity tag, None if it is absent."""
        try:
            info = self._retry(lambda: self._fs.info(self._at(path), refresh=True))
        except FileNotFoundError:
            return None
        return str(info["ETag"])

    def _conditional(self, path: str, content: bytes, **condition: str) -> str | None:
        try:
            written = self._retry(lambda: self._fs.pipe_file(self._at(path), content, **condition))
        except FileNotFoundError:  # to be replaced, and gone
            return None
        except OSError as error:
            if _is_unmet(error):
                return None
            raise
        return str(written["ETag"])

    def upload(self, source: Path, path: str) -> None:
        """Send a local file; S3 shows it only when it is complete."""
        self._retry(lambda: self._fs.put_file(str(source), self._at(path)))

    def download(self, path: str, target: Path) -> None:
        """Fetch a file to a local path."""
        target.parent.mkdir(parents=True, exist_ok=True)
        self._retry(lambda: self._fs.get_file(self._at(path), str(target)))

    def remove(self, path: str) -> None:
        """Delete a file; an absent one is fine."""
        if self.exists(path):
            self._retry(lambda: self._fs.rm_file(self._at(path)))

    def remove_below(self, folder: str) -> None:
        """Delete every file below a folder."""
        for name in self.sizes(folder):
            self.remove(f"{folder}/{name}")

    def _at(self, path: str) -> str:
        return f"{self._base}/{path}"

    def _retry(self, action: Callable[[], T]) -> T:
        attempts = Retrying(
            stop=stop_after_attempt(6),
            wait=wait_random_exponential(multiplier=0.2, max=20),
            retry=retry_if_exception(is_transient),
            before_sleep=_report,
            reraise=True,
        )
        return attempts(action)


def _is_unmet(error: OSError) -> bool:
    """Whether the condition of a write did not hold; 409 is S3's word for two such writes at once."""
    for cause in (error, error.__cause__):
        response = getattr(cause, "response", None) or {}
        if response.get("ResponseMetadata", {}).get("HTTPStatusCode") in (409, 412):
            return True
    return False


def _report(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    _LOG.warning("store: %s; trying again (attempt %d failed)", error, state.attempt_number)
