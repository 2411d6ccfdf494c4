"""What our package makes of a row, by the readable losses or the fused ones.

Shape letters: T tokens, S slots (A anchors x K block slots), V verifier vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from dspark_model.batch import PackedRow, Slots
from dspark_model.drafter import DrafterOutput, DSparkDrafter
from dspark_model.fused_loss import SlotTargets, fused_loss
from dspark_model.losses import acceptance_rate, confidence_loss, reference_loss, slot_weights
from dspark_model.strip_loss import Objective, SlotStats
from dspark_model.verifier import VerifierParts
from dspark_model.verifier_targets import VerifierTargets, log_normalisers, verifier_targets

Implementation = Literal["reference", "fused"]


@dataclass(frozen=True)
class OurStep:
    """A training forward of ours, and the verifier's logits behind each slot."""

    drafter: DSparkDrafter
    output: DrafterOutput
    slots: Slots
    verifier_logits_SV: Tensor
    verifier: VerifierTargets
    """The same for the fused loss."""

    @property
    def mask_AK(self) -> Tensor:
        return self.slots.supervision_mask_AK

    @property
    def mask_S(self) -> Tensor:
        return self.mask_AK.flatten()

    @property
    def logits_SW(self) -> Tensor:
        return self.drafter.logits(self.output.hidden_SD, self.output.markov_SR)

    @property
    def verifier_draft_logits_SW(self) -> Tensor:
        return self.verifier_logits_SV[:, self.drafter.verifier_ids_W]

    @property
    def labels_S(self) -> Tensor:
        """The verifier's most likely draft id, which speculators trains ce towards."""
        return self.verifier_draft_logits_SW.argmax(-1)

    @property
    def confidence_S(self) -> Tensor:
        assert self.drafter.confidence_head is not None
        return self.drafter.confidence_head(self.output.hidden_SD, self.output.prev_embedding_SR)


def our_step(
    drafter: DSparkDrafter,
    parts: VerifierParts,
    row: PackedRow,
    anchors: tuple[int, ...],
    *,
    mask_outside: bool = False,
) -> OurStep:
    """Run the drafter over blocks at the anchors.

    Args:
        drafter: ours.
        parts: the verifier's.
        row: packed documents.
        anchors: ascending row positions.
        mask_outside: pretend that the verifier gives no probability to ids outside the draft vocabulary, which is what
            speculators assumes.
    """
    anchor_pos_A = torch.tensor(anchors)
    slots = drafter.slots(row, anchor_pos_A)
    logits_TV = parts.logits(row.last_hidden_TD)
    log_norm_T = log_normalisers(parts, row.last_hidden_TD)
    if mask_outside:
        logits_TV = logits_TV.masked_fill(~drafter.t2d, -torch.inf)
        log_norm_T = logits_TV.logsumexp(-1)
    row = replace(row, log_norm_T=log_norm_T)
    return OurStep(
        drafter,
        drafter(row, anchor_pos_A, slots),
        slots,
        logits_TV[slots.state_index_AK.flatten()],
        verifier_targets(parts, row, slots.state_index_AK, reduced_vocab=drafter.config.reduced_vocab),
    )


def our_loss(step: OurStep, objective: Objective, implementation: Implementation) -> Tensor:
    """The step's loss without the confidence head's, by one of our two implementations."""
    if implementation == "fused":
        return our_fused(step, objective)[0]
    return reference_loss(
        step.logits_SW,
        step.labels_S,
        step.mask_AK,
        objective.terms,
        sample_from_anchor=objective.sample_from_anchor,
        p_SW=step.verifier_logits_SV.softmax(-1)[:, step.drafter.verifier_ids_W],
        gamma=objective.gamma,
        weighting=objective.weighting,
        dpace_alpha=objective.dpace_alpha,
    )


def our_fused(step: OurStep, objective: Objective) -> tuple[Tensor, SlotStats]:
    """The fused loss, and what it says each slot did."""
    head = step.drafter.markov_head
    return fused_loss(
        step.output.hidden_SD,
        step.output.markov_SR,
        step.drafter.lm_head,
        None if head is None else head.markov_w2.weight,
        SlotTargets(step.labels_S, step.mask_AK, step.verifier),
        objective,
    )


def our_confidence_loss(step: OurStep, gamma: float) -> Tensor:
    """The confidence head's loss, towards the analytic acceptance rate."""
    config = step.drafter.config
    weights_K = slot_weights(config.block_size, gamma, sample_from_anchor=config.sample_from_anchor)
    weights_S = (step.mask_AK * weights_K).flatten()
    return confidence_loss(step.confidence_S, our_acceptance(step), weights_S, step.mask_S.sum())


def our_acceptance(step: OurStep) -> Tensor:
    """Analytic acceptance rate [S]."""
    return acceptance_rate(step.logits_SW, step.verifier_logits_SV, step.drafter.verifier_ids_W)
