"""A speculators drafter and ours with the same weights, what each makes of one row, and how the two are compared.

Shape letters: S slots (A anchors x K block slots), D hidden, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import speculators.models.dflash.core as peer_backbone
import speculators.models.dspark.core as peer_core
import torch
from speculators.models.dspark import DSparkDraftModel
from torch import Tensor

from dspark_model.batch import PackedRow, pack
from dspark_model.losses import SLOT_TERMS
from tests.dspark_model.tiny import answer, document

RTOL = 1e-4
PEER_TERMS = {name: name for name in SLOT_TERMS} | {"kl": "kl_div"}
"""Our loss terms in speculators' spelling."""
# Blocks of these lie whole inside supervised text, where the two trainers' rules agree. 23 has no context at all.
FEW_ANCHORS = (5, 6, 11, 18, 23, 25, 30)
# As many slots as tokens: speculators then computes the targets another way.
MANY_ANCHORS = (5, 6, 7, 8, 11, 14, 18, 23, 24, 25, 28, 30)


def two_document_row() -> PackedRow:
    """A prompt of 5 with an answer of 18, then 12 supervised tokens: 35 in all."""
    return pack([answer(5, 18, seed=1), document([1] * 12, seed=2)])


@dataclass(frozen=True)
class PeerStep:
    """What one training forward of speculators computed."""

    hidden_SD: Tensor
    logits_SW: Tensor
    targets_SW: Tensor
    """The verifier's logits at draft ids."""
    mask_S: Tensor
    confidence_S: Tensor | None
    loss: Tensor
    metrics: Mapping[str, Tensor]

    def metric(self, name: str) -> Tensor:
        """A mean that speculators keeps as sum and count."""
        return self.metrics[f"{name}_sum"] / self.metrics[f"{name}_total"]


def peer_step(
    peer: DSparkDraftModel, row: PackedRow, anchors: tuple[int, ...], loss_fn: str = "kl_div", **choices: Any
) -> PeerStep:
    """Run the training forward at given anchors, which speculators would draw itself."""
    kwargs, _ = DSparkDraftModel.get_trainer_kwargs(
        loss_fn=loss_fn, loss_implementation="eager", max_anchors=len(anchors), **choices
    )
    seen: dict[str, Any] = {}

    def at_anchors(loss_mask: Tensor, num_anchors: int, block_size: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(anchors), torch.ones(len(anchors), dtype=torch.bool)

    original: Callable[..., Any] = peer_core.compute_metrics

    def recorded(
        logits: Tensor, targets: Tensor, confidence: Tensor | None, mask: Tensor, *args: Any, **kw: Any
    ) -> Any:
        seen.update(logits=logits[0], targets=targets[0], confidence=confidence, mask=mask[0])
        return original(logits, targets, confidence, mask, *args, **kw)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_backbone, "select_anchors", at_anchors)
        patch.setattr(peer_core, "compute_metrics", recorded)
        hook = peer.norm.register_forward_hook(lambda module, inputs, output: seen.update(hidden=output[0]))
        _, loss, metrics = peer(
            hidden_states=row.aux_hidden_TF[None],
            input_ids=row.input_ids_T[None],
            loss_mask=row.loss_mask_T.long()[None],
            verifier_last_hidden_states=row.last_hidden_TD[None],
            document_ids=row.document_ids_T[None],
            position_ids=row.position_ids_T[None],
            **kwargs,
        )
        hook.remove()
    confidence = seen["confidence"]
    return PeerStep(
        seen["hidden"],
        seen["logits"],
        seen["targets"],
        seen["mask"].bool(),
        None if confidence is None else confidence[0],
        loss,
        metrics,
    )


def gradients(loss: Tensor, model: torch.nn.Module) -> dict[str, Tensor]:
    """Gradient of every trainable parameter by name, zero where the loss does not reach it."""
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, retain_graph=True)
    return {
        name: torch.zeros_like(value) if grad is None else grad
        for (name, value), grad in zip(parameters.items(), found, strict=True)
    }


def assert_same(ours: Tensor, theirs: Tensor, what: str) -> None:
    """Equal to 1e-4 of the tensor's norm, and no entry off by more than 1e-4 of the largest."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)} here, {tuple(theirs.shape)} in speculators"
    off = (ours - theirs).norm() / theirs.norm().clamp(min=1e-12)
    worst = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)
    assert max(off, worst) < RTOL, f"{what}: off by {off:.2e} of the norm, {worst:.2e} of the largest entry"


def assert_same_gradients(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], unused: tuple[str, ...] = ()
) -> None:
    """Every parameter's gradient agrees; none but those named by a prefix in `unused` is zero."""
    assert set(ours) == set(theirs)
    for name, gradient in theirs.items():
        assert name.startswith(unused) if not gradient.any() else True, f"{name}: no gradient to compare"
        assert_same(ours[name], gradient, f"gradient of {name}")
