"""The command line as users see it: real processes, a real Prefect server, toy stages."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
RECIPE = """
name: toy
verifier: {source: path, path: /nowhere}
training: {learning_rate: 0.001}
"""


class Cli:
    """Runs the toy command line with a Prefect home, store and recipe of its own."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.recipe = folder / "toy.yaml"
        self.recipe.write_text(RECIPE)
        self.mark = folder / "mark"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
            "PREFECT_HOME": str(folder / "prefect"),
            "PYTHONPATH": str(REPO),
            "TOY_MARK": str(self.mark),
        }

    def command(self, *options: str) -> list[str]:
        common = ["--recipe", str(self.recipe), "--store", str(self.store)]
        return [sys.executable, str(REPO / "tests" / "flows" / "toy_cli.py"), *common, *options]

    def __call__(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*options),
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=200,
            cwd=self.store.parent,
        )

    def start_hanging(self, stage: str, *options: str) -> subprocess.Popen[str]:
        """Start a run and return once `stage` is at work, with half its output written."""
        self.mark.unlink(missing_ok=True)
        process = subprocess.Popen(
            self.command(*options),
            env={**self.environment, "TOY_HANG": stage},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        while not self.mark.exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        return process


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    made = Cli(tmp_path_factory.mktemp("cli"))
    first = made()
    assert first.returncode == 0, first.stderr
    assert "11 of 11 stages to run" in first.stderr
    return made


def test_second_run_is_all_cached_and_prints_the_summary_last(cli: Cli) -> None:
    second = cli()
    assert second.returncode == 0, second.stderr
    assert second.stderr.count("Cached") == 11
    assert "prefect" not in second.stderr.lower(), "no noise"
    assert "Traceback" not in second.stderr
    summary = Path(second.stdout.strip().splitlines()[-1])
    assert summary.name == "summary.json"
    assert summary.is_file()
    assert "servers closed" not in second.stdout, "nothing had been opened"


def test_plan_names_the_field_and_exactly_the_stages_that_change(cli: Cli) -> None:
    shown = cli("--set", "training.learning_rate=1e-2", "--plan")
    assert shown.returncode == 0, shown.stderr
    rows = {line.split()[0]: line for line in shown.stdout.splitlines()}
    waiting = [name for name, line in rows.items() if "will run" in line]
    assert waiting == ["drafter", "evaluation", "release"]
    assert "field training.learning_rate changed: 0.001 -> 0.01" in rows["drafter"]
    assert "depends on drafter, which changed" in rows["evaluation"]
    assert shown.stdout.splitlines()[-1].startswith("3 of 11 stages would run")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "training.learning_rat=1"], "training.learning_rat: unknown field"),
        (["--set", "evaluation.num_speculative_tokens=99"], "evaluation.num_speculative_tokens=99"),
        (["--force", "trainer"], "--force trainer: no such stage; stages are verifier, prompts"),
        (["--recipe", "nonsense"], "recipe 'nonsense' not found"),
        (["--store", "gibberish://x"], "store='gibberish://x'"),
    ],
)
def test_wrong_input_is_refused_before_prefect_starts(cli: Cli, options: list[str], message: str) -> None:
    refused = cli(*options, PREFECT_HOME="/dev/null/impossible")
    assert refused.returncode == 2
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    assert refused.stdout == ""


def test_failed_stage_is_named_and_servers_are_closed(cli: Cli) -> None:
    failed = cli("--set", "training.learning_rate=0.5", TOY_FAIL="drafter")
    assert failed.returncode == 1
    assert "drafter        error: failed" in failed.stderr
    assert failed.stderr.strip().splitlines()[-1] == "error: RuntimeError: the trainer lost its way"
    assert "servers closed" in failed.stdout


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_run_leaves_no_half_artifact_and_continues(cli: Cli, kind: signal.Signals) -> None:
    change = ["--set", f"training.learning_rate=0.0{kind.value}"]
    before = sorted((cli.store / "drafter").iterdir())
    process = cli.start_hanging("drafter", *change)
    process.send_signal(kind)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "summary.json" not in shown
    if kind != signal.SIGKILL:
        assert "servers closed" in shown
    assert sorted((cli.store / "drafter").iterdir()) == before
    halves = list(cli.store.with_name("work").glob("drafter/*/output/half"))
    assert halves, "what the stage had done is kept"
    again = cli(*change)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("Cached") == 8
    assert not any(path.exists() for path in halves)


OPTIONS = ("--recipe", "--set", "--plan", "--store", "--force", "--list-recipes", "Exit codes")


@pytest.mark.parametrize(
    ("flow", "words"),
    [
        ("full_pipeline.py", ("summary.json",)),
        ("regenerate.py", ("prompts.sources=chats.jsonl", "serving.urls", "draft_vocab_size=auto", "Parquet")),
    ],
)
def test_help_teaches(flow: str, words: tuple[str, ...]) -> None:
    command = [sys.executable, str(REPO / "flows" / flow), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd="/", check=True)
    for word in (*OPTIONS, *words):
        assert word in shown.stdout


def test_regenerate_plans_the_data_stages_only(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "flows" / "regenerate.py"), "--plan", "--store", str(tmp_path / "store")]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True).stdout.splitlines()
    stages = ["verifier", "prompts", "references", "responses", "examples", "vocab", "coverage"]
    assert [line.split()[0] for line in shown[:-1]] == stages
    assert shown[-1] == "7 of 7 stages would run"
