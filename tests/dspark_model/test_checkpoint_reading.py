"""Checkpoint files of all trainers: what is read, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_model.checkpoint import load_checkpoint
from dspark_model.checkpoint_files import CheckpointFiles
from dspark_model.config import ConfigError
from dspark_model.drafter import DSparkDrafter
from dspark_model.verifier import VerifierParts
from tests.dspark_model.checkpoints import SIZE, make, outputs, rounded, save
from tests.dspark_model.foreign_checkpoints import speculators_config, stored_tensors, write
from tests.dspark_model.tiny import HIDDEN, VOCAB, some_t2d, tiny_config, tiny_drafter, tiny_parts


def foreign_parts() -> VerifierParts:
    """A verifier stored in bfloat16, as published ones are."""
    parts = tiny_parts()
    return replace(parts, embed_VD=parts.embed_VD.bfloat16().float(), lm_head_VD=parts.lm_head_VD.bfloat16().float())


def foreign(reduced: bool, **choices: Any) -> DSparkDrafter:
    size = SIZE if reduced else VOCAB
    config = tiny_config(draft_vocab_size=size, **choices)
    drafter = rounded(tiny_drafter(config, some_t2d(SIZE) if reduced else None))
    trained = {name: value.detach().clone() for name, value in drafter.trainable_state().items()}
    drafter.load_verifier(foreign_parts())
    with torch.no_grad():
        for name, value in drafter.trainable_state().items():
            value.copy_(trained[name])
    return drafter


@torch.no_grad()
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("frozen", [False, True], ids=["without_frozen", "with_frozen"])
@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_what_speculators_writes_is_read(tmp_path, reduced, frozen, markov):
    drafter = foreign(reduced, markov_head_type=markov, layer_kinds=("sliding", "full"))
    write(tmp_path, speculators_config(drafter.config), stored_tensors(drafter, frozen=frozen))
    loaded = load_checkpoint(tmp_path, foreign_parts())
    for name, value in drafter.trainable_state().items():
        assert torch.equal(loaded.trainable_state()[name], value), name
    assert loaded.config == replace(drafter.config, verifier_num_layers=4), "the depth is not in the file"
    assert torch.equal(outputs(loaded), outputs(drafter))


@torch.no_grad()
def test_sharded_checkpoints_are_read(tmp_path):
    drafter = foreign(True)
    write(tmp_path, speculators_config(drafter.config), stored_tensors(drafter, frozen=True), shards=3)
    assert not (tmp_path / "model.safetensors").exists()
    assert torch.equal(outputs(load_checkpoint(tmp_path, foreign_parts())), outputs(drafter))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"names model-00002-of-00003\.safetensors, which is missing"):
        load_checkpoint(tmp_path, foreign_parts())


def test_settings_that_a_config_lacks_are_speculators_own(tmp_path):
    """Defaults of speculators 0.9.0, not vLLM's: there a missing sample_from_anchor or confidence flag is false."""
    drafter = foreign(False, markov_rank=256, block_size=8, sliding_window=64)
    raw = speculators_config(drafter.config)
    for name in ("sample_from_anchor", "sliding_window_non_causal", "block_size", "confidence_head_with_markov",
                 "enable_confidence_head", "markov_rank", "markov_head_type"):  # fmt: skip
        del raw[name]
    for name in ("rms_norm_eps", "hidden_act", "layer_types", "attention_bias", "model_type"):
        del raw["transformer_layer_config"][name]
    write(tmp_path, raw, stored_tensors(drafter, frozen=False))
    assert load_checkpoint(tmp_path, foreign_parts()).config == replace(drafter.config, verifier_num_layers=4)


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25}}, 100.0),
        ({"rope_theta": 100.0, "rope_scaling": None}, 100.0),
        ({}, 10000.0),
        ({"rope_parameters": {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 9.0}}}, 9.0),
    ],
    ids=["partial", "before_transformers_5", "none", "per_kind"],
)
def test_rope_settings_are_read_as_the_trainers_use_them(tmp_path, rope, theta):
    drafter = foreign(False)
    raw = speculators_config(drafter.config)
    del raw["transformer_layer_config"]["rope_parameters"]
    raw["transformer_layer_config"] |= rope
    write(tmp_path, raw, stored_tensors(drafter, frozen=False))
    assert load_checkpoint(tmp_path, foreign_parts()).config.rope_theta == theta


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_frozen_weights_of_another_verifier_are_refused(tmp_path, name):
    drafter = foreign(False)
    tensors = stored_tensors(drafter, frozen=True)
    tensors[name][7, 0] += 1
    write(tmp_path, speculators_config(drafter.config), tensors)
    with pytest.raises(ValueError, match=rf"{name} is not this verifier's \(1 of {VOCAB} rows differ, the first is 7"):
        load_checkpoint(tmp_path, foreign_parts())


@torch.no_grad()
def test_the_stored_head_of_a_reduced_vocabulary_is_the_drafters_own(tmp_path):
    drafter = foreign(True)
    drafter.lm_head.mul_(2)
    write(tmp_path, speculators_config(drafter.config), stored_tensors(drafter, frozen=True))
    assert torch.equal(outputs(load_checkpoint(tmp_path, foreign_parts())), outputs(drafter))


