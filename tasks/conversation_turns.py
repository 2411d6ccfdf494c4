"""A conversation while the verifier answers it: the user's turns as recorded, the assistant's turns its own.

Calls of tools are paired with the results that were recorded, never executed (speculators does so as well,
https://github.com/vllm-project/speculators): first a result of the same tool with equal arguments, else the next unused
one of the same tool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ANSWERS = ("assistant", "tool")
_KEPT_FIELDS = ("content", "reasoning", "reasoning_content", "tool_calls")


@dataclass
class _Recorded:
    name: str
    arguments: str
    content: str
    used: bool = False


class Conversation:
    """What to ask next, given the answers so far.

    Args:
        messages: the recorded conversation, up to its last user or tool turn.
        max_turns: answers at most.

    Attributes:
        turn: number of the answer that is due.
        tool_results_by_name: results given although the arguments differ from the recorded call's.
        tool_results_missing: calls for which nothing was recorded; the conversation ends there.
    """

    def __init__(self, messages: list[dict[str, Any]], max_turns: int) -> None:
        self.max_turns = max_turns
        self.turn = 0
        self.tool_results_by_name = 0
        self.tool_results_missing = 0
        self._parts = _user_parts(messages)
        self._results = _recorded_results(messages)
        self._history: list[dict[str, Any]] = []
        self._due = bool(self._parts)
        if self._due:
            self._history += self._parts.pop(0)

    def next_messages(self) -> list[dict[str, Any]] | None:
        """Messages of the next request; None when the conversation is over."""
        return list(self._history) if self._due and self.turn < self.max_turns else None

    def take(self, message: Mapping[str, Any]) -> None:
        """Take the verifier's answer to `next_messages`."""
        kept = {name: message[name] for name in _KEPT_FIELDS if message.get(name)}
        self._history.append({"role": "assistant", "content": "", **kept})
        self.turn += 1
        calls = message.get("tool_calls") or []
        if calls:
            self._answer_calls(calls)
        elif self._parts:
            self._history += self._parts.pop(0)
        else:
            self._due = False

    def _answer_calls(self, calls: list[Mapping[str, Any]]) -> None:
        for call in calls:
            function = call.get("function", {})
            result = self._find(str(function.get("name")), str(function.get("arguments") or ""))
            if result is None:
                self.tool_results_missing += 1
                self._due = False
                return
            result.used = True
            self._history.append({"role": "tool", "tool_call_id": call.get("id"), "content": result.content})

    def _find(self, name: str, arguments: str) -> _Recorded | None:
        unused = [result for result in self._results if not result.used and result.name == name]
        wanted = _canonical(arguments)
        exact = next((result for result in unused if result.arguments == wanted), None)
        if exact is None and unused:
            self.tool_results_by_name += 1
            return unused[0]
        return exact


def _user_parts(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What is said between two answers; the recorded answers themselves are left out."""
    parts: list[list[dict[str, Any]]] = []
    fresh = True
    for message in messages:
        if message["role"] in _ANSWERS:
            fresh = True
            continue
        if fresh:
            parts.append([])
            fresh = False
        parts[-1].append(message)
    # A system prompt alone, before a recorded greeting of the assistant, asks nothing.
    while len(parts) > 1 and parts[0][-1]["role"] != "user":
        parts[:2] = [parts[0] + parts[1]]
    return parts if parts and parts[-1][-1]["role"] == "user" else []


def _recorded_results(messages: list[dict[str, Any]]) -> list[_Recorded]:
    """Results in the order recorded, each with the call that it answers."""
    unanswered: list[tuple[str | None, str, str]] = []  # id, name, arguments
    found = []
    for message in messages:
        for call in message.get("tool_calls") or []:
            function = call["function"]
            unanswered.append((call.get("id"), function["name"], _canonical(function.get("arguments") or "")))
        if message["role"] == "tool":
            wanted = message.get("tool_call_id")
            # Logs without ids: results answer calls in order.
            own = next((call for call in unanswered if wanted in (None, "", call[0])), None)
            if own is not None:
                unanswered.remove(own)
            _, name, arguments = own or (None, str(message.get("name")), "")
            found.append(_Recorded(name, arguments, message["content"]))
    return found


def _canonical(arguments: str) -> str:
    """Arguments in a form in which equal ones are equal texts."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments
