"""`python -m dspark_model.inspect`: a clean checkpoint has no findings, a planted fault is named, nothing else is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from dspark_model.checkpoint import save_checkpoint
from dspark_model.checkpoint_files import CheckpointFiles
from dspark_model.drafter import DSparkDrafter
from dspark_model.inspect import inspect_checkpoint, main
from tests.dspark_model.foreign_checkpoints import deepspec_config, speculators_config, stored_tensors, write
from tests.dspark_model.tiny import HIDDEN, VOCAB, some_t2d, tiny_config, tiny_drafter

REPOSITORY = Path(__file__).resolve().parents[2]
SIZE = 9
LAYER = "transformer_layer_config"
TOKENS = "speculators_config.proposal_methods[0].speculative_tokens"
NAME = "speculators_config.verifier.name_or_path"
W2 = "markov_head.markov_w2.weight"
Fault = Callable[[dict[str, Any], dict[str, Tensor]], None]


def make(*, reduced: bool = False, **choices: Any) -> DSparkDrafter:
    config = tiny_config(draft_vocab_size=SIZE if reduced else VOCAB, **choices)
    return tiny_drafter(config, some_t2d(SIZE) if reduced else None)


def found_in(folder: Path) -> list[tuple[str, str]]:
    return [(finding.severity, finding.field) for finding in inspect_checkpoint(folder)[1]]


def put(path: str, value: Any) -> Fault:
    """Set a key of config.json ("a.b" is b in a), or remove it with `...`."""

    def edit(raw: dict[str, Any], _: dict[str, Tensor]) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            raw = raw[parent]
        if value is ...:
            del raw[name]
        else:
            raw[name] = value

    return edit


def tensor(name: str, change: Callable[[Tensor], Tensor] | None) -> Fault:
    """Change a tensor, or remove it with None."""

    def edit(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors.get(name, torch.ones(2, 2).bfloat16())).contiguous()

    return edit


def both(*faults: Fault) -> Fault:
    def edit(raw: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for fault in faults:
            fault(raw, tensors)

    return edit


def proposals(value: Any) -> Fault:
    def edit(raw: dict[str, Any], _: dict[str, Tensor]) -> None:
        method = raw["speculators_config"]["proposal_methods"][0]
        if value is ...:
            del method["speculative_tokens"]
        else:
            method["speculative_tokens"] = value

    return edit


def spoilt(value: float) -> Callable[[Tensor], Tensor]:
    def change(weight: Tensor) -> Tensor:
        weight = weight.clone()
        weight.flatten()[-1] = value
        return weight

    return change


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"layer_kinds": ("sliding", "sliding")},
        {"sample_from_anchor": False},
        {"confidence_head": False, "confidence_with_markov": False},
        {"confidence_with_markov": False},
    ],
)
def test_a_clean_checkpoint_of_ours_has_no_findings(tmp_path, reduced, choices):
    drafter = make(reduced=reduced, **choices)
    save_checkpoint(tmp_path, drafter, verifier_name_or_path="Qwen/Qwen3-0.6B", verifier_architectures=["X"])
    assert found_in(tmp_path) == []


@pytest.mark.parametrize("reduced", [False, True])
def test_a_clean_checkpoint_of_speculators_has_no_findings(tmp_path, reduced):
    drafter = make(reduced=reduced)
    write(tmp_path, speculators_config(drafter.config), stored_tensors(drafter, frozen=False), shards=2)
    assert found_in(tmp_path) == []


# Fault in a speculators checkpoint, what is found (severity, field), words of what vLLM does.
FAULTS: dict[str, tuple[Fault, list[tuple[str, str]], str]] = {
    "anchor": (put("sample_from_anchor", ...), [("error", "sample_from_anchor")], "false"),
    "null_anchor": (put("sample_from_anchor", None), [("error", "sample_from_anchor")], "under 1 %"),
    "gated": (
        both(put("markov_head_type", "gated"), tensor("markov_head.gate_proj.weight", lambda w: w)),
        [("error", "markov_head_type")],
        "unknown parameters (markov_head.gate_proj.weight)",
    ),
    "rnn": (put("markov_head_type", "rnn"), [("error", "markov_head_type")], "vanilla rule"),
    "no_rank": (put("markov_rank", ...), [("error", "markov_rank")], "stops"),
    "unsorted": (put("aux_hidden_state_layer_ids", [3, 1]), [("error", "aux_hidden_state_layer_ids")], "[1, 3]"),
    "duplicates": (put("aux_hidden_state_layer_ids", [3, 3]), [("error", "aux_hidden_state_layer_ids")], "1 states"),
    "embedding": (put("aux_hidden_state_layer_ids", [0, 3]), [("warning", "aux_hidden_state_layer_ids")], "embedding"),
    "no_ids": (put("aux_hidden_state_layer_ids", ...), [("error", "aux_hidden_state_layer_ids")], "required"),
    "last_layer": (
        put(f"{LAYER}.verifier_num_hidden_layers", 3),
        [("warning", "aux_hidden_state_layer_ids")],
        "before the final norm",
    ),
    "beyond_last_layer": (
        put(f"{LAYER}.verifier_num_hidden_layers", 2), [("error", "aux_hidden_state_layer_ids")], "fewer states",
    ),
    "no_tokens": (proposals(...), [("error", TOKENS)], "invalid speculators config structure"),
    "no_methods": (put("speculators_config.proposal_methods", []), [("error", TOKENS)], "stops"),
    "too_many_tokens": (proposals(5), [("warning", TOKENS)], "never trained"),
    "fewer_tokens": (proposals(3), [("note", TOKENS)], "works"),
    "dflash_layout_tokens": (put("sample_from_anchor", False), [("warning", TOKENS)], "never trained"),
    "no_section": (put("speculators_config", ...), [("error", "speculators_config")], "does not recognise"),
    "no_type": (put("speculators_model_type", ...), [("error", "speculators_model_type")], "stops"),
    "model_type": (put("model_type", "dspark"), [("error", "model_type")], "before speculators_config"),
    "no_verifier": (put(NAME, None), [("error", NAME)], "swaps to this model"),
    "relative_verifier": (put(NAME, "./verifier"), [("warning", NAME)], "hub id"),
    "absent_verifier": (put(NAME, "/no/such/verifier"), [("note", NAME)], "serving machine"),
    "no_block": (put("block_size", ...), [("warning", "block_size"), ("note", TOKENS)], "takes 8"),
    "no_mask": (put("mask_token_id", ...), [("error", "mask_token_id")], "stops"),
    "mask_outside": (put("mask_token_id", VOCAB), [("error", "mask_token_id")], "row that the embedding"),
    "negative_mask": (put("mask_token_id", -1), [("error", "mask_token_id")], "row that the embedding"),
    "no_draft_vocab": (put("draft_vocab_size", ...), [("warning", "draft_vocab_size")], "32000"),
    "no_confidence_flag": (put("enable_confidence_head", ...), [("warning", "enable_confidence_head")], "false"),
    "confidence_off": (put("enable_confidence_head", False), [("note", "enable_confidence_head")], "drops"),
    "no_markov_flag": (
        put("confidence_head_with_markov", ...), [("error", "confidence_head_with_markov")], "width hidden_size",
    ),
    "no_confidence_weights": (
        both(tensor("confidence_head.proj.weight", None), tensor("confidence_head.proj.bias", None)),
        [("warning", "confidence_head.proj.weight")],
        "disables the head without a word",
    ),
    "no_confidence_bias": (
        tensor("confidence_head.proj.bias", None), [("error", "confidence_head.proj.bias")], "does not notice",
    ),
    "confidence_width": (
        put("confidence_head_with_markov", False), [("error", "confidence_head.proj.weight")], "stops while loading",
    ),
    # Layers
    "no_kinds": (put(f"{LAYER}.layer_types", ...), [("note", f"{LAYER}.layer_types")], "full attention, bidirectional"),
    "no_kinds_but_windows": (
        both(put(f"{LAYER}.layer_types", ...), put(f"{LAYER}.use_sliding_window", True),
             put(f"{LAYER}.sliding_window", 8), put(f"{LAYER}.max_window_layers", 1)),
        [("error", f"{LAYER}.layer_types")],
        "['full', 'sliding']",
    ),
    "too_few_kinds": (
        put(f"{LAYER}.layer_types", ["full_attention"]), [("error", f"{LAYER}.layer_types")], "one kind per layer",
    ),
    "other_kind": (
        put(f"{LAYER}.layer_types", ["full_attention", "chunked_attention"]),
        [("error", f"{LAYER}.layer_types")],
        "any other for full attention",
    ),
    "mixed": (
        both(put(f"{LAYER}.layer_types", ["full_attention", "sliding_attention"]), put(f"{LAYER}.sliding_window", 8)),
        [("note", f"{LAYER}.layer_types")],
        "on CPU it stops",
    ),
    "no_window": (
        put(f"{LAYER}.layer_types", ["sliding_attention"] * 2), [("error", f"{LAYER}.sliding_window")], "window",
    ),
    "non_causal_windows": (
        both(put(f"{LAYER}.layer_types", ["sliding_attention"] * 2), put(f"{LAYER}.sliding_window", 8),
             put("sliding_window_non_causal", True)),
        [("error", "sliding_window_non_causal")],
        "served causal",
    ),
    "causal": (put(f"{LAYER}.is_causal", True), [("error", f"{LAYER}.is_causal")], "every layer causal"),
    "no_size": (put(f"{LAYER}.rms_norm_eps", ...), [("error", f"{LAYER}.rms_norm_eps")], "without a default"),
    "no_head_dim": (put(f"{LAYER}.head_dim", ...), [("error", f"{LAYER}.head_dim")], "= 3; transformers"),
    "activation": (put(f"{LAYER}.hidden_act", "gelu"), [("error", f"{LAYER}.hidden_act")], "only silu"),
    "llama": (put(f"{LAYER}.model_type", "llama"), [("warning", f"{LAYER}.model_type")], "builds Qwen3 layers"),
    # Rope
    "no_rope": (put(f"{LAYER}.rope_parameters", ...), [("error", f"{LAYER}.rope_parameters")], "1000000"),
    "partial_rope": (
        put(f"{LAYER}.rope_parameters.partial_rotary_factor", 0.25),
        [("error", f"{LAYER}.rope_parameters.partial_rotary_factor")],
        "only that part",
    ),
    "partial_rope_beside": (
        put(f"{LAYER}.partial_rotary_factor", 0.5),
        [("error", f"{LAYER}.rope_parameters.partial_rotary_factor")],
        "only that part",
    ),
    "yarn": (
        put(f"{LAYER}.rope_parameters.rope_type", "yarn"),
        [("warning", f"{LAYER}.rope_parameters.rope_type")],
        "scales positions",
    ),
    "mrope": (
        put(f"{LAYER}.rope_parameters.mrope_section", [1, 1, 1]),
        [("note", f"{LAYER}.rope_parameters.mrope_section")],
        "multimodal",
    ),
    "rope_per_kind": (
        put(f"{LAYER}.rope_parameters", {"sliding_attention": {"rope_theta": 9.0}}),
        [("error", f"{LAYER}.rope_parameters")],
        "one flat setting",
    ),
    # Tensors
    "missing": (tensor("layers.1.mlp.up_proj.weight", None), [("error", "layers.1.mlp.up_proj.weight")], "memory"),
    "unknown": (tensor("verifier_norm.weight", lambda w: w), [("error", "verifier_norm.weight")], "unknown parameters"),
    "shape": (tensor("fc.weight", lambda w: w[:, 1:]), [("error", "fc.weight")], "stops while loading"),
    "float32": (tensor("fc.weight", Tensor.float), [("note", "fc.weight")], "casts"),
    "float16": (tensor("norm.weight", Tensor.half), [("note", "norm.weight")], "casts"),
    "int8": (tensor("fc.weight", lambda w: w.to(torch.int8)), [("warning", "fc.weight")], "quantization_config"),
    "nan": (tensor(W2, spoilt(torch.nan)), [("error", W2)], "garbage"),
    "inf": (tensor("norm.weight", spoilt(torch.inf)), [("error", "norm.weight")], "garbage"),
    "zero": (tensor(W2, torch.zeros_like), [("warning", W2)], "nothing"),
    "embedding_stored": (
        tensor("embed_tokens.weight", lambda _: torch.ones(VOCAB, HIDDEN).bfloat16()),
        [("note", "embed_tokens.weight")],
        "keeps this copy",
    ),
    "head_stored": (
        tensor("lm_head.weight", lambda _: torch.ones(VOCAB, HIDDEN).bfloat16()),
        [("note", "lm_head.weight")],
        "keeps this copy",
    ),
    "map_with_whole_vocabulary": (
        tensor("d2t", lambda _: torch.zeros(VOCAB, dtype=torch.int64)), [("error", "d2t")], "unknown parameter",
    ),
}  # fmt: skip
# What the trainers take for a key that is removed.
TRAINERS_DEFAULTS: dict[str, dict[str, Any]] = {"no_rank": {"markov_rank": 256}, "no_head_dim": {"head_dim": 128}}
REDUCED_FAULTS: dict[str, tuple[Fault, list[tuple[str, str]], str]] = {
    "no_head": (tensor("lm_head.weight", None), [("error", "lm_head.weight")], "cannot be shared"),
    "no_map": (tensor("d2t", None), [("error", "d2t")], "could not be mapped"),
    "ids_for_offsets": (tensor("d2t", lambda d2t: d2t + torch.arange(SIZE)), [("error", "d2t")], "do not exist"),
    "repeated": (tensor("d2t", lambda d2t: d2t - torch.arange(SIZE)), [("error", "d2t")], "several draft ids"),
    "descending": (
        tensor("d2t", lambda d2t: (d2t + torch.arange(SIZE)).flip(0) - torch.arange(SIZE)),
        [("warning", "d2t")],
        "rows",
    ),
    "short_map": (tensor("d2t", lambda d2t: d2t[:-1]), [("error", "d2t")], "stops while loading"),
    "float_map": (tensor("d2t", Tensor.float), [("error", "d2t")], "rounded ids"),
    "other_t2d": (tensor("t2d", lambda t2d: t2d.roll(1)), [("warning", "t2d")], "ignores t2d"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("reduced", "name"), [*((False, name) for name in FAULTS), *((True, name) for name in REDUCED_FAULTS)]
)
def test_a_planted_fault_is_named_and_nothing_else(tmp_path, reduced, name):
    edit, expected, words = (REDUCED_FAULTS if reduced else FAULTS)[name]
    drafter = make(reduced=reduced, **TRAINERS_DEFAULTS.get(name, {}))
    raw, tensors = speculators_config(drafter.config), stored_tensors(drafter, frozen=False)
    edit(raw, tensors)
    findings = inspect_checkpoint(write(tmp_path, raw, tensors))[1]
    assert [(finding.severity, finding.field) for finding in findings] == expected
    assert words in findings[0].vllm, findings[0].vllm
    assert all(finding.remedy and finding.found for finding in findings)


@pytest.mark.parametrize("row", [0, 7, VOCAB - 1])
def test_values_are_looked_at_in_every_run_of_rows(tmp_path, monkeypatch, row):
    whole = CheckpointFiles.read_rows
    monkeypatch.setattr(CheckpointFiles, "read_rows", lambda files, name: whole(files, name, 10))
    drafter = make()
    tensors = stored_tensors(drafter, frozen=False)
    tensors[W2][row, 0] = torch.nan
    only = tensors["markov_head.markov_w1.weight"]
    only.zero_()
    only[row, 0] = 1
    assert found_in(write(tmp_path, speculators_config(drafter.config), tensors)) == [("error", W2)]


def test_a_drafter_without_markov_head_is_named(tmp_path):
    drafter = make(markov_rank=0, confidence_with_markov=False)
    write(tmp_path, speculators_config(drafter.config), stored_tensors(drafter, frozen=False))
    assert found_in(tmp_path) == [("error", "markov_rank")]


def test_bidirectional_windows_are_fine_with_the_key_that_vllm_reads(tmp_path):
    drafter = make(layer_kinds=("sliding", "sliding"))
    raw = speculators_config(drafter.config) | {"sliding_window_non_causal": True}
    raw[LAYER]["is_causal"] = False
    assert found_in(write(tmp_path, raw, stored_tensors(drafter, frozen=False))) == []


@pytest.mark.parametrize(
    ("verifier", "expected"),
    [
        ({}, []),
        ({"max_position_embeddings": 65}, [("warning", f"{LAYER}.max_position_embeddings")]),
        ({"vocab_size": VOCAB + 1}, [("error", f"{LAYER}.vocab_size")]),
        ({"hidden_size": HIDDEN + 4}, [("error", f"{LAYER}.hidden_size")]),
        ({"num_hidden_layers": 3}, [("warning", "aux_hidden_state_layer_ids")]),
    ],
)
def test_a_local_verifiers_config_is_compared(tmp_path, verifier, expected):
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 6, "max_position_embeddings": 64}
    Qwen3Config(**{**sizes, **verifier}, num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path / "v")
    drafter = make()
    raw = speculators_config(drafter.config)
    raw["speculators_config"]["verifier"]["name_or_path"] = str(tmp_path / "v")
    assert found_in(write(tmp_path / "d", raw, stored_tensors(drafter, frozen=False))) == expected


FROZEN = [("note", "embed_tokens.weight"), ("note", "lm_head.weight")]
USAGE = ("warning", "speculators_config")


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ({}, [USAGE, *FROZEN]),
        ({"target_layer_ids": [2, 0]}, [("error", "target_layer_ids"), USAGE, *FROZEN]),
        ({"target_layer_ids": [-1, 2]}, [USAGE, ("warning", "target_layer_ids"), *FROZEN]),
        ({"target_layer_ids": [0, 5]}, [USAGE, ("warning", "target_layer_ids"), *FROZEN]),
        ({"partial_rotary_factor": 0.25}, [("error", "rope_parameters.partial_rotary_factor"), USAGE, *FROZEN]),
        ({"markov_head_type": "rnn"}, [("error", "markov_head_type"), USAGE, *FROZEN]),
    ],
)
def test_deepspec_checkpoints_are_judged_by_what_vllm_makes_of_their_format(tmp_path, edits, expected):
    drafter = make()
    write(tmp_path, deepspec_config(drafter.config) | edits, stored_tensors(drafter, frozen=True))
    assert found_in(tmp_path) == expected


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
