"""What `dspark_model.inspect` finds: a checkpoint's facts in our terms, and what a finding is.

Facts are read leniently, so that a checkpoint that nothing can load is still described.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dspark_model import deepspec, foreign_config
from dspark_model.checkpoint_files import CONFIG, CheckpointFiles
from dspark_model.config import ConfigError
from dspark_model.families import VerifierGeometry

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""error: vLLM refuses, or drafts by another rule than trained. warning: less than the owner expects, or unusual."""


_TOP_NUMBERS = ("block_size", "draft_vocab_size", "markov_rank", "mask_token_id", "num_target_layers")
_LAYER_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
)


@dataclass(frozen=True)
class Finding:
    """Something that vLLM would do otherwise than a checkpoint's owner may expect."""

    severity: Severity
    field: str
    """Of config.json, or a tensor."""
    found: str
    vllm: str
    """What vLLM 0.32 does, as read in its source."""
    remedy: str
    source: str = ""
    """Public issue, where there is one."""


@dataclass(frozen=True)
class Facts:
    """A checkpoint in either format, spelled our way."""

    files: CheckpointFiles
    speculators: bool
    """The speculators format; else DeepSpec's."""
    top: Mapping[str, Any]
    """config.json."""
    layer: Mapping[str, Any]
    """Settings of the draft's layers: a section of config.json, or the same mapping in DeepSpec's flat format."""
    verifier: VerifierGeometry | None
    """Known when the named verifier is a folder on this machine."""

    @classmethod
    def of(cls, folder: Path) -> Facts:
        """Read config and headers.

        Raises:
            FileNotFoundError: no checkpoint in the folder.
            ValueError: unreadable, no DSpark drafter, or a drafter that is no Qwen3 stack.
        """
        files = CheckpointFiles(folder)
        top = files.config
        if foreign_config.is_speculators(top):
            kind = top.get("speculators_model_type", foreign_config.FORMAT)
            if kind != foreign_config.FORMAT:
                raise ConfigError(
                    f"{folder}: speculators_model_type={kind!r} is another kind of drafter, not {foreign_config.FORMAT}"
                )
            layer = top.get("transformer_layer_config")
            layer = layer if isinstance(layer, dict) else {}
            facts = cls(files, True, top, layer, _verifier_of(top))
        elif deepspec.is_deepspec(top):
            deepspec.refuse_other_architectures(top)
            facts = cls(files, False, top, top, None)
        else:
            raise ConfigError(
                f"{folder / CONFIG} describes no DSpark drafter: architectures={top.get('architectures')}, "
                f"model_type={top.get('model_type')!r}"
            )
        facts._check_types()
        return facts

    def _check_types(self) -> None:
        config = self.files.folder / CONFIG
        for mapping, names, kind, what in (
            (self.top, ("transformer_layer_config", "speculators_config"), Mapping, "a JSON object"),
            (self.top, ("aux_hidden_state_layer_ids", "target_layer_ids", "architectures"), list, "a list"),
            (self.layer, ("rope_parameters", "rope_scaling"), Mapping, "a JSON object"),
            (self.layer, ("layer_types",), list, "a list"),
            (self.top, _TOP_NUMBERS, int, "a whole number"),
            (self.layer, _LAYER_NUMBERS, int, "a whole number"),
        ):
            for name in names:
                value = mapping.get(name)
                if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
                    raise ValueError(f"{config}: {name}={value!r} is not {what}")
        ids = self.top.get(self.layer_ids_field) or []
        if not all(isinstance(i, int) for i in ids):
            raise ValueError(f"{config}: {self.layer_ids_field}={ids} must hold whole numbers")

    @property
    def section(self) -> Mapping[str, Any]:
        """`speculators_config`; empty in DeepSpec's format."""
        return self.top.get("speculators_config") or {}

    @property
    def layer_ids_field(self) -> str:
        """How the format calls the tapped layers."""
        return "aux_hidden_state_layer_ids" if self.speculators else "target_layer_ids"

    @property
    def layer_ids(self) -> list[int]:
        """In our numbering: i is the state after i verifier layers; empty where none are stored."""
        stored = self.top.get(self.layer_ids_field) or []
        return stored if self.speculators else [i + 1 for i in stored]

    @property
    def verifier_num_layers(self) -> int | None:
        """Depth of the verifier, where anything says so."""
        known = self.layer.get("verifier_num_hidden_layers") or self.top.get("num_target_layers")
        return known or (self.verifier.num_layers if self.verifier else None)

    @property
    def vocab_size(self) -> int | None:
        """The verifier's vocabulary, which the draft reads."""
        return self.layer.get("vocab_size")

    @property
    def draft_vocab_size(self) -> int | None:
        """What the draft writes, as vLLM has it: all of the vocabulary where nothing is said."""
        return self.top.get("draft_vocab_size") or self.vocab_size

    @property
    def reduced_vocab(self) -> bool:
        """Whether the draft proposes from a subset."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def block_size(self) -> int | None:
        """Slots of a block."""
        return self.setting("block_size")

    @property
    def sample_from_anchor(self) -> bool:
        """As trained: both trainers' default is true."""
        stored = self.top.get("sample_from_anchor")
        return True if stored is None else bool(stored)

    @property
    def trained_proposals(self) -> int | None:
        """Tokens that a block was trained to propose."""
        if self.block_size is None:
            return None
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def speculative_tokens(self) -> int | None:
        """Tokens that vLLM would propose by default; for a DeepSpec checkpoint that is block_size."""
        if not self.speculators:
            return self.block_size
        methods = self.section.get("proposal_methods")
        first = methods[0] if isinstance(methods, list) and methods else {}
        return first.get("speculative_tokens") if isinstance(first, Mapping) else None

    @property
    def verifier_name(self) -> str | None:
        """Hub id or path of the verifier; a DeepSpec checkpoint names none."""
        verifier = self.section.get("verifier")
        return verifier.get("name_or_path") if isinstance(verifier, Mapping) else None

    @property
    def kinds(self) -> list[str]:
        """Kind of each layer as trained; empty where the depth is unknown."""
        return foreign_config.layer_kinds(self.layer) if self.layer.get("num_hidden_layers") else []

    @property
    def has_confidence_head(self) -> bool:
        """Whether its weights are stored."""
        return any(name.startswith("confidence_head.") for name in self.files.tensors)

    def setting(self, name: str) -> Any:
        """A top-level setting; in the speculators format with speculators' default."""
        stored = self.top.get(name)
        return foreign_config.DEFAULTS.get(name) if stored is None and self.speculators else stored


def _verifier_of(top: Mapping[str, Any]) -> VerifierGeometry | None:
    section = top.get("speculators_config")
    verifier = section.get("verifier") if isinstance(section, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    if not isinstance(name, str) or not (Path(name) / CONFIG).is_file():
        return None
    try:
        return VerifierGeometry.from_config(json.loads((Path(name) / CONFIG).read_text()))
    except (ValueError, KeyError, TypeError):  # a verifier that our package does not know
        return None
