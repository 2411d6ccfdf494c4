"""Drafters that are refused, by field and value, and what is derived from the ones that are not."""

from __future__ import annotations

import json

import pytest
import torch

from dspark_model.config import ConfigError, DrafterConfig, check_layer_ids, default_layer_ids
from dspark_model.drafter import DSparkDrafter
from dspark_model.families import derive_config
from dspark_model.verifier import VerifierParts
from tests.dspark_model.tiny import tiny_config, tiny_parts

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


def derive(verifier, **choices) -> DrafterConfig:
    values = {
        "layer_kinds": ("full", "full"),
        "block_size": 8,
        "draft_vocab_size": 4096,
        "mask_token_id": 7,
        "markov_rank": 64,
        "confidence_head": True,
        "sample_from_anchor": True,
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
    config = derive(QWEN3, draft_vocab_size=None, layer_kinds=("sliding", "full", "sliding"))
    assert (config.head_dim, config.rope_theta) == (128, 1e6)
    assert not config.reduced_vocab
    assert (config.num_layers, config.layer_kinds) == (3, ("sliding", "full", "sliding"))


def test_missing_fields_mean_what_they_mean_to_transformers():
    bare = {
        name: value for name, value in LLAMA.items() if name not in {"num_key_value_heads", "rope_theta", "head_dim"}
    }
    config = derive(bare)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (9, 64, 10000.0)


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


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"num_layers": 0, "layer_kinds": ()}, "num_layers=0 must be at least 1"),
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"draft_vocab_size": 0}, "draft_vocab_size=0 must be at least 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0 must be at least 1"),
        ({"rms_norm_eps": 0.0}, r"rms_norm_eps=0\.0 must be above 0"),
        ({"rope_theta": float("nan")}, "rope_theta=nan must be above 0"),
        ({"draft_vocab_size": 24}, r"draft_vocab_size=24 is above the verifier's 23 \(verifier_vocab_size\).*lower it"),
        ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"layer_kinds": ("full",)}, "has 1 entries; it must name each of the 2 layers"),
        ({"layer_kinds": ("full", "chunked")}, "must be of full, sliding"),
        ({"layer_kinds": ("sliding", "full"), "sliding_window": 0}, "sliding_window=0 must be at least 1"),
        (
            {"mask_token_id": 23},
            r"mask_token_id=23 is outside .* rows are 0\.\.22 \(verifier_vocab_size=23\): name an id",
        ),
        ({"mask_token_id": -1}, "mask_token_id=-1 is outside"),
        ({"markov_rank": -1}, "markov_rank=-1 must be 0"),
        ({"markov_head_type": "lstm"}, "markov_head_type='lstm' must be one of vanilla, gated, rnn"),
        ({"markov_rank": 0}, "confidence_with_markov=True needs a Markov head, and markov_rank=0 means none"),
        ({"sample_from_anchor": False, "block_size": 1}, "block_size=1 .*proposes no token.*use at least 2"),
        ({"aux_hidden_state_layer_ids": ()}, r"aux_hidden_state_layer_ids=\[\] names no layer.*in 1\.\.5"),
        ({"aux_hidden_state_layer_ids": (3, 1)}, r"=\[3, 1\] must be distinct and ascending.*: write \[1, 3\]"),
        ({"aux_hidden_state_layer_ids": (1, 1)}, r"=\[1, 1\] must be distinct and ascending.*: write \[1\]"),
        ({"aux_hidden_state_layer_ids": (0, 3)}, r"must lie in 1\.\.5, but contains 0: .*the embedding; start at 1"),
        ({"aux_hidden_state_layer_ids": (-1, 3)}, r"must lie in 1\.\.5, but contains -1"),
        (
            {"aux_hidden_state_layer_ids": (1, 6)},
            r"in 1\.\.5, but contains 6: the verifier has 6 layers.*use at most 5",
        ),
        ({"aux_hidden_state_layer_ids": (1, 9)}, r"in 1\.\.5, but contains 9: the verifier has 6 layers"),
        ({"verifier_num_layers": 1, "aux_hidden_state_layer_ids": (1,)}, "verifier_num_layers=1 leaves no layer"),
    ],
)
def test_contradictions_are_refused_by_name_and_value(choices, message):
    with pytest.raises(ConfigError, match=message):
        tiny_config(**choices)


def test_an_empty_draft_vocabulary_is_not_taken_for_the_whole_one():
    with pytest.raises(ConfigError, match="draft_vocab_size=0"):
        derive(LLAMA, draft_vocab_size=0)


@pytest.mark.parametrize("layers", range(2, 40))
def test_default_layer_ids_are_always_allowed(layers):
    ids = default_layer_ids(layers)
    check_layer_ids(ids, layers)
    assert ids
    assert list(ids) == sorted(set(ids))
    assert set(ids) <= set(range(1, layers))


def test_an_empty_list_of_layers_is_not_taken_for_the_default():
    with pytest.raises(ConfigError, match="names no layer"):
        derive(LLAMA, aux_hidden_state_layer_ids=())


@pytest.mark.parametrize(
    ("embedding", "head", "message"),
    [
        ((23, 16), (23, 12), r"embedding has shape \(23, 16\), the drafter expects \(23, 12\).*derive a new"),
        ((23, 12), (31, 12), r"head has shape \(31, 12\), the drafter expects \(23, 12\).*derive a new"),
    ],
)
def test_another_verifiers_parts_are_refused(embedding, head, message):
    drafter = DSparkDrafter(tiny_config())
    parts = VerifierParts(torch.zeros(embedding), torch.zeros(head), tiny_parts().norm_D, 1e-6)
    with pytest.raises(ValueError, match=message):
        drafter.load_verifier(parts)
