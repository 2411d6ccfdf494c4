"""Prompts that the verifier writes itself."""

from __future__ import annotations

import json
import logging
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest

from tasks import prompts
from tasks.external_server import ExternalServer
from tasks.prompt_rows import PromptsError
from tasks.recipe_file import parse_recipe
from tests.tiny_verifier import make_tiny_verifier


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return make_tiny_verifier(tmp_path_factory.mktemp("tiny") / "verifier")


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


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
    server = ExternalServer(url, "verifier", 60.0)
    the_recipe = parse_recipe(
        {
            "name": "t",
            "verifier": {"source": "path", "path": str(verifier)},
            "prompts": {"sources": ["self"], "num_prompts": number, "min_prompts": number},
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
    with pytest.raises(PromptsError, match=r"only 1 prompts are left.*duplicate"):
        self_build(writer, verifier, tmp_path / "a", tmp_path / "scratch", 10)
