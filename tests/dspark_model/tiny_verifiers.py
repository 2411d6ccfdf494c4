"""Real transformers models of every supported verifier family, tiny and random, each weight large enough to show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCAB, HIDDEN, LAYERS = 40, 16, 4
# 3 heads of 10: neither divides the hidden size, nor is their product equal to it.
ODD = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10}
EVEN = {"num_attention_heads": 4, "num_key_value_heads": 2}
# No family's default: a base that was not read shows.
THETA = 777.0
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": LAYERS,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-3, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
_SHARED = {"shared_expert_intermediate_size": 8}
_LINEAR = {
    "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
_PARTIAL = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.4}
_NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": THETA},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
_MIXED = ["sliding_attention", "full_attention"] * 2
_YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 32}
_QWEN3_5 = {**ODD, **_LINEAR, "rope_parameters": _PARTIAL}
_SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
_PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "head_dim": 4, "image_size": 28, "patch_size": 14,
}  # fmt: skip
_QWEN_VISION = {
    "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
}  # fmt: skip


_GEMMA3 = {**EVEN, "head_dim": 10, "rope_parameters": _NESTED, "layer_types": _MIXED}


def _text(classes: str, **choices: Any) -> tuple[str, str, dict[str, Any]]:
    return f"{classes}Config", f"{classes}ForCausalLM", {**_SIZES, **choices}


def _wrapper(classes: str, vision: dict[str, Any], **choices: Any) -> tuple[str, str, dict[str, Any]]:
    sections = {"text_config": {**_SIZES, **choices}, "vision_config": vision}
    return f"{classes}Config", f"{classes}ForConditionalGeneration", sections


# model_type: names of config and model class, arguments of the config.
MAKERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma": _text("Gemma", **ODD),
    "gemma2": _text("Gemma2", **EVEN, head_dim=10, final_logit_softcapping=1.5),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_SIZES, **_GEMMA3, "final_logit_softcapping": 1.5}),
    # No cap: transformers' wrapper ignores it, vLLM does not, and no published one has it.
    "gemma3": _wrapper("Gemma3", _SIGLIP, **_GEMMA3),
    "gpt_oss": _text("GptOss", **ODD, rope_parameters=_YARN, num_local_experts=4, num_experts_per_tok=2),
    "granite": _text("Granite", **EVEN, logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5),
    "llama": _text("Llama", **EVEN, head_dim=10),
    "mistral": _text("Mistral", **ODD),
    "mistral3": _wrapper("Mistral3", _PIXTRAL, **ODD, model_type="mistral"),
    "mixtral": _text("Mixtral", **EVEN, num_local_experts=4),
    "qwen2": _text("Qwen2", **EVEN),
    "qwen2_moe": _text("Qwen2Moe", **EVEN, **_EXPERTS, **_SHARED),
    "qwen3": _text("Qwen3", **ODD),
    "qwen3_moe": _text("Qwen3Moe", **ODD, **_EXPERTS),
    "qwen3_next": _text("Qwen3Next", **ODD, rope_parameters=_PARTIAL, **_EXPERTS, **_SHARED, **_LINEAR),
    "qwen3_vl": _wrapper("Qwen3VL", {**_QWEN_VISION, "deepstack_visual_indexes": [0]}, **ODD),
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**_SIZES, **_QWEN3_5}),
    "qwen3_5": _wrapper("Qwen3_5", _QWEN_VISION, **EVEN, **_LINEAR, head_dim=8, rope_parameters=_MROPE),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**_SIZES, **_QWEN3_5, **_EXPERTS, **_SHARED},
    ),
    "qwen3_5_moe": _wrapper(
        "Qwen3_5Moe", _QWEN_VISION, **EVEN, **_LINEAR, **_EXPERTS, **_SHARED, head_dim=8, rope_parameters=_MROPE
    ),
}  # fmt: skip


def make_verifier(family: str, *, tied: bool = False, **choices: Any) -> nn.Module:
    """A seeded model in evaluation mode; `choices` go to its (text) config."""
    import transformers

    config_name, model_name, arguments = MAKERS[family]
    nested = {**arguments.get("text_config", arguments), **choices, "tie_word_embeddings": tied}
    arguments = {**arguments, "text_config": nested} if "text_config" in arguments else nested
    config = getattr(transformers, config_name)(**{**arguments, "tie_word_embeddings": tied})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, model_name)(config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim > 1:
                    weight.normal_(std=weight.shape[-1] ** -0.5)
                elif name.endswith("norm.weight"):
                    weight.normal_(1.0, 0.5)
            model.get_output_embeddings().weight.normal_(std=0.5)
    return model


def text_model(model: nn.Module) -> nn.Module:
    """The stack of layers with embedding and final norm."""
    backbone: nn.Module = model.get_decoder()
    return backbone


@torch.no_grad()
def forward(model: nn.Module, ids_1T: Tensor) -> tuple[Tensor, tuple[Tensor, ...], Tensor, list[Tensor]]:
    """Logits, transformers' tuple of states, the input of the final norm, and the input of each layer."""
    prenorm: list[Tensor] = []
    inputs: list[Tensor] = []

    def keep(into: list[Tensor]) -> Callable[..., None]:
        return lambda _, args, kwargs: into.append((args or (kwargs["hidden_states"],))[0])

    stack = text_model(model)
    modules = [(stack.norm, prenorm), *((layer, inputs) for layer in stack.layers)]
    hooks = [module.register_forward_pre_hook(keep(into), with_kwargs=True) for module, into in modules]
    output = model(input_ids=ids_1T, output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    return output.logits, output.hidden_states, prenorm[0], inputs
