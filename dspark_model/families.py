"""Verifier families: what a `config.json` says about geometry, norms, logits and tensor names.

Missing fields mean what they mean to the installed transformers, whose config classes read the mapping: hub configs
leave out whatever equals a class default (Gemma 3's text section names no heads and no vocabulary).

A draft is a Qwen3-style stack that vLLM runs as `Qwen3DSparkModel`, whatever its verifier is. Of the verifier's
arithmetic only this enters it:

- The rows of the embedding, as stored. Gemma multiplies looked-up rows by sqrt(hidden_size) and Granite by
  `embedding_multiplier`; vLLM's draft does not, so the draft is trained without.
- The rows of the head. Gemma's logit soft-cap bends the verifier's logits, which are the targets; vLLM's draft has
  none, so the drafter's own logits have none.
- The gain of the final norm, where the drafter's own final norm starts. It is kept folded: Gemma, Qwen3-Next and
  Qwen3.5 store w for a gain of 1 + w (with the plain rule training converges to wrong targets,
  https://github.com/vllm-project/speculators/issues/1098), and Granite divides logits by `logits_scaling`, which is a
  smaller gain.
- Of the rope settings rope_theta alone. Scaling, `partial_rotary_factor` and multimodal sections stay out, because the
  drafter's forward turns whole heads by plain positions and an engine would honour what the config says
  (https://github.com/deepseek-ai/DeepSpec/issues/71).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark_model.config import ConfigError, DrafterConfig, LayerKind, default_layer_ids


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What tells a family apart that its config does not say."""

    norm_offset: float = 0.0
    experts: bool = False


_PLAIN, _EXPERTS = _Family(), _Family(experts=True)
_GEMMA = _Family(norm_offset=1.0)

# By model_type of the text model. Each is compared with its transformers model in tests/dspark_model.
FAMILIES: Mapping[str, _Family] = {
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt_oss": _EXPERTS,
    "granite": _PLAIN,
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "mixtral": _EXPERTS,
    "qwen2": _PLAIN,
    "qwen2_moe": _EXPERTS,
    "qwen3": _PLAIN,
    "qwen3_moe": _EXPERTS,
    "qwen3_next": _Family(norm_offset=1.0, experts=True),
    "qwen3_5_text": _Family(norm_offset=1.0),
    "qwen3_5_moe_text": _Family(norm_offset=1.0, experts=True),
    "qwen3_vl_text": _PLAIN,
}
# Vision-language wrappers, whose text model is described in their `text_config`.
WRAPPERS = ("gemma3", "mistral3", "qwen3_5", "qwen3_5_moe", "qwen3_vl")
SUPPORTED_VERIFIERS = tuple(sorted((*FAMILIES, *WRAPPERS)))

# Where the text model sits in a file: alone, in a wrapper (as saved today and by older wrappers), or saved bare.
_BACKBONES = ("model.", "model.language_model.", "language_model.model.", "")
EMBEDDING_STEMS = tuple(f"{backbone}embed_tokens" for backbone in _BACKBONES)
NORM_STEMS = tuple(f"{backbone}norm" for backbone in _BACKBONES)
HEAD_STEMS = ("lm_head", "language_model.lm_head")


@dataclass(frozen=True, kw_only=True)
class VerifierGeometry:
    """What a drafter needs to know about its verifier's text model."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Not always hidden_size / num_heads, nor are all of their products equal to hidden_size."""
    intermediate_size: int
    """Of a dense MLP: 3 * hidden_size where the verifier's MLPs are mixtures of experts."""
    vocab_size: int
    """Rows of embedding and head that are tokens; files may hold more (padding)."""
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    norm_offset: float
    """Added to the stored weight of the final norm to make its gain: 0 or 1."""
    logit_divisor: float
    """The verifier divides its logits by this (Granite)."""
    logit_softcap: float | None
    """c of c * tanh(logits / c), or None. As vLLM reads it: transformers' Gemma 3 wrapper ignores it."""
    tied_embeddings: bool
    """The head is the embedding, unless a head is stored."""

    @classmethod
    def from_config(cls, verifier_config: Mapping[str, Any]) -> VerifierGeometry:
        """Read a verifier's `config.json`.

        Raises:
            ConfigError: unsupported family, or a config that transformers refuses.
        """
        wrapper, text = _transformers_configs(verifier_config)
        family = FAMILIES[text.model_type]
        hidden_size, num_heads = text.hidden_size, text.num_attention_heads
        head_dim = getattr(text, "head_dim", None)
        if not head_dim and hidden_size % num_heads:
            raise ConfigError(
                f"verifier hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}, and its "
                "config.json has no head_dim: add the head_dim that its q_proj weights show"
            )
        return cls(
            hidden_size=hidden_size,
            num_layers=text.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or num_heads,
            head_dim=head_dim or hidden_size // num_heads,
            intermediate_size=3 * hidden_size if family.experts else text.intermediate_size,
            vocab_size=text.vocab_size,
            rms_norm_eps=text.rms_norm_eps,
            rope_theta=_rope_theta(text.rope_parameters),
            max_position_embeddings=text.max_position_embeddings,
            norm_offset=family.norm_offset,
            logit_divisor=getattr(text, "logits_scaling", 1.0),
            logit_softcap=getattr(text, "final_logit_softcapping", None),
            # Wrappers disagree on which level carries the flag.
            tied_embeddings=bool(wrapper.tie_word_embeddings or text.tie_word_embeddings),
        )


