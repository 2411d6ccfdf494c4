"""Sampling, modes and reports of answers."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from tasks.answer_report import AnswerReport, looks_like_refusal
from tasks.answer_rows import AnswerRow, AnswerWriter, answer_tables, read_answers
from tasks.recipe import RecipeError
from tasks.recipe_data import ResponseMode, ResponsesSection
from tasks.response_modes import choose_mode, ignored_modes, mode_fields
from tasks.sampling import OFF, sampling_of

# --- sampling


@pytest.mark.parametrize(
    ("fields", "config", "temperature", "extra"),
    [
        ({}, {"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.1}, 0.0, {}),
        ({"temperature": 0.8}, {"temperature": 0.6, "top_p": 0.5}, 0.8, {}),
        ({"temperature": 0.8, "top_k": 7}, None, 0.8, {"top_k": 7}),
        ({"temperature": "model"}, {"do_sample": True, "top_p": 0.95, "top_k": 20}, 1.0, {"top_p": 0.95, "top_k": 20}),
        ({"temperature": "model"}, {"temperature": 0.6, "repetition_penalty": 1.1}, 0.6, {"repetition_penalty": 1.1}),
        ({"temperature": "model"}, {"do_sample": True, "temperature": None, "top_p": None}, 1.0, {}),
        ({"temperature": "model", "top_p": 0.5}, {"temperature": 0.6, "top_p": 0.9}, 0.6, {"top_p": 0.5}),
    ],
)
def test_every_value_is_sent_and_only_model_reads_the_generation_config(tmp_path, fields, config, temperature, extra):
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    sampling = sampling_of(ResponsesSection(**fields), tmp_path)
    assert (sampling.temperature, dict(sampling.extra)) == (temperature, {**OFF, **extra})
    assert sampling.is_greedy == (temperature == 0.0)


@pytest.mark.parametrize(("config", "said"), [(None, "does not exist"), ({"eos_token_id": 2}, "does not say how")])
def test_model_without_a_word_about_sampling_is_refused(tmp_path, config, said):
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=f"temperature='model'.*{said}"):
        sampling_of(ResponsesSection(temperature="model"), tmp_path)


# --- modes

MODES = (
    ResponseMode(name="think", weight=3, chat_template_kwargs={"enable_thinking": True}),
    ResponseMode(name="plain", weight=1, chat_template_kwargs={"enable_thinking": False}),
    ResponseMode(name="low", weight=1, reasoning_effort="low"),
)


def test_modes_follow_their_weights_and_depend_on_nothing_but_the_conversation():
    names = [f"c{i}" for i in range(5000)]
    chosen = {name: choose_mode(MODES, 0, name).name for name in names}
    shares = Counter(chosen.values())
    for mode, share in (("think", 0.6), ("plain", 0.2), ("low", 0.2)):
        assert shares[mode] / 5000 == pytest.approx(share, abs=0.03)
    assert {name: choose_mode(MODES, 0, name).name for name in reversed(names)} == chosen
    assert {name: choose_mode(MODES, 1, name).name for name in names} != chosen
    assert choose_mode((), 0, "c").name == "default"
    assert {choose_mode(MODES[:1], 0, name).name for name in names} == {"think"}


def test_a_mode_is_what_the_chat_template_is_told():
    assert [mode_fields(mode) for mode in MODES] == [
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "low"},
    ]


def test_modes_that_the_template_does_not_know_are_found():
    def render(messages, tokenize, add_generation_prompt, enable_thinking=True, **others):
        return f"{messages}{enable_thinking}"

    knows = SimpleNamespace(apply_chat_template=render)
    deaf = SimpleNamespace(apply_chat_template=lambda messages, **others: "x")
    assert ignored_modes(MODES[:2], knows) == [], "the default is one of them, and the other one differs"
    assert ignored_modes(MODES, knows) == ["low"]
    assert ignored_modes(MODES, deaf) == ["think", "plain", "low"]
    assert ignored_modes(MODES[2:], knows) == ["low"]
    half = ResponseMode(name="half", chat_template_kwargs={"enable_thinking": False, "unheard": 1})
    assert ignored_modes((half,), knows) == ["half"]


def test_a_reasoning_effort_switches_thinking_on_as_vllm_does():
    def render(messages, tokenize, add_generation_prompt, enable_thinking=False, **others):
        return f"{messages}{enable_thinking}"

    opt_in = SimpleNamespace(apply_chat_template=render)
    assert ignored_modes(MODES[2:], opt_in) == []
    off = ResponseMode(name="off", reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert ignored_modes((off,), opt_in) == ["off"]


# --- rows and reports


def row(number, tokens=3, reason="stop", content="Yes.", mode=""):
    name = f"c{number}"
    message = json.dumps({"role": "assistant", "content": content})
    return AnswerRow(f"{name}/0", name, 0, "s", "x", mode, [1, 2], list(range(tokens)), reason, message)


def test_rows_come_back_in_order_from_shards(tmp_path):
    rows = [row(i, tokens=i % 4) for i in range(10)]
    writer = AnswerWriter(tmp_path, rows_per_shard=4)
    for one in rows:
        writer.add(one)
    assert len(list(answer_tables(tmp_path))) == 2, "what is pending is not there yet"
    writer.close()
    assert [len(table) for table in answer_tables(tmp_path)] == [4, 4, 2]
    assert list(read_answers(tmp_path)) == rows
    assert not list(tmp_path.glob("*.partial"))


def test_the_report_counts(tmp_path):
    rows = [row(0, 1), row(1, 5, "length", "I'm sorry, but I can't help."), row(2, 9, "length"), row(3, 100)]
    report = AnswerReport()
    for one in rows:
        report.add([one], SimpleNamespace(tool_results_by_name=1, tool_results_missing=0))
    counts = report.write(tmp_path, failed=2, cut=1)
    assert counts == {
        "rows": 4, "conversations": 4, "failed": 2, "conversations_cut": 1, "prompt_tokens": 8, "response_tokens": 115,
        "finished_by_length": 2, "refusals_estimate": 1,
    }  # fmt: skip
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["finish_reasons"] == {"stop": 2, "length": 2}
    assert written["answer_tokens_quantiles"] == {"0.1": 1, "0.5": 9, "0.9": 100, "0.99": 100}
    assert written["answer_tokens_histogram"] == {"<=1": 1, "<=8": 1, "<=16": 1, "<=128": 1}
    assert written["tool_results_by_name"] == 4
    assert written["conversations_by_turns"] == {"1": 4}
    assert "2 stop" in report.lines()[0]


@pytest.mark.parametrize(
    ("message", "reason", "refused"),
    [
        ({"content": "I’m sorry, but I can’t help with that."}, "stop", True),
        ({"content": "I cannot assist with this request."}, "stop", True),
        ({"content": "<think>hm</think>\n\nI can't provide that."}, "stop", True),
        ({"content": "", "refusal": "no"}, "stop", True),
        ({"content": "Sure"}, "content_filter", True),
        ({"content": "I canoe every summer."}, "stop", False),
        ({"content": "She said: I cannot help."}, "stop", False),
        ({"content": None}, "tool_calls", False),
    ],
)
def test_what_looks_like_a_refusal(message, reason, refused):
    assert looks_like_refusal(message, reason) == refused
