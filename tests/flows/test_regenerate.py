"""`flows/regenerate.py` on files of two layouts with a real vLLM server: killed with SIGKILL, then finished."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from dspark_model.dataset import Examples
from tasks.answer_rows import read_answers
from tests.tiny_verifier import make_tiny_verifier

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS = 60
RECIPE = {
    "name": "data",
    "verifier": {"source": "path", "path": "verifier", "dtype": "float32"},
    "prompts": {
        "sources": ["sharegpt.jsonl", {"source": "messages.jsonl", "license": "mit"}],
        "num_prompts": "all",
        "max_prompt_tokens": 400,
    },
    "responses": {"max_new_tokens": 24, "temperature": 0.7},
    "examples": {"validation_share": 0.3},  # enough to have both sources in it
    "vocab": {"draft_vocab_size": "auto", "max_coverage_loss": 0.5},
    "evaluation": {"prompts_per_subset": 1, "max_new_tokens": 8},
    "serving": {"max_model_len": 1024, "max_num_seqs": 8, "concurrency": 8, "kv_cache_gib": 0.5},
}


def turns(number: int) -> list[str]:
    return [f"Question {number}, part {part}: what is the capital of France?" for part in range(1 + number % 3)]


def write_sources(folder: Path) -> None:
    sharegpt, messages = [], []
    for number in range(ROWS):
        talk = []
        for text in turns(number):
            talk += [("user", text), ("assistant", "A recorded answer.")]
        if number % 2:
            roles = {"user": "human", "assistant": "gpt"}
            sharegpt.append({"conversations": [{"from": roles[role], "value": text} for role, text in talk]})
        else:
            system = {"role": "system", "content": "Be brief."}
            messages.append({"messages": [system, *({"role": role, "content": text} for role, text in talk)]})
    for name, records in (("sharegpt", sharegpt), ("messages", messages)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(store folder, what the finished run printed)."""
    folder = tmp_path_factory.mktemp("regenerate")
    make_tiny_verifier(folder / "verifier", dtype="float32")
    write_sources(folder)
    (folder / "data.yaml").write_text(yaml.safe_dump(RECIPE))
    command = [sys.executable, str(REPOSITORY / "flows" / "regenerate.py"), "--recipe", str(folder / "data.yaml")]
    command += ["--store", str(folder / "store")]
    environment = {**os.environ, "PREFECT_HOME": str(folder / "prefect"), "XDG_CACHE_HOME": str(folder / "cache")}
    with (folder / "killed.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 300
    while sum(file.read_text().count("\n") for file in folder.glob("work/responses/*/scratch/journal/*.jsonl")) < 20:
        assert process.poll() is None, (folder / "killed.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "store", done


def artifact(store: Path, stage: str) -> Path:
    (folder,) = (store / stage).iterdir()
    return folder


def test_each_turn_of_each_conversation_is_answered_once(finished):
    store, done = finished
    prompts = [json.loads(line) for line in (artifact(store, "prompts") / "train.jsonl").read_text().splitlines()]
    assert len(prompts) == ROWS
    rows = list(read_answers(artifact(store, "responses")))
    expected = [
        f"{one['id']}/{turn}" for one in prompts for turn in range(sum(m["role"] == "user" for m in one["messages"]))
    ]
    assert [row.id for row in rows] == expected
    assert "answers are there already" in done.stderr
    assert done.stdout.splitlines()[-1] == str(artifact(store, "responses"))


def test_later_turns_follow_the_models_own_answers(finished):
    from transformers import AutoTokenizer

    store, _ = finished
    tokenizer = AutoTokenizer.from_pretrained(artifact(store, "verifier"))
    rows = {row.id: row for row in read_answers(artifact(store, "responses"))}
    for line in (artifact(store, "prompts") / "train.jsonl").read_text().splitlines():
        prompt = json.loads(line)
        history, turn = [], 0
        for message in prompt["messages"]:
            if message["role"] == "assistant":
                continue
            history.append({"role": message["role"], "content": message["content"]})
            if message["role"] == "user":
                row = rows[f"{prompt['id']}/{turn}"]
                rendered = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
                assert row.prompt_token_ids == rendered
                history.append({"role": "assistant", "content": json.loads(row.message)["content"]})
                turn += 1


def test_examples_hold_the_servers_tokens(finished):
    store, _ = finished
    rows = {row.id: row for row in read_answers(artifact(store, "responses"))}
    seen = set()
    for split in ("train", "validation"):
        examples = Examples(artifact(store, "examples") / f"{split}.safetensors")
        for index, name in enumerate(examples.ids):
            ids, mask = examples.row(index)
            row = rows[name]
            assert ids.tolist() == (row.prompt_token_ids + row.token_ids)[:512]
            assert ids[mask].tolist() == row.token_ids
            seen.add(name)
    assert seen == {name for name, row in rows.items() if len(row.token_ids) >= 4}


def test_the_draft_vocabulary_is_explained(finished):
    store, done = finished
    report = json.loads((artifact(store, "coverage") / "coverage.json").read_text())
    chosen = next(row for row in report["sizes"] if row["chosen"])
    assert 1 - chosen["coverage"]["validation"] <= 0.5
    assert {"source sharegpt.jsonl", "source messages.jsonl", "evaluation HumanEval"} <= chosen["coverage"].keys()
    assert report["reason"] in done.stderr
    assert "acceptance_length at most" in done.stdout
