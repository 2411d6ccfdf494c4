"""Answers are in the order of the prompts, survive kill -9, and fail loudly only when too many do."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tasks.answers import ANSWERS, ERRORS, Journal, TooManyFailuresError, answer_prompts, read_jsonl
from tasks.states_spool import StatesSpool
from tests.stage_room import FakeEngine, bare_verifier, made_up_answer, made_up_states, stage_context, toy_recipe

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPTS = [
    {"id": f"p{i}", "subset": "even" if i % 2 == 0 else "odd", "messages": [{"role": "user", "content": f"{i}?"}]}
    for i in range(20)
]
IDS = [prompt["id"] for prompt in PROMPTS]


def context_in(room, max_failed_share=0.1):
    verifier = bare_verifier(room / "verifier")
    return stage_context(
        room, toy_recipe(verifier, responses={"max_failed_share": max_failed_share}), {"verifier": verifier}
    )


def answer(context, temperature=0.0):
    return answer_prompts(context, "responses", PROMPTS, max_new_tokens=6, temperature=temperature, seed=5)


def check_rows(rows, requests):
    """Each row is what the engine made of its prompt."""
    expected = {request.id: made_up_answer(request) for request in requests}
    subsets = {prompt["id"]: prompt["subset"] for prompt in PROMPTS}
    for row in rows:
        assert (row["prompt_token_ids"], row["token_ids"]) == expected[row["id"]]
        assert row["subset"] == subsets[row["id"]]
        assert row["finish_reason"] == "length"


@pytest.fixture
def engine(monkeypatch):
    return FakeEngine().install(monkeypatch)


def test_rows_keep_the_order_of_prompts_and_their_states(engine, tmp_path):
    context = context_in(tmp_path)
    counts = answer(context)
    rows = read_jsonl(context.output / ANSWERS)
    assert [row["id"] for row in rows] == IDS
    check_rows(rows, engine.asked)
    assert counts == {
        "rows": 20,
        "failed": 0,
        "prompt_tokens": sum(len(row["prompt_token_ids"]) for row in rows),
        "response_tokens": sum(len(row["token_ids"]) for row in rows),
        "finished_by_length": 20,
    }
    assert (context.output / ERRORS).read_text() == ""
    spool = StatesSpool.of(context, "responses")
    for row in rows:
        ids = [*row["prompt_token_ids"], *row["token_ids"]][:-1]
        assert torch.equal(spool.read(row["id"], ids), made_up_states(ids))
    assert list((context.work / "states").iterdir()) == [], "the server's files and locks are gone"


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, None), (0.7, 5)])
def test_requests_carry_what_the_recipe_says(engine, tmp_path, temperature, seed):
    context = context_in(tmp_path)
    answer(context, temperature)
    assert {(r.temperature, r.seed, r.max_tokens, r.with_states) for r in engine.asked} == {
        (temperature, seed, 6, True)
    }
    (spec,) = context.servers.acquired
    assert (spec.mode, spec.layer_ids) == ("extract", (1, 3, 4))


KILLED = """
import sys
from pathlib import Path
import tasks.answers
from tests.stage_room import FakeEngine
from tests.tasks.test_answers import answer, context_in
context = context_in(Path(sys.argv[1]))
def tear():
    with (context.scratch / "journal.jsonl").open("a") as file:
        file.write('{"id": "p3", "subset": "od')
tasks.answers.generate = FakeEngine(kill_after=9, before_kill=tear).generate
answer(context)
"""


def test_killed_run_loses_and_doubles_nothing(engine, tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=REPOSITORY, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    *whole, torn = (tmp_path / "scratch" / "journal.jsonl").read_text().split("\n")
    assert torn, "the last line is cut off in the middle"
    finished = [json.loads(line)["id"] for line in whole]
    assert len(finished) == 9
    assert not (tmp_path / "output" / ANSWERS).exists()

    context = context_in(tmp_path)
    answer(context)
    assert sorted(engine.ids + finished) == sorted(IDS), "finished rows are not asked again, all others are"
    rows = read_jsonl(context.output / ANSWERS)
    assert [row["id"] for row in rows] == IDS
    check_rows([row for row in rows if row["id"] in engine.ids], engine.asked)
    # What the killed process wrote is what an uninterrupted one writes.
    unbroken = context_in(tmp_path / "unbroken")
    answer(unbroken)
    assert (context.output / ANSWERS).read_bytes() == (unbroken.output / ANSWERS).read_bytes()


def test_a_torn_line_with_the_text_of_a_row_is_not_a_row(tmp_path):
    # Without its newline nobody knows whether the line ended there.
    path = tmp_path / "journal.jsonl"
    path.write_text('{"id": "a", "n": 1}\n{"id": "b", "n": 12}')
    journal = Journal(path)
    assert journal.rows == {"a": {"id": "a", "n": 1}}
    journal.append({"id": "b", "n": 123})
    journal.close()
    assert Journal(path).rows["b"] == {"id": "b", "n": 123}
    assert path.read_text() == '{"id": "a", "n": 1}\n{"id": "b", "n": 123}\n'


def test_too_many_failures_name_the_commonest_and_keep_what_is_done(engine, tmp_path):
    context = context_in(tmp_path)
    engine.failing = {"p1": RuntimeError("too long"), "p5": ValueError("odd"), "p6": RuntimeError("too long")}
    with pytest.raises(TooManyFailuresError, match=r"3 of 20 .*max_failed_share=0\.1.*\(2 times\): RuntimeError: too"):
        answer(context)
    assert not (context.output / ANSWERS).exists()
    engine.failing, engine.asked = {}, []
    answer(context)
    assert sorted(engine.ids) == ["p1", "p5", "p6"]
    assert [row["id"] for row in read_jsonl(context.output / ANSWERS)] == IDS


def test_a_few_failures_are_recorded(engine, tmp_path):
    context = context_in(tmp_path)
    engine.failing = {"p2": RuntimeError("too long"), "p7": ValueError("odd")}
    counts = answer(context)
    assert (counts["rows"], counts["failed"]) == (18, 2)
    assert [row["id"] for row in read_jsonl(context.output / ANSWERS)] == [i for i in IDS if i not in engine.failing]
    errors = {row["id"]: row["error"] for row in read_jsonl(context.output / ERRORS)}
    assert errors == {"p2": "RuntimeError: too long", "p7": "ValueError: odd"}


def test_written_answers_are_final(engine, tmp_path):
    # A stage that goes on after answering and is killed must find the same rows: its shards count on their order.
    context = context_in(tmp_path)
    engine.failing = {"p2": RuntimeError("too long")}
    first = answer(context), (context.output / ANSWERS).read_bytes()
    engine.failing, engine.asked = {}, []
    assert (answer(context), (context.output / ANSWERS).read_bytes()) == first
    assert engine.asked == []


def test_states_of_other_tokens_end_the_run(engine, tmp_path, monkeypatch):
    honest = engine.write_states
    monkeypatch.setattr(engine, "write_states", lambda stem, ids: honest(stem, [*ids[:-1], ids[-1] + 1]))
    with pytest.raises(RuntimeError, match="is of other tokens"):
        answer(context_in(tmp_path))
