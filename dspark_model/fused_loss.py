"""The losses of `losses.py`, chunked and fused: logits never exist beyond one panel, float32 ones beyond a strip.

A panel of slots goes through the matrix products (large, so that they run at full speed); its logits are then worked
through strip by strip (small, so that the dozen elementwise passes stay in cache). The gradient is made during the
forward, while a strip's probabilities are at hand, and takes the place of the logits, so the backward is a scaling.
The Markov bias rides in the same product: logits = [hidden ; factor] @ [lm_head ; w2]^T, as two accumulating products
(no copy of the head). The verifier's logits are made once per position, however many blocks cover it.

Shape letters: S slots (A anchors x K block slots), P distinct positions, C slots of a strip, B its blocks, D hidden,
R Markov rank, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dspark_model.strip_loss import Objective, SlotStats, Strip, overlap, strip_loss
from dspark_model.verifier_targets import VerifierTargets

PANEL_BYTES = 1 << 26
"""Logits of one kind held at once, in the head's dtype."""
STRIP_ELEMENTS = 1 << 19
"""Float32 probabilities of one kind held at once on CPU: 2 MiB, about a core's cache. On CUDA a strip is a panel."""


@dataclass(frozen=True)
class SlotTargets:
    """What slots are trained towards."""

    draft_targets_S: Tensor
    """Draft ids of the data tokens, -1 where the draft vocabulary lacks the token."""
    mask_AK: Tensor
    """Bool, supervised slots."""
    verifier: VerifierTargets | None
    """Needed by every term but ce."""


def fused_loss(
    hidden_SD: Tensor,
    markov_SR: Tensor | None,
    lm_head_WD: Tensor,
    markov_w2_WR: Tensor | None,
    targets: SlotTargets,
    objective: Objective,
) -> tuple[Tensor, SlotStats]:
    """`losses.reference_loss` with gradients to hidden states, Markov factors and markov_w2.

    Args:
        hidden_SD: slot states after the drafter's final norm.
        markov_SR: Markov factors, None without a Markov head.
        lm_head_WD: the verifier's head at the draft ids, frozen; its dtype is that of the products.
        markov_w2_WR: output matrix of the Markov head.
        targets: data tokens, supervised slots and the verifier's distribution.
        objective: terms and weights.

    Returns:
        The scalar loss and what each slot did.

    Raises:
        ValueError: a term reads the verifier's distribution and `targets` has none.
    """
    if objective.reads_verifier and targets.verifier is None:
        raise ValueError(f"loss terms {sorted(objective.terms)} need the verifier's states: targets.verifier is None")
    markov_SR, markov_w2_WR = _or_zero_width(markov_SR, markov_w2_WR, hidden_SD, lm_head_WD)
    loss, *stats = _FusedLoss.apply(hidden_SD, markov_SR, markov_w2_WR, lm_head_WD, targets, objective)
    return loss, SlotStats(*stats)


def acceptance_rates(
    hidden_SD: Tensor,
    markov_SR: Tensor | None,
    lm_head_WD: Tensor,
    markov_w2_WR: Tensor | None,
    verifier: VerifierTargets,
    block_size: int,
) -> Tensor:
    """`losses.acceptance_rate` [S] of whole blocks, without gradient."""
    markov_SR, markov_w2_WR = _or_zero_width(markov_SR, markov_w2_WR, hidden_SD, lm_head_WD)
    w2_WR = markov_w2_WR.to(lm_head_WD.dtype)
    rates_S = torch.empty(hidden_SD.shape[0], device=hidden_SD.device)
    with torch.no_grad(), torch.autocast(hidden_SD.device.type, enabled=False):
        for panel in _panels(hidden_SD, lm_head_WD, verifier, block_size):
            logits = _logits(hidden_SD[panel.rows], markov_SR[panel.rows], lm_head_WD, w2_WR)
            for rows, part in panel.strips(logits):
                strip = panel.strip(rows, part)
                q_CW = strip.draft_logits_CW.softmax(-1, dtype=torch.float32)
                rates_S[rows] = overlap(strip.verifier_probabilities(), q_CW)
    return rates_S


def _or_zero_width(
    markov_SR: Tensor | None, markov_w2_WR: Tensor | None, hidden_SD: Tensor, lm_head_WD: Tensor
) -> tuple[Tensor, Tensor]:
    """The Markov factors and matrix, or ones of rank 0 that add nothing."""
    if markov_SR is None or markov_w2_WR is None:
        return hidden_SD.new_zeros(hidden_SD.shape[0], 0), lm_head_WD.new_zeros(lm_head_WD.shape[0], 0)
    return markov_SR, markov_w2_WR


def _logits(hidden_CD: Tensor, markov_CR: Tensor, lm_head_WD: Tensor, w2_WR: Tensor) -> Tensor:
    dtype = lm_head_WD.dtype
    return (hidden_CD.to(dtype) @ lm_head_WD.T).addmm_(markov_CR.to(dtype), w2_WR.T)


