"""Records of files in a seeded order, without holding them in memory: JSON lines, JSON arrays and Parquet."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import random
import shutil
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from tasks.prompt_rows import PromptsError, Unusable
from tasks.recipe_data import PromptSource
from tasks.source_files import source_sha256

Record = Mapping[str, Any] | Unusable


class Records(Protocol):
    """A file's records by number."""

    def __len__(self) -> int:
        """Records, usable or not."""

    def __getitem__(self, index: int) -> Record:
        """One record."""


def list_files(source: PromptSource) -> list[str]:
    """Paths or URLs that a source names, sorted.

    Raises:
        PromptsError: there is none, or the storage cannot be asked.
    """
    name = source.source
    if "://" not in name:
        found = sorted(glob.glob(name)) if "*" in name else [name] if Path(name).is_file() else []
        looked = str(Path(name).resolve())
    else:
        found, looked = _list_remote(name), name
    if not found:
        raise PromptsError(f"prompts.sources: {name!r}: no such file (looked for {looked}); correct the path")
    return found


def _list_remote(name: str) -> list[str]:
    import fsspec

    scheme = name.split("://")[0]
    try:
        filesystem, path = fsspec.core.url_to_fs(name)
        paths = filesystem.glob(path) if "*" in path else [path] if filesystem.exists(path) else []
    except Exception as error:
        raise PromptsError(
            f"prompts.sources: {name!r} cannot be reached ({error}): check the address, the credentials and, for S3, "
            "AWS_ENDPOINT_URL"
        ) from error
    return sorted(f"{scheme}://{path}" for path in paths)


def content_identity(path: str) -> str:
    """What tells a file's content: the sha256 of a local one, S3's entity tag and size of a remote one."""
    if "://" not in path:
        return source_sha256(Path(path))
    import fsspec

    filesystem, inner = fsspec.core.url_to_fs(path)
    info = filesystem.info(inner)
    tag = info.get("ETag") or info.get("etag") or info.get("LastModified") or info.get("mtime")
    return f"{str(tag).strip(chr(34))}-{info['size']}"


def shuffled_records(paths: Sequence[str], seed: int, scratch: Path) -> Iterator[tuple[str, Record]]:
    """Yield (where, record) over all files in a seeded order, the same on any machine.

    Args:
        paths: of `list_files`.
        seed: of the order.
        scratch: where remote and compressed files are copied to, once.

    Raises:
        PromptsError: a file cannot be read at all.
    """
    names = [path.rsplit("/", 1)[-1] for path in paths]
    opened = [_open(_local(path, scratch), scratch) for path in paths]
    ends = list(accumulate(len(records) for records in opened))
    order = array("q", range(ends[-1] if ends else 0))
    random.Random(seed).shuffle(order)
    for index in order:
        file = bisect_right(ends, index)
        inner = index - (ends[file] - len(opened[file]))
        yield f"{names[file]} record {inner + 1}", opened[file][inner]


def _local(path: str, scratch: Path) -> Path:
    """The file itself, or a complete local copy of it."""
    if "://" not in path and not path.endswith(".gz"):
        return Path(path)
    name = hashlib.sha256(f"{path}:{content_identity(path)}".encode()).hexdigest()[:16]
    target = scratch / "sources" / f"{name}-{path.rsplit('/', 1)[-1].removesuffix('.gz')}"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")
    try:
        if "://" in path:
            import fsspec

            filesystem, inner = fsspec.core.url_to_fs(path)
            filesystem.get_file(inner, str(partial))
        else:
            shutil.copyfile(path, partial)
        if path.endswith(".gz"):
            with gzip.open(partial) as compressed, target.open("wb") as plain:
                shutil.copyfileobj(compressed, plain)
            partial.unlink()
            return target
    except (gzip.BadGzipFile, EOFError) as error:
        target.unlink(missing_ok=True)
        raise PromptsError(f"prompts.sources: {path!r} is not a whole gzip file: {error}") from error
    partial.replace(target)
    return target


def _open(path: Path, scratch: Path) -> Records:
    if path.suffix == ".parquet":
        return _parquet(path, scratch)
    return JsonArray(path) if path.suffix == ".json" else JsonLines(path)


class JsonLines:
    """A JSON-lines file: only the places of its lines are held."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._offsets = array("q")
        offset = 0
        for line in self._file:
            if line.strip():
                self._offsets.append(offset)
            offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Record:
        self._file.seek(self._offsets[index])
        return _parse(self._file.readline(), index)


def _parse(line: bytes, index: int) -> Record:
    def unusable(reason: str) -> Unusable:
        return Unusable(reason, f"record {index + 1}", line[:300].decode(errors="replace"))

    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return unusable("invalid_utf8")
    except (ValueError, RecursionError):
        return unusable("invalid_json")
    return record if isinstance(record, Mapping) else unusable("no_object")


class JsonArray:
    """A JSON file that is one array of records, as ShareGPT's are; held in memory."""

    def __init__(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:  # UnicodeDecodeError is one
            raise PromptsError(
                f"prompts.sources: {path.name!r} is not valid JSON ({error}); a file with one object per "
                "line ends in .jsonl"
            ) from error
        if not isinstance(content, list):
            raise PromptsError(
                f"prompts.sources: {path.name!r} holds {type(content).__name__}, not an array of records"
            )
        self._records = content

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        record = self._records[index]
        if isinstance(record, Mapping):
            return record
        return Unusable("no_object", f"record {index + 1}", str(record)[:300])


def _parquet(path: Path, scratch: Path) -> Records:
    """Mapped from an Arrow file that `datasets` writes once."""
    from datasets import Dataset

    try:
        found: Records = Dataset.from_parquet(str(path), cache_dir=str(scratch / "parquet"))
    except Exception as error:  # what Arrow says comes wrapped in errors of `datasets`
        raise PromptsError(f"prompts.sources: {path.name!r} cannot be read as Parquet: {error}") from error
    return found
