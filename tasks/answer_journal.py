"""Answers as they arrive, durable one by one; only their places are held in memory.

Segments of JSON lines, `00000.jsonl` and so on: a row is in the kernel's hands when `append` returns (it survives
kill -9), and on disk when its segment is full or the journal is closed. A line that a kill cut short is removed when
the journal is opened again.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from tasks.answer_rows import AnswerRow

ROWS_PER_SEGMENT = 1000


class Journal:
    """Rows by conversation; one process writes at a time (the stage's lock sees to that)."""

    def __init__(self, folder: Path, rows_per_segment: int = ROWS_PER_SEGMENT) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rows_per_segment = folder, rows_per_segment
        self.rows = 0
        self._places: dict[str, list[tuple[int, int]]] = {}
        segments = sorted(int(path.stem) for path in folder.glob("*.jsonl"))
        for segment in segments:
            self._read_places(segment)
        self._segment = segments[-1] if segments else 0
        self._in_segment = sum(segment == self._segment for places in self._places.values() for segment, _ in places)
        self._writer = self._path(self._segment).open("ab")

    def __contains__(self, conversation: str) -> bool:
        return conversation in self._places

    def append(self, row: AnswerRow) -> None:
        """Keep a row.

        Raises:
            ValueError: it is not the next turn of its conversation.
        """
        places = self._places.setdefault(row.conversation, [])
        if row.turn != len(places):
            raise ValueError(f"answer {row.id} is not the next turn of its conversation, {len(places)} are there")
        if self._in_segment == self.rows_per_segment:
            self._rotate()
        place = (self._segment, self._writer.tell())
        self._writer.write(json.dumps(asdict(row)).encode() + b"\n")
        self._writer.flush()
        places.append(place)
        self._in_segment += 1
        self.rows += 1

    def turns(self, conversation: str) -> list[AnswerRow]:
        """The answers of a conversation, by turn; none if it was not answered."""
        return [self._read(segment, offset) for segment, offset in self._places.get(conversation, [])]

    def close(self) -> None:
        """Make the rows durable against power loss as well."""
        os.fsync(self._writer.fileno())
        self._writer.close()

    def _path(self, segment: int) -> Path:
        return self.folder / f"{segment:05d}.jsonl"

    def _rotate(self) -> None:
        self.close()
        self._segment, self._in_segment = self._segment + 1, 0
        self._writer = self._path(self._segment).open("ab")

    def _read(self, segment: int, offset: int) -> AnswerRow:
        with self._path(segment).open("rb") as file:
            file.seek(offset)
            return AnswerRow(**json.loads(file.readline()))

    def _read_places(self, segment: int) -> None:
        path = self._path(segment)
        offset = 0
        with path.open("r+b") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                row = json.loads(line)
                self._places.setdefault(row["conversation"], []).append((segment, offset))
                self.rows += 1
                offset += len(line)
            file.truncate(offset)
