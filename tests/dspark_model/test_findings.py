"""A clean checkpoint has no findings; a planted fault is named, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from dspark_model.checkpoint import save_checkpoint
from dspark_model.checkpoint_files import CheckpointFiles
from dspark_model.inspect import inspect_checkpoint
from tests.dspark_model.checkpoints import SIZE, make
from tests.dspark_model.foreign_checkpoints import deepspec_config, speculators_config, stored_tensors, write
from tests.dspark_model.tiny import HIDDEN, VOCAB

LAYER = "transformer_layer_config"
TOKENS = "speculators_config.proposal_methods[0].speculative_tokens"
NAME = "speculators_config.verifier.name_or_path"
W2 = "markov_head.markov_w2.weight"
Fault = Callable[[dict[str, Any], dict[str, Tensor]], None]


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
