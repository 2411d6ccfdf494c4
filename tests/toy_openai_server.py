"""A server that plays vLLM's part: deterministic answers with token ids, and nothing to load.

    python -m tests.toy_openai_server --port-file FILE [--delay SECONDS] [--model NAME]

Token ids are bytes: a prompt is the JSON of its messages (and tools) and then a mark, so that whoever asks can compute
what was asked. An answer is a function of the prompt alone. A user turn that begins with "call NAME ARGUMENTS" makes it
call a tool; "refuse" and "forbid later" are answered with status 400.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

STOP = 300


def prompt_ids(messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
    """Token ids of a conversation."""
    return [*json.dumps([messages, tools], sort_keys=True).encode(), 256]


def answer_ids(prompt: list[int], max_tokens: int) -> list[int]:
    """The answer to a prompt: 1 to 8 letters, then the stop token, cut off at max_tokens."""
    digest = hashlib.sha256(json.dumps(prompt).encode()).digest()
    letters = [97 + byte % 26 for byte in digest[1 : 2 + digest[0] % 8]]
    return [*letters, STOP][:max_tokens]


def answer_message(messages: list[dict[str, Any]], ids: list[int]) -> dict[str, Any]:
    """The assistant message of an answer."""
    last = messages[-1]["content"]
    if messages[-1]["role"] == "user" and last.startswith("call "):
        _, name, arguments = last.split(" ", 2)
        function = {"name": name, "arguments": arguments}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        }
    return {"role": "assistant", "content": bytes(i for i in ids if i < 256).decode(), "tool_calls": []}


class ToyServer(ThreadingHTTPServer):
    """Counts what it was asked."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, delay: float = 0.0, model: str = "verifier", root: str = "/models/verifier") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.delay, self.model, self.root = delay, model, root
        self.max_model_len = 4096
        self.lock, self.asked, self.flying, self.peak = threading.Lock(), 0, 0, 0
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> ToyServer:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ToyServer
    # Headers and body in one packet: else each answer waits for a delayed acknowledgement.
    wbufsize = -1
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            one = {"id": self.server.model, "root": self.server.root, "max_model_len": self.server.max_model_len}
            self._reply(200, {"data": [one]})
        else:
            self._reply(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.asked += 1
            self.server.flying += 1
            self.server.peak = max(self.server.peak, self.server.flying)
            self.server.bodies.append(body)
        time.sleep(self.server.delay)
        with self.server.lock:
            self.server.flying -= 1
        messages = body.get("messages")
        prompt = body["prompt"] if messages is None else prompt_ids(messages, body.get("tools"))
        users = [message["content"] for message in messages or [] if message["role"] == "user"]
        if any(user.startswith("refuse") for user in users) or (
            len(users) > 1 and users[-1].startswith("forbid later")
        ):
            self._reply(400, {"error": {"message": f"maximum context length exceeded by {len(prompt)} tokens"}})
            return
        ids = answer_ids(prompt, body["max_tokens"])
        choice: dict[str, Any] = {"token_ids": ids, "finish_reason": "stop" if ids[-1:] == [STOP] else "length"}
        if messages is not None:
            choice["message"] = answer_message(messages, ids)
            if choice["message"]["tool_calls"]:
                choice["finish_reason"] = "tool_calls"
        self._reply(200, {"model": self.server.model, "prompt_token_ids": prompt, "choices": [choice]})

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--model", default="verifier")
    arguments = parser.parse_args()
    server = ToyServer(arguments.delay, arguments.model)
    partial = arguments.port_file.with_suffix(".partial")
    partial.write_text(str(server.server_port))
    os.replace(partial, arguments.port_file)
    server.serve_forever()


if __name__ == "__main__":
    main()