@torch.no_grad()
def test_a_vocabulary_is_read_from_d2t_alone(tmp_path):
    drafter = foreign(True)
    tensors = stored_tensors(drafter, frozen=False)
    del tensors["t2d"]
    write(tmp_path, speculators_config(drafter.config), tensors)
    loaded = load_checkpoint(tmp_path, foreign_parts())
    assert torch.equal(loaded.t2d, drafter.t2d)
    assert torch.equal(outputs(loaded), outputs(drafter))


def test_a_folder_without_a_whole_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no folder"):
        load_checkpoint(tmp_path / "absent", tiny_parts())
    with pytest.raises(FileNotFoundError, match=r"config\.json not found"):
        load_checkpoint(tmp_path, tiny_parts())
    raw = save(tmp_path, make(False))
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="is damaged or cut short"):
        load_checkpoint(tmp_path, tiny_parts())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="holds no safetensors weights"):
        load_checkpoint(tmp_path, tiny_parts())
    (tmp_path / "config.json").write_text(json.dumps(raw)[:-5])
    with pytest.raises(ValueError, match="is not JSON"):
        load_checkpoint(tmp_path, tiny_parts())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("markov_head_type",), "carh", "markov_head_type='carh' must be one of vanilla, gated, rnn"),
        (("speculators_model_type",), "dflash", "speculators_model_type='dflash'"),
        (("sliding_window_non_causal",), True, "sliding_window_non_causal=True"),
        (("target_hidden_size",), HIDDEN + 1, "target_hidden_size=13 differs from the draft's hidden_size=12"),
        (("transformer_layer_config", "model_type"), "llama", "model_type='llama'"),
        (("transformer_layer_config", "attention_bias"), True, "attention_bias=True"),
        (("transformer_layer_config", "is_causal"), False, "is_causal=False is not supported with layers"),
        (("transformer_layer_config", "hidden_size"), None, "lacks the field 'hidden_size'"),
        (("transformer_layer_config", "hidden_act"), "gelu", "hidden_act='gelu'"),
        (("transformer_layer_config", "rope_parameters", "rope_type"), "yarn", "rope_type='yarn'"),
        (("transformer_layer_config", "layer_types"), ["full_attention", "chunked_attention"], "'chunked'"),
        (("mask_token_id",), None, "lacks the field 'mask_token_id'"),
        (("aux_hidden_state_layer_ids",), None, "lacks the field 'aux_hidden_state_layer_ids'"),
        (("aux_hidden_state_layer_ids",), [3, 1], "must be distinct and ascending.*write \\[1, 3\\].*reordered"),
        (("aux_hidden_state_layer_ids",), [3, 3], "must be distinct and ascending"),
        (("aux_hidden_state_layer_ids",), [0, 3], "contains 0"),
        (("aux_hidden_state_layer_ids",), [1, 6], "contains 6: the verifier has 6 layers"),
        (("speculators_model_type",), None, "speculators_model_type=None"),
    ],
)
def test_configs_that_would_draft_by_another_rule_are_refused(tmp_path, path, value, message):
    raw = save(tmp_path, make(True, layer_kinds=("full", "sliding")))
    parent = raw
    for name in path[:-1]:
        parent = parent[name]
    if value is None:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(tmp_path, tiny_parts())


def spoil(tensors: dict[str, torch.Tensor], how: str) -> None:
    if how == "swapped maps":
        tensors["t2d"] = tensors["t2d"].roll(1)
    elif how == "ids for offsets":
        tensors["d2t"] = tensors["d2t"] + torch.arange(SIZE)
    elif how == "quantised":
        tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)
    elif how == "another head":
        tensors["markov_head.gate_proj.weight"] = torch.zeros(2)
    elif how == "another shape":
        tensors["fc.weight"] = tensors["fc.weight"][:, 1:].contiguous()
    else:
        del tensors[how]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("swapped maps", "d2t and t2d describe different vocabularies"),
        ("ids for offsets", r"d2t gives verifier ids .* must ascend inside 0\.\.22: d2t holds offsets"),
        ("quantised", r"fc.weight is stored as I8, not as one of BF16, F16, F32"),
        ("another head", r"unknown tensors \['markov_head.gate_proj.weight'\]"),
        ("another shape", r"fc.weight has shape \(12, 23\), expected \(12, 24\)"),
        ("norm.weight", r"missing tensors \['norm.weight'\]"),
        ("d2t", r"missing tensors \['d2t'\]"),
        ("lm_head.weight", r"missing tensors \['lm_head.weight'\]"),
    ],
)
def test_damaged_tensors_are_refused(tmp_path, how, message):
    save(tmp_path, make(True))
    tensors = load_file(tmp_path / "model.safetensors")
    spoil(tensors, how)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path, tiny_parts())


def test_rows_are_read_in_runs_that_make_up_the_tensor(tmp_path):
    save(tmp_path, make(True))
    files = CheckpointFiles(tmp_path)
    for name, stored in load_file(tmp_path / "model.safetensors").items():
        for numbers in (1, 3 * HIDDEN, 10**6):
            runs = list(files.read_rows(name, numbers))
            assert torch.equal(torch.cat(runs), stored), name
        assert stored.ndim == 1 or max(run.numel() for run in files.read_rows(name, 3 * HIDDEN)) <= max(
            3 * HIDDEN, stored.shape[1]
        )