@dataclass(frozen=True)
class _Panel:
    """Slots whose logits are made together, with the verifier's logits at the positions they cover."""

    rows: slice
    rows_per_strip: int
    verifier: VerifierTargets | None
    verifier_logits: Tensor | None
    first_position: int

    def strips(self, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Slots of each strip and their part of the panel's logits."""
        for low in range(0, logits.shape[0], self.rows_per_strip):
            part = logits[low : low + self.rows_per_strip]
            yield slice(self.rows.start + low, self.rows.start + low + part.shape[0]), part

    def strip(self, rows: slice, logits_CW: Tensor) -> Strip:
        """Draft logits with the verifier's at the same slots."""
        if self.verifier is None or self.verifier_logits is None:
            return Strip(logits_CW, None, None, None)
        position_C = self.verifier.position_S[rows]
        log_norm_P = self.verifier.log_norm_P
        return Strip(
            logits_CW,
            self.verifier_logits[position_C - self.first_position],
            None if log_norm_P is None else log_norm_P[position_C, None],
            self.verifier.logit_softcap,
        )


def _panels(
    hidden_SD: Tensor, lm_head_WD: Tensor, verifier: VerifierTargets | None, block_size: int
) -> Iterator[_Panel]:
    """Whole blocks per panel and per strip: some losses weight a slot by what its block did."""
    slots, vocabulary = hidden_SD.shape[0], lm_head_WD.shape[0]
    rows_per_panel = block_size * max(1, PANEL_BYTES // (vocabulary * block_size * lm_head_WD.element_size()))
    rows_per_strip = block_size * max(1, STRIP_ELEMENTS // (vocabulary * block_size))
    if hidden_SD.is_cuda:
        rows_per_strip = rows_per_panel
    lows = range(0, slots, rows_per_panel)
    slices = [slice(low, min(low + rows_per_panel, slots)) for low in lows]
    if verifier is None:
        yield from (_Panel(rows, rows_per_strip, None, None, 0) for rows in slices)
        return
    # Anchors ascend, so a panel covers one run of the ascending positions.
    bounds = torch.stack([torch.stack(verifier.position_S[rows].aminmax()) for rows in slices]).tolist()
    for rows, (first, last) in zip(slices, bounds, strict=True):
        logits_PW = verifier.normed_PD[first : last + 1] @ lm_head_WD.T
        yield _Panel(rows, rows_per_strip, verifier, logits_PW, first)


@cache
def _strip_function(device_type: str) -> Callable[..., Any]:
    # On CUDA each elementwise pass would travel to memory and back; compiled they are a handful of kernels.
    return torch.compile(strip_loss) if device_type == "cuda" else strip_loss


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: Tensor,
        markov_SR: Tensor,
        markov_w2_WR: Tensor,
        lm_head_WD: Tensor,
        targets: SlotTargets,
        objective: Objective,
    ) -> tuple[Tensor, ...]:
        head_WD, mask_AK, K = lm_head_WD, targets.mask_AK, targets.mask_AK.shape[1]
        w2_WR = markov_w2_WR.to(head_WD.dtype)
        count = mask_AK.sum().clamp(min=1)
        loss = torch.zeros((), device=hidden_SD.device)
        stats = SlotStats.empty(hidden_SD.shape[0], hidden_SD.device)
        grad_hidden, grad_markov = torch.empty_like(hidden_SD), torch.empty_like(markov_SR)
        grad_w2 = torch.zeros_like(markov_w2_WR, dtype=torch.float32)
        verifier = targets.verifier if objective.reads_verifier else None
        strip_function = _strip_function(hidden_SD.device.type)
        with torch.autocast(hidden_SD.device.type, enabled=False):
            for panel in _panels(hidden_SD, head_WD, verifier, K):
                logits = _logits(hidden_SD[panel.rows], markov_SR[panel.rows], head_WD, w2_WR)
                for rows, part in panel.strips(logits):
                    blocks = slice(rows.start // K, rows.stop // K)
                    part_loss, grad, *found = strip_function(
                        panel.strip(rows, part), targets.draft_targets_S[rows], mask_AK[blocks], objective, count
                    )
                    loss += part_loss
                    stats.put(rows, found)
                    part.copy_(grad)
                grad_hidden[panel.rows] = (logits @ head_WD).to(grad_hidden.dtype)
                grad_markov[panel.rows] = (logits @ w2_WR).to(grad_markov.dtype)
                grad_w2 += logits.T @ markov_SR[panel.rows].to(head_WD.dtype)
        ctx.gradients = (grad_hidden, grad_markov, grad_w2)
        found = (stats.acceptance_S, stats.ce_S, stats.greedy_match_S)
        ctx.mark_non_differentiable(*found)
        return loss, *found

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # In place, since each is as large as a parameter: so a second backward must fail, as it does elsewhere.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("fused_loss: backward was already called; run the forward again")
        hidden, markov, w2 = (gradient.mul_(grad_loss.to(gradient.dtype)) for gradient in gradients)
        return hidden, markov, w2, None, None, None
