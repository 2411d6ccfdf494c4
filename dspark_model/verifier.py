"""The frozen parts of a verifier that a drafter needs, read from its safetensors without loading the model.

Shape letters: V vocabulary, D hidden.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class VerifierParts:
    """Embedding, head and final norm of a verifier."""

    embed_VD: Tensor
    lm_head_VD: Tensor
    norm_D: Tensor
    norm_eps: float
    logit_softcap: float | None = None

    def normed(self, last_hidden_prenorm: Tensor) -> Tensor:
        """States after the final norm (computed in float32), in the head's dtype."""
        normed = F.rms_norm(last_hidden_prenorm.float(), self.norm_D.shape, self.norm_D.float(), self.norm_eps)
        return normed.to(self.lm_head_VD.dtype)

    def logits(self, last_hidden_prenorm: Tensor) -> Tensor:
        """Float32 logits [..., V] of states taken before the final norm."""
        logits = F.linear(self.normed(last_hidden_prenorm), self.lm_head_VD).float()
        return logits if self.logit_softcap is None else self.logit_softcap * (logits / self.logit_softcap).tanh()

    def to(self, device: torch.device, dtype: torch.dtype) -> VerifierParts:
        """The same parts on another device, in another dtype."""
        return VerifierParts(
            self.embed_VD.to(device, dtype),
            self.lm_head_VD.to(device, dtype),
            self.norm_D.to(device),
            self.norm_eps,
            self.logit_softcap,
        )


def load_verifier_parts(folder: Path) -> VerifierParts:
    """Read the parts from a Hugging Face folder (one file or sharded; tied embeddings share the tensor).

    Raises:
        FileNotFoundError: no safetensors in the folder.
        ValueError: a tensor is missing, quantised, or rows disagree with the config's vocabulary.
    """
    config = json.loads((folder / "config.json").read_text())
    embed_VD = _read_tensor(folder, EMBEDDING)
    lm_head_VD = embed_VD if config.get("tie_word_embeddings") else _read_tensor(folder, HEAD)
    for name, value in ((EMBEDDING, embed_VD), (HEAD, lm_head_VD)):
        if not value.is_floating_point():
            raise ValueError(f"{folder}: {name} is stored as {value.dtype}; a quantised tensor cannot be shared")
        if value.shape[0] != config["vocab_size"]:
            raise ValueError(f"{folder}: {name} has {value.shape[0]} rows, config.json says {config['vocab_size']}")
    return VerifierParts(embed_VD, lm_head_VD, _read_tensor(folder, NORM), config.get("rms_norm_eps", 1e-6))


def _read_tensor(folder: Path, name: str) -> Tensor:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        if name not in weight_map:
            raise ValueError(f"{index}: no tensor {name!r}; this verifier's layout is not supported")
        file = folder / weight_map[name]
    else:
        file = folder / "model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(f"{file} not found: the verifier folder needs safetensors weights")
    with safe_open(file, framework="pt") as tensors:
        if name not in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
            raise ValueError(f"{file}: no tensor {name!r}; this verifier's layout is not supported")
        return tensors.get_tensor(name)


def transformers_state(hidden_states: tuple[Tensor, ...], layer_id: int, prenorm_last: Tensor) -> Tensor:
    """State after `layer_id` layers in transformers' output.

    `hidden_states[i]` is the state after i layers for i below num_layers, but its last entry is taken **after**
    the final norm; the state after all layers (before the norm) has to be captured separately.

    Args:
        hidden_states: transformers' tuple of num_layers + 1 tensors.
        layer_id: 0 (embedding) to num_layers.
        prenorm_last: input of the final norm, from a forward hook.
    """
    return prenorm_last if layer_id == len(hidden_states) - 1 else hidden_states[layer_id]
