"""Answers on disk: one row per generation, in Parquet shards, with the token ids that the server returned."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_PER_SHARD = 4096


@dataclass(frozen=True)
class AnswerRow:
    """One answer of the verifier.

    Attributes:
        id: `<conversation>/<turn>`.
        conversation: id of the prompt.
        turn: number of the answer in its conversation, from 0.
        subset: of the prompt.
        source: of the prompt.
        mode: name of the recipe's response mode, "" without modes.
        prompt_token_ids: all that the answer follows, chat template and history included, as the server tokenised it.
        token_ids: the answer, its stop token included.
        finish_reason: "stop", "length" or "tool_calls".
        message: the assistant message as the server returned it, JSON.
    """

    id: str
    conversation: str
    turn: int
    subset: str
    source: str
    mode: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    message: str


def schema() -> pa.Schema:
    """Columns of a shard."""
    import pyarrow as pa

    ids = pa.list_(pa.int32())
    kinds: dict[str, Any] = {"turn": pa.int32(), "prompt_token_ids": ids, "token_ids": ids}
    return pa.schema([(name, kinds.get(name, pa.string())) for name in AnswerRow.__dataclass_fields__])


class AnswerWriter:
    """Writes rows in the order given; each shard appears whole or not at all."""

    def __init__(self, folder: Path, rows_per_shard: int = ROWS_PER_SHARD) -> None:
        self.folder, self.rows_per_shard = folder, rows_per_shard
        self._pending: list[dict[str, Any]] = []
        self._shards = 0

    def add(self, row: AnswerRow) -> None:
        """Append a row."""
        self._pending.append(asdict(row))
        if len(self._pending) == self.rows_per_shard:
            self._flush()

    def close(self) -> None:
        """Write what is pending."""
        if self._pending or not self._shards:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        path = self.folder / f"responses-{self._shards:05d}.parquet"
        partial = path.with_suffix(".partial")
        parquet.write_table(pa.Table.from_pylist(self._pending, schema=schema()), partial, compression="zstd")
        os.replace(partial, path)
        self._pending = []
        self._shards += 1


def answer_tables(folder: Path) -> Iterator[pa.Table]:
    """The shards of an answers artifact, in order."""
    from pyarrow import parquet

    for path in sorted(folder.glob("responses-*.parquet")):
        yield parquet.read_table(path)


def read_answers(folder: Path) -> Iterator[AnswerRow]:
    """The rows of an answers artifact, in order."""
    for table in answer_tables(folder):
        for row in table.to_pylist():
            yield AnswerRow(**row)
