"""A real vLLM server on the tiny verifier agrees with transformers, and dies with the pipeline."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.states_file import read_states
from tasks.vllm_client import Request, generate
from tasks.vllm_server import ServerDied, ServerPool, ServerSpec, ServingError, VllmServer, serving_python
from tests.tiny_verifier import NUM_LAYERS, make_tiny_verifier

pytestmark = pytest.mark.serve

REPOSITORY = Path(__file__).resolve().parents[2]
LAYER_IDS = (1, 3, NUM_LAYERS)
QUESTIONS = ("What is the capital of France?", "hello", "Write a short poem about the sea.", "print(i)")
# Starts a server as the pipeline does, and never stops it.
PIPELINE = """
import sys, time
from pathlib import Path
from tasks.vllm_server import ServerSpec, VllmServer, serving_python
model, logs = map(Path, sys.argv[1:])
spec = ServerSpec(serving_python(), model, 'float32', 128, 4, 0.25, 'plain')
VllmServer.start(spec, logs)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return make_tiny_verifier(tmp_path_factory.mktemp("verifier"))


@pytest.fixture(scope="module")
def server(verifier, tmp_path_factory):
    folder = tmp_path_factory.mktemp("extract")
    spec = ServerSpec(
        python=serving_python(),
        model=verifier,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        kv_cache_gib=0.25,
        mode="extract",
        layer_ids=LAYER_IDS,
        states_dir=folder / "states",
    )
    with ServerPool(folder / "logs") as pool:
        server = pool.acquire(spec)
        assert pool.acquire(spec) is server
        yield server


@pytest.fixture(scope="module")
def reference(verifier):
    """Transformers' view of token ids: states by layer id (the last before the final norm) and logits."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32)
    before_norm = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0]))

    def forward(token_ids):
        before_norm.clear()
        with torch.no_grad():
            output = model(torch.tensor([token_ids]), output_hidden_states=True)
        states = [*output.hidden_states[:NUM_LAYERS], before_norm[0]]
        return torch.stack([states[i][0] for i in LAYER_IDS], dim=1), output.logits[0]

    return forward


def ask(server, requests):
    answers = {}

    def fail(request, error):
        raise error

    generate(
        server,
        requests,
        concurrency=4,
        on_completion=lambda request, completion: answers.__setitem__(request.id, completion),
        on_failure=fail,
    )
    return [answers[request.id] for request in requests]


def test_one_request_gives_the_greedy_answer_and_its_states(server, reference):
    import torch

    requests = [
        Request(question, messages=[{"role": "user", "content": question}], max_tokens=40, with_states=True)
        for question in QUESTIONS
    ]
    for answer in ask(server, requests):
        ids = answer.prompt_token_ids + answer.token_ids
        assert len(answer.token_ids) == 40
        assert answer.finish_reason == "length"
        states, _ = read_states(answer.states_path, ids[:-1], num_states=len(LAYER_IDS), delete=True)
        expected, logits = reference(ids[:-1])
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
        assert answer.token_ids == logits[len(answer.prompt_token_ids) - 1 :].argmax(-1).tolist()
    assert list(server.spec.states_dir.iterdir()) == []


def test_states_of_given_tokens_do_not_depend_on_how_they_were_reached(server):
    import torch

    chat = Request("chat", messages=[{"role": "user", "content": "hello"}], max_tokens=20, with_states=True)
    [answer] = ask(server, [chat])
    ids = answer.prompt_token_ids + answer.token_ids[:-1]
    [again] = ask(server, [Request("given", prompt_token_ids=ids, max_tokens=1, with_states=True)])
    assert again.prompt_token_ids == ids
    assert again.token_ids == answer.token_ids[-1:]
    decoded, prefilled = (read_states(one.states_path, ids, delete=True)[0] for one in (answer, again))
    torch.testing.assert_close(decoded, prefilled, rtol=1e-4, atol=1e-4)


def test_a_prompt_too_long_is_refused_with_the_servers_reason(server):
    failures = []
    generate(
        server,
        [Request("long", prompt_token_ids=[5] * 400)],
        concurrency=1,
        on_completion=lambda request, completion: failures.append(None),
        on_failure=lambda request, error: failures.append(error),
    )
    assert failures[0].status == 400
    assert "256" in str(failures[0])


def test_a_model_that_cannot_be_served_is_reported_with_the_reason(verifier, tmp_path):
    spec = ServerSpec(serving_python(), tmp_path, "float32", 128, 4, 0.25, "plain")
    with pytest.raises(ServerDied, match=str(tmp_path)):
        VllmServer.start(spec, tmp_path / "logs")


def test_kill_9_of_the_pipeline_leaves_no_vllm_process(verifier, tmp_path):
    pipeline = subprocess.Popen([sys.executable, "-c", PIPELINE, str(verifier), str(tmp_path)], cwd=REPOSITORY)
    try:
        wait_for(lambda: any("EngineCore" in name for name in descendants(pipeline.pid).values()))
        family = set(descendants(pipeline.pid))
        pipeline.kill()
        pipeline.wait()
        wait_for(lambda: not any(map(is_running, family)))
        assert len(family) > 1, "a server and its engine had been seen"
        assert not any(map(is_running, family))
    finally:
        pipeline.kill()
        pipeline.wait()


def test_an_interpreter_without_vllm_is_refused():
    with pytest.raises(ServingError, match="no vLLM"):
        VllmServer.launch(ServerSpec(Path(sys.executable), Path(), "float32", 128, 4, 0.25, "plain"), Path())


def wait_for(condition, seconds=100.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.1)


def descendants(pid: int) -> dict[int, str]:
    """Command lines of all processes below `pid`."""
    found: dict[int, str] = {}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
            found |= descendants(child)
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
