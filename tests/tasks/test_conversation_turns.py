"""What is asked next: the user's turns as recorded, the model's own answers, and recorded results of tools."""

from __future__ import annotations

import json

import pytest

from tasks.conversation_turns import Conversation


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def calls(*named):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}
            for key, name, arguments in named
        ],
    }


def result(key, content, **more):
    return {"role": "tool", "tool_call_id": key, "content": content, **more}


def play(messages, answers, max_turns=9):
    """Every list of messages that is asked while `answers` come back, and the conversation after them."""
    conversation, asked = Conversation(messages, max_turns), []
    for answer in answers:
        asked.append(conversation.next_messages())
        conversation.take(answer)
    return asked, conversation


def test_recorded_answers_are_replaced_by_the_models_own():
    system = {"role": "system", "content": "Be brief."}
    recorded = [system, user("1"), said("old 1"), user("2"), said("old 2"), user("3")]
    asked, after = play(recorded, [said("a"), said("b"), said("c")])
    assert asked == [
        [system, user("1")],
        [system, user("1"), said("a"), user("2")],
        [system, user("1"), said("a"), user("2"), said("b"), user("3")],
    ]
    assert after.next_messages() is None


@pytest.mark.parametrize("max_turns", [1, 2, 3])
def test_no_more_turns_than_the_recipe_says(max_turns):
    recorded = [user("1"), said("x"), user("2"), said("x"), user("3")]
    asked, after = play(recorded, [said("a")] * max_turns, max_turns)
    assert len(asked[-1]) == 2 * max_turns - 1
    assert after.next_messages() is None


def test_reasoning_and_calls_stay_in_the_history_and_empty_fields_do_not():
    answer = {"role": "assistant", "content": "4", "reasoning": "2+2", "tool_calls": [], "refusal": None}
    asked, _ = play([user("1"), said("x"), user("2")], [answer, said("b")])
    assert asked[1][1] == {"role": "assistant", "content": "4", "reasoning": "2+2"}


WEATHER = [
    user("Weather?"),
    calls(
        ("r1", "weather", '{"city": "Rome", "unit": "C"}'), ("r2", "weather", '{"city": "Oslo"}'), ("r3", "time", "{}")
    ),
    result("r1", "warm"),
    result("r2", "cold"),
    result("r3", "noon"),
    said("old"),
    user("Thanks."),
]


@pytest.mark.parametrize(
    ("made", "contents", "by_name"),
    [
        ([("c", "weather", '{"unit": "C", "city": "Rome"}')], ["warm"], 0),  # order of keys does not matter
        ([("c", "weather", '{"city": "Oslo"}')], ["cold"], 0),
        ([("c", "weather", '{"city": "Bonn"}')], ["warm"], 1),
        ([("c", "time", "{}")], ["noon"], 0),
        ([("c", "time", "")], ["noon"], 1),
        ([("c", "weather", '{"city": "Bonn"}'), ("d", "weather", '{"city": "Kiel"}')], ["warm", "cold"], 2),
        ([("c", "weather", '{"city": "Oslo"}'), ("d", "weather", '{"city": "Oslo"}')], ["cold", "warm"], 1),
        ([("c", "weather", "no json")], ["warm"], 1),
        # The second call's own result is not given to the first one, which has none.
        (
            [("c", "weather", '{"city": "Bonn"}'), ("d", "weather", '{"city": "Rome", "unit": "C"}')],
            ["cold", "warm"],
            1,
        ),
    ],
)
def test_calls_get_recorded_results_by_arguments_then_by_name_each_once(made, contents, by_name):
    (_, asked, last), after = play(WEATHER, [calls(*made), said("ok"), said("bye")])
    assert asked[2:] == [result(call[0], content) for call, content in zip(made, contents, strict=True)]
    assert last[-2:] == [said("ok"), user("Thanks.")]
    assert (after.tool_results_by_name, after.tool_results_missing) == (by_name, 0)
    assert after.next_messages() is None


@pytest.mark.parametrize(
    "made",
    [
        [("c", "news", "{}")],
        [("c", "time", "{}"), ("d", "time", "{}")],  # recorded once
    ],
)
def test_a_call_without_recorded_result_ends_the_conversation(made):
    _, after = play(WEATHER, [calls(*made)])
    assert after.next_messages() is None
    assert after.tool_results_missing == 1


def test_words_instead_of_a_call_go_on_with_the_next_user_turn():
    asked, _ = play(WEATHER, [said("I cannot know."), said("bye")])
    assert asked[1] == [user("Weather?"), said("I cannot know."), user("Thanks.")]


def test_results_without_ids_answer_calls_in_order():
    recorded = [
        user("?"),
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2", "name": "g"},
    ]
    asked, _ = play(recorded, [calls(("c", "f", "{}")), calls(("d", "g", "{}")), said("x")])
    assert [message["content"] for message in asked[-1] if message["role"] == "tool"] == ["1", "2"]


@pytest.mark.parametrize(
    ("recorded", "first"),
    [
        ([{"role": "system", "content": "s"}, said("Hello!"), user("Hi")], 2),
        ([said("Hello!"), user("Hi")], 1),
        ([{"role": "system", "content": "s"}], None),
        ([], None),
    ],
)
def test_what_is_asked_first(recorded, first):
    asked = Conversation(recorded, 3).next_messages()
    assert (None if asked is None else len(asked)) == first
    assert asked is None or asked[-1] == user("Hi")


def test_replaying_the_answers_gives_the_same_state():
    answers = [calls(("c", "weather", '{"city": "Bonn"}')), said("ok")]
    _, live = play(WEATHER, answers)
    _, replayed = play(WEATHER, [json.loads(json.dumps(answer)) for answer in answers])
    assert replayed.next_messages() == live.next_messages()
    assert replayed.turn == live.turn == 2
