"""Local folders that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from tasks.fingerprint import file_sha256
from tasks.manifest import FileEntry


def inventory(folder: Path) -> Iterator[FileEntry]:
    """Size and sha256 of every file below `folder`, in sorted order, flushed to disk on the way.

    Raises:
        ValueError: a symbolic link, whose target would not be part of the artifact.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link to {os.readlink(path)}: write a file or a hard link")
        if path.is_file():
            sync(path)
            name = path.relative_to(folder).as_posix()
            yield FileEntry(path=name, size=path.stat().st_size, sha256=file_sha256(path))


def write_durably(path: Path, text: str) -> None:
    """Write a small file so that after a crash it is either complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.write_text(text)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def replace_folder(source: Path, target: Path) -> None:
    """Move a folder to `target` by renames; a folder that was there is removed.

    Across file systems a copy is made beside the target first, so the last step is a rename there too.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f".*-{target.name}"):  # of a commit that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    discard_folder(target)
    try:
        source.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        incoming = target.with_name(f".incoming-{target.name}")
        shutil.copytree(source, incoming)
        for path in incoming.rglob("*"):
            sync(path)
        incoming.rename(target)
        shutil.rmtree(source)
    sync(target.parent)


def discard_folder(folder: Path) -> None:
    """Remove a folder that readers may be looking at: it vanishes from its name at once."""
    trash = folder.with_name(f".trash-{folder.name}")
    shutil.rmtree(trash, ignore_errors=True)
    if folder.exists():
        folder.rename(trash)
        shutil.rmtree(trash)


def sync(path: Path) -> None:
    """Ask the kernel to put a file or folder on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
