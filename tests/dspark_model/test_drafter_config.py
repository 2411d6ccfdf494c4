"""Geometry taken from a verifier's config.json, and the drafters that are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dspark_model.config import ConfigError, DrafterConfig, default_layer_ids, derive_config
from tests.dspark_model.tiny import tiny_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "max_position_embeddings": 8192,
    "head_dim": None,
}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000, "factor": 4.0},
    "max_position_embeddings": 40960,
}


def derive(verifier: dict[str, Any], **choices: Any) -> DrafterConfig:
    values = {
        "num_layers": 2,
        "block_size": 8,
        "draft_vocab_size": 4096,
        "mask_token_id": 7,
        "markov_rank": 64,
        "confidence_head": True,
        "sample_from_anchor": True,
        "attention": "full",
        "sliding_window": 2048,
    }
    return derive_config(verifier, **{**values, **choices})


def test_llama_geometry():
    config = derive(LLAMA)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (576, 1536, 64)
    assert (config.num_heads, config.num_kv_heads) == (9, 3)
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (1e-5, 100000.0, 8192)
    assert (config.verifier_vocab_size, config.draft_vocab_size, config.verifier_num_layers) == (49152, 4096, 30)
    assert config.aux_hidden_state_layer_ids == (2, 15, 27)
    assert config.aux_width == 3 * 576
    assert config.layer_kinds == ("full", "full")


def test_qwen3_geometry_takes_only_theta_of_the_rope_settings():
    config = derive(QWEN3, draft_vocab_size=None, attention="sliding")
    assert (config.head_dim, config.rope_theta) == (128, 1e6)
    assert not config.reduced_vocab
    assert config.layer_kinds == ("sliding", "sliding")


def test_missing_fields_mean_what_they_mean_to_transformers():
    bare = {
        name: value for name, value in LLAMA.items() if name not in {"num_key_value_heads", "rope_theta", "head_dim"}
    }
    config = derive(bare)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (9, 64, 10000.0)


def test_mixture_of_experts_verifiers_get_a_dense_width():
    moe = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 128, "moe_intermediate_size": 768}
    assert derive(moe).intermediate_size == 3 * 1024
    assert derive(moe, intermediate_size=512).intermediate_size == 512


def test_confidence_reads_the_markov_embedding_when_there_is_one():
    assert derive(LLAMA).confidence_with_markov
    assert not derive(LLAMA, markov_rank=0).confidence_with_markov
    assert not derive(LLAMA, confidence_head=False).confidence_with_markov


@pytest.mark.parametrize(("from_anchor", "proposals"), [(True, 8), (False, 7)])
def test_proposals_per_block(from_anchor, proposals):
    assert derive(LLAMA, sample_from_anchor=from_anchor).proposals_per_block == proposals


@pytest.mark.parametrize(("layers", "ids"), [(2, (1,)), (4, (1, 2)), (6, (2, 3)), (28, (2, 14, 25)), (36, (2, 18, 33))])
def test_default_layer_ids_are_early_middle_and_late(layers, ids):
    assert default_layer_ids(layers) == ids


def test_json_round_trip():
    config = tiny_config(layer_kinds=("full", "sliding"))
    assert DrafterConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "gpt_oss", None])
def test_families_with_another_norm_or_head_are_refused(family):
    with pytest.raises(ConfigError, match=f"model_type={family!r} is not supported; supported: llama"):
        derive({**LLAMA, "model_type": family})


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"num_layers": 0, "layer_kinds": ()}, "num_layers=0 must be at least 1"),
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"draft_vocab_size": 0}, "draft_vocab_size=0 must be at least 1"),
        ({"draft_vocab_size": 24}, "draft_vocab_size=24 is above the verifier's 23"),
        ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"layer_kinds": ("full",)}, "must name each of the 2 layers"),
        ({"layer_kinds": ("full", "chunked")}, "must be of full, sliding"),
        ({"layer_kinds": ("sliding", "full"), "sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ({"mask_token_id": 23}, "mask_token_id=23 is outside"),
        ({"mask_token_id": -1}, "mask_token_id=-1 is outside"),
        ({"markov_rank": -1}, "markov_rank=-1 must be 0"),
        ({"markov_rank": 0}, "confidence_with_markov=True needs a Markov head"),
        ({"sample_from_anchor": False, "block_size": 1}, "proposes no token"),
        ({"aux_hidden_state_layer_ids": ()}, "must be distinct and ascending"),
        ({"aux_hidden_state_layer_ids": (3, 1)}, "must be distinct and ascending"),
        ({"aux_hidden_state_layer_ids": (1, 1)}, "must be distinct and ascending"),
        ({"aux_hidden_state_layer_ids": (0, 3)}, r"must lie in 1\.\.5"),
        ({"aux_hidden_state_layer_ids": (1, 6)}, r"must lie in 1\.\.5"),
    ],
)
def test_contradictions_are_refused_by_name_and_value(choices, message):
    with pytest.raises(ConfigError, match=message):
        tiny_config(**choices)


def test_an_empty_draft_vocabulary_is_not_taken_for_the_whole_one():
    with pytest.raises(ConfigError, match="draft_vocab_size=0"):
        derive(LLAMA, draft_vocab_size=0)
