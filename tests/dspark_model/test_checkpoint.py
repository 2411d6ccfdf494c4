"""Checkpoint files that we write: what vLLM and speculators expect in them, and what is not exported."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dspark_model.checkpoint import load_checkpoint, save_checkpoint
from dspark_model.config import ConfigError
from tests.dspark_model.checkpoints import RANK, SIZE, F, make, outputs, rounded, save
from tests.dspark_model.tiny import HIDDEN, MASK, VOCAB, tiny_parts

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


@torch.no_grad()
@pytest.mark.parametrize("reduced", [False, True])
def test_weights_and_outputs_survive_the_round_trip(tmp_path, reduced):
    drafter = rounded(make(reduced, layer_kinds=("sliding", "full")))
    save(tmp_path, drafter)
    loaded = load_checkpoint(tmp_path, tiny_parts())
    assert loaded.config == drafter.config
    for name, value in drafter.trainable_state().items():
        assert torch.equal(loaded.trainable_state()[name], value), name
    if not reduced:  # the full head comes from the verifier, unrounded
        drafter.lm_head.copy_(tiny_parts().lm_head_VD)
    assert torch.equal(outputs(loaded), outputs(drafter))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"markov_rank": 0, "confidence_with_markov": False}, "markov_rank=0"),
        ({"markov_head_type": "gated"}, "markov_head_type='gated': vLLM builds the vanilla head"),
        ({"markov_head_type": "rnn"}, "markov_head_type='rnn': vLLM builds the vanilla head"),
    ],
)
def test_what_vllm_does_not_serve_is_not_exported(tmp_path, choices, message):
    with pytest.raises(ConfigError, match=message):
        save(tmp_path / "out", make(False, **choices))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["", "./verifier", "../v", "~/v", "runs/a/verifier", "a/"])
def test_a_verifier_that_a_server_could_not_find_is_not_exported(tmp_path, name):
    with pytest.raises(ConfigError, match="give a hub id 'owner/name' or an absolute path"):
        save_checkpoint(tmp_path / "out", make(False), verifier_name_or_path=name, verifier_architectures=[])
    assert not (tmp_path / "out").exists()


def test_broken_weights_are_not_exported(tmp_path):
    drafter = make(True)
    with torch.no_grad():
        drafter.lm_head[2, 3] = torch.nan
        drafter.fc.weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"fc\.weight, lm_head\.weight: NaN or infinite"):
        save(tmp_path / "out", drafter)
    assert not (tmp_path / "out").exists()


def test_other_weights_in_the_folder_stop_an_export(tmp_path):
    """vLLM loads every safetensors file that it finds; writing over an earlier export is fine."""
    save(tmp_path, make(False))
    save(tmp_path, make(True))
    save_file({"momentum": torch.zeros(1)}, tmp_path / "optimizer.safetensors")
    with pytest.raises(ValueError, match=r"already holds optimizer\.safetensors"):
        save(tmp_path, make(False))
