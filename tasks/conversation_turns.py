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
        functions = [call.get("function", {}) for call in calls]
        wanted = [(str(one.get("name")), _canonical(str(one.get("arguments") or ""))) for one in functions]
        # All equal arguments first: a call that takes any result of its tool must not take another call's own.
        found = [self._take_result(name, arguments) for name, arguments in wanted]
        for place, (name, _) in enumerate(wanted):
            if found[place] is None:
                found[place] = self._take_result(name, None)
                self.tool_results_by_name += found[place] is not None
        results = [result for result in found if result is not None]
        if missing := len(calls) - len(results):
            self.tool_results_missing += missing
            self._due = False
            return
        self._history += [
            {"role": "tool", "tool_call_id": call.get("id"), "content": result.content}
            for call, result in zip(calls, results, strict=True)
        ]

    def _take_result(self, name: str, arguments: str | None) -> _Recorded | None:
        """The first unused result of a tool, of a call with these arguments where they are given; it is used then."""
        for result in self._results:
            if not result.used and result.name == name and arguments in (None, result.arguments):
                result.used = True
                return result
        return None


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
