"""Architecture of a drafter: one frozen dataclass, derived from the verifier's config plus a few choices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

LayerKind = Literal["full", "sliding"]
MarkovKind = Literal["vanilla", "gated", "rnn"]

# Families whose final norm is a plain RMSNorm gain and whose logits are a plain matrix product. Gemma and Qwen3.5
# use (1 + w) norms or soft caps: training on them with the plain rule converges to the wrong targets
# (https://github.com/vllm-project/speculators/issues/1098), so they are refused until supported.
SUPPORTED_VERIFIERS = ("llama", "qwen2", "qwen3", "qwen3_moe")


class ConfigError(ValueError):
    """A drafter that cannot be built: names the field, its value, what was expected and what to do."""


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Everything that fixes a drafter's shapes and masks.

    Raises:
        ConfigError: on construction, when fields contradict each other or what vLLM can load.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    verifier_vocab_size: int
    draft_vocab_size: int
    verifier_num_layers: int
    block_size: int
    aux_hidden_state_layer_ids: tuple[int, ...]
    """Index i is the residual stream after i verifier layers (0 is the embedding), as in speculators and vLLM."""
    mask_token_id: int
    markov_rank: int
    """0 means no Markov head."""
    markov_head_type: MarkovKind = "vanilla"
    """How the bias is formed, see `dspark_model.heads`. vLLM serves vanilla only."""
    confidence_head: bool
    confidence_with_markov: bool
    sample_from_anchor: bool
    """True: slot k predicts the token at anchor + k + 1. False (the DFlash layout): at anchor + k."""
    layer_kinds: tuple[LayerKind, ...]
    """full: bidirectional inside the block. sliding: causal inside the block, windowed context."""
    sliding_window: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        positive = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for field in (*positive, "block_size", "draft_vocab_size"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if len(self.layer_kinds) != self.num_layers:
            raise ConfigError(f"layer_kinds={list(self.layer_kinds)} must name each of the {self.num_layers} layers")
        if not set(self.layer_kinds) <= set(get_args(LayerKind)):
            raise ConfigError(f"layer_kinds={list(self.layer_kinds)} must be of {', '.join(get_args(LayerKind))}")
        if "sliding" in self.layer_kinds and self.sliding_window < 1:
            raise ConfigError(f"sliding_window={self.sliding_window} must be at least 1: a slot sees itself")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs")
        if self.markov_head_type not in get_args(MarkovKind):
            raise ConfigError(
                f"markov_head_type={self.markov_head_type!r} must be one of {', '.join(get_args(MarkovKind))}"
            )
        if self.markov_rank < 0:
            raise ConfigError(f"markov_rank={self.markov_rank} must be 0 (no Markov head) or more")
        if self.draft_vocab_size > self.verifier_vocab_size:
            raise ConfigError(
                f"draft_vocab_size={self.draft_vocab_size} is above the verifier's {self.verifier_vocab_size}"
            )
        if not 0 <= self.mask_token_id < self.verifier_vocab_size:
            raise ConfigError(f"mask_token_id={self.mask_token_id} is outside the verifier's vocabulary")
        if not self.sample_from_anchor and self.block_size < 2:
            raise ConfigError("block_size=1 with sample_from_anchor=False proposes no token: use at least 2")
        if self.confidence_with_markov and not self.markov_rank:
            raise ConfigError("confidence_with_markov=True needs a Markov head: markov_rank is 0")
        check_layer_ids(self.aux_hidden_state_layer_ids, self.verifier_num_layers)

    @property
    def proposals_per_block(self) -> int:
        """Tokens proposed per block: slot 0 of the DFlash layout predicts nothing."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def reduced_vocab(self) -> bool:
        """Whether the drafter proposes from a subset of the verifier's vocabulary."""
        return self.draft_vocab_size < self.verifier_vocab_size

    @property
    def aux_width(self) -> int:
        """Width F of the concatenated verifier states that enter `fc`."""
        return len(self.aux_hidden_state_layer_ids) * self.hidden_size

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DrafterConfig:
        """Inverse of `to_dict` (JSON turns tuples into lists)."""
        values = dict(raw)
        for field in ("aux_hidden_state_layer_ids", "layer_kinds"):
            values[field] = tuple(values[field])
        return cls(**values)


