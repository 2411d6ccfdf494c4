"""The responses stage: what it warns of, and when hidden states come along."""

from __future__ import annotations

import json
import logging

import pytest

from tasks import responses
from tasks.answer_rows import read_answers
from tasks.jsonl import write_jsonl
from tasks.responses import tokens_estimate
from tests.stage_room import HIDDEN, LAYER_IDS, FakeEngine, bare_verifier, manifest, stage_context, toy_recipe

PROMPTS = [
    {
        "id": f"p{i}", "subset": "s", "messages": [{"role": "user", "content": f"{i}?"}], "tools": None,
        "source": "x.jsonl", "license": "mit",
    }
    for i in range(10)
]  # fmt: skip
PROMPT_TOKENS, MAX_NEW_TOKENS = 60, 4
# 10 rows of 6 prompt tokens and at most 4 more, a state of 2 bytes per layer and dimension.
STATES_GIB = (10 * (6 + MAX_NEW_TOKENS)) * len(LAYER_IDS) * HIDDEN * 2 / 2**30


def build(room, monkeypatch, *, spool_gib=1.0, keep_states=True, **settings):
    engine = FakeEngine().install(monkeypatch)
    verifier = bare_verifier(room / "verifier")
    write_jsonl(room / "train.jsonl", PROMPTS)
    recipe = toy_recipe(
        verifier, responses={"max_new_tokens": MAX_NEW_TOKENS, **settings}, serving={"spool_gib": spool_gib}
    )
    context = stage_context(
        room, recipe, {"verifier": verifier, "prompts": room}, keep_states=keep_states,
        manifests={"prompts": manifest("prompts", prompts=10, prompt_tokens=PROMPT_TOKENS)},
    )  # fmt: skip
    return context, responses.build(context), engine


@pytest.mark.parametrize(
    ("spool_gib", "keep_states", "with_states"),
    [(STATES_GIB * 1.001, True, True), (STATES_GIB * 0.999, True, False), (STATES_GIB * 2, False, False)],
)
def test_states_come_along_where_a_later_stage_wants_them_and_they_fit(
    tmp_path, monkeypatch, spool_gib, keep_states, with_states
):
    context, counts, engine = build(tmp_path, monkeypatch, spool_gib=spool_gib, keep_states=keep_states)
    assert {request.with_states for request in engine.asked} == {with_states}
    assert [spec.mode for spec in context.servers.acquired] == ["extract" if with_states else "plain"]
    assert counts["rows"] == len(list(read_answers(context.output))) == 10


def test_the_estimate_counts_every_turn_with_all_that_precedes_it():
    def talk(turns):
        return {"messages": [{"role": role, "content": ""} for _ in range(turns) for role in ("user", "assistant")]}

    expected = 0
    for turns in (1, 3, 9):
        for turn in range(min(turns, 4)):
            expected += 50 + 7 * (turn + 1)  # the recorded conversation at most, and the model's own answers
    found = tokens_estimate(map(talk, (1, 3, 9)), tokens_per_prompt=50, max_new_tokens=7, max_turns=4)
    assert found == expected


def test_many_truncated_answers_are_a_warning_with_its_remedy(tmp_path, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        build(tmp_path, monkeypatch)  # the fake engine cuts every answer off
    (record,) = caplog.records
    assert "100 % of the answers were cut off at responses.max_new_tokens=4" in record.message
    assert "examples.truncated_answers=drop" in record.message


def test_modes_that_change_no_prompt_are_a_warning(tmp_path, monkeypatch, caplog):
    class Deaf:
        def apply_chat_template(self, *_, **__):
            return "x"

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda folder: Deaf())
    with caplog.at_level(logging.WARNING):
        context, _, _ = build(tmp_path, monkeypatch, modes=[{"name": "think", "reasoning_effort": "low"}])
    assert any("responses.modes think" in record.message for record in caplog.records)
    assert json.loads((context.output / "report.json").read_text())["modes"] == {"think": 10}


def test_identity_holds_all_that_decides_the_answers(tmp_path):
    recipe = toy_recipe(bare_verifier(tmp_path / "verifier"))
    identity = responses.identity(recipe)
    assert "max_failed_share" not in identity
    assert identity.keys() | {"max_failed_share"} == set(type(recipe.responses).model_fields)
