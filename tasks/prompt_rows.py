"""One prompt as every source yields it, and the text measures by which prompts are compared."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.recipe import RecipeError

_WORDS = re.compile(r"\w+")
# One turn of a chat: role, content, and for tools tool_calls, tool_call_id and name.
Message = dict[str, Any]


class PromptsError(RecipeError):
    """Prompts that cannot be used: says how many there were, what was expected and what to do."""


@dataclass(frozen=True)
class PromptRow:
    """One line of `train.jsonl` or `evaluation.jsonl`.

    Attributes:
        id: content hash of messages and tools: the same prompt has the same id in every run.
        subset: what it is reported under.
        messages: the recorded conversation up to its last user or tool turn.
        source: where it comes from, without a place on this machine.
        license: of the prompt.
        tools: that the verifier may call, in OpenAI form.
    """

    id: str
    subset: str
    messages: tuple[Message, ...]
    source: str
    license: str
    tools: tuple[dict[str, Any], ...] | None = None

    @classmethod
    def create(
        cls,
        subset: str,
        messages: Sequence[Message],
        source: str,
        license_name: str,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> PromptRow:
        """Build a row; its id follows from the messages and tools alone."""
        plain = all(message.keys() == {"role", "content"} for message in messages)
        told: Any = [[m["role"], m["content"]] for m in messages] if plain and not tools else [messages, tools]
        content = json.dumps(told, ensure_ascii=False)
        digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:20]
        return cls(digest, subset, tuple(messages), source, license_name, tuple(tools) if tools else None)

    def to_json(self) -> str:
        """The row as one line of ASCII JSON, without the line end: no reader can split it at U+2028."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Unusable:
    """A record of a source that is no prompt.

    Attributes:
        reason: one word for reports.
        where: record or line number.
        text: the beginning of it.
    """

    reason: str
    where: str
    text: str


Candidate = PromptRow | Unusable


def row_text(row: PromptRow) -> str:
    """All turns of a row in one text."""
    return "\n".join(message["content"] for message in row.messages)


def user_text(row: PromptRow) -> str:
    """What the user says, in one text."""
    return "\n".join(message["content"] for message in row.messages if message["role"] == "user")


def normalised(text: str) -> str:
    """Lower case and single spaces: what two texts must share to count as the same."""
    return " ".join(text.casefold().split())


def words_of(text: str) -> list[str]:
    """Words without case and punctuation."""
    return _WORDS.findall(text.casefold())


def ngrams(text: str, length: int) -> set[tuple[str, ...]]:
    """Runs of `length` words, without case and punctuation; empty for a shorter text."""
    words = words_of(text)
    return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}


def write_rows(path: Path, rows: Iterable[PromptRow]) -> None:
    """Write rows as JSON lines."""
    with path.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(row.to_json() + "\n")
