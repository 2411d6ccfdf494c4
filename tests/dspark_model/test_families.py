"""Geometry, norms and logits of every verifier family against the real modules of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_model.checkpoint import save_checkpoint
from dspark_model.config import ConfigError, DrafterConfig
from dspark_model.drafter import DSparkDrafter
from dspark_model.families import SUPPORTED_VERIFIERS, VerifierGeometry, derive_config
from dspark_model.verifier import load_verifier_parts, transformers_state
from tests.dspark_model.tiny_verifiers import (
    HIDDEN,
    LAYERS,
    MAKERS,
    THETA,
    VOCAB,
    forward,
    make_verifier,
    text_model,
)

IDS = torch.arange(9)[None]
EXPERTS = {"gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"}
ONE_PLUS = {"gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next"} | {f for f in MAKERS if f.startswith("qwen3_5")}


def derive(verifier: dict[str, Any], **choices: Any) -> DrafterConfig:
    values = {
        "layer_kinds": ("full", "sliding"), "block_size": 4, "draft_vocab_size": None, "mask_token_id": 7,
        "markov_rank": 5, "confidence_head": True, "sample_from_anchor": True, "sliding_window": 8,
    }  # fmt: skip
    return derive_config(verifier, **{**values, **choices})


class Saved:
    """A family's model, its folder and its config.json."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.model = make_verifier(family)
        self.model.save_pretrained(folder)
        self.folder = folder
        self.config = json.loads((folder / "config.json").read_text())
        self.logits, self.hidden_states, self.prenorm, self.layer_inputs = forward(self.model, IDS)


@pytest.fixture(scope="module", params=list(MAKERS))
def saved(request, tmp_path_factory) -> Saved:
    return Saved(request.param, tmp_path_factory.mktemp(request.param))


def test_every_supported_name_is_tried_here():
    # Only ever inside its wrapper.
    assert set(MAKERS) | {"qwen3_vl_text"} == set(SUPPORTED_VERIFIERS)


def test_geometry_is_that_of_the_modules(saved):
    geometry = VerifierGeometry.from_config(saved.config)
    stack = text_model(saved.model)
    assert (geometry.vocab_size, geometry.hidden_size) == tuple(stack.embed_tokens.weight.shape) == (VOCAB, HIDDEN)
    assert geometry.num_layers == len(stack.layers) == LAYERS
    # Hybrid verifiers have attention in some layers only; gated attention has twice the rows in q_proj.
    attention = next(layer.self_attn for layer in reversed(stack.layers) if hasattr(layer, "self_attn"))
    assert geometry.head_dim == attention.head_dim
    assert geometry.num_heads * geometry.head_dim == attention.o_proj.in_features
    assert geometry.num_kv_heads * geometry.head_dim == attention.k_proj.out_features
    norm_eps = stack.norm.eps if hasattr(stack.norm, "eps") else stack.norm.variance_epsilon
    assert geometry.rms_norm_eps == norm_eps == 1e-3
    assert geometry.max_position_embeddings == 128
    dense = None if saved.family in EXPERTS else stack.layers[0].mlp.down_proj.in_features
    assert geometry.intermediate_size == (dense or 3 * HIDDEN)
    assert geometry.norm_offset == (saved.family in ONE_PLUS)


def test_rope_theta_is_the_base_of_the_frequencies(saved):
    """Of the full-attention layers where kinds differ; gpt_oss scales its frequencies, so its own are of no base."""
    assert VerifierGeometry.from_config(saved.config).rope_theta == THETA
    rotary = text_model(saved.model).rotary_emb
    if saved.family != "gpt_oss":
        frequencies = getattr(rotary, "full_attention_inv_freq", None)
        scale = 1.0 if frequencies is None else 8.0
        frequencies = rotary.inv_freq if frequencies is None else frequencies
        assert float(frequencies[1] * scale) == pytest.approx(THETA ** (-1 / len(frequencies)))


def test_a_drafter_reads_rows_as_stored_where_the_verifier_scales_them(saved):
    rows = load_verifier_parts(saved.folder).embed_VD[IDS[0]]
    assert torch.equal(rows, saved.model.get_input_embeddings().weight[IDS[0]])
    scale = {"granite": 3.0}.get(saved.family, 4.0 if saved.family.startswith("gemma") else 1.0)
    torch.testing.assert_close(saved.hidden_states[0][0], scale * rows)


def test_states_are_those_after_i_layers_and_the_last_is_before_the_norm(saved):
    assert len(saved.hidden_states) == LAYERS + 1
    for i, expected in enumerate([*saved.layer_inputs, saved.prenorm]):
        assert torch.equal(transformers_state(saved.hidden_states, i, saved.prenorm), expected), i
    # What transformers itself calls the last state is on the other side.
    assert not torch.allclose(saved.hidden_states[-1], saved.prenorm, atol=1e-2)


def test_a_drafter_that_reached_the_verifiers_state_has_its_logits(saved):
    """The drafter's own final norm starts at the verifier's gain, and its logits have no soft-cap, as in vLLM."""
    drafter = DSparkDrafter(derive(saved.config))
    drafter.load_verifier(load_verifier_parts(saved.folder))
    with torch.no_grad():
        logits = drafter.logits(drafter.norm(saved.prenorm[0]), None)
    cap = VerifierGeometry.from_config(saved.config).logit_softcap
    assert (cap is not None) == (saved.family in {"gemma2", "gemma3_text"})
    torch.testing.assert_close(logits if cap is None else cap * torch.tanh(logits / cap), saved.logits[0])


