"""Loss and gradient of a few whole blocks whose logits are at hand: the inside of `fused_loss.py`.

Row gradients with respect to the draft logits, q draft and p verifier probabilities (p restricted to draft ids, its sum
P may be below 1), alpha = sum min(p, q), m = (p + q) / 2:

    ce   q - onehot(target)             rkl  q (log q - log p - sum q (log q - log p))
    kl   P q - p                        jsd  q (log(q / m) - sum q log(q / m)) / 2
    tv   q mass - q 1[q <= p],  mass = sum of q where q <= p;  it is also -d alpha

nla, lk_hybrid and expected_length are tv (and kl) with a factor per slot. Definitions and sources: `losses.py`.

Shape letters: C slots of the strip, B blocks of K slots (C = B K), W draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_model.losses import (
    LOG_P_FLOOR,
    NLA_FLOOR,
    Weighting,
    dpace_weights,
    expected_length_loss,
    lk_hybrid_share,
    needs_verifier_distribution,
    slot_weights,
)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a step minimises; arguments of `losses.reference_loss`."""

    terms: Mapping[str, float]
    gamma: float
    weighting: Weighting = "decay"
    dpace_alpha: float = 0.5
    sample_from_anchor: bool = True

    @property
    def reads_verifier(self) -> bool:
        """Whether a term needs the verifier's distribution."""
        return needs_verifier_distribution(self.terms)


@dataclass(frozen=True)
class SlotStats:
    """What each slot did, without gradient."""

    acceptance_S: Tensor
    """Analytic acceptance rate; nan where no term read the verifier's distribution."""
    ce_S: Tensor
    """-log q[data token]; inf where the draft vocabulary lacks it."""
    greedy_match_S: Tensor
    """Bool: the drafter's most likely token is the data token."""

    @classmethod
    def empty(cls, slots: int, device: torch.device) -> SlotStats:
        """To be filled strip by strip."""
        return cls(
            torch.empty(slots, device=device),
            torch.empty(slots, device=device),
            torch.empty(slots, dtype=torch.bool, device=device),
        )

    def put(self, rows: slice, found: list[Tensor]) -> None:
        """Fill the slots of a strip."""
        for whole, part in zip((self.acceptance_S, self.ce_S, self.greedy_match_S), found, strict=True):
            whole[rows] = part


@dataclass(frozen=True)
class Strip:
    """Logits of a few blocks."""

    draft_logits_CW: Tensor
    verifier_logits_CW: Tensor | None
    """At draft ids, before the soft cap."""
    log_norm_C1: Tensor | None
    """Log-normaliser of the verifier's whole vocabulary; None where W is the whole vocabulary."""
    logit_softcap: float | None

    def verifier_log_probabilities(self) -> Tensor:
        """Float32 log p [C, W] at draft ids."""
        assert self.verifier_logits_CW is not None
        logits_CW = self.verifier_logits_CW.float()
        if self.logit_softcap is not None:
            logits_CW = (logits_CW / self.logit_softcap).tanh() * self.logit_softcap
        return logits_CW.log_softmax(-1) if self.log_norm_C1 is None else logits_CW - self.log_norm_C1

    def verifier_probabilities(self) -> Tensor:
        """Float32 p [C, W] at draft ids."""
        if self.log_norm_C1 is None and self.logit_softcap is None:  # one pass less than through the logarithm
            assert self.verifier_logits_CW is not None
            return self.verifier_logits_CW.softmax(-1, dtype=torch.float32)
        return self.verifier_log_probabilities().exp_()


def overlap(p_CW: Tensor, q_CW: Tensor) -> Tensor:
    """Analytic acceptance rate [C]: sum min(p, q)."""
    return torch.minimum(p_CW, q_CW).sum(-1)


