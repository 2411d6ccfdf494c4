"""`python -m dspark_model.inspect`: the description, the report, the command and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dspark_model.checkpoint import save_checkpoint
from dspark_model.inspect import inspect_checkpoint, main
from tests.dspark_model.checkpoints import make
from tests.dspark_model.foreign_checkpoints import deepspec_config, speculators_config, stored_tensors, write
from tests.dspark_model.tiny import VOCAB

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("writer", "ids"), [(speculators_config, [1, 3]), (deepspec_config, [0, 2])])
def test_description_says_what_the_layer_ids_mean(tmp_path, writer, ids):
    drafter = make(layer_kinds=("full", "full"))
    write(tmp_path, writer(drafter.config), stored_tensors(drafter, frozen=writer is deepspec_config))
    description, _ = inspect_checkpoint(tmp_path)
    field = "target_layer_ids" if writer is deepspec_config else "aux_hidden_state_layer_ids"
    assert description["layer_ids_as_stored"] == {field: ids}
    assert description["layer_ids"] == [1, 3]
    assert description["hidden_states"] == [
        "hidden_states[1], the residual stream after 1 layer",
        "hidden_states[3], the residual stream after 3 layers",
    ]
    trained = sum(value.numel() for value in drafter.trainable_state().values())
    assert description["parameters"]["trained"] == trained
    assert description["parameters"]["markov_head"] == 2 * VOCAB * 5
    assert (description["block_size"], description["trained_proposals"], description["speculative_tokens"]) == (4, 4, 4)
    assert description["read_by_dspark_model"] == "yes"


def build(kind: str, folder: Path) -> Path:
    drafter = make(markov_head_type="gated" if kind == "gated" else "vanilla")
    raw, tensors = speculators_config(drafter.config), stored_tensors(drafter, frozen=kind in ("older", "deepspec"))
    if kind == "ours":
        save_checkpoint(folder, drafter, verifier_name_or_path="Qwen/Qwen3-0.6B", verifier_architectures=["X"])
        return folder
    if kind == "deepspec":
        raw = deepspec_config(drafter.config)
    elif kind == "no_anchor":
        del raw["sample_from_anchor"]
    elif kind == "unsorted":
        raw["aux_hidden_state_layer_ids"] = [3, 1]
    elif kind == "empty":
        folder.mkdir(parents=True)
        return folder
    return write(folder, raw, tensors)


CASES = [
    ("ours", 0, ["findings: none", "format                  speculators"]),
    ("older", 0, ["NOTE  embed_tokens.weight: stored", "speculators 0.9.0"]),
    ("deepspec", 0, ["format                  DeepSpec", "--speculative-config", "save_checkpoint"]),
    ("no_anchor", 1, ["ERROR  sample_from_anchor: missing", "https://github.com/vllm-project/vllm/issues/56792"]),
    ("gated", 1, ["ERROR  markov_head_type: 'gated'", "unknown parameters"]),
    ("unsorted", 1, ["ERROR  aux_hidden_state_layer_ids: [3, 1] (not ascending)", "captures a sorted set"]),
]


@pytest.mark.parametrize(("kind", "code", "words"), CASES)
def test_report(tmp_path, capsys, kind, code, words):
    folder = build(kind, tmp_path / kind)
    assert main([str(folder)]) == code
    text = capsys.readouterr().out
    assert all(word in text for word in words), text
    assert max(map(len, text.splitlines())) <= 130
    assert main([str(folder), "--json"]) == code
    written = json.loads(capsys.readouterr().out)
    assert written["description"]["num_layers"] == 2
    assert {tuple(finding) for finding in written["findings"]} <= {
        ("severity", "field", "found", "vllm", "remedy", "source")
    }
    assert len(written["findings"]) == text.count("    vLLM: ")


@pytest.mark.parametrize(("kind", "code"), [("ours", 0), ("unsorted", 1), ("empty", 2)])
def test_command(tmp_path, kind, code):
    folder = build(kind, tmp_path / kind)
    command = [sys.executable, "-m", "dspark_model.inspect", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    if code == 2:
        assert done.stdout == ""
        assert done.stderr == f"error: {folder}/config.json not found: name the folder of a drafter's checkpoint\n"
    else:
        assert done.stderr == ""


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "another kind of drafter"),
        ({"block_size": "8"}, "block_size='8' is not a whole number"),
        ({"aux_hidden_state_layer_ids": ["1"]}, "must hold whole numbers"),
        ({"transformer_layer_config": []}, "is not a JSON object"),
    ],
)
def test_what_cannot_be_described_is_said_in_one_line(tmp_path, capsys, edits, message):
    drafter = make()
    write(tmp_path, speculators_config(drafter.config) | edits, stored_tensors(drafter, frozen=False))
    assert main([str(tmp_path)]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert message in written.err
    assert written.err.count("\n") == 1


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "describes no DSpark drafter"),
        ({"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text"}, "a Gemma 4 stack"),
    ],
)
def test_other_models_are_no_drafters(tmp_path, capsys, raw, message):
    write(tmp_path, raw, {"a": torch.zeros(1)})
    assert main([str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
