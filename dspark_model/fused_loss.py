"""The losses of `losses.py`, chunked and fused: logits [S, W] never exist beyond one chunk of rows.

The gradient is made during the forward, while a chunk's probabilities are at hand, so the backward is a scaling.
The Markov bias rides in the same product: logits = [hidden ; w1(prev)] @ [lm_head ; w2]^T, as two accumulating
matrix products (no copy of the head). Row gradients with respect to the logits, q draft and p verifier probabilities:

    ce: q - onehot(target)      kl: (sum p) q - p      tv: -q (1[q <= p] - sum_{q <= p} q)

Shape letters: S slots, C rows of a chunk, D hidden, R Markov rank, V verifier vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark_model.losses import needs_verifier_distribution
from dspark_model.verifier import VerifierParts

CHUNK_ELEMENTS = 1 << 23
"""Logits held at once (rows x vocabulary): 32 MiB in float32."""


@dataclass(frozen=True)
class FusedTargets:
    """What slots are trained towards."""

    draft_targets_S: Tensor
    """Draft ids, -1 where the draft vocabulary lacks the token."""
    weights_S: Tensor
    """Slot weight divided by the number of supervised slots; 0 where a slot does not count."""
    last_hidden_SD: Tensor | None
    """Verifier states (before the final norm) of the token before each target; needed by kl and tv."""


def fused_loss(
    hidden_SD: Tensor,
    markov_SR: Tensor | None,
    lm_head_WD: Tensor,
    markov_w2_WR: Tensor | None,
    targets: FusedTargets,
    terms: Mapping[str, float],
    verifier: VerifierParts | None = None,
    verifier_ids_W: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Sum of weights times slot losses, with gradients to hidden, Markov embedding and markov_w2.

    Returns:
        The scalar loss, and the analytic acceptance rate [S] (None unless a term reads the verifier's distribution).

    Raises:
        ValueError: a term needs the verifier's distribution and the parts for it are missing.
    """
    if needs_verifier_distribution(terms) and (
        verifier is None or verifier_ids_W is None or targets.last_hidden_SD is None
    ):
        raise ValueError("loss terms kl and tv need the verifier's head and last states")
    markov_SR, markov_w2_WR = _or_zero_width(markov_SR, markov_w2_WR, hidden_SD, lm_head_WD)
    request = _Request(lm_head_WD, targets, dict(terms), verifier, verifier_ids_W)
    loss, acceptance_S = _FusedLoss.apply(hidden_SD, markov_SR, markov_w2_WR, request)
    return loss, acceptance_S if needs_verifier_distribution(terms) else None


def chunked_acceptance_rate(
    hidden_SD: Tensor,
    markov_SR: Tensor | None,
    lm_head_WD: Tensor,
    markov_w2_WR: Tensor | None,
    last_hidden_SD: Tensor,
    verifier: VerifierParts,
    verifier_ids_W: Tensor,
) -> Tensor:
    """`losses.acceptance_rate` [S] in chunks, without gradient."""
    rates = []
    markov_SR, markov_w2_WR = _or_zero_width(markov_SR, markov_w2_WR, hidden_SD, lm_head_WD)
    with torch.no_grad(), torch.autocast(hidden_SD.device.type, enabled=False):
        for rows in _chunks(hidden_SD.shape[0], verifier.lm_head_VD.shape[0]):
            q_CW = _logits(hidden_SD[rows], markov_SR[rows], lm_head_WD, markov_w2_WR).softmax(-1)
            p_CW = verifier.logits(last_hidden_SD[rows]).softmax(-1)[:, verifier_ids_W]
            rates.append(torch.minimum(p_CW, q_CW).sum(-1))
    return torch.cat(rates)


@dataclass(frozen=True)
class _Request:
    lm_head_WD: Tensor
    targets: FusedTargets
    terms: dict[str, float]
    verifier: VerifierParts | None
    verifier_ids_W: Tensor | None


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    return [slice(low, min(low + size, rows)) for low in range(0, rows, size)]


def _or_zero_width(
    markov_SR: Tensor | None, markov_w2_WR: Tensor | None, hidden_SD: Tensor, lm_head_WD: Tensor
) -> tuple[Tensor, Tensor]:
    """The Markov factors, or factors of rank 0 that add nothing."""
    if markov_SR is None or markov_w2_WR is None:
        return hidden_SD.new_zeros(hidden_SD.shape[0], 0), lm_head_WD.new_zeros(lm_head_WD.shape[0], 0)
    return markov_SR, markov_w2_WR


