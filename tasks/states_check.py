"""Are the engine's states those the drafter is trained for? Compared with a transformers forward, layer by layer.

The two faults that training cannot see and serving cannot survive: a layer offset by one, and the wrong side of the
final norm (https://github.com/vllm-project/vllm/pull/40727, https://github.com/vllm-project/speculators/pull/313).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from dspark_model.batch import Document

SAMPLES = 3
# Measured (mean over tokens): bf16 engines differ by 0.002-0.02 per layer, the neighbouring layer by 0.2 or more.
TOLERANCE = {"float32": 0.002, "float16": 0.02, "bfloat16": 0.08}


class StatesMismatchError(RuntimeError):
    """Stored states are not the verifier's at the named layers."""


def check_states(
    verifier: Path, documents: Sequence[Document], layer_ids: tuple[int, ...], dtype: str
) -> dict[int, float]:
    """Compare a few documents' stored states with transformers.

    Args:
        verifier: Hugging Face folder.
        documents: with stored states.
        layer_ids: the auxiliary layers, in stored order.
        dtype: the engine's compute dtype, which sets the tolerance.

    Returns:
        Relative error (mean over tokens, largest of the documents) per layer id; the last key is the verifier's depth.

    Raises:
        StatesMismatchError: an error above tolerance; says which layer's states fit best instead.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32).eval()
    depth, errors = (
        model.config.num_hidden_layers,
        dict.fromkeys((*layer_ids, model.config.num_hidden_layers), 0.0),
    )
    for document in documents[:SAMPLES]:
        truth = _all_states(model, document.input_ids_T[None])
        count = document.last_hidden_TD.shape[0]
        stored = [
            *document.aux_hidden_TF.unflatten(1, (len(layer_ids), -1)).unbind(1),
            document.last_hidden_TD,
        ]
        for layer_id, states_TD in zip(errors, stored, strict=True):
            distances = {name: _relative_error(states_TD.float(), full[:count]) for name, full in truth.items()}
            errors[layer_id] = max(errors[layer_id], distances[str(layer_id)])
            if not distances[str(layer_id)] <= TOLERANCE[dtype]:
                best = min(distances, key=distances.__getitem__)
                raise StatesMismatchError(
                    f"states stored for layer {layer_id} (of {depth}) differ from transformers by "
                    f"{distances[str(layer_id)]:.3f}, tolerance {TOLERANCE[dtype]}; the closest are those of layer "
                    f"{best} ({distances[best]:.3f}): the engine counts layers otherwise or took the other "
                    "side of the norm"
                )
    return errors


def _all_states(model: PreTrainedModel, input_ids_1T: torch.Tensor) -> dict[str, torch.Tensor]:
    """States [T, D] by layer id, the last one before the final norm, and "after the norm"."""
    import torch

    from dspark_model.verifier import transformers_state

    prenorm: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: prenorm.append(inputs[0]))
    try:
        with torch.no_grad():
            hidden = model(input_ids_1T, output_hidden_states=True, use_cache=False).hidden_states
    finally:
        hook.remove()
    states = {str(i): transformers_state(hidden, i, prenorm[0])[0] for i in range(len(hidden))}
    return {**states, "after the norm": hidden[-1][0]}


def _relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Mean over tokens of each token's own relative error.

    One norm over all tokens would be that of the attention sink (SmolLM2: 25,000 against 160 for other tokens), which
    hardly changes from layer to layer and hides an offset by one.
    """
    return float(((found - truth).norm(dim=-1) / truth.norm(dim=-1)).mean())
