"""Checkpoint files: what vLLM and speculators expect in them, and what is refused on reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dspark_model.batch import make_slots, pack
from dspark_model.checkpoint import load_checkpoint, save_checkpoint
from dspark_model.config import ConfigError
from dspark_model.drafter import DSparkDrafter
from tests.dspark_model.tiny import HIDDEN, MASK, VOCAB, answer, some_t2d, tiny_config, tiny_drafter, tiny_parts

SIZE, F, RANK = 9, 2 * HIDDEN, 5
LAYER_SHAPES = {
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (24, HIDDEN),
    "self_attn.k_proj.weight": (12, HIDDEN),
    "self_attn.v_proj.weight": (12, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, 24),
    "self_attn.q_norm.weight": (6,),
    "self_attn.k_norm.weight": (6,),
    "mlp.gate_proj.weight": (20, HIDDEN),
    "mlp.up_proj.weight": (20, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, 20),
}
FULL_SHAPES = {
    "fc.weight": (HIDDEN, F),
    "hidden_norm.weight": (HIDDEN,),
    "norm.weight": (HIDDEN,),
    **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER_SHAPES.items()},
    "markov_head.markov_w1.weight": (VOCAB, RANK),
    "markov_head.markov_w2.weight": (VOCAB, RANK),
    "confidence_head.proj.weight": (1, HIDDEN + RANK),
    "confidence_head.proj.bias": (1,),
}
REDUCED_SHAPES = {
    **FULL_SHAPES,
    "markov_head.markov_w2.weight": (SIZE, RANK),
    "lm_head.weight": (SIZE, HIDDEN),
    "d2t": (SIZE,),
    "t2d": (VOCAB,),
}


def make(reduced: bool, **choices: Any) -> DSparkDrafter:
    size = SIZE if reduced else VOCAB
    return tiny_drafter(tiny_config(draft_vocab_size=size, **choices), some_t2d(SIZE) if reduced else None)


def save(folder: Path, drafter: DSparkDrafter) -> dict[str, Any]:
    save_checkpoint(folder, drafter, verifier_name_or_path="/models/v", verifier_architectures=["Qwen3ForCausalLM"])
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("reduced", [False, True])
def test_tensor_names_shapes_and_dtypes_are_those_of_the_contract(tmp_path, reduced):
    save(tmp_path, make(reduced))
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in tensors.items()} == (REDUCED_SHAPES if reduced else FULL_SHAPES)
    special = {"d2t": torch.int64, "t2d": torch.bool}
    assert all(value.dtype == special.get(name, torch.bfloat16) for name, value in tensors.items())
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    if reduced:
        assert (torch.arange(SIZE) + tensors["d2t"]).tolist() == tensors["t2d"].nonzero().flatten().tolist()
        assert torch.equal(tensors["lm_head.weight"], tiny_parts().lm_head_VD[tensors["t2d"]].bfloat16())


@pytest.mark.parametrize(("sample_from_anchor", "proposals"), [(True, 4), (False, 3)])
def test_config_is_what_vllm_reads(tmp_path, sample_from_anchor, proposals):
    raw = save(tmp_path, make(True, sample_from_anchor=sample_from_anchor, layer_kinds=("full", "sliding")))
    assert raw["sample_from_anchor"] is sample_from_anchor, "vLLM takes a missing key for false: always written"
    assert raw["speculators_config"] == {
        "algorithm": "dspark",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": proposals,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": "/models/v", "architectures": ["Qwen3ForCausalLM"]},
    }
    expected = {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "block_size": 4,
        "draft_vocab_size": SIZE,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": MASK,
        "sliding_window_non_causal": False,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    assert {name: raw[name] for name in expected} == expected


def test_layer_config_reads_as_the_qwen3_config_that_was_trained(tmp_path):
    """transformers' own class, which vLLM builds from this mapping, sees the same geometry and kinds."""
    from transformers import Qwen3Config

    raw = save(tmp_path, make(False, layer_kinds=("full", "sliding")))
    layer = Qwen3Config(**raw["transformer_layer_config"])
    assert (layer.vocab_size, layer.hidden_size, layer.intermediate_size) == (VOCAB, HIDDEN, 20)
    assert (layer.num_hidden_layers, layer.num_attention_heads, layer.num_key_value_heads) == (2, 4, 2)
    assert (layer.head_dim, layer.rms_norm_eps, layer.max_position_embeddings) == (6, 1e-6, 64)
    assert layer.layer_types == ["full_attention", "sliding_attention"]
    assert (layer.sliding_window, layer.hidden_act, layer.attention_bias) == (5, "silu", False)
    assert layer.rope_parameters == {"rope_type": "default", "rope_theta": 100.0}
    assert layer.tie_word_embeddings is False


