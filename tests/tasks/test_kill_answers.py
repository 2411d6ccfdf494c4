"""The responses stage, really killed with SIGKILL at random moments until it finishes: no answer lost, none twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.answer_rows import read_answers
from tasks.jsonl import read_jsonl, write_jsonl
from tests.fault_proxy import FAULTS, fault_proxy
from tests.toy_openai_server import ToyServer, answer_ids, answer_message, prompt_ids

REPOSITORY = Path(__file__).resolve().parents[2]
SEEDS = range(20)
MAX_NEW_TOKENS, MAX_TURNS = 6, 3
# One attempt at the stage, as a process of its own: nothing but a folder and a server's address outlives it.
ATTEMPT = """
import logging, sys
from pathlib import Path
from types import SimpleNamespace
from tasks import answers, vllm_client
from tasks.answer_servers import AnswerServers
from tasks.external_server import ExternalServer
from tasks.sampling import GREEDY
vllm_client.FIRST_WAIT_SECONDS, vllm_client.JITTER_SECONDS = 0.002, 0.002
room, url, timeout = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
server = ExternalServer(url, "verifier", timeout)
answers.answer_servers = lambda context, want_states: AnswerServers((server,), False)
for name in ("output", "scratch"):
    (room / name).mkdir(exist_ok=True)
responses = SimpleNamespace(max_failed_share=0.0, tool_call_parser="toy")
recipe = SimpleNamespace(responses=responses, serving=SimpleNamespace(concurrency=4, urls=(url,)))
context = SimpleNamespace(
    recipe=recipe, output=room / "output", scratch=room / "scratch",
    log=logging.getLogger("t"), progress=lambda *_: None,
)
plan = answers.AnswerPlan("responses", room.parent / "prompts.jsonl", 6, 3, GREEDY, want_states=False)
import httpx, tenacity  # what takes longest, so that the kill meets the work
print("ready", flush=True)
answers.answer_prompts(context, plan)
"""


def conversations():
    """One, two and three turns, and one that calls a tool."""
    found = []
    for number in range(30):
        turns = [f"{number} turn {turn}?" for turn in range(1 + number % 3)]
        if number % 10 == 4:
            turns = [f"call f {json.dumps({'n': number})}"]
        messages = []
        for turn in turns:
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": "old"}]
        if number % 10 == 4:
            call = {"id": "r", "type": "function", "function": {"name": "f", "arguments": json.dumps({"n": number})}}
            messages[-1]["tool_calls"] = [call]
            messages.append({"role": "tool", "tool_call_id": "r", "content": f"result {number}"})
        else:
            messages.pop()
        found.append(
            {"id": f"c{number}", "subset": "s", "messages": messages, "tools": None, "source": "x", "license": "y"}
        )
    return found


def expected():
    """id -> (prompt ids, answer ids), by a plain loop."""
    rows = {}
    for prompt in conversations():
        users = [m["content"] for m in prompt["messages"] if m["role"] == "user"]
        results = [m["content"] for m in prompt["messages"] if m["role"] == "tool"]
        history, turn = [{"role": "user", "content": users.pop(0)}], 0
        while True:
            asked = prompt_ids(history)
            ids = answer_ids(asked, MAX_NEW_TOKENS)
            rows[f"{prompt['id']}/{turn}"] = (asked, ids)
            message = answer_message(history, ids)
            calls = {"tool_calls": message["tool_calls"]} if message["tool_calls"] else {}
            history.append({"role": "assistant", "content": message["content"] or "", **calls})
            turn += 1
            if calls:
                history.append({"role": "tool", "tool_call_id": "c1", "content": results.pop(0)})
            elif users and turn < MAX_TURNS:
                history.append({"role": "user", "content": users.pop(0)})
            else:
                break
    return rows


def attempt(room, url, timeout=20.0):
    return subprocess.Popen(
        [sys.executable, "-c", ATTEMPT, str(room), url, str(timeout)],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill")
    write_jsonl(folder / "prompts.jsonl", conversations())
    return folder


def check(room):
    rows = list(read_answers(room / "output"))
    wanted = expected()
    assert [row.id for row in rows] == list(wanted), "each turn once, in the order of the prompts"
    for row in rows:
        assert (row.prompt_token_ids, row.token_ids) == wanted[row.id]


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_random_moments(prompts, seed):
    room = prompts / f"seed-{seed}"
    room.mkdir()
    draw = random.Random(seed)
    kills = 0
    with ToyServer(delay=0.02) as server:
        while True:
            process = attempt(room, server.url)
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
            started = time.monotonic()
            wait = draw.uniform(0.0, 0.35) if kills < 3 else 30.0
            while process.poll() is None and time.monotonic() - started < wait:
                time.sleep(0.003)
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
            _, error = process.communicate()
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL, error
        check(room)
        # What was in flight when the process was killed is asked again, and nothing else.
        assert len(expected()) <= server.asked <= len(expected()) + 4 * kills


def test_every_fault_of_a_network_changes_nothing(prompts):
    room = prompts / "faults"
    room.mkdir()
    with ToyServer() as server, fault_proxy(server.url, every=2, seed=3) as proxy:
        process = attempt(room, proxy.url, timeout=5.0)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
        assert set(proxy.injected) == set(FAULTS), "each kind happened"
    check(room)
    assert list(read_jsonl(room / "output" / "errors.jsonl")) == []
