"""The client against a small HTTP server process that misbehaves on demand."""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from pathlib import Path

import pytest

from tasks import vllm_client
from tasks.process import ManagedProcess
from tasks.speculation_counters import SpecDecodeCounters, parse_counters
from tasks.vllm_client import Request, RequestRefused, generate, read_counters
from tasks.vllm_server import ServerDied, ServerSpec, ServingError, VllmServer

# Answers a prompt [behaviour, ...] with the prompt reversed; counts requests in flight, served at /peak.
SERVER = """
import json, os, socket, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
lock, seen, flying, peak = threading.Lock(), {}, 0, 0

class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def log_message(self, *args): pass

    def reply(self, status, body, kind='application/json'):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header('content-type', kind)
        self.send_header('content-length', str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == '/metrics':
            self.reply(200, open(sys.argv[2], 'rb').read(), 'text/plain')
        else:
            self.reply(200, {'peak': peak})

    def do_POST(self):
        global flying, peak
        body = json.loads(self.rfile.read(int(self.headers['content-length'])))
        prompt = body.get('prompt') or [ord(c) for c in body['messages'][0]['content']]
        with lock:
            flying += 1; peak = max(peak, flying)
            key = tuple(prompt); seen[key] = attempt = seen.get(key, 0) + 1
        try:
            self.behave(body, prompt, attempt)
        finally:
            with lock: flying -= 1

    def behave(self, body, prompt, attempt):
        behaviour = prompt[0]
        if behaviour == 2 and attempt <= 2: return self.reply(503, {'error': 'busy'})
        if behaviour == 3 and attempt == 1:
            self.connection.shutdown(socket.SHUT_RDWR); self.close_connection = True; return
        if behaviour == 4: return self.reply(400, {'error': 'prompt too long'})
        if behaviour == 5: return self.reply(503, {'error': 'always busy'})
        if behaviour == 6: time.sleep(0.3)
        if behaviour == 7:
            print('the engine is on fire', flush=True); os._exit(9)
        choice = {'token_ids': prompt[::-1], 'finish_reason': 'stop'}
        if behaviour == 8: del choice['token_ids']
        if behaviour == 9: prompt = prompt + [1]
        if body.get('stream'):
            events = [{'choices': [{'token_ids': [t], 'finish_reason': None}]} for t in choice['token_ids']]
            events[0]['prompt_token_ids'] = prompt
            events[-1]['choices'][0]['finish_reason'] = 'stop'
            text = ''.join('data: ' + json.dumps(e) + '\\n\\n' for e in events) + 'data: [DONE]\\n\\n'
            return self.reply(200, text.encode(), 'text/event-stream')
        states = {'hidden_states_path': '/states/x'} if body.get('kv_transfer_params') else None
        self.reply(200, {'choices': [choice], 'prompt_token_ids': prompt, 'kv_transfer_params': states})

server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
open(sys.argv[1] + '.tmp', 'w').write(str(server.server_port))
os.rename(sys.argv[1] + '.tmp', sys.argv[1])
server.serve_forever()
"""
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="verifier"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="verifier"} 30.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="verifier"} 1.79e+09
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="verifier"} 20.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="verifier"} 60.0
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="verifier"} 8.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="verifier"} 22.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="verifier",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="verifier",position="1"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="verifier",position="0"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="verifier",position="1"} 7.0
"""
OK, BUSY_TWICE, DISCONNECTS_ONCE, REFUSES, ALWAYS_BUSY, SLOW, DIES, NO_TOKENS, OTHER_PROMPT = range(1, 10)


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_client, "ATTEMPTS", 3)
    monkeypatch.setattr(vllm_client, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(vllm_client, "JITTER_SECONDS", 0.01)
    script, port_file, metrics = tmp_path / "server.py", tmp_path / "port", tmp_path / "metrics"
    script.write_text(SERVER)
    metrics.write_text(METRICS)
    log = tmp_path / "server.log"
    command = [sys.executable, str(script), str(port_file), str(metrics)]
    with ManagedProcess.start(command, log, grace_seconds=1) as process:
        deadline = time.monotonic() + 20
        while not port_file.exists():
            assert process.alive()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        spec = ServerSpec(Path(sys.executable), tmp_path, "float32", 64, 8, 1.0, "plain")
        yield VllmServer(spec, process, int(port_file.read_text()), log)


def ask(server, requests, concurrency=4, stream=False):
    answers, failures = {}, {}
    generate(
        server,
        requests,
        concurrency=concurrency,
        stream=stream,
        on_completion=lambda request, completion: answers.__setitem__(request.id, completion),
        on_failure=lambda request, error: failures.__setitem__(request.id, error),
    )
    return answers, failures


def of_behaviour(behaviour, count=1):
    return [Request(f"{behaviour}-{i}", prompt_token_ids=[behaviour, 10, i]) for i in range(count)]


@pytest.mark.parametrize("stream", [False, True])
def test_every_request_is_answered_with_its_own_tokens(server, stream):
    requests = of_behaviour(OK, 25)
    answers, failures = ask(server, requests, stream=stream)
    assert not failures
    assert {i: a.token_ids for i, a in answers.items()} == {r.id: r.prompt_token_ids[::-1] for r in requests}
    one = answers["1-3"]
    assert (one.prompt_token_ids, one.finish_reason, one.states_path) == ([1, 10, 3], "stop", None)
    assert one.seconds > 0
    assert (one.first_token_seconds is not None) == stream


def test_chat_messages_and_states_are_passed_on(server):
    request = Request("chat", messages=[{"role": "user", "content": "\x01ab"}], with_states=True)
    answers, _ = ask(server, [request])
    assert answers["chat"].token_ids == [98, 97, 1]
    assert answers["chat"].states_path == Path("/states/x")


@pytest.mark.parametrize("behaviour", [BUSY_TWICE, DISCONNECTS_ONCE])
def test_transient_faults_are_retried(server, behaviour):
    answers, failures = ask(server, of_behaviour(behaviour, 3))
    assert len(answers) == 3
    assert not failures


def test_a_refused_or_ever_failing_request_is_reported_and_does_not_stop_the_rest(server):
    requests = of_behaviour(REFUSES) + of_behaviour(ALWAYS_BUSY) + of_behaviour(OK, 5)
    answers, failures = ask(server, requests)
    assert len(answers) == 5
    assert isinstance(failures["4-0"], RequestRefused)
    assert "prompt too long" in str(failures["4-0"])
    assert failures["5-0"].status == 503


def test_failures_without_end_stop_the_call(server):
    with pytest.raises(ServingError, match=r"requests in a row failed.*prompt too long"):
        ask(server, of_behaviour(REFUSES, 1000))


def test_concurrency_is_reached_and_never_exceeded(server):
    import httpx

    ask(server, of_behaviour(SLOW, 12), concurrency=5)
    assert httpx.get(f"{server.url}/peak").json()["peak"] == 5


def test_requests_are_drawn_as_answers_come_in(server):
    drawn = 0

    def endless():
        nonlocal drawn
        while True:
            drawn += 1
            yield Request(str(drawn), prompt_token_ids=[OK, drawn])

    def stop_at_tenth(request, completion):
        if request.id == "10":
            raise StopHere

    class StopHere(Exception):  # noqa: N818
        pass

    with pytest.raises(StopHere):
        generate(server, endless(), concurrency=2, on_completion=stop_at_tenth, on_failure=lambda *_: None)
    assert drawn < 20


def test_callbacks_do_not_overlap_and_see_the_callers_context(server):
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="lost")
    variable.set("kept")
    busy, seen = threading.Lock(), []

    def record(request, completion):
        assert busy.acquire(blocking=False)
        time.sleep(0.01)
        seen.append(variable.get())
        busy.release()

    generate(server, of_behaviour(OK, 10), concurrency=5, on_completion=record, on_failure=lambda *_: None)
    assert seen == ["kept"] * 10


def test_the_death_of_the_server_stops_the_call_and_shows_its_log(server):
    with pytest.raises(ServerDied, match=r"status 9(.|\n)*the engine is on fire"):
        ask(server, of_behaviour(SLOW, 3) + of_behaviour(DIES) + of_behaviour(SLOW, 1000))
    with pytest.raises(ServerDied):
        ask(server, of_behaviour(OK))


@pytest.mark.parametrize(("behaviour", "message"), [(NO_TOKENS, "no token ids"), (OTHER_PROMPT, "another prompt")])
def test_an_answer_that_cannot_be_trusted_stops_the_call(server, behaviour, message):
    with pytest.raises(ServingError, match=message):
        ask(server, of_behaviour(behaviour))


def test_a_request_needs_exactly_one_kind_of_prompt():
    with pytest.raises(ValueError, match="either messages or prompt_token_ids"):
        Request("none")


def test_counters_are_read_and_summed_over_engines(server):
    counters = read_counters(server)
    assert counters == SpecDecodeCounters(40, 80, 30, (21, 9))
    assert counters.acceptance_length == pytest.approx(1 + 21 / 40 + 9 / 40)


def test_counters_of_an_interval_are_a_difference():
    earlier, later = SpecDecodeCounters(0, 0, 0, ()), SpecDecodeCounters(4, 8, 3, (2, 1))
    assert later - earlier == later
    assert SpecDecodeCounters(10, 20, 9, (6, 3)) - later == SpecDecodeCounters(6, 12, 6, (4, 2))
    with pytest.raises(ServingError, match="drafted nothing"):
        _ = (later - later).acceptance_length


def test_counters_that_disagree_or_are_missing_are_refused():
    with pytest.raises(ServingError, match="add up to 31"):
        parse_counters(METRICS.replace('position="0"} 6.0', 'position="0"} 7.0'))
    with pytest.raises(ServingError, match="mode 'dspark'"):
        parse_counters("vllm:num_requests_running 0.0\n")