def outputs(drafter: DSparkDrafter) -> torch.Tensor:
    row, anchors = pack([answer(3, 9)]), torch.tensor([2, 5, 8])
    slots = make_slots(row, anchors, block_size=4, mask_token_id=MASK, sample_from_anchor=True)
    output = drafter(row, anchors, slots)
    confidence = drafter.confidence_head(output.hidden_SD, output.markov_SR)
    return torch.cat([drafter.logits(output.hidden_SD, output.markov_SR), confidence[:, None]], 1)


@torch.no_grad()
@pytest.mark.parametrize("reduced", [False, True])
def test_weights_and_outputs_survive_the_round_trip(tmp_path, reduced):
    drafter = make(reduced, layer_kinds=("sliding", "full"))
    for value in (*drafter.trainable_state().values(), drafter.lm_head):
        value.copy_(value.bfloat16())  # what the file can hold
    save(tmp_path, drafter)
    loaded = load_checkpoint(tmp_path, tiny_parts())
    assert loaded.config == drafter.config
    for name, value in drafter.trainable_state().items():
        assert torch.equal(loaded.trainable_state()[name], value), name
    if not reduced:  # the full head comes from the verifier, unrounded
        drafter.lm_head.copy_(tiny_parts().lm_head_VD)
    assert torch.equal(outputs(loaded), outputs(drafter))


@torch.no_grad()
@pytest.mark.parametrize("reduced", [False, True])
def test_files_of_older_speculators_that_store_frozen_weights_are_read(tmp_path, reduced):
    drafter = make(reduced)
    raw = save(tmp_path, drafter)
    expected = outputs(load_checkpoint(tmp_path, tiny_parts()))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_tokens.weight"] = tiny_parts().embed_VD.bfloat16()
    tensors["lm_head.weight"] = drafter.lm_head.bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    del raw["sample_from_anchor"], raw["transformer_layer_config"]["verifier_num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    loaded = load_checkpoint(tmp_path, tiny_parts())
    assert loaded.config.sample_from_anchor, "speculators' own default"
    assert torch.equal(outputs(loaded), expected)


def test_a_drafter_without_markov_head_is_not_exported(tmp_path):
    with pytest.raises(ConfigError, match="markov_rank=0"):
        save(tmp_path / "out", make(False, markov_rank=0, confidence_with_markov=False))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("markov_head_type",), "gated", "markov_head_type='gated' is not supported; supported: 'vanilla'"),
        (("speculators_model_type",), "dflash", "speculators_model_type='dflash'"),
        (("sliding_window_non_causal",), True, "sliding_window_non_causal=True"),
        (("transformer_layer_config", "hidden_act"), "gelu", "hidden_act='gelu'"),
        (("transformer_layer_config", "rope_parameters", "rope_type"), "yarn", "rope_type='yarn'"),
        (("transformer_layer_config", "layer_types"), ["full_attention", "chunked_attention"], "'chunked'"),
        (("block_size",), None, "lacks the field 'block_size'"),
        (("aux_hidden_state_layer_ids",), [3, 1], "must be distinct and ascending"),
    ],
)
def test_configs_that_would_draft_by_another_rule_are_refused(tmp_path, path, value, message):
    raw = save(tmp_path, make(True))
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
        tensors["d2t"][2:] += 1
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
        ("another head", r"unknown tensors \['markov_head.gate_proj.weight'\]"),
        ("another shape", r"fc.weight has shape \(12, 23\), expected \(12, 24\)"),
        ("norm.weight", r"missing tensors \['norm.weight'\]"),
        ("t2d", r"missing tensors \['t2d'\]"),
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