def _logits(hidden_CD: Tensor, markov_CR: Tensor, lm_head_WD: Tensor, markov_w2_WR: Tensor) -> Tensor:
    dtype = lm_head_WD.dtype
    base_CW = hidden_CD.to(dtype) @ lm_head_WD.T
    return torch.addmm(base_CW, markov_CR.to(dtype), markov_w2_WR.to(dtype).T).float()


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_SD: Tensor, markov_SR: Tensor, markov_w2_WR: Tensor, request: _Request
    ) -> tuple[Tensor, Tensor]:
        head_WD = request.lm_head_WD
        w2_WR = markov_w2_WR.to(head_WD.dtype)
        loss = torch.zeros((), device=hidden_SD.device)
        acceptance_S = torch.zeros(hidden_SD.shape[0], device=hidden_SD.device)
        grad_hidden, grad_markov = torch.empty_like(hidden_SD), torch.empty_like(markov_SR)
        grad_w2 = torch.zeros_like(markov_w2_WR, dtype=torch.float32)
        wide = request.verifier.lm_head_VD.shape[0] if request.verifier is not None else head_WD.shape[0]
        with torch.autocast(hidden_SD.device.type, enabled=False):
            for rows in _chunks(hidden_SD.shape[0], wide):
                logits_CW = _logits(hidden_SD[rows], markov_SR[rows], head_WD, w2_WR)
                part, grad_CW = _chunk_loss_and_gradient(logits_CW, rows, request, acceptance_S)
                loss += part
                grad_CW = grad_CW.to(head_WD.dtype)
                grad_hidden[rows] = (grad_CW @ head_WD).to(grad_hidden.dtype)
                grad_markov[rows] = (grad_CW @ w2_WR).to(grad_markov.dtype)
                grad_w2 += (grad_CW.T @ markov_SR[rows].to(head_WD.dtype)).float()
        ctx.save_for_backward(grad_hidden, grad_markov, grad_w2)
        ctx.mark_non_differentiable(acceptance_S)
        return loss, acceptance_S

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, markov, w2 = (grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors)
        return hidden, markov, w2, None


def _chunk_loss_and_gradient(
    logits_CW: Tensor, rows: slice, request: _Request, acceptance_S: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted loss of a chunk and its gradient with respect to the logits; fills `acceptance_S[rows]`."""
    terms, weights_C = request.terms, request.targets.weights_S[rows]
    log_norm_C = logits_CW.logsumexp(-1, keepdim=True)
    q_CW = (logits_CW - log_norm_C).exp_()
    loss_C, scale_C1, grad_CW = torch.zeros_like(weights_C), torch.zeros_like(log_norm_C), None
    targets_C = request.targets.draft_targets_S[rows]
    known_C = targets_C >= 0
    if needs_verifier_distribution(terms):
        assert request.verifier is not None
        assert request.targets.last_hidden_SD is not None
        p_CW = request.verifier.logits(request.targets.last_hidden_SD[rows]).softmax(-1)[:, request.verifier_ids_W]
        below_CW = q_CW <= p_CW
        acceptance_S[rows] = torch.where(below_CW, q_CW, p_CW).sum(-1)
        grad_CW = torch.zeros_like(q_CW)
        if terms.get("tv"):
            loss_C += terms["tv"] * (1 - acceptance_S[rows])
            mass_C1 = (q_CW * below_CW).sum(-1, keepdim=True)
            grad_CW -= terms["tv"] * q_CW * (below_CW.to(q_CW.dtype) - mass_C1)
        if terms.get("kl"):
            mass_C1 = p_CW.sum(-1, keepdim=True)
            cross_C = (p_CW * logits_CW).sum(-1) - mass_C1[:, 0] * log_norm_C[:, 0]
            loss_C += terms["kl"] * (torch.xlogy(p_CW, p_CW).sum(-1) - cross_C)
            scale_C1 = scale_C1 + terms["kl"] * mass_C1
            grad_CW -= terms["kl"] * p_CW
    picked_C1 = targets_C.clamp(min=0)[:, None]
    if terms.get("ce"):
        ce_C = (log_norm_C - logits_CW.gather(1, picked_C1))[:, 0]
        loss_C += terms["ce"] * torch.where(known_C, ce_C, 0.0)
        scale_C1 = scale_C1 + terms["ce"] * known_C[:, None]
    grad_CW = q_CW.mul_(scale_C1) if grad_CW is None else grad_CW.add_(q_CW * scale_C1)
    if terms.get("ce"):
        grad_CW.scatter_add_(1, picked_C1, -terms["ce"] * known_C[:, None].to(grad_CW.dtype))
    return (loss_C * weights_C).sum(), grad_CW.mul_(weights_C[:, None])