def derive_config(
    verifier_config: Mapping[str, Any],
    *,
    layer_kinds: tuple[LayerKind, ...],
    block_size: int,
    draft_vocab_size: int | None,
    mask_token_id: int,
    markov_rank: int,
    confidence_head: bool,
    sample_from_anchor: bool,
    sliding_window: int,
    aux_hidden_state_layer_ids: tuple[int, ...] | None = None,
    intermediate_size: int | None = None,
) -> DrafterConfig:
    """Take geometry from a verifier's `config.json` and add the recipe's choices.

    Args:
        verifier_config: the verifier's `config.json` as a mapping.
        layer_kinds: one per drafter layer (vLLM's CPU runner cannot mix kinds).
        block_size: slots per block.
        draft_vocab_size: None for the verifier's whole vocabulary.
        mask_token_id: verifier id whose embedding fills the slots after the anchor.
        markov_rank: 0 for none.
        confidence_head: whether to train one; it reads the Markov embedding when there is one.
        sample_from_anchor: slot layout, see `DrafterConfig`.
        sliding_window: context tokens a sliding layer sees.
        aux_hidden_state_layer_ids: None for `default_layer_ids`.
        intermediate_size: None for the verifier's; 3 * hidden for mixture-of-experts verifiers.

    Raises:
        ConfigError: unsupported verifier family or contradicting choices.
    """
    verifier = VerifierGeometry.from_config(verifier_config)
    if aux_hidden_state_layer_ids is None:
        aux_hidden_state_layer_ids = default_layer_ids(verifier.num_layers)
    return DrafterConfig(
        hidden_size=verifier.hidden_size,
        intermediate_size=verifier.intermediate_size if intermediate_size is None else intermediate_size,
        num_layers=len(layer_kinds),
        num_heads=verifier.num_heads,
        num_kv_heads=verifier.num_kv_heads,
        head_dim=verifier.head_dim,
        verifier_vocab_size=verifier.vocab_size,
        draft_vocab_size=verifier.vocab_size if draft_vocab_size is None else draft_vocab_size,
        verifier_num_layers=verifier.num_layers,
        block_size=block_size,
        aux_hidden_state_layer_ids=aux_hidden_state_layer_ids,
        mask_token_id=mask_token_id,
        markov_rank=markov_rank,
        confidence_head=confidence_head,
        confidence_with_markov=confidence_head and markov_rank > 0,
        sample_from_anchor=sample_from_anchor,
        layer_kinds=layer_kinds,
        sliding_window=sliding_window,
        rms_norm_eps=verifier.rms_norm_eps,
        rope_theta=verifier.rope_theta,
        max_position_embeddings=verifier.max_position_embeddings,
    )


def _transformers_configs(verifier_config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The verifier's config as transformers reads it, and that of its text model (the same where nothing wraps it)."""
    family = verifier_config.get("model_type")
    section = verifier_config.get("text_config") if family in WRAPPERS else verifier_config
    if family not in SUPPORTED_VERIFIERS:
        raise ConfigError(
            f"verifier model_type={family!r} is not supported; supported: {', '.join(SUPPORTED_VERIFIERS)}"
        )
    # Sizes that every config.json states: a class default would be another model's.
    absent = [name for name in ("hidden_size", "num_hidden_layers") if not (section or {}).get(name)]
    if absent:
        where = "text_config of the verifier's config.json" if family in WRAPPERS else "the verifier's config.json"
        raise ConfigError(f"{where} (model_type={family!r}) lacks {', '.join(absent)}: it describes no whole model")
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        raise ConfigError(
            f"verifier model_type={family!r} is unknown to the installed transformers {__version__}: "
            "install a later one"
        )
    try:
        wrapper = CONFIG_MAPPING[family].from_dict(copy.deepcopy(dict(verifier_config)))
    except Exception as error:  # its validators raise errors of many kinds
        raise ConfigError(f"transformers {__version__} refuses this {family} config.json: {error}") from error
    text = wrapper.get_text_config(decoder=True)
    if text.model_type not in FAMILIES:
        raise ConfigError(
            f"text_config.model_type={text.model_type!r} inside {family!r} is not supported; "
            f"supported: {', '.join(FAMILIES)}"
        )
    return wrapper, text


def _rope_theta(rope: Mapping[str, Any]) -> float:
    """The base of the rotary frequencies.

    Gemma 3 has one base per layer kind (10,000 sliding, 1,000,000 full). A draft has one for all its layers, and may
    have full ones: the smaller base repeats itself within long contexts, the larger serves short ones as well.
    """
    return float(rope.get("full_attention", rope)["rope_theta"])
