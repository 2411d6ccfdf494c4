"""One prompt as every source yields it, and the text measures by which prompts are compared."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from tasks.recipe import RecipeError

_WORDS = re.compile(r"\w+")


class PromptsError(RecipeError):
    """Prompts that cannot be used: says how many there were, what was expected and what to do."""


class Message(TypedDict):
    """One chat turn; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class PromptRow:
    """One line of `train.jsonl` or `evaluation.jsonl`."""

    id: str
    """Content hash of the messages: the same prompt has the same id in every run."""
    subset: str
    messages: tuple[Message, ...]
    source: str
    license: str

    @classmethod
    def create(cls, subset: str, messages: Sequence[Message], source: str, license_name: str) -> PromptRow:
        """Build a row; its id follows from the messages alone."""
        content = json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=False)
        digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:20]
        return cls(digest, subset, tuple(messages), source, license_name)

    def to_json(self) -> str:
        """The row as one line of ASCII JSON, without the line end: no reader can split it at U+2028."""
        return json.dumps(asdict(self))


def row_text(row: PromptRow) -> str:
    """All turns of a row in one text."""
    return "\n".join(message["content"] for message in row.messages)


def normalised(text: str) -> str:
    """Lower case and single spaces: what two texts must share to count as the same."""
    return " ".join(text.casefold().split())


def ngrams(text: str, length: int) -> set[tuple[str, ...]]:
    """Runs of `length` words, without case and punctuation; empty for a shorter text."""
    words = _WORDS.findall(text.casefold())
    return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}


def write_rows(path: Path, rows: Iterable[PromptRow]) -> None:
    """Write rows as JSON lines."""
    with path.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(row.to_json() + "\n")
