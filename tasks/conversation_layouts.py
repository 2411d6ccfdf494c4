"""Conversations as data sets and request logs write them, read into one form.

Known by convention: `messages` (role, content); `conversations` (from, value, as in ShareGPT, or role, content);
`prompt` (a text or messages); request logs, whose `body` or `request` is an OpenAI request. A conversation is kept up
to its last user or tool turn, for the verifier answers itself; recorded answers stay in it only for the tool calls that
results belong to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

COLUMNS = ("messages", "conversations", "prompt")
REQUESTS = ("body", "request")
_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "model": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip


class UnusableError(ValueError):
    """A record without a conversation to answer; `reason` is one word for reports."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def read_conversation(
    record: Mapping[str, Any], column: str | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """(messages, tools) of a record.

    Raises:
        UnusableError: no conversation, or one that a text model cannot be asked.
    """
    record = _request_of(record)
    name = column or next((name for name in COLUMNS if record.get(name) is not None), None)
    if name is None or record.get(name) is None:
        raise UnusableError("no_conversation")
    turns = _from_json(record[name])
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    if not isinstance(turns, list):
        raise UnusableError("no_conversation")
    system = record.get("system") or record.get("system_prompt")
    messages = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    messages += [_message(turn) for turn in turns]
    messages = _tidied(messages)
    if not messages:
        raise UnusableError("no_user_turn")
    return messages, _tools(record.get("tools"))


def known_columns(record: Mapping[str, Any]) -> bool:
    """Whether a record has the form of any layout, usable or not."""
    names = {*record, *_request_of(record)}
    return not names.isdisjoint(COLUMNS)


def is_request_log(record: Mapping[str, Any]) -> bool:
    """Whether a record is a line of a request log."""
    return _request_of(record) is not record


def _request_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The OpenAI request in a log's line, or the record itself."""
    for name in REQUESTS:
        inner = _from_json(record.get(name))
        if isinstance(inner, Mapping) and not set(inner).isdisjoint(COLUMNS):
            return inner
    return record


def _from_json(value: Any) -> Any:
    """Logs and Parquet files often hold structures as JSON text."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _message(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise UnusableError("no_conversation")
    role = _ROLES.get(str(turn.get("role") or turn.get("from")).lower())
    if role is None:
        raise UnusableError("unknown_role")
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    calls = [_call(call) for call in _from_json(turn.get("tool_calls")) or []] if role == "assistant" else []
    text = _text(content, may_be_empty=bool(calls) or role == "tool")
    message: dict[str, Any] = {"role": role, "content": text}
    if calls:
        message["tool_calls"] = calls
    if role == "tool":
        message |= {name: str(turn[name]) for name in ("tool_call_id", "name") if turn.get(name)}
    return message


def _text(content: Any, may_be_empty: bool) -> str:
    """A turn's text; parts of a multimodal message are joined if all are text."""
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise UnusableError("not_text")
        content = "\n".join(part["text"] for part in content)
    if content is None and may_be_empty:
        return ""
    if not isinstance(content, str):
        raise UnusableError("not_text")
    if any("\ud800" <= char <= "\udfff" for char in content):  # a lone surrogate: no tokenizer takes it
        raise UnusableError("invalid_unicode")
    if not content.strip() and not may_be_empty:
        raise UnusableError("empty_turn")
    return content


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UnusableError("broken_tool_call")
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": text},
    }


def _tools(value: Any) -> list[dict[str, Any]] | None:
    tools = _from_json(value)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UnusableError("broken_tools")
    return [dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools]


def _tidied(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Up to the last user or tool turn; no answer before the first user turn; user turns in a row are one."""
    while messages and messages[-1]["role"] not in ("user", "tool"):
        messages.pop()
    tidy: list[dict[str, Any]] = []
    for message in messages:
        asked = any(earlier["role"] == "user" for earlier in tidy)
        if message["role"] in ("assistant", "tool") and not asked:
            continue
        if tidy and message["role"] == tidy[-1]["role"] in ("user", "system"):
            tidy[-1] = {**message, "content": f"{tidy[-1]['content']}\n\n{message['content']}"}
        else:
            tidy.append(message)
    return tidy if any(message["role"] == "user" for message in tidy) else []
