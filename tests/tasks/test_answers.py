"""Answers are in the order of the prompts, survive kill -9, and fail loudly only when too many do."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tasks.answer_journal import Journal
from tasks.answer_rows import read_answers
from tasks.answer_servers import AnswerServers
from tasks.answers import ERRORS, AnswerPlan, PromptFileError, TooManyFailuresError, answer_prompts, check_prompt_file
from tasks.jsonl import read_jsonl, write_jsonl
from tasks.recipe_data import ResponseMode
from tasks.response_modes import choose_mode
from tasks.sampling import GREEDY, Sampling, request_seed
from tasks.states_spool import StatesSpool
from tasks.vllm_client import RequestRefused
from tests.stage_room import FakeEngine, bare_verifier, made_up_answer, made_up_states, stage_context, toy_recipe

REPOSITORY = Path(__file__).resolve().parents[2]


def prompt(name, *turns, subset="s"):
    messages = [{"role": "user", "content": turn} for turn in turns]
    for place in range(len(turns) - 1, 0, -1):
        messages.insert(place, {"role": "assistant", "content": "recorded"})
    return {"id": name, "subset": subset, "messages": messages, "tools": None, "source": "x.jsonl", "license": "mit"}


PROMPTS = [prompt(f"p{i}", f"{i}?", subset="even" if i % 2 == 0 else "odd") for i in range(20)]
IDS = [f"{one['id']}/0" for one in PROMPTS]


def context_in(room, max_failed_share=0.1, **options):
    room.mkdir(parents=True, exist_ok=True)
    verifier = bare_verifier(room / "verifier")
    return stage_context(
        room, toy_recipe(verifier, responses={"max_failed_share": max_failed_share}), {"verifier": verifier}, **options
    )


def answer(context, prompts=PROMPTS, **changes):
    path = context.work / "prompts.jsonl"
    write_jsonl(path, prompts)
    plan = AnswerPlan("responses", path, max_new_tokens=6, max_turns=4, sampling=GREEDY, seed=5)
    return answer_prompts(context, replace(plan, **changes))


def rows_of(context):
    return list(read_answers(context.output))


@pytest.fixture
def engine(monkeypatch):
    return FakeEngine().install(monkeypatch)


def test_rows_keep_the_order_of_prompts_and_their_states(engine, tmp_path):
    context = context_in(tmp_path)
    counts = answer(context)
    rows = rows_of(context)
    assert [row.id for row in rows] == IDS
    expected = {request.id: made_up_answer(request) for request in engine.asked}
    for row, asked in zip(rows, PROMPTS, strict=True):
        assert (row.prompt_token_ids, row.token_ids) == expected[row.id]
        assert (row.conversation, row.turn, row.subset, row.source) == (asked["id"], 0, asked["subset"], "x.jsonl")
        assert (row.finish_reason, row.mode) == ("length", "")
        assert json.loads(row.message)["content"] == f"said {row.token_ids}"
    assert counts == {
        "rows": 20,
        "conversations": 20,
        "failed": 0,
        "conversations_cut": 0,
        "prompt_tokens": sum(len(row.prompt_token_ids) for row in rows),
        "response_tokens": sum(len(row.token_ids) for row in rows),
        "finished_by_length": 20,
        "refusals_estimate": 0,
    }
    assert (context.output / ERRORS).read_text() == ""
    spool = StatesSpool.of(context, "responses")
    for row in rows:
        ids = [*row.prompt_token_ids, *row.token_ids][:-1]
        assert torch.equal(spool.read(row.id, ids), made_up_states(ids))
    assert list((context.work / "states").iterdir()) == [], "the server's files and locks are gone"


def test_greedy_requests_switch_off_what_a_servers_defaults_would_do(engine, tmp_path):
    context = context_in(tmp_path)
    answer(context)
    for request in engine.asked:
        assert (request.temperature, request.seed, request.max_tokens, request.with_states) == (0.0, None, 6, True)
        assert request.extra == {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    (spec,) = context.servers.acquired
    assert (spec.mode, spec.layer_ids, spec.prefix_caching) == ("extract", (1, 3, 4), False)


def test_sampled_requests_have_a_seed_each_and_the_same_in_every_run(engine, tmp_path):
    answer(context_in(tmp_path / "a"), sampling=Sampling(0.7))
    seeds = {request.id: request.seed for request in engine.asked}
    assert seeds == {f"{one['id']}/0": request_seed(5, one["id"], 0) for one in PROMPTS}
    assert len(set(seeds.values())) == 20
    assert all(0 <= seed < 2**31 for seed in seeds.values())
    assert request_seed(5, "p1", 1) != request_seed(5, "p1", 0) != request_seed(6, "p1", 0)


def test_without_states_a_plain_server_with_prefix_cache_answers(engine, tmp_path):
    context = context_in(tmp_path)
    answer(context, want_states=False)
    (spec,) = context.servers.acquired
    assert (spec.mode, spec.prefix_caching) == ("plain", True)
    assert not any(request.with_states for request in engine.asked)
    assert not (context.work / "spool").exists()


def test_later_turns_are_asked_with_the_models_own_answers(engine, tmp_path):
    talks = [prompt("a", "1", "2", "3"), prompt("b", "1"), prompt("c", *"12345")]
    context = context_in(tmp_path)
    answer(context, talks)
    assert [row.id for row in rows_of(context)] == ["a/0", "a/1", "a/2", "b/0", "c/0", "c/1", "c/2", "c/3"]
    asked = {request.id: request for request in engine.asked}
    for talk in talks:
        history = []  # a plain loop over what the user says
        for turn, said in enumerate([m["content"] for m in talk["messages"] if m["role"] == "user"][:4]):
            history.append({"role": "user", "content": said})
            request = asked[f"{talk['id']}/{turn}"]
            assert request.messages == history
            history.append({"role": "assistant", "content": f"said {made_up_answer(request)[1]}"})


KILLED = """
import sys
from pathlib import Path
import tasks.answers
from tests.stage_room import FakeEngine
from tests.tasks.test_answers import answer, context_in
context = context_in(Path(sys.argv[1]))
def tear():
    with (context.scratch / "journal" / "00000.jsonl").open("a") as file:
        file.write('{"id": "p3/0", "conversation": "p3", "subset": "od')
