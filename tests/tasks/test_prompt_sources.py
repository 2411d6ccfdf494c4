"""Prompts from datasets and from the verifier itself."""

from __future__ import annotations

import json
import logging
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest

from tasks import prompts
from tasks.dataset_prompts import dataset_prompts
from tasks.prompt_rows import PromptRow, PromptsError
from tasks.recipe import PromptsSection, RecipeError
from tasks.recipe_file import parse_recipe
from tests.tiny_verifier import make_tiny_verifier


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return make_tiny_verifier(tmp_path_factory.mktemp("tiny") / "verifier")


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- datasets


def rows_of(path, **fields):
    return list(dataset_prompts(PromptsSection(source="dataset", dataset=str(path), **fields)))


RECORDS = [
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    {
        "messages": [
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "Two?"},
            {"role": "assistant", "content": "2"},
        ]
    },
    {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]},
    {"prompt": "Just a text"},
    {"messages": [{"role": "assistant", "content": "No question here."}]},
    {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    {"prompt": "half a smiley \ud83d"},
]


def test_dataset_columns_are_found_and_the_last_answer_is_dropped(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in RECORDS) + "\n\n")
    found = rows_of(path)
    turns = {tuple((m["role"], m["content"]) for m in r.messages) for r in found if isinstance(r, PromptRow)}
    assert turns == {
        (("system", "Be brief."), ("user", "Hi")),
        (("user", "One?"), ("assistant", "1"), ("user", "Two?")),
        (("user", "Who?"),),
        (("user", "Just a text"),),
    }
    assert sum(isinstance(r, str) for r in found) == 3
    assert {r.source for r in found if isinstance(r, PromptRow)} == {"chats.jsonl"}


def test_parquet_gives_the_same_rows_as_jsonl(tmp_path):
    from pyarrow import Table, parquet

    records = [{"prompt": f"Question number {i}?"} for i in range(20)]
    parquet.write_table(Table.from_pylist(records), tmp_path / "p.parquet")
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(r) for r in records))
    ids = [r.id for r in rows_of(tmp_path / "p.parquet", seed=3)]
    assert ids == [r.id for r in rows_of(tmp_path / "p.jsonl", seed=3)]
    assert ids != [r.id for r in rows_of(tmp_path / "p.jsonl", seed=4)]


def test_faults_of_a_dataset_name_the_file_the_line_and_the_columns(tmp_path):
    path = tmp_path / "d.jsonl"
    with pytest.raises(RecipeError, match="no such file"):
        rows_of(path)
    path.write_text('{"prompt": "ok"}\n{"prompt": ')
    with pytest.raises(PromptsError, match="line 2 is not valid JSON"):
        rows_of(path)
    path.write_text('{"text": "x", "label": 1}')
    with pytest.raises(PromptsError, match="only text, label"):
        rows_of(path)


def test_a_hub_dataset_is_read_at_its_pinned_revision_in_seeded_order(monkeypatch):
    import datasets

    asked = []

    def load(name, split, revision):
        asked.append((name, split, revision))
        return datasets.Dataset.from_list([{"prompt": f"Question {i}?"} for i in range(30)])

    monkeypatch.setattr(datasets, "load_dataset", load)
    first, again = (rows_of("owner/chats@abc", split="test", seed=1) for _ in range(2))
    other = rows_of("owner/chats", seed=2)
    assert asked[1:] == [("owner/chats", "test", "abc"), ("owner/chats", "train", None)]
    assert [r.id for r in first] == [r.id for r in again] != [r.id for r in other]
    assert {r.id for r in first} == {r.id for r in other}
    assert {r.source for r in first} == {"owner/chats@abc"}


def test_a_folder_is_no_dataset_because_no_fingerprint_would_follow_it(tmp_path):
    with pytest.raises(PromptsError, match=r"is a folder on this machine; name one of its"):
        rows_of(tmp_path)


# --- prompts that the verifier writes


class UserTurns(BaseHTTPRequestHandler):
    """Answers completion requests as vLLM does, with a text that depends on the seed."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        text, reason = self.server.turns(body["seed"])
        ids = self.server.tokenizer.encode(text)
        choice = {"token_ids": ids, "finish_reason": reason}
        answer = json.dumps({"choices": [choice], "prompt_token_ids": body["prompt"]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def writer(verifier):
    """A server of user turns; every third turn is cut off."""
    from transformers import AutoTokenizer

    server = ThreadingHTTPServer(("127.0.0.1", 0), UserTurns)
    server.asked = []
    server.tokenizer = AutoTokenizer.from_pretrained(verifier)
    server.turns = lambda seed: (f"Question number {seed}?<|im_end|>", "length" if seed % 3 == 0 else "stop")
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def self_build(writer, verifier, output, scratch, number):
    output.mkdir()
    scratch.mkdir(exist_ok=True)
    url = f"http://127.0.0.1:{writer.server_port}"
    server = SimpleNamespace(url=url, model_name="verifier", check_alive=lambda: None)
    the_recipe = parse_recipe(
        {
            "name": "t",
            "verifier": {"source": "path", "path": str(verifier)},
            "prompts": {"source": "self", "num_prompts": number},
            "serving": {"python": sys.executable, "concurrency": 4},
        }
    )
    context = SimpleNamespace(
        recipe=the_recipe,
        output=output,
        scratch=scratch,
        parents={"verifier": verifier},
        log=logging.getLogger("t"),
        servers=SimpleNamespace(acquire=lambda spec: server),
    )
    return prompts.build(context)


def test_the_verifier_continues_a_user_turn_and_cut_off_turns_are_dropped(writer, verifier, tmp_path):
    counts = self_build(writer, verifier, tmp_path / "a", tmp_path / "scratch", 40)
    texts = [r["messages"][0]["content"] for r in read(tmp_path / "a" / "train.jsonl")]
    assert texts == [f"Question number {seed}?" for seed in range(60) if seed % 3][:40]
    assert counts["dropped_unusable"] == 20
    request = writer.asked[0]
    assert request["temperature"] == 1.0
    assert writer.tokenizer.decode(request["prompt"]) == "<|im_start|>user\n"


def test_an_interrupted_source_asks_only_for_what_is_missing(writer, verifier, tmp_path):
    self_build(writer, verifier, tmp_path / "a", tmp_path / "scratch", 40)
    shard = tmp_path / "scratch" / "self-prompts.jsonl"
    lines = shard.read_bytes().splitlines(keepends=True)
    shard.write_bytes(b"".join(lines[:100]) + lines[100][:20])
    writer.asked.clear()
    self_build(writer, verifier, tmp_path / "b", tmp_path / "scratch", 40)
    assert len(writer.asked) == len(lines) - 100
    assert (tmp_path / "a/train.jsonl").read_bytes() == (tmp_path / "b/train.jsonl").read_bytes()


def test_a_verifier_with_nothing_else_to_say_is_an_error(writer, verifier, tmp_path):
    writer.turns = lambda seed: ("The same question?", "stop")
    with pytest.raises(PromptsError, match=r"source self has only 1 after.*duplicate"):
        self_build(writer, verifier, tmp_path / "a", tmp_path / "scratch", 10)
