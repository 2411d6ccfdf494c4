"""Checkpoints in the speculators format that vLLM loads; foreign spellings live only here.

Layout and names: vllm-project/speculators 0.9; what vLLM requires of them: its speculators `algos.py` and
`qwen3_dspark.py` (0.32). The embedding, and the head when the vocabulary is full, stay with the verifier.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark_model.config import ConfigError, DrafterConfig, LayerKind
from dspark_model.drafter import DSparkDrafter
from dspark_model.verifier import VerifierParts

FORMAT = "dspark"
REDUCED_VOCAB_TENSORS = ("t2d", "d2t", "lm_head.weight")


def save_checkpoint(
    folder: Path, drafter: DSparkDrafter, *, verifier_name_or_path: str, verifier_architectures: list[str]
) -> None:
    """Write `config.json` and bfloat16 `model.safetensors`.

    Args:
        folder: created if missing.
        drafter: trained weights.
        verifier_name_or_path: hub id or absolute path; `vllm serve <folder>` swaps to it.
        verifier_architectures: from the verifier's config.

    Raises:
        ConfigError: what vLLM would load wrongly or not at all.
    """
    config = drafter.config
    if not config.markov_rank:
        raise ConfigError("markov_rank=0: vLLM's DSpark drafting is untested without a Markov head; train with one")
    folder.mkdir(parents=True, exist_ok=True)
    raw = _foreign_config(config, verifier_name_or_path, verifier_architectures)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    tensors = {
        name: value.detach().to(torch.bfloat16).cpu().contiguous() for name, value in drafter.trainable_state().items()
    }
    if config.reduced_vocab:
        tensors["lm_head.weight"] = drafter.lm_head.detach().to(torch.bfloat16).cpu().contiguous()
        tensors["d2t"] = drafter.d2t.cpu().contiguous()
        tensors["t2d"] = drafter.t2d.cpu().contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_checkpoint(folder: Path, verifier: VerifierParts) -> DSparkDrafter:
    """Read a checkpoint written here or by speculators (whose older versions also store the frozen weights).

    Raises:
        ConfigError: the config lacks a required field or describes an unsupported drafter.
        ValueError: tensors are missing, unknown or of another shape.
    """
    try:
        config = _own_config(json.loads((folder / "config.json").read_text()))
    except KeyError as error:
        raise ConfigError(f"{folder}/config.json lacks the field {error}: it describes no DSpark drafter") from error
    tensors = load_file(folder / "model.safetensors")
    absent = sorted(set(REDUCED_VOCAB_TENSORS) - set(tensors))
    if config.reduced_vocab and absent:
        raise ValueError(f"{folder}: missing tensors {absent}, which a reduced vocabulary needs")
    drafter = DSparkDrafter(config, tensors["t2d"].bool() if config.reduced_vocab else None)
    if "d2t" in tensors and not torch.equal(tensors["d2t"], drafter.d2t):
        raise ValueError(f"{folder}: d2t and t2d describe different vocabularies; the checkpoint is damaged")
    drafter.load_verifier(verifier)
    expected: dict[str, Tensor] = dict(drafter.trainable_state())
    if config.reduced_vocab:
        expected["lm_head.weight"] = drafter.lm_head
    for name in {"embed_tokens.weight", *REDUCED_VOCAB_TENSORS} - set(expected):
        tensors.pop(name, None)
    missing, unknown = set(expected) - set(tensors), set(tensors) - set(expected)
    if missing or unknown:
        raise ValueError(f"{folder}: missing tensors {sorted(missing)}, unknown tensors {sorted(unknown)}")
    with torch.no_grad():
        for name, parameter in expected.items():
            if parameter.shape != tensors[name].shape:
                raise ValueError(
                    f"{folder}: {name} has shape {tuple(tensors[name].shape)}, expected {tuple(parameter.shape)}"
                )
            parameter.copy_(tensors[name])
    return drafter


def _foreign_config(config: DrafterConfig, verifier_name_or_path: str, architectures: list[str]) -> dict[str, Any]:
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": FORMAT,
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "aux_hidden_state_layer_ids": list(config.aux_hidden_state_layer_ids),
        "mask_token_id": config.mask_token_id,
        # Always written: vLLM and llama.cpp read a missing key as false (https://github.com/vllm-project/vllm/issues/56792).
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": False,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
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
        "transformer_layer_config": {
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
        },
    }


def _own_config(raw: dict[str, Any]) -> DrafterConfig:
    layer = raw["transformer_layer_config"]
    rope = layer["rope_parameters"]
    # What would load and then draft by another rule than the one trained.
    for field, value, expected in (
        ("speculators_model_type", raw["speculators_model_type"], FORMAT),
        ("markov_head_type", raw.get("markov_head_type", "vanilla"), "vanilla"),
        ("sliding_window_non_causal", raw.get("sliding_window_non_causal", False), False),
        ("hidden_act", layer.get("hidden_act", "silu"), "silu"),
        ("rope_type", rope.get("rope_type", "default"), "default"),
    ):
        if value != expected:
            raise ConfigError(f"{field}={value!r} is not supported; supported: {expected!r}")
    layers = layer["num_hidden_layers"]
    kinds = [kind.removesuffix("_attention") for kind in layer.get("layer_types") or ["full"] * layers]
    layer_ids = tuple(raw["aux_hidden_state_layer_ids"])
    return DrafterConfig(
        hidden_size=layer["hidden_size"],
        intermediate_size=layer["intermediate_size"],
        num_layers=layers,
        num_heads=layer["num_attention_heads"],
        num_kv_heads=layer["num_key_value_heads"],
        head_dim=layer["head_dim"],
        verifier_vocab_size=layer["vocab_size"],
        draft_vocab_size=raw["draft_vocab_size"],
        # speculators does not record the verifier's depth; any depth above the last tap is consistent.
        verifier_num_layers=layer.get("verifier_num_hidden_layers", layer_ids[-1] + 1),
        block_size=raw["block_size"],
        aux_hidden_state_layer_ids=layer_ids,
        mask_token_id=raw["mask_token_id"],
        markov_rank=raw["markov_rank"],
        confidence_head=raw["enable_confidence_head"],
        confidence_with_markov=raw["confidence_head_with_markov"],
        sample_from_anchor=raw.get("sample_from_anchor", True),
        layer_kinds=cast("tuple[LayerKind, ...]", tuple(kinds)),
        sliding_window=layer.get("sliding_window") or layer["max_position_embeddings"],
        rms_norm_eps=layer["rms_norm_eps"],
        rope_theta=rope["rope_theta"],
        max_position_embeddings=layer["max_position_embeddings"],
        initializer_range=layer.get("initializer_range", 0.02),
    )
