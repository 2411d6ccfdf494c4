"""Checkpoints as other trainers write them: key by key and tensor by tensor, without our own writer.

What speculators 0.9.0 wrote for a tiny drafter was read off its files; DeepSpec's config off its source.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from dspark_model.config import DrafterConfig
from dspark_model.drafter import DSparkDrafter


def speculators_config(config: DrafterConfig) -> dict[str, Any]:
    """config.json of speculators 0.9.0."""
    return {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"": "config.DSparkSpeculatorConfig"},
        "aux_hidden_state_layer_ids": list(config.aux_hidden_state_layer_ids),
        "block_size": config.block_size,
        "confidence_head_with_markov": config.confidence_with_markov,
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": "bfloat16",
        "enable_confidence_head": config.confidence_head,
        "markov_head_type": config.markov_head_type,
        "markov_rank": config.markov_rank,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": config.block_size - (not config.sample_from_anchor),
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-0.6B"},
        },
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "transformer_layer_config": qwen3_config(config),
        "transformers_version": "5.19.0",
    }


def deepspec_config(config: DrafterConfig) -> dict[str, Any]:
    """config.json of DeepSpec: the verifier's, with fewer layers and the drafter's fields."""
    return qwen3_config(config) | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": config.block_size,
        "confidence_head_with_markov": config.confidence_with_markov,
        "dtype": "bfloat16",
        "enable_confidence_head": config.confidence_head,
        "markov_head_type": config.markov_head_type,
        "markov_rank": config.markov_rank,
        "mask_token_id": config.mask_token_id,
        "num_anchors": 512,
        "num_target_layers": config.verifier_num_layers,
        "target_layer_ids": [i - 1 for i in config.aux_hidden_state_layer_ids],
        "transformers_version": "5.10.2",
    }


def qwen3_config(config: DrafterConfig) -> dict[str, Any]:
    """transformers' Qwen3Config as it is saved."""
    sliding = "sliding" in config.layer_kinds
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": [f"{kind}_attention" for kind in config.layer_kinds],
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": None,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "sliding_window": config.sliding_window if sliding else None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": sliding,
        "vocab_size": config.verifier_vocab_size,
    }


def stored_tensors(drafter: DSparkDrafter, *, frozen: bool) -> dict[str, Tensor]:
    """bfloat16 tensors; `frozen`: embedding and head as well, as older speculators and DeepSpec store them."""
    weights = dict(drafter.trainable_state())
    if frozen or drafter.config.reduced_vocab:
        weights["lm_head.weight"] = drafter.lm_head
    if frozen:
        weights["embed_tokens.weight"] = drafter.embed_tokens
    tensors = {name: value.detach().bfloat16().contiguous() for name, value in weights.items()}
    if drafter.config.reduced_vocab:
        tensors |= {"d2t": drafter.d2t.clone(), "t2d": drafter.t2d.clone()}
    return tensors


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, shards: int = 1) -> Path:
    """Write a checkpoint, in `shards` files with an index if more than one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = sorted(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
