"""The frozen parts of a verifier that a drafter needs, read from its safetensors without loading the model.

Shape letters: V vocabulary, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark_model.families import EMBEDDING_STEMS, HEAD_STEMS, NORM_STEMS, VerifierGeometry
from dspark_model.verifier_files import UNQUANTISED, VerifierFiles


@dataclass(frozen=True)
class VerifierParts:
    """Embedding, head and final norm of a verifier."""

    embed_VD: Tensor
    """Rows as stored: a verifier that scales looked-up rows does so itself."""
    lm_head_VD: Tensor
    """The same tensor as `embed_VD` where the verifier ties them."""
    norm_D: Tensor
    """Gain of the final norm, whatever the family stores for it."""
    norm_eps: float
    logit_softcap: float | None = None
    """c of c * tanh(logits / c), of the verifier's logits only: vLLM's draft has none."""

    def normed(self, last_hidden_prenorm: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """States after the final norm (computed in float32), in `dtype` (default: the head's)."""
        normed = F.rms_norm(last_hidden_prenorm.float(), self.norm_D.shape, self.norm_D.float(), self.norm_eps)
        return normed.to(dtype or self.lm_head_VD.dtype)

    def capped(self, logits: Tensor) -> Tensor:
        """Float32 logits after the soft-cap, where there is one."""
        logits = logits.float()
        return logits if self.logit_softcap is None else self.logit_softcap * (logits / self.logit_softcap).tanh()

    def logits(self, last_hidden_prenorm: Tensor) -> Tensor:
        """Float32 logits [..., V] of states taken before the final norm."""
        return self.capped(F.linear(self.normed(last_hidden_prenorm), self.lm_head_VD))

    def to(self, device: torch.device) -> VerifierParts:
        """The same parts on another device; tied ones stay one tensor."""
        embed_VD = self.embed_VD.to(device)
        lm_head_VD = embed_VD if self.lm_head_VD is self.embed_VD else self.lm_head_VD.to(device)
        return replace(self, embed_VD=embed_VD, lm_head_VD=lm_head_VD, norm_D=self.norm_D.to(device))


def load_verifier_parts(folder_or_hub_id: str | Path, *, revision: str | None = None) -> VerifierParts:
    """Read the parts from a Hugging Face folder or from the hub, in the dtypes they are stored in.

    A stored head is used even where the config says that it is tied to the embedding, as transformers and vLLM do.
    Rows past the config's vocabulary are padding and left out.

    Args:
        folder_or_hub_id: local folder, or "owner/name", of which only config, index and needed shards are fetched.
        revision: branch, tag or commit of a hub id.

    Returns:
        Embedding and head [V, D] as stored; the norm's gain [D] in float32, ready to multiply whatever the family
        stores (see `dspark_model.families`).

    Raises:
        ConfigError: unsupported verifier family.
        FileNotFoundError: no such folder, or no safetensors in it.
        OSError: the hub cannot be reached or has no such file.
        ValueError: a tensor is missing, quantised, or of another shape than the config says.
    """
    files = VerifierFiles(folder_or_hub_id, revision)
    geometry = VerifierGeometry.from_config(files.config)
    _refuse_quantised_head(files)
    shape = (geometry.vocab_size, geometry.hidden_size)
    embed_VD = files.read(_require(files, EMBEDDING_STEMS), shape)
    head = files.find(HEAD_STEMS)
    if head is None and not geometry.tied_embeddings:
        raise ValueError(
            f"{files.source}: no tensor '{HEAD_STEMS[0]}.weight', and config.json says tie_word_embeddings=false: "
            "the weights are incomplete; or set tie_word_embeddings to true if the head is the embedding"
        )
    lm_head_VD = embed_VD if head is None else files.read(head, shape)
    stored_D = files.read(_require(files, NORM_STEMS), (geometry.hidden_size,))
    return VerifierParts(
        embed_VD=embed_VD,
        lm_head_VD=lm_head_VD,
        norm_D=(geometry.norm_offset + stored_D.float()) / geometry.logit_divisor,
        norm_eps=geometry.rms_norm_eps,
        logit_softcap=geometry.logit_softcap,
    )


def _require(files: VerifierFiles, stems: tuple[str, ...]) -> str:
    stem = files.find(stems)
    if stem is None:
        raise ValueError(
            f"{files.source}: no tensor '{stems[0]}.weight', nor under the names {', '.join(stems[1:])}: "
            "this verifier's layout is not supported"
        )
    return stem


def _refuse_quantised_head(files: VerifierFiles) -> None:
    """Refuse a config that has the engine quantise the head.

    Quantised models as such are fine: most leave embedding and head as they are.
    """
    for section in (files.config, files.config.get("text_config") or {}):
        quantisation = section.get("quantization_config") or {}
        groups = (quantisation.get("config_groups") or {}).values()
        targets = [target for group in groups for target in group.get("targets") or []]
        # GPTQ's flag; compressed-tensors' targets, which are class names, module names or "re:" patterns.
        if quantisation.get("lm_head") or any("lm_head" in target for target in targets):
            raise ValueError(
                f"{files.source}: quantization_config (quant_method={quantisation.get('quant_method')!r}) covers "
                f"lm_head: a quantised head cannot be shared with a drafter. {UNQUANTISED}"
            )


def transformers_state(hidden_states: tuple[Tensor, ...], layer_id: int, prenorm_last: Tensor) -> Tensor:
    """State after `layer_id` layers in transformers' output.

    `hidden_states[i]` is the state after i layers for i below num_layers, but its last entry is taken **after**
    the final norm; the state after all layers (before the norm) has to be captured separately.

    Args:
        hidden_states: transformers' tuple of num_layers + 1 tensors.
        layer_id: 0 (embedding, scaled where the family scales it) to num_layers.
        prenorm_last: input of the final norm, from a forward hook.

    Raises:
        ValueError: `layer_id` outside 0..num_layers (DeepSpec's -1 for the embedding would be the last state).
    """
    num_layers = len(hidden_states) - 1
    if not 0 <= layer_id <= num_layers:
        raise ValueError(
            f"layer_id={layer_id} must lie in 0..{num_layers}: it counts layers passed, 0 is the embedding"
        )
    return prenorm_last if layer_id == num_layers else hidden_states[layer_id]