def strip_loss(
    strip: Strip, draft_targets_C: Tensor, mask_BK: Tensor, objective: Objective, count: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss of the strip's blocks, its gradient [C, W] and the columns of `SlotStats`."""
    q_CW = strip.draft_logits_CW.softmax(-1, dtype=torch.float32)
    top_C, top_id_C = strip.draft_logits_CW.max(-1)
    # The largest probability never underflows, so neither does the normaliser read from it.
    log_norm_C = top_C.float() - q_CW.gather(1, top_id_C[:, None])[:, 0].log()
    known_C, picked_C1 = draft_targets_C >= 0, draft_targets_C.clamp(min=0)[:, None]
    ce_C = log_norm_C - strip.draft_logits_CW.gather(1, picked_C1)[:, 0].float()
    ce_C = torch.where(known_C, ce_C, torch.inf)
    scale_C = _slot_scale(ce_C, mask_BK, objective) / count
    if objective.reads_verifier:
        loss, grad_CW, ce_scale_C, acceptance_C = _verifier_terms(
            strip, q_CW, log_norm_C, scale_C, mask_BK, objective, count
        )
    else:
        loss, grad_CW, acceptance_C = ce_C.new_zeros(()), None, torch.full_like(ce_C, torch.nan)
        ce_scale_C = torch.zeros_like(ce_C)
    weight_C = scale_C * objective.terms.get("ce", 0.0) * known_C
    loss = loss + torch.where(known_C, ce_C * weight_C, 0.0).sum()
    q_CW *= (ce_scale_C + weight_C)[:, None]
    grad_CW = q_CW if grad_CW is None else grad_CW.add_(q_CW)
    grad_CW.scatter_add_(1, picked_C1, -weight_C[:, None])
    return loss, grad_CW, acceptance_C, ce_C, (top_id_C == draft_targets_C)


def _slot_scale(ce_C: Tensor, mask_BK: Tensor, objective: Objective) -> Tensor:
    """Weight of each slot's terms [C], 0 where unsupervised."""
    if objective.weighting == "dpace":
        return dpace_weights(ce_C.unflatten(0, mask_BK.shape), mask_BK, objective.dpace_alpha).flatten()
    weights_K = slot_weights(mask_BK.shape[1], objective.gamma, sample_from_anchor=objective.sample_from_anchor)
    return (mask_BK * weights_K.to(mask_BK.device)).flatten()


def _verifier_terms(
    strip: Strip,
    q_CW: Tensor,
    log_norm_C: Tensor,
    scale_C: Tensor,
    mask_BK: Tensor,
    objective: Objective,
    count: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, gradient but for its multiple of q, that multiple [C], and the acceptance rate [C]."""
    terms = objective.terms
    logarithms = any(terms.get(name) for name in ("kl", "rkl", "jsd", "lk_hybrid"))
    log_p_CW = strip.verifier_log_probabilities() if logarithms else None
    p_CW = strip.verifier_probabilities() if log_p_CW is None else log_p_CW.exp()
    below_CW = torch.where(q_CW <= p_CW, q_CW, 0.0)
    mass_C, alpha_C = below_CW.sum(-1), overlap(p_CW, q_CW)
    tv_C, loss_C = _tv_factors(alpha_C, scale_C, terms)
    loss = (loss_C * scale_C).sum()
    if terms.get("expected_length"):
        factor_C, shortfall = _expected_length(alpha_C, mask_BK)
        tv_C = tv_C + terms["expected_length"] * factor_C / count
        loss = loss + terms["expected_length"] * shortfall / count
    q_scale_C = tv_C * mass_C
    grad_CW = below_CW.mul_(-tv_C[:, None])
    if log_p_CW is None:
        return loss, grad_CW, q_scale_C, alpha_C
    log_q_CW = strip.draft_logits_CW.float() - log_norm_C[:, None]
    log_p_CW = log_p_CW.clamp_(min=LOG_P_FLOOR)
    kl_C = scale_C * (terms.get("kl", 0.0) + terms.get("lk_hybrid", 0.0) * lk_hybrid_share(alpha_C))
    loss = loss + (kl_C * (p_CW * (log_p_CW - log_q_CW)).sum(-1)).sum()
    grad_CW -= kl_C[:, None] * p_CW
    q_scale_C = q_scale_C + kl_C * p_CW.sum(-1)
    for name, inner_CW, constant_C, rate in _reverse_terms(terms, p_CW, q_CW, log_p_CW, log_q_CW):
        mean_C = (q_CW * inner_CW).sum(-1)
        loss = loss + (terms[name] * scale_C * (rate * mean_C + constant_C)).sum()
        factor_C = terms[name] * rate * scale_C
        grad_CW += factor_C[:, None] * q_CW * (inner_CW - mean_C[:, None])
    return loss, grad_CW, q_scale_C, alpha_C


def _tv_factors(alpha_C: Tensor, scale_C: Tensor, terms: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """Multiple of tv's gradient per slot (scaled), and the tv-like part of the loss per slot (not scaled)."""
    tv, nla, hybrid = terms.get("tv", 0.0), terms.get("nla", 0.0), terms.get("lk_hybrid", 0.0)
    factor_C = tv + nla * (alpha_C > NLA_FLOOR) / alpha_C.clamp(min=NLA_FLOOR)
    loss_C = tv * (1 - alpha_C) - nla * alpha_C.clamp(min=NLA_FLOOR).log()
    share_C = 1 - lk_hybrid_share(alpha_C)
    return scale_C * (factor_C + hybrid * share_C), loss_C + hybrid * share_C * (1 - alpha_C)


def _expected_length(alpha_C: Tensor, mask_BK: Tensor) -> tuple[Tensor, Tensor]:
    """-d loss / d alpha per slot [C], and the summed shortfall of the blocks.

    With alpha 1 where unsupervised, the derivative at slot k is (product before k) * r_k, where r_k counts the
    supervised slots from k on, each times the product between: r_k = mask_k + alpha_{k+1} r_{k+1}.
    """
    alpha_BK = torch.where(mask_BK, alpha_C.unflatten(0, mask_BK.shape), 1.0)
    reach_B, reaches = torch.zeros_like(alpha_BK[:, 0]), []
    for slot in reversed(range(mask_BK.shape[1])):
        reach_B = mask_BK[:, slot] + reach_B
        reaches.append(reach_B)
        reach_B = alpha_BK[:, slot] * reach_B
    before_BK = torch.cat([torch.ones_like(alpha_BK[:, :1]), alpha_BK[:, :-1]], 1).cumprod(1)
    factor_BK = before_BK * torch.stack(reaches[::-1], 1) * mask_BK
    return factor_BK.flatten(), expected_length_loss(alpha_BK, mask_BK).sum()


def _reverse_terms(
    terms: Mapping[str, float], p_CW: Tensor, q_CW: Tensor, log_p_CW: Tensor, log_q_CW: Tensor
) -> list[tuple[str, Tensor, Tensor, float]]:
    """(term, inner, constant, rate): the loss is rate * sum q inner + constant, its gradient rate q (inner - mean)."""
    found = []
    if terms.get("rkl"):
        found.append(("rkl", log_q_CW - log_p_CW, torch.zeros_like(p_CW[:, 0]), 1.0))
    if terms.get("jsd"):
        log_m_CW = torch.logaddexp(log_p_CW, log_q_CW) - math.log(2.0)
        outside_C = (1 - p_CW.sum(-1)).clamp(min=0) * math.log(2.0)
        constant_C = 0.5 * ((p_CW * (log_p_CW - log_m_CW)).sum(-1) + outside_C)
        found.append(("jsd", log_q_CW - log_m_CW, constant_C, 0.5))
    return found
