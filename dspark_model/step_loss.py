"""What a training step minimises: the fused losses, the confidence head's loss, and the figures that come with them.

Shape letters: A anchors, K block slots, S = A K slots, D hidden, R Markov rank, V verifier vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_model.batch import PackedRow, Slots
from dspark_model.drafter import DrafterOutput, DSparkDrafter
from dspark_model.fused_loss import SlotTargets, acceptance_rates, fused_loss
from dspark_model.losses import confidence_loss, slot_weights
from dspark_model.step_metrics import StepMetrics, acceptance_metrics, token_metrics
from dspark_model.strip_loss import Objective, SlotStats
from dspark_model.verifier import VerifierParts
from dspark_model.verifier_targets import VerifierTargets, verifier_targets
from dspark_model.vocab import verifier_to_draft_ids


@dataclass(frozen=True, kw_only=True)
class ConfidenceObjective:
    """How the confidence head is trained."""

    weight: float
    slots: int
    """Slots per step that train it when no other term reads the verifier's distribution."""
    detach: bool
    """Keep its gradient out of everything before the head."""


@dataclass(frozen=True)
class StepLoss:
    """A step's losses, attached to the graph, and what its blocks did."""

    loss: Tensor
    """Without the confidence head's."""
    confidence: Tensor
    """Unweighted; 0 where the head is not trained."""
    supervised_slots: Tensor
    metrics: StepMetrics


class Criterion:
    """Losses of a drafter on rows of documents, in one dtype."""

    def __init__(
        self,
        drafter: DSparkDrafter,
        verifier: VerifierParts,
        objective: Objective,
        confidence: ConfidenceObjective | None,
        dtype: torch.dtype,
    ) -> None:
        """Nothing is computed yet.

        Args:
            drafter: with the verifier's parts loaded.
            verifier: on the drafter's device.
            objective: terms and weights.
            confidence: None to leave the head as it is.
            dtype: of the products; parameters stay as they are.
        """
        self._drafter, self._verifier, self._objective, self._dtype = drafter, verifier, objective, dtype
        trained = confidence is not None and confidence.weight > 0 and drafter.confidence_head is not None
        self.confidence = confidence if trained else None
        self._draft_ids_V = verifier_to_draft_ids(drafter.t2d)

    @property
    def needs_normalisers(self) -> bool:
        """Whether rows must carry `log_norm_T`."""
        reads_verifier = self._objective.reads_verifier or self.confidence is not None
        return reads_verifier and self._drafter.config.reduced_vocab

    def __call__(self, row: PackedRow, anchors_A: Tensor, step: int = 0) -> StepLoss:
        """Losses of the blocks at ascending anchors.

        Args:
            row: on the drafter's device.
            anchors_A: row positions, ascending.
            step: rotates which blocks train the confidence head where only a sample does.

        Raises:
            ValueError: no anchor.
        """
        if not anchors_A.numel():
            raise ValueError(
                "anchors_A is empty: a row needs at least one anchor, a token before a supervised one of the same "
                "document (`draw_anchors`); skip rows that have none"
            )
        drafter, objective = self._drafter, self._objective
        slots = drafter.slots(row, anchors_A)
        mask_AK = slots.supervision_mask_AK
        with torch.autocast(anchors_A.device.type, dtype=self._dtype, enabled=self._dtype != torch.float32):
            output = drafter(row, anchors_A, slots)
        targets = SlotTargets(
            draft_targets_S=self._draft_ids_V[slots.target_ids_AK.flatten()],
            mask_AK=mask_AK,
            verifier=self._judge(row, slots.state_index_AK) if objective.reads_verifier else None,
        )
        loss, stats = fused_loss(
            output.hidden_SD, output.markov_SR, drafter.lm_head, drafter.markov_w2_WR, targets, objective
        )
        layout = drafter.config.sample_from_anchor
        metrics = token_metrics(
            stats.greedy_match_S.view_as(mask_AK),
            targets.draft_targets_S.view_as(mask_AK),
            mask_AK,
            sample_from_anchor=layout,
        )
        confidence = torch.zeros((), device=anchors_A.device)
        if self.confidence is not None:
            confidence, judged = self._confidence_loss(self.confidence, row, slots, output, stats, step)
            metrics += judged
        elif objective.reads_verifier:
            metrics += acceptance_metrics(stats.acceptance_S.view_as(mask_AK), mask_AK, sample_from_anchor=layout)
        return StepLoss(loss, confidence, mask_AK.sum(), metrics)

    def _judge(self, row: PackedRow, state_index_AK: Tensor) -> VerifierTargets:
        drafter = self._drafter
        return verifier_targets(
            self._verifier,
            row,
            state_index_AK,
            reduced_vocab=drafter.config.reduced_vocab,
            dtype=drafter.lm_head.dtype,
        )

    def _confidence_loss(
        self,
        choices: ConfidenceObjective,
        row: PackedRow,
        slots: Slots,
        output: DrafterOutput,
        stats: SlotStats,
        step: int,
    ) -> tuple[Tensor, StepMetrics]:
        """Without acceptance rates at hand, a sample of whole blocks is enough to train one linear layer."""
        drafter, config = self._drafter, self._drafter.config
        assert drafter.confidence_head is not None
        K, layout, mask_AK = config.block_size, config.sample_from_anchor, slots.supervision_mask_AK
        hidden_SD, markov_SR, embedding_SR = output.hidden_SD, output.markov_SR, output.prev_embedding_SR
        acceptance_S = stats.acceptance_S
        if not self._objective.reads_verifier:
            chosen_A = _sampled_blocks(mask_AK, choices.slots, step)
            mask_AK = mask_AK[chosen_A]
            rows_S = (chosen_A[:, None] * K + torch.arange(K, device=chosen_A.device)).flatten()
            hidden_SD = hidden_SD[rows_S]
            markov_SR = None if markov_SR is None else markov_SR[rows_S]
            embedding_SR = None if embedding_SR is None else embedding_SR[rows_S]
            judge = self._judge(row, slots.state_index_AK[chosen_A])
            acceptance_S = acceptance_rates(hidden_SD, markov_SR, drafter.lm_head, drafter.markov_w2_WR, judge, K)
        if choices.detach:
            hidden_SD, embedding_SR = hidden_SD.detach(), None if embedding_SR is None else embedding_SR.detach()
        weights_K = slot_weights(K, self._objective.gamma, sample_from_anchor=layout).to(mask_AK.device)
        logits_S = drafter.confidence_head(hidden_SD, embedding_SR)
        loss = confidence_loss(logits_S, acceptance_S, (mask_AK * weights_K).flatten(), mask_AK.sum().clamp(min=1))
        metrics = acceptance_metrics(
            acceptance_S.view_as(mask_AK),
            mask_AK,
            sample_from_anchor=layout,
            confidence_AK=logits_S.detach().sigmoid().view_as(mask_AK),
        )
        return loss, metrics


def _sampled_blocks(mask_AK: Tensor, slots: int, step: int) -> Tensor:
    """Every n-th block, about `slots` slots in all, another residue each step; ascending."""
    blocks_A = torch.arange(mask_AK.shape[0], device=mask_AK.device)
    stride = min(max(1, mask_AK.numel() // max(1, slots)), mask_AK.shape[0])
    return blocks_A[blocks_A % stride == step % stride]
