"""Everything one training run needs, as one JSON file: `python -m dspark_model.train --config train.json`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from dspark_model.config import ConfigError, DrafterConfig
from dspark_model.losses import LOSS_TERMS, Weighting
from dspark_model.precision import Dtype

Optimizer = Literal["adamw", "muon"]
Schedule = Literal["cosine", "linear", "constant"]
PATHS = ("verifier", "examples", "hidden_states", "vocab", "output", "scratch")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Paths, architecture and the optimiser's decisions.

    Raises:
        ConfigError: on construction, for values out of range.
    """

    drafter: DrafterConfig
    verifier: Path
    """Hugging Face folder of the verifier (only embedding, head and final norm are read)."""
    examples: Path
    hidden_states: Path
    vocab: Path
    """safetensors with `t2d`, bool [V]."""
    output: Path
    """Receives the best weights and the history."""
    scratch: Path
    """Receives resumable checkpoints."""
    steps: int
    tokens_per_step: int
    anchors_per_step: int
    optimizer: Optimizer
    """muon: Muon for the matrices of layers and fc, AdamW for the rest, at one learning rate."""
    learning_rate: float
    warmup_share: float
    schedule: Schedule
    weight_decay: float
    max_grad_norm: float
    loss: dict[str, float]
    loss_decay_gamma: float
    slot_weighting: Weighting
    """decay: exp(-slot / loss_decay_gamma). dpace: by what each slot adds to the accepted length."""
    dpace_alpha: float
    confidence_loss_weight: float
    confidence_slots: int
    """Slots per step that train the confidence head when the loss itself does not read the verifier's distribution."""
    detach_confidence: bool
    validate_every: int
    checkpoint_every_seconds: float
    num_speculative_tokens: int
    dtype: Dtype
    """Of matrix products, see `dspark_model.precision`; master weights are float32."""
    seed: int

    def __post_init__(self) -> None:
        unknown = set(self.loss) - set(LOSS_TERMS)
        if unknown or not any(self.loss.values()):
            raise ConfigError(f"loss={self.loss} must weight at least one of {', '.join(LOSS_TERMS)} and nothing else")
        for field in ("steps", "tokens_per_step", "anchors_per_step", "validate_every"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)} must be at least 1")
        for field, allowed in (
            ("optimizer", Optimizer),
            ("schedule", Schedule),
            ("dtype", Dtype),
            ("slot_weighting", Weighting),
        ):
            if getattr(self, field) not in get_args(allowed):
                raise ConfigError(f"{field}={getattr(self, field)!r} must be one of {', '.join(get_args(allowed))}")
        if not 1 <= self.num_speculative_tokens <= self.drafter.proposals_per_block:
            raise ConfigError(
                f"num_speculative_tokens={self.num_speculative_tokens} must lie in "
                f"1..{self.drafter.proposals_per_block}, what a block proposes"
            )

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2, default=str) + "\n")

    @classmethod
    def load(cls, path: Path) -> TrainConfig:
        """Read what `save` wrote.

        Raises:
            ConfigError: missing or unknown fields.
        """
        raw: dict[str, Any] = json.loads(path.read_text())
        known = {field.name for field in dataclasses.fields(cls)}
        if set(raw) != known:
            raise ConfigError(f"{path}: missing {sorted(known - set(raw))}, unknown {sorted(set(raw) - known)}")
        for name in PATHS:
            raw[name] = Path(raw[name])
        raw["drafter"] = DrafterConfig.from_dict(raw["drafter"])
        return cls(**raw)

    def identity(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to be continued, as flat JSON data: all but paths and intervals."""
        raw = dataclasses.asdict(self)
        for name in (*PATHS, "checkpoint_every_seconds"):
            del raw[name]
        drafter = {f"drafter.{name}": value for name, value in raw.pop("drafter").items()}
        flat: dict[str, Any] = json.loads(json.dumps({**drafter, **raw}))
        return flat


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`name: old -> new` for each setting of `TrainConfig.identity` that differs."""
    names = sorted(old.keys() | new.keys())
    return [f"{name}: {old.get(name)!r} -> {new.get(name)!r}" for name in names if old.get(name) != new.get(name)]