def test_derived_config_builds_and_says_nothing_of_rope_but_theta(saved, tmp_path):
    config = derive(saved.config)
    geometry = VerifierGeometry.from_config(saved.config)
    for field in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps"):
        assert getattr(config, field) == getattr(geometry, field), field
    assert (config.verifier_vocab_size, config.verifier_num_layers, config.num_layers) == (VOCAB, LAYERS, 2)
    drafter = DSparkDrafter(config)
    drafter.load_verifier(load_verifier_parts(saved.folder))
    save_checkpoint(tmp_path, drafter, verifier_name_or_path="v", verifier_architectures=saved.config["architectures"])
    text = (tmp_path / "config.json").read_text()
    layer = json.loads(text)["transformer_layer_config"]
    assert layer["rope_parameters"] == {"rope_type": "default", "rope_theta": THETA}
    assert not any(word in text for word in ("partial_rotary", "mrope", "scaling", "factor"))


# As published: text sections name only what differs from transformers' defaults.
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}  # fmt: skip
QWEN3_5_2B = {
    "model_type": "qwen3_5",
    "text_config": {
        "head_dim": 256, "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text", "num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
        "tie_word_embeddings": True, "vocab_size": 248320,
    },
    "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_3_2_1B = {
    "model_type": "llama", "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("verifier", "sizes", "vocab", "theta", "positions", "layer_ids"),
    [
        (GEMMA3_4B, (2560, 10240, 8, 4, 256), 262208, 1e6, 131072, (2, 17, 31)),
        (QWEN3_5_2B, (2048, 6144, 8, 2, 256), 248320, 1e7, 262144, (2, 12, 21)),
        (LLAMA_3_2_1B, (2048, 8192, 32, 8, 64), 128256, 5e5, 131072, (2, 8, 13)),
    ],
    ids=["gemma-3-4b", "qwen3.5-2b", "llama-3.2-1b"],
)
def test_published_configs(verifier, sizes, vocab, theta, positions, layer_ids):
    config = derive(verifier)
    fields = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    assert tuple(getattr(config, field) for field in fields) == sizes
    assert (config.verifier_vocab_size, config.rope_theta, config.max_position_embeddings) == (vocab, theta, positions)
    assert config.aux_hidden_state_layer_ids == layer_ids
    assert VerifierGeometry.from_config(verifier).tied_embeddings


def test_reading_a_config_leaves_it_as_it_is():
    """transformers mends this vision section in place."""
    config = {**QWEN3_5_2B, "vision_config": {"model_type": "qwen3_5"}}
    before = json.dumps(config)
    VerifierGeometry.from_config(config)
    assert json.dumps(config) == before


def test_mixture_of_experts_verifiers_get_a_dense_width_unless_one_is_chosen():
    config = make_verifier("qwen3_moe").config.to_dict()
    assert derive(config).intermediate_size == 3 * HIDDEN
    assert derive(config, intermediate_size=12).intermediate_size == 12


def test_heads_need_not_divide_the_hidden_size():
    config = make_verifier("qwen3").config.to_dict()
    derived = derive(config)
    assert (derived.num_heads, derived.head_dim) == (3, 10)
    # Qwen2's config has no head_dim to say so.
    qwen2 = {**make_verifier("qwen2").config.to_dict(), "num_attention_heads": 3, "num_key_value_heads": 1}
    with pytest.raises(ConfigError, match=r"hidden_size=16 is no multiple of num_attention_heads=3.*add the head_dim"):
        derive(qwen2)


@pytest.mark.parametrize("family", ["gemma3n", "gemma4", "deepseek_v3", "olmo2", "phi3", "bert", "llama2", None])
def test_other_families_are_refused_by_name(family):
    with pytest.raises(
        ConfigError, match=f"model_type={family!r} is not supported; supported: gemma, gemma2, .*qwen3_vl"
    ):
        derive({**LLAMA_3_2_1B, "model_type": family})


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ({"model_type": "qwen3_5"}, "text_config of the verifier's config.json .*lacks hidden_size, num_hidden_layers"),
        ({"model_type": "llama", "hidden_size": 8}, r"config.json \(model_type='llama'\) lacks num_hidden_layers"),
        (
            {**GEMMA3_4B, "text_config": {**GEMMA3_4B["text_config"], "model_type": "phi3"}},
            "text_config.model_type='phi3' inside 'gemma3' is not supported; supported: gemma",
        ),
        (
            {**LLAMA_3_2_1B, "num_attention_heads": 31},
            r"refuses this llama config.json: .*number of attention heads \(31",
        ),
    ],
    ids=["no text_config", "no depth", "another text model", "refused by transformers"],
)
def test_configs_of_no_whole_model_are_refused(verifier, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        derive(verifier)


def test_a_family_that_the_installed_transformers_lacks(monkeypatch):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    monkeypatch.delitem(CONFIG_MAPPING._mapping, "qwen3_5")
    with pytest.raises(ConfigError, match=r"'qwen3_5' is unknown to the installed transformers \d.*: install a later"):
        derive(QWEN3_5_2B)