def check_layer_ids(layer_ids: tuple[int, ...], verifier_num_layers: int) -> None:
    """Refuse ids that vLLM would capture otherwise than they were trained.

    vLLM captures a sorted set; id `num_layers` collides with the last state during extraction, and 0 is the
    embedding, which vLLM does not tap for every model.

    Raises:
        ConfigError: ids not distinct, not ascending, or outside 1..num_layers-1.
    """
    if not layer_ids or list(layer_ids) != sorted(set(layer_ids)):
        raise ConfigError(f"aux_hidden_state_layer_ids={list(layer_ids)} must be distinct and ascending")
    if layer_ids[0] < 1 or layer_ids[-1] >= verifier_num_layers:
        raise ConfigError(
            f"aux_hidden_state_layer_ids={list(layer_ids)} must lie in 1..{verifier_num_layers - 1}: "
            f"the verifier has {verifier_num_layers} layers and its last state is read separately"
        )


def default_layer_ids(verifier_num_layers: int) -> tuple[int, ...]:
    """Early, middle and late states, the field's default [2, n/2, n-3], kept inside 1..n-1 for tiny models."""
    wanted = (2, verifier_num_layers // 2, verifier_num_layers - 3)
    return tuple(sorted({min(max(i, 1), verifier_num_layers - 1) for i in wanted}))


def derive_config(
    verifier_config: Mapping[str, Any],
    *,
    num_layers: int,
    block_size: int,
    draft_vocab_size: int | None,
    mask_token_id: int,
    markov_rank: int,
    confidence_head: bool,
    sample_from_anchor: bool,
    attention: LayerKind,
    sliding_window: int,
    aux_hidden_state_layer_ids: tuple[int, ...] | None = None,
    intermediate_size: int | None = None,
) -> DrafterConfig:
    """Take geometry from a verifier's `config.json` and add the recipe's choices.

    Only rope_theta is taken of the verifier's rope settings: scaling fields that the drafter's forward does not
    use must not reach its config (https://github.com/deepseek-ai/DeepSpec/issues/71).

    Args:
        verifier_config: the verifier's `config.json` as a mapping.
        num_layers: drafter layers.
        block_size: slots per block.
        draft_vocab_size: None for the verifier's whole vocabulary.
        mask_token_id: verifier id whose embedding fills the slots after the anchor.
        markov_rank: 0 for none.
        confidence_head: whether to train one; it reads the Markov embedding when there is one.
        sample_from_anchor: slot layout, see `DrafterConfig`.
        attention: kind of every layer (vLLM's CPU runner cannot mix kinds).
        sliding_window: context tokens a sliding layer sees.
        aux_hidden_state_layer_ids: None for `default_layer_ids`.
        intermediate_size: None for the verifier's; 3 * hidden for mixture-of-experts verifiers.

    Raises:
        ConfigError: unsupported verifier family or contradicting choices.
    """
    family = verifier_config.get("model_type")
    if family not in SUPPORTED_VERIFIERS:
        raise ConfigError(
            f"verifier model_type={family!r} is not supported; supported: {', '.join(SUPPORTED_VERIFIERS)}"
        )
    hidden_size, num_heads = verifier_config["hidden_size"], verifier_config["num_attention_heads"]
    rope = verifier_config.get("rope_parameters") or {}
    fallback_width = 3 * hidden_size if "num_experts" in verifier_config else verifier_config["intermediate_size"]
    return DrafterConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or fallback_width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=verifier_config.get("num_key_value_heads") or num_heads,
        head_dim=verifier_config.get("head_dim") or hidden_size // num_heads,
        verifier_vocab_size=verifier_config["vocab_size"],
        draft_vocab_size=verifier_config["vocab_size"] if draft_vocab_size is None else draft_vocab_size,
        verifier_num_layers=verifier_config["num_hidden_layers"],
        block_size=block_size,
        aux_hidden_state_layer_ids=(
            aux_hidden_state_layer_ids or default_layer_ids(verifier_config["num_hidden_layers"])
        ),
        mask_token_id=mask_token_id,
        markov_rank=markov_rank,
        confidence_head=confidence_head,
        confidence_with_markov=confidence_head and markov_rank > 0,
        sample_from_anchor=sample_from_anchor,
        layer_kinds=(attention,) * num_layers,
        sliding_window=sliding_window,
        rms_norm_eps=verifier_config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or verifier_config.get("rope_theta") or 10000.0),
        max_position_embeddings=verifier_config["max_position_embeddings"],
    )