tasks.answers.generate = FakeEngine(kill_after=9, before_kill=tear).generate
answer(context)
"""


def test_killed_run_loses_and_doubles_nothing(engine, tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=REPOSITORY, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    *whole, torn = (tmp_path / "scratch" / "journal" / "00000.jsonl").read_text().split("\n")
    assert torn, "the last line is cut off in the middle"
    finished = [json.loads(line)["id"] for line in whole]
    assert len(finished) == 9
    assert not list((tmp_path / "output").iterdir())

    context = context_in(tmp_path)
    answer(context)
    assert sorted(engine.ids + finished) == sorted(IDS), "finished rows are not asked again, all others are"
    # What the killed process wrote is what an uninterrupted one writes.
    unbroken = context_in(tmp_path / "unbroken")
    answer(unbroken)
    assert rows_of(context) == rows_of(unbroken)
    assert [row.id for row in rows_of(context)] == IDS


def test_half_a_conversation_goes_on_at_its_next_turn(engine, tmp_path):
    talks = [prompt("a", "1", "2", "3"), prompt("b", "1", "2")]
    unbroken = context_in(tmp_path / "unbroken")
    answer(unbroken, talks)
    context = context_in(tmp_path / "half")
    journal = Journal(context.scratch / "journal")
    for row in rows_of(unbroken)[:2]:
        journal.append(row)
    journal.close()
    engine.asked.clear()
    answer(context, talks)
    assert sorted(engine.ids) == ["a/2", "b/0", "b/1"]
    assert rows_of(context) == rows_of(unbroken)


def test_too_many_failures_name_the_commonest_and_keep_what_is_done(engine, tmp_path):
    context = context_in(tmp_path)
    engine.failing = {
        "p1/0": RuntimeError("40 too long"),
        "p5/0": ValueError("odd"),
        "p6/0": RuntimeError("7 too long"),
    }
    with pytest.raises(TooManyFailuresError, match=r"3 of 20 .*share=0\.1.*\(2 times\): RuntimeError: \d+ too long"):
        answer(context)
    assert not list(context.output.glob("responses*"))
    assert sorted(row["id"] for row in read_jsonl(context.scratch / ERRORS)) == ["p1", "p5", "p6"]
    engine.failing, engine.asked = {}, []
    answer(context)
    assert sorted(engine.ids) == ["p1/0", "p5/0", "p6/0"], "only what failed is asked again"
    assert [row.id for row in rows_of(context)] == IDS


def test_a_few_failures_are_recorded_with_their_cause(engine, tmp_path):
    context = context_in(tmp_path)
    engine.failing = {"p2/0": RuntimeError("too long"), "p7/0": ValueError("odd")}
    counts = answer(context)
    assert (counts["rows"], counts["failed"]) == (18, 2)
    assert [row.id for row in rows_of(context)] == [i for i in IDS if i not in engine.failing]
    errors = {row["id"]: (row["turn"], row["error"]) for row in read_jsonl(context.output / ERRORS)}
    assert errors == {"p2": (0, "RuntimeError: too long"), "p7": (0, "ValueError: odd")}


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_no_run_ends_without_answers(engine, tmp_path, share):
    context = context_in(tmp_path, max_failed_share=share)
    engine.failing = dict.fromkeys(IDS, RuntimeError("no"))
    with pytest.raises(TooManyFailuresError, match="20 of 20"):
        answer(context)


def test_a_later_turn_that_is_refused_ends_its_conversation_and_fails_nothing(engine, tmp_path):
    context = context_in(tmp_path, max_failed_share=0.0)
    engine.failing = {"a/1": RequestRefused(400, "longer than max_model_len")}
    counts = answer(context, [prompt("a", "1", "2", "3"), prompt("b", "1", "2")])
    assert [row.id for row in rows_of(context)] == ["a/0", "b/0", "b/1"]
    assert (counts["failed"], counts["conversations_cut"]) == (0, 1)
    (error,) = read_jsonl(context.output / ERRORS)
    assert (error["id"], error["turn"]) == ("a", 1)
    assert "longer than max_model_len" in error["error"]


@pytest.mark.parametrize("status", [401, 403, 404, 429])
def test_a_later_turn_that_fails_on_the_server_is_a_failure_and_keeps_the_turns_before(engine, tmp_path, status):
    context = context_in(tmp_path, max_failed_share=0.5)
    engine.failing = {"a/1": RequestRefused(status, "no")}
    counts = answer(context, [prompt("a", "1", "2", "3"), prompt("b", "1", "2")])
    assert [row.id for row in rows_of(context)] == ["a/0", "b/0", "b/1"]
    assert (counts["failed"], counts["conversations_cut"]) == (1, 0)


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize(
    ("section", "choice"),
    [
        ({}, "none"),
        ({"responses": {"tool_call_parser": "hermes"}}, None),
        ({"serving": {"urls": ["http://gpu1:8000"]}}, None),
    ],
)
def test_tools_are_sent_and_only_a_parser_lets_the_verifier_call_them(engine, tmp_path, monkeypatch, section, choice):
    external = AnswerServers((SimpleNamespace(url="http://gpu1:8000"),), with_states=False)
    monkeypatch.setattr("tasks.answers.answer_servers", lambda context, want_states: external)
    context = stage_context(tmp_path, toy_recipe(bare_verifier(tmp_path / "verifier"), **section), {})
    answer(context, [PROMPTS[0] | {"tools": TOOLS}, PROMPTS[1]])
    asked = {request.id: request for request in engine.asked}
    assert asked["p0/0"].tools == TOOLS
    assert asked["p0/0"].extra.get("tool_choice") == choice
    assert asked["p1/0"].tools is None
    assert "tool_choice" not in asked["p1/0"].extra


def test_every_turn_of_a_conversation_is_asked_in_its_mode(engine, tmp_path):
    modes = tuple(ResponseMode(name=f"m{i}", chat_template_kwargs={"effort": i}) for i in range(3))
    talks = [prompt(f"t{i}", "1", "2") for i in range(12)]
    context = context_in(tmp_path)
    answer(context, talks, modes=modes)
    for row in rows_of(context):
        mode = choose_mode(modes, 5, row.conversation)
        asked = next(request for request in engine.asked if request.id == row.id)
        assert row.mode == mode.name
        assert asked.extra["chat_template_kwargs"] == mode.chat_template_kwargs
    assert len({row.mode for row in rows_of(context)}) == 3


def test_written_answers_are_final(engine, tmp_path):
    # A stage that goes on after answering and is killed must find the same rows: its shards count on their order.
    context = context_in(tmp_path)
    engine.failing = {"p2/0": RuntimeError("too long")}
    first = answer(context), rows_of(context)
    engine.failing, engine.asked = {}, []
    assert (answer(context), rows_of(context)) == first
    assert engine.asked == []


def test_states_of_other_tokens_end_the_run(engine, tmp_path, monkeypatch):
    honest = engine.write_states
    monkeypatch.setattr(engine, "write_states", lambda stem, ids: honest(stem, [*ids[:-1], ids[-1] + 1]))
    with pytest.raises(RuntimeError, match="is of other tokens"):
        answer(context_in(tmp_path))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no prompts"),
        ([PROMPTS[0], PROMPTS[1], PROMPTS[0]], "line 3: id 'p0' occurs twice"),
        ([PROMPTS[0], PROMPTS[1] | {"messages": []}], "line 2: 'messages' is missing or empty"),
        ([PROMPTS[0] | {"id": ""}], "line 1: 'id' is missing"),
        ([PROMPTS[0] | {"messages": [{"role": "system", "content": "x"}]}], "'p0' has no user turn"),
    ],
)
def test_prompts_that_cannot_be_asked_are_named_before_anything_is(engine, tmp_path, rows, message):
    context = context_in(tmp_path)
    with pytest.raises(PromptFileError, match=message):
        answer(context, rows)
    assert engine.asked == []


def test_good_prompts_are_counted(tmp_path):
    write_jsonl(tmp_path / "p.jsonl", PROMPTS)
    assert check_prompt_file(tmp_path / "p.jsonl") == 20
