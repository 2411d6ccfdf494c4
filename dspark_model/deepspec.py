"""Checkpoints of deepseek-ai/DeepSpec (MIT), read for evaluation or as a warm start.

Read in its source (`modeling/dspark/{common,markov_head}.py`, `modeling/dspark/qwen3/{config,modeling}.py`), and how
each point maps here:

- Config: the verifier's Qwen3 config, flat, with the drafter's fields beside it; `architectures` is Qwen3DSparkModel.
- `target_layer_ids` counts layers from 0 and names their **output**: our id minus one. -1 is the embedding. The states
  are transformers' `hidden_states[id + 1]`, so the last layer's (there after the final norm) DeepSpec refuses as well.
- `fc` reads the states concatenated in that ascending order; context = hidden_norm(fc(states)); every layer projects it
  with its own k_proj and v_proj. Separate q, k, v, gate and up projections: nothing is stored fused.
- Tensors have our names, `markov_head.{gate,joint}_proj` and `confidence_head.proj` (with bias) included.
- Slot 0 is the anchor and predicts the next token; the block is bidirectional and sees all of its context. DeepSpec's
  own attention has no window, whatever a config says.
- Full vocabulary. `embed_tokens` and `lm_head` are stored: frozen copies of the verifier's.
- `norm` is the drafter's own; the verifier's final norm only shapes the training targets.
- Rope is transformers' Qwen3: neox halves, whole heads.

DeepSpec's DFlash baseline is the same class with markov_rank 0. Its confidence head runs in the model's dtype, ours in
float32: probabilities differ by rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark_model.config import ConfigError, DrafterConfig
from dspark_model.foreign_config import read_layers, require

ARCHITECTURE = "Qwen3DSparkModel"
TRAINER_ARCHITECTURE = "DSparkDraftModel"
"""Name under which vLLM also finds the same Qwen3 drafter; alone it is DeepSeek V4's."""
NOT_READ = {
    "Gemma4DSparkModel": "a Gemma 4 stack: rope and norms of another kind, a scaled embedding, soft-capped logits",
    "Qwen3OmniDSparkModel": "a drafter of Qwen3-Omni's thinker, whose states are taken after its DeepStack",
    "K3DSparkModel": "a Kimi K3 drafter with latent attention",
    "DSparkV41DraftModel": "DeepSeek V4.1's drafter, mixture-of-experts stages inside the verifier's checkpoint",
    "DSparkDraftModel": "DeepSeek V4's drafter, mixture-of-experts stages inside the verifier's checkpoint",
}
"""Public DSpark architectures that are no Qwen3 stack, and why."""


def is_deepspec(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is a DSpark drafter's flat one, readable here or not."""
    names = set(raw.get("architectures") or [])
    return "speculators_config" not in raw and bool(names & {ARCHITECTURE, *NOT_READ})


def refuse_other_architectures(raw: Mapping[str, Any]) -> None:
    """Refuse drafters that are no Qwen3 stack.

    Raises:
        ConfigError: names the architecture.
    """
    names = list(raw.get("architectures") or [])
    if ARCHITECTURE in names or (TRAINER_ARCHITECTURE in names and raw.get("model_type") == "qwen3"):
        return
    known = next((name for name in names if name in NOT_READ), None)
    what = f": {NOT_READ[known]}" if known else ""
    raise ConfigError(
        f"architectures={names} is not supported{what}; supported: [{ARCHITECTURE!r}], a stack of Qwen3 layers"
    )


def read_config(raw: Mapping[str, Any]) -> DrafterConfig:
    """The drafter that a DeepSpec config.json describes.

    Raises:
        ConfigError: another architecture, a required key is missing, or what our forward cannot do.
    """
    refuse_other_architectures(raw)
    fields = read_layers(raw, non_causal_windows=False)
    if "sliding" in fields["layer_kinds"]:
        raise ConfigError(
            f"layer_types={raw.get('layer_types')} is not supported in a DeepSpec checkpoint: its trainer writes "
            "full_attention and masks no window, so how a sliding layer was trained is unknown"
        )
    draft_vocab = raw.get("draft_vocab_size") or fields["verifier_vocab_size"]
    if draft_vocab != fields["verifier_vocab_size"]:
        raise ConfigError(
            f"draft_vocab_size={draft_vocab} is not supported in a DeepSpec checkpoint, which has the verifier's whole "
            f"vocabulary ({fields['verifier_vocab_size']})"
        )
    target_ids = list(require(raw, "target_layer_ids"))
    if target_ids != sorted(set(target_ids)) or (target_ids and target_ids[0] < 0):
        raise ConfigError(
            f"target_layer_ids={target_ids} must be distinct, ascending and 0 or more: -1 is the embedding, which vLLM "
            "does not tap for every model"
        )
    layer_ids = tuple(i + 1 for i in target_ids)
    rank, confidence = require(raw, "markov_rank"), require(raw, "enable_confidence_head")
    return DrafterConfig(
        **fields,
        draft_vocab_size=draft_vocab,
        verifier_num_layers=require(raw, "num_target_layers"),
        block_size=require(raw, "block_size"),
        aux_hidden_state_layer_ids=layer_ids,
        mask_token_id=require(raw, "mask_token_id"),
        markov_rank=rank,
        markov_head_type=raw.get("markov_head_type") or "vanilla",
        confidence_head=confidence,
        confidence_with_markov=bool(raw.get("confidence_head_with_markov")) if confidence else False,
        sample_from_anchor=raw.get("sample_from_anchor", True),
    )
