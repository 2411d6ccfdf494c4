"""Architecture of a drafter: one frozen dataclass. `dspark_model.families` derives it from a verifier's config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

LayerKind = Literal["full", "sliding"]
MarkovKind = Literal["vanilla", "gated", "rnn"]


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
        self._check_sizes()
        self._check_layers()
        self._check_vocabulary()
        if self.markov_head_type not in get_args(MarkovKind):
            raise ConfigError(
                f"markov_head_type={self.markov_head_type!r} must be one of {', '.join(get_args(MarkovKind))}"
            )
        if self.markov_rank < 0:
            raise ConfigError(f"markov_rank={self.markov_rank} must be 0 (no Markov head) or more")
        if not self.sample_from_anchor and self.block_size < 2:
            raise ConfigError(
                f"block_size={self.block_size} with sample_from_anchor=False proposes no token, as slot 0 repeats the "
                "anchor: use at least 2"
            )
        if self.confidence_with_markov and not self.markov_rank:
            raise ConfigError(
                f"confidence_with_markov=True needs a Markov head, and markov_rank={self.markov_rank} means none: set "
                "markov_rank above 0 or confidence_with_markov=False"
            )
        check_layer_ids(self.aux_hidden_state_layer_ids, self.verifier_num_layers)

    def _check_sizes(self) -> None:
        positive = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for field in (*positive, "block_size", "draft_vocab_size", "max_position_embeddings"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)} must be at least 1")
        for field in ("rms_norm_eps", "rope_theta", "initializer_range"):
            if not getattr(self, field) > 0:
                raise ConfigError(f"{field}={getattr(self, field)} must be above 0")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}: "
                "each key head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs")

    def _check_layers(self) -> None:
        if len(self.layer_kinds) != self.num_layers:
            raise ConfigError(
                f"layer_kinds={list(self.layer_kinds)} has {len(self.layer_kinds)} entries; it must name each of the "
                f"{self.num_layers} layers (num_layers)"
            )
        if not set(self.layer_kinds) <= set(get_args(LayerKind)):
            raise ConfigError(f"layer_kinds={list(self.layer_kinds)} must be of {', '.join(get_args(LayerKind))}")
        if "sliding" in self.layer_kinds and self.sliding_window < 1:
            raise ConfigError(f"sliding_window={self.sliding_window} must be at least 1: a slot sees itself")

    def _check_vocabulary(self) -> None:
        if self.draft_vocab_size > self.verifier_vocab_size:
            raise ConfigError(
                f"draft_vocab_size={self.draft_vocab_size} is above the verifier's {self.verifier_vocab_size} "
                "(verifier_vocab_size): the drafter can only propose tokens that the verifier has; lower it"
            )
        if not 0 <= self.mask_token_id < self.verifier_vocab_size:
            raise ConfigError(
                f"mask_token_id={self.mask_token_id} is outside the verifier's embedding, whose rows are "
                f"0..{self.verifier_vocab_size - 1} (verifier_vocab_size={self.verifier_vocab_size}): "
                "name an id in that range that never occurs in the data"
            )

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
    named = f"aux_hidden_state_layer_ids={list(layer_ids)}"
    if verifier_num_layers < 2:
        raise ConfigError(
            f"verifier_num_layers={verifier_num_layers} leaves no layer to take states from: "
            "a verifier needs at least 2"
        )
    allowed = f"must lie in 1..{verifier_num_layers - 1}"
    if not layer_ids:
        raise ConfigError(f"{named} names no layer: ids must be distinct and ascending, at least one, and {allowed}")
    if list(layer_ids) != sorted(set(layer_ids)):
        raise ConfigError(
            f"{named} must be distinct and ascending, as vLLM hands over the states of a sorted set: "
            f"write {sorted(set(layer_ids))}"
        )
    if layer_ids[0] < 1:
        raise ConfigError(
            f"{named} {allowed}, but contains {layer_ids[0]}: id i is the state after i verifier layers, and 0 is the "
            "embedding; start at 1"
        )
    if layer_ids[-1] >= verifier_num_layers:
        raise ConfigError(
            f"{named} {allowed}, but contains {layer_ids[-1]}: the verifier has {verifier_num_layers} layers and its "
            f"last state is read separately; use at most {verifier_num_layers - 1}"
        )


def default_layer_ids(verifier_num_layers: int) -> tuple[int, ...]:
    """Early, middle and late states, the field's default [2, n/2, n-3], kept inside 1..n-1 for tiny models."""
    wanted = (2, verifier_num_layers // 2, verifier_num_layers - 3)
    return tuple(sorted({min(max(i, 1), verifier_num_layers - 1) for i in wanted}))
