"""JSON lines: one object per line, UTF-8."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file, read as they are asked for."""
    with path.open(encoding="utf-8", newline="\n") as lines:  # a text may hold U+2028 or \r, which end no row
        for line in lines:
            yield json.loads(line)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows so that the file either is whole or does not exist; returns how many."""
    partial = path.with_name(f"{path.name}.partial")
    number = 0
    with partial.open("w", encoding="utf-8") as stream:
        for number, row in enumerate(rows, start=1):  # noqa: B007 - the last number is the count
            stream.write(json.dumps(row) + "\n")
    os.replace(partial, path)
    return number
