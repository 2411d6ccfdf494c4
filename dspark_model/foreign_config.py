"""`config.json` of the speculators format, which vLLM serves: the one place that knows its spellings.

Layout and defaults: vllm-project/speculators 0.9.0 (`models/dspark/config.py`, `models/dflash/config.py`). What is made
of it: vLLM 0.32 (`transformers_utils/configs/speculators/algos.py`, `model_executor/models/qwen3_dspark.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from dspark_model.config import ConfigError, DrafterConfig, LayerKind

FORMAT = "dspark"
DEFAULTS: Mapping[str, Any] = {
    "block_size": 8,
    "draft_vocab_size": 32000,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    # speculators' own; vLLM and llama.cpp read a missing key as false (https://github.com/vllm-project/vllm/issues/56792).
    "sample_from_anchor": True,
    "sliding_window_non_causal": False,
}
"""What speculators 0.9.0 takes for a key that config.json lacks."""
LAYER_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "attention_bias": False,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
"""What transformers' Qwen3Config, which both trainers build their layers from, takes for a missing key."""
DEFAULT_ROPE_THETA = 10000.0
"""transformers' own. vLLM takes 1,000,000 where no rope setting is stored at all."""


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is of the speculators format, of whatever algorithm."""
    return "speculators_model_type" in raw or "speculators_config" in raw


def refuse_unservable(config: DrafterConfig) -> None:
    """Refuse what vLLM does not load, or loads to another effect than trained.

    Raises:
        ConfigError: names the field, what vLLM would do and what to do.
    """
    if not config.markov_rank:
        raise ConfigError(
            "markov_rank=0: vLLM builds an empty Markov head, over which its CPU engine dies while loading, and "
            "drafting without a bias is untested elsewhere; train with markov_rank above 0, such as 256"
        )
    if config.markov_head_type != "vanilla":
        raise ConfigError(
            f"markov_head_type={config.markov_head_type!r}: vLLM builds the vanilla head whatever is named, and its "
            "loader stops at the head's further tensors as unknown parameters; train with markov_head_type='vanilla' "
            "to serve"
        )


def write_config(config: DrafterConfig, verifier_name_or_path: str, architectures: list[str]) -> dict[str, Any]:
    """The config.json of a drafter that passed `refuse_unservable`."""
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": FORMAT,
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "aux_hidden_state_layer_ids": list(config.aux_hidden_state_layer_ids),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": False,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": FORMAT,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.proposals_per_block,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier_name_or_path, "architectures": architectures},
        },
        "transformer_layer_config": _write_layers(config),
    }


def _write_layers(config: DrafterConfig) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": config.verifier_vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "layer_types": [f"{kind}_attention" for kind in config.layer_kinds],
        "sliding_window": config.sliding_window,
        "use_sliding_window": "sliding" in config.layer_kinds,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": False,
        "verifier_num_hidden_layers": config.verifier_num_layers,
    }


def read_config(raw: Mapping[str, Any]) -> DrafterConfig:
    """The drafter that a speculators config.json describes; missing keys have speculators' defaults.

    Raises:
        ConfigError: another algorithm, a required key is missing, or what our forward cannot do.
    """
    if raw.get("speculators_model_type") != FORMAT:
        raise ConfigError(
            f"speculators_model_type={raw.get('speculators_model_type')!r} is not supported; supported: {FORMAT!r}"
        )
    values = {**DEFAULTS, **{name: value for name, value in raw.items() if value is not None}}
    layer = require(raw, "transformer_layer_config")
    layer_ids = list(require(raw, "aux_hidden_state_layer_ids"))
    if layer_ids != sorted(set(layer_ids)):
        raise ConfigError(
            f"aux_hidden_state_layer_ids={layer_ids} must be distinct and ascending: which columns of fc.weight belong "
            "to which layer cannot be told from the file. States that vLLM extracted (speculators' way) come in "
            f"ascending order whatever the list says: then write {sorted(set(layer_ids))}. Where a trainer "
            "concatenated them in the order of the list, fc's column groups have to be reordered as well"
        )
    width = layer.get("hidden_size")
    if values.get("target_hidden_size", width) != width:
        raise ConfigError(
            f"target_hidden_size={values['target_hidden_size']} differs from the draft's hidden_size={width}: a "
            "drafter here shares the verifier's embedding and head, so both must be equal"
        )
    rank, confidence = values["markov_rank"], values["enable_confidence_head"]
    return DrafterConfig(
        **read_layers(layer, non_causal_windows=values["sliding_window_non_causal"]),
        draft_vocab_size=values["draft_vocab_size"],
        # speculators does not record the verifier's depth; any depth above the last tap is consistent.
        verifier_num_layers=layer.get("verifier_num_hidden_layers", layer_ids[-1] + 1 if layer_ids else 2),
        block_size=values["block_size"],
        aux_hidden_state_layer_ids=tuple(layer_ids),
        mask_token_id=require(raw, "mask_token_id"),
        markov_rank=rank,
        markov_head_type=values["markov_head_type"],
        confidence_head=confidence,
        # Without either head the flag says nothing.
        confidence_with_markov=values["confidence_head_with_markov"] and bool(rank or confidence),
        sample_from_anchor=values["sample_from_anchor"],
    )


def read_layers(layer: Mapping[str, Any], *, non_causal_windows: bool) -> dict[str, Any]:
    """Fields of DrafterConfig that a Qwen3 config fixes: geometry, kinds of layers, rope.

    `partial_rotary_factor` and `mrope_section` are left out of account, as both trainers' rotary embedding
    (transformers' Qwen3) turns whole heads whatever they say: https://github.com/deepseek-ai/DeepSpec/issues/71.

    Args:
        layer: the mapping.
        non_causal_windows: sliding layers were trained bidirectional inside the block.

    Raises:
        ConfigError: a size is missing, or what our layers cannot do.
    """
    values = {**LAYER_DEFAULTS, **{name: value for name, value in layer.items() if value is not None}}
    rope = rope_settings(values)
    for field, value, expected in (
        ("model_type", values.get("model_type", "qwen3"), "qwen3"),
        ("hidden_act", values["hidden_act"], "silu"),
        ("attention_bias", values["attention_bias"], False),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
    ):
        if value != expected:
            raise ConfigError(f"{field}={value!r} is not supported; supported: {expected!r}")
    kinds = layer_kinds(values)
    if non_causal_windows and "sliding" in kinds:
        raise ConfigError(
            "sliding_window_non_causal=True is not supported: sliding layers here are causal inside the block, as vLLM "
            "serves them; supported: False"
        )
    is_causal = values.get("is_causal")
    if is_causal is not None and any(is_causal != (kind == "sliding") for kind in kinds):
        raise ConfigError(
            f"is_causal={is_causal} is not supported with layers {kinds}: full layers here are bidirectional inside "
            "the block and sliding ones causal; supported: leave it out"
        )
    positions = values["max_position_embeddings"]
    return {
        "hidden_size": require(values, "hidden_size"),
        "intermediate_size": require(values, "intermediate_size"),
        "num_layers": require(values, "num_hidden_layers"),
        "num_heads": require(values, "num_attention_heads"),
        "num_kv_heads": values.get("num_key_value_heads", values["num_attention_heads"]),
        "head_dim": values["head_dim"],
        "verifier_vocab_size": require(values, "vocab_size"),
        "layer_kinds": cast("tuple[LayerKind, ...]", tuple(kinds)),
        "sliding_window": values.get("sliding_window", positions),
        "rms_norm_eps": values["rms_norm_eps"],
        "rope_theta": rope.get("rope_theta", DEFAULT_ROPE_THETA),
        "max_position_embeddings": positions,
        "initializer_range": values["initializer_range"],
    }


def layer_kinds(layer: Mapping[str, Any]) -> list[str]:
    """Kind of each layer ("full", "sliding", or what else is named); Qwen3Config's rule where none is stored."""
    if layer.get("layer_types"):
        return [str(kind).removesuffix("_attention") for kind in layer["layer_types"]]
    windows = layer.get("use_sliding_window") and layer.get("sliding_window")
    first = layer.get("max_window_layers", LAYER_DEFAULTS["max_window_layers"])
    return ["sliding" if windows and i >= first else "full" for i in range(require(layer, "num_hidden_layers"))]


def rope_settings(layer: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters`; in configs written before transformers 5 `rope_scaling` and, beside it, `rope_theta`.

    Of settings per kind of layer the sliding layers' one, as in speculators.
    """
    stored = layer.get("rope_parameters") or {}
    rope = {**(layer.get("rope_scaling") or {}), **stored.get("sliding_attention", stored)}
    for name in ("rope_theta", "partial_rotary_factor"):
        if layer.get(name) is not None:
            rope.setdefault(name, layer[name])
    return rope


def require(values: Mapping[str, Any], field: str) -> Any:
    """A field that has no default.

    Raises:
        ConfigError: it is missing or null.
    """
    if values.get(field) is None:
        raise ConfigError(f"config.json lacks the field {field!r}: it describes no DSpark drafter")
    return values[field]
