"""Conversations of every known layout become the same messages; nothing of them is lost, and nothing is guessed."""

from __future__ import annotations

import json

import pytest

from tasks.conversation_layouts import UnusableError, is_request_log, known_columns, read_conversation


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}

SAME = [SYSTEM, user("One?"), said("1"), user("Two?")]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [*SAME, said("2")]},
        {"messages": json.dumps([*SAME, said("2")])},
        {"messages": [{**SYSTEM, "role": "developer"}, *SAME[1:]]},
        {"conversations": [*SAME, said("2")]},
        {"conversations": [
            {"from": "system", "value": "Be brief."}, {"from": "human", "value": "One?"}, {"from": "gpt", "value": "1"},
            {"from": "human", "value": "Two?"}, {"from": "gpt", "value": "2"},
        ]},
        {"conversations": SAME[1:], "system": "Be brief."},
        {"prompt": SAME},
        {"request": {"model": "m", "messages": SAME, "temperature": 0.5}, "response": {"choices": []}},
        {"body": {"messages": SAME}, "custom_id": "7", "method": "POST", "url": "/v1/chat/completions"},
        {"body": json.dumps({"messages": SAME})},
        {"model": "m", "messages": SAME, "stream": True},
        {"messages": [SYSTEM, user([{"type": "text", "text": "One?"}]), said("1"), user("Two?")]},
    ],
)  # fmt: skip
def test_all_layouts_give_the_same_messages(record):
    assert known_columns(record)
    assert read_conversation(record) == (SAME, None)


@pytest.mark.parametrize(
    ("turns", "messages"),
    [
        ([said("Hello!"), user("Hi")], [user("Hi")]),
        ([SYSTEM, said("Hello!"), user("Hi"), said("x")], [SYSTEM, user("Hi")]),
        ([user("a"), user("b"), said("x"), user("c")], [user("a\n\nb"), said("x"), user("c")]),
        ([user("a"), said("x"), said("y")], [user("a")]),
    ],
)
def test_turns_are_tidied(turns, messages):
    assert read_conversation({"messages": turns})[0] == messages


def test_a_text_is_a_user_turn():
    assert read_conversation({"prompt": "[Draft] Hi"}) == ([user("[Draft] Hi")], None)
    assert read_conversation({"prompt": "Hi", "system_prompt": "Be brief."}) == ([SYSTEM, user("Hi")], None)


def test_tools_calls_and_results_are_kept():
    turns = [
        user("Weather?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "warm"},
    ]
    expected = [user("Weather?"), {**said(""), "tool_calls": [CALL]}, turns[2]]
    for tools in ([TOOL], json.dumps([TOOL]), [TOOL["function"]]):
        assert read_conversation({"messages": [*turns, said("Warm.")], "tools": tools}) == (expected, [TOOL])
    bare = {"name": "weather", "arguments": {"city": "Rome"}}
    (_, answer, _), _ = read_conversation({"messages": [turns[0], {**turns[1], "tool_calls": [bare]}, turns[2]]})
    assert answer["tool_calls"] == [{**CALL, "id": ""}]
    sharegpt = [
        {"from": "human", "value": "Weather?"},
        {"from": "gpt", "value": "I look."},
        {"from": "observation", "value": "warm"},
    ]  # fmt: skip
    assert read_conversation({"conversations": sharegpt})[0][-1] == {"role": "tool", "content": "warm"}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "x"}, "no_conversation"),
        ({"messages": None}, "no_conversation"),
        ({"messages": 5}, "no_conversation"),
        ({"messages": ["x"]}, "no_conversation"),
        ({"messages": []}, "no_user_turn"),
        ({"messages": [SYSTEM, said("x")]}, "no_user_turn"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "unknown_role"),
        ({"messages": [user("")]}, "empty_turn"),
        ({"messages": [user(None)]}, "not_text"),
        ({"messages": [user(7)]}, "not_text"),
        ({"messages": [user([{"type": "image_url", "image_url": {}}])]}, "not_text"),
        ({"messages": [user("\ud83d")]}, "invalid_unicode"),
        ({"messages": [user("x"), {**said(""), "tool_calls": ["f"]}, user("y")]}, "broken_tool_call"),
        ({"messages": [user("x")], "tools": "f"}, "broken_tools"),
    ],
)
def test_what_cannot_be_asked_has_a_reason(record, reason):
    with pytest.raises(UnusableError) as caught:
        read_conversation(record)
    assert caught.value.reason == reason


def test_only_the_named_column_counts():
    record = {"messages": [user("no")], "dialog": [user("yes")]}
    assert read_conversation(record, "dialog")[0] == [user("yes")]
    with pytest.raises(UnusableError):
        read_conversation({"messages": [user("no")]}, "dialog")


@pytest.mark.parametrize(
    ("record", "is_log"),
    [
        ({"request": {"messages": []}}, True),
        ({"body": '{"prompt": "x"}'}, True),
        ({"body": "plain text", "prompt": "x"}, False),
        ({"messages": []}, False),
        ({"request": {"id": 1}, "messages": []}, False),
    ],
)
def test_request_logs_are_recognised(record, is_log):
    assert is_request_log(record) == is_log
