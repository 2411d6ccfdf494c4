"""Prompts from a conversation dataset: a hub id, or a local .jsonl or .parquet file.

A hub id may pin a revision, `owner/name@revision`. Columns are found by convention: `messages` (role,
content), `conversations` (from, value; or role, content) or `prompt` (text or messages). System prompts and
earlier turns are kept; everything after the last user turn is dropped, for the verifier answers itself.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.prompt_rows import Message, PromptRow, PromptsError
from tasks.recipe import PromptsSection

LOCAL_SUFFIXES = (".jsonl", ".parquet")
COLUMNS = ("messages", "conversations", "prompt")
_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}


def is_local(dataset: str) -> bool:
    """True for a file on this machine, by its suffix."""
    return dataset.endswith(LOCAL_SUFFIXES)


def local_file(dataset: str) -> Path:
    """The local file that a recipe names.

    Raises:
        PromptsError: no such file.
    """
    path = Path(dataset).expanduser()
    if not path.is_file():
        raise PromptsError(
            f"prompts.dataset={dataset!r}: no such file (looked for {path.resolve()}); "
            "expected a .jsonl or .parquet file, or the id of a dataset on the hub"
        )
    return path


def hub_dataset(dataset: str) -> tuple[str, str | None]:
    """The hub id and the pinned revision, if any, that a recipe names as `owner/name@revision`.

    Raises:
        PromptsError: it is a folder on this machine, whose content no fingerprint would follow.
    """
    name, _, revision = dataset.partition("@")
    if Path(name).expanduser().is_dir():
        raise PromptsError(
            f"prompts.dataset={dataset!r} is a folder on this machine; name one of its .jsonl or .parquet files"
        )
    return name, revision or None


def dataset_prompts(section: PromptsSection) -> Iterator[PromptRow | str]:
    """Yield rows in seeded order; for a record that holds no usable prompt, its text instead of a row.

    Raises:
        PromptsError: missing or unreadable file, or no known column.
    """
    assert section.dataset is not None  # the recipe checks it
    records, license_name = _records(section)
    source = Path(section.dataset).name if is_local(section.dataset) else section.dataset
    for record in records:
        messages = _messages(record[_column(record, section.dataset)])
        if messages:
            yield PromptRow.create("dataset", messages, source, license_name)
        else:
            yield json.dumps(record, ensure_ascii=False, default=str)


def _records(section: PromptsSection) -> tuple[Iterator[Mapping[str, Any]], str]:
    dataset = str(section.dataset)
    if not is_local(dataset):
        from datasets import load_dataset

        name, revision = hub_dataset(dataset)
        loaded = load_dataset(name, split=section.split, revision=revision)
        return iter(loaded.shuffle(seed=section.seed)), loaded.info.license or "unknown"
    path = local_file(dataset)
    records = _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
    random.Random(section.seed).shuffle(records)
    return iter(records), "unknown"


def _read_parquet(path: Path) -> list[Mapping[str, Any]]:
    from pyarrow import parquet  # type: ignore[import-untyped]

    rows: list[Mapping[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


def _read_jsonl(path: Path) -> list[Mapping[str, Any]]:
    records: list[Mapping[str, Any]] = []
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise PromptsError(f"prompts.dataset: {path} line {number} is not valid JSON: {error}") from error
            if not isinstance(record, dict):
                raise PromptsError(f"prompts.dataset: {path} line {number} holds no object: {line[:60]!r}")
            records.append(record)
    return records


def _column(record: Mapping[str, Any], dataset: str) -> str:
    for column in COLUMNS:
        if record.get(column) is not None:
            return column
    known = [column for column in COLUMNS if column in record]
    if known:  # present and null: an empty record, not a wrong dataset
        return known[0]
    raise PromptsError(
        f"prompts.dataset={dataset!r}: none of the columns {', '.join(COLUMNS)} found, only "
        f"{', '.join(map(str, record))}; rename the column that holds the conversation"
    )


def _is_text(content: str) -> bool:
    """False for blanks and for lone surrogates, which no tokenizer takes."""
    return bool(content.strip()) and not any("\ud800" <= char <= "\udfff" for char in content)


def _messages(value: Any) -> list[Message]:
    """Turns up to the last user turn; empty when the record is no plain text conversation."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return []
    messages: list[Message] = []
    for turn in value:
        if not isinstance(turn, Mapping):
            return []
        role = _ROLES.get(str(turn.get("role") or turn.get("from")))
        content = turn.get("content") if turn.get("content") is not None else turn.get("value")
        if role is None or not isinstance(content, str) or not _is_text(content):
            return []
        messages.append({"role": role, "content": content})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    return messages
