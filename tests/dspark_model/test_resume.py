"""A stopped or killed run continues where it was, to the bit."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspark_model.checkpoint import load_checkpoint
from dspark_model.metrics import total, walk_documents
from dspark_model.train_config import TrainConfig
from dspark_model.trainer import BEST, CHECKPOINT, HISTORY, ResumeError, Trainer
from dspark_model.verifier import load_verifier_parts
from tests.dspark_model.training_run import StoppingTrainer, architecture, differing, run_config, weights

REPOSITORY = Path(__file__).resolve().parents[2]


def optimizer_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        f"{i}.{index}.{name}": torch.as_tensor(value)
        for i, optimizer in enumerate(trainer.optimizers)
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def without_times(history: list[dict]) -> list[dict]:
    plain = json.loads(json.dumps(history))
    return [{name: value for name, value in entry.items() if name != "seconds"} for entry in plain]


@pytest.mark.parametrize("stop_after", [1, 5, 7])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_stopped_run_ends_as_an_uninterrupted_one(data, tmp_path, optimizer, stop_after):
    whole = Trainer(run_config(data, tmp_path / "whole", optimizer=optimizer))
    assert whole.run()
    config = run_config(data, tmp_path / "stopped", optimizer=optimizer)
    stopped = StoppingTrainer(config)
    stopped.stop_after = stop_after
    assert not stopped.run()
    assert stopped.step == stop_after
    torch.manual_seed(12345)  # what the process had drawn before it died is unknown
    resumed = Trainer(config)
    assert resumed.step == stop_after
    assert resumed.run()
    assert not differing(weights(resumed), weights(whole))
    assert not differing(optimizer_state(resumed), optimizer_state(whole))
    assert (resumed.best, resumed.best_step) == (whole.best, whole.best_step)
    best = [torch.load(trainer.config.scratch / BEST, weights_only=True) for trainer in (resumed, whole)]
    assert not differing(*best)
    assert without_times(resumed.history) == without_times(whole.history)


def test_a_finished_run_does_not_train_again(data, tmp_path):
    config = run_config(data, tmp_path)
    first = Trainer(config)
    first.run()
    again = Trainer(config)
    assert again.step == config.steps
    assert again.run()
    assert not differing(weights(again), weights(first))
    assert again.history == first.history


def test_changed_settings_are_named_with_both_values(data, tmp_path):
    config = run_config(data, tmp_path)
    stopped = StoppingTrainer(config)
    stopped.stop_after = 1
    stopped.run()
    changed = dataclasses.replace(config, learning_rate=0.5, drafter=architecture(markov_rank=16))
    with pytest.raises(ResumeError) as error:
        Trainer(changed)
    message = str(error.value)
    assert str(config.scratch / CHECKPOINT) in message
    assert "learning_rate: 0.003 -> 0.5" in message
    assert "drafter.markov_rank: 8 -> 16" in message
    assert "seed" not in message
    assert "delete it to start anew" in message


def test_paths_and_intervals_may_change(data, tmp_path):
    config = run_config(data, tmp_path)
    stopped = StoppingTrainer(config)
    stopped.stop_after = 3
    stopped.run()
    (tmp_path / "moved").mkdir()
    config.scratch.rename(tmp_path / "elsewhere")
    moved = dataclasses.replace(
        config, scratch=tmp_path / "elsewhere", output=tmp_path / "moved", checkpoint_every_seconds=1.0
    )
    assert Trainer(moved).step == 3


class Child:
    """`python -m dspark_model.train` as the pipeline starts it, one thread as in the tests."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        path = config.scratch / "train.json"
        config.save(path)
        self.log = config.scratch / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dspark_model.train", "--config", str(path)],
                cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log,
            )  # fmt: skip

    def wait(self) -> int:
        return self.process.wait(timeout=120)

    def signal_after_first_checkpoint(self, number: signal.Signals) -> int:
        while self.process.poll() is None and not (self.config.scratch / CHECKPOINT).exists():
            time.sleep(0.005)
        self.process.send_signal(number)
        return self.wait()


def test_sigterm_saves_and_ends_with_143(data, tmp_path):
    config = run_config(data, tmp_path, checkpoint_every_seconds=0.0, steps=60)
    assert Child(config).signal_after_first_checkpoint(signal.SIGTERM) == 143
    assert 0 < Trainer(config).step < 60
    assert not (config.output / "training.json").exists()


def test_a_process_killed_hard_continues_to_the_same_bits(data, tmp_path):
    steps = {"steps": 40, "validate_every": 15, "optimizer": "muon"}
    # A checkpoint after each step: the first appears as soon as training runs.
    config = run_config(data, tmp_path / "killed", checkpoint_every_seconds=0.0, **steps)
    assert Child(config).signal_after_first_checkpoint(signal.SIGKILL) == -signal.SIGKILL
    at = torch.load(config.scratch / CHECKPOINT, weights_only=True)["step"]
    assert 0 < at < 40
    second = Child(config)
    assert second.wait() == 0, second.log.read_text()
    assert "resumed at step" in second.log.read_text()

    whole = Trainer(run_config(data, tmp_path / "whole", **steps))
    whole.run()
    end = torch.load(config.scratch / CHECKPOINT, weights_only=True)
    assert not differing(end["drafter"], weights(whole))
    recorded = [json.loads(line) for line in (config.output / HISTORY).read_text().splitlines()]
    assert without_times(recorded) == without_times(whole.history), "no step lost, none twice"
    result = json.loads((config.output / "training.json").read_text())
    assert (result["walked_acceptance_length"], result["best_step"]) == (whole.best, whole.best_step)
    written = load_file(config.output / "drafter" / "model.safetensors")
    best = {name: value.detach().bfloat16() for name, value in whole.load_best().trainable_state().items()}
    assert not differing(written, best)
    loaded = load_checkpoint(config.output / "drafter", load_verifier_parts(config.verifier))
    walked = total(walk_documents(loaded, whole.validation_documents), 4)
    assert walked.acceptance_length == pytest.approx(whole.best, abs=0.2), "bfloat16 may turn a near-tie"


def test_a_wrong_setting_ends_the_process_with_a_message(data, tmp_path):
    config = run_config(data, tmp_path, drafter=architecture(mask_token_id=int(data.ids[0, 0])))
    child = Child(config)
    assert child.wait() == 2
    assert "error: mask_token_id=" in child.log.read_text()
    assert "Traceback" not in child.log.read_text()
