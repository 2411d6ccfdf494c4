"""Losses, readable: the reference that `fused_loss.py` is compared with in value and gradient.

q is the drafter's distribution over draft ids, p the verifier's **full** distribution restricted to draft ids, so its
sum P may be below 1: what the draft vocabulary lacks can never be accepted and counts as rejected. The overlap
alpha = sum min(p, q) is the probability that speculative sampling accepts a token drawn from q.

Per-slot terms:

- ce: -log q[target], the data token (DSpark paper, arXiv 2607.05147, L_ce; for greedy data it is the verifier's argmax)
- kl: sum p log(p / q) over draft ids. Over the whole vocabulary it would be infinite wherever P < 1, because q is 0
  there; the part left out does not depend on q. It is at least P log P, so it may be negative.
- rkl: sum q log(q / p)
- jsd: Jensen-Shannon divergence between p over the whole vocabulary and q extended by zeros, exact: the mass outside
  the draft vocabulary adds (1 - P) / 2 * log 2
- tv: 1 - alpha (the paper's L1 / 2, over the whole vocabulary)
- nla: -log(max(alpha, 1e-5)) ("LK loss", arXiv 2602.23881)
- lk_hybrid: s kl + (1 - s) tv, s = exp(-3 alpha) without gradient (the same article's hybrid, eta = 3)

Term of a block: expected_length, the shortfall of the expected number of accepted tokens (AngelSpec, arXiv 2607.25852).

p may underflow to 0 where q does not. rkl and jsd read log max(p, smallest normal float32) = max(log p, LOG_P_FLOOR),
so that they stay finite and can be reproduced from log p alone.

A loss is (sum weight_k * slot terms + sum over blocks of block terms) / number of supervised slots, which is
speculators' reduction (https://github.com/vllm-project/speculators); the paper divides by the sum of weights.
Logits of lower precision are worked on in float32; float64 stays float64, which numerical gradients need.
Shape letters: S slots = A anchors x K block slots, V verifier vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

SLOT_TERMS = ("ce", "kl", "rkl", "jsd", "tv", "nla", "lk_hybrid")
LOSS_TERMS = (*SLOT_TERMS, "expected_length")
NLA_FLOOR = 1e-5
LK_HYBRID_ETA = 3.0
LOG_P_FLOOR = math.log(torch.finfo(torch.float32).tiny)

Weighting = Literal["decay", "dpace"]


def needs_verifier_distribution(terms: Mapping[str, float]) -> bool:
    """Whether any weighted term reads p, which costs a pass through the verifier's whole head: all but ce do."""
    return any(weight for name, weight in terms.items() if name != "ce")


def slot_weights(block_size: int, gamma: float, *, sample_from_anchor: bool) -> Tensor:
    """Float32 [K]: exp(-i / gamma) for the i-th predicted token; 0 for the DFlash layout's slot 0."""
    index_K = torch.arange(block_size, dtype=torch.float32) - (0 if sample_from_anchor else 1)
    return torch.where(index_K < 0, 0.0, torch.exp(-index_K / gamma))


def dpace_weights(ce_AK: Tensor, mask_AK: Tensor, alpha: float = 0.5) -> Tensor:
    """How much each slot matters to the smoothed accepted length of its block (D-PACE, arXiv 2605.18810).

    s_k = (1 - alpha) q_k + alpha with q_k = exp(-ce_k), and 1 on unsupervised slots; w_k = sum over supervised m >= k
    of prod_{i <= m} s_i. A slot whose target the draft vocabulary lacks can never be accepted: q_k = 0.

    Args:
        ce_AK: -log q[data token], inf where the draft vocabulary lacks the token; anything where unsupervised.
        mask_AK: bool, supervised slots.
        alpha: smoothing; at 1 each supervised slot weighs the number of supervised slots from it on.

    Returns:
        [A, K], detached, 0 where unsupervised.
    """
    smooth_AK = (1 - alpha) * torch.exp(-ce_AK.detach()) + alpha
    prefix_AK = torch.where(mask_AK, smooth_AK, 1.0).cumprod(1)
    reach_AK = (prefix_AK * mask_AK).flip(1).cumsum(1).flip(1)
    return reach_AK * mask_AK


def acceptance_rate(draft_logits_SW: Tensor, verifier_logits_SV: Tensor, verifier_ids_W: Tensor) -> Tensor:
    """Analytic acceptance probability alpha = sum min(p, q) of each slot, float32 [S]."""
    q_SW = _at_least_float32(draft_logits_SW).softmax(-1)
    p_SW = _at_least_float32(verifier_logits_SV).softmax(-1)[:, verifier_ids_W]
    return torch.minimum(p_SW, q_SW).sum(-1)


def lk_hybrid_share(acceptance: Tensor) -> Tensor:
    """Share of kl in lk_hybrid, same shape, detached: exp(-3 alpha) (arXiv 2602.23881)."""
    return torch.exp(-LK_HYBRID_ETA * acceptance.detach())


def slot_losses(
    draft_logits_SW: Tensor,
    draft_targets_S: Tensor,
    terms: Mapping[str, float],
    p_SW: Tensor | None = None,
) -> Tensor:
    """Weighted sum of the per-slot terms, float32 [S].

    Args:
        draft_logits_SW: drafter logits after the Markov bias.
        draft_targets_S: draft id of the data token; -1 where the draft vocabulary lacks it (no ce signal).
        terms: weight per term name.
        p_SW: the verifier's full distribution restricted to draft ids; needed by all terms but ce.

    Raises:
        ValueError: a term that is unknown or no per-slot term, or one that needs `p_SW` without it.
    """
    _check_terms(terms, SLOT_TERMS, p_SW)
    log_q_SW = _at_least_float32(draft_logits_SW).log_softmax(-1)
    total_S = log_q_SW.new_zeros(log_q_SW.shape[0])
    if terms.get("ce"):
        total_S = total_S + terms["ce"] * torch.where(draft_targets_S >= 0, _ce(log_q_SW, draft_targets_S), 0.0)
    if p_SW is not None:
        for name, weight in terms.items():
            if weight and name != "ce":
                total_S = total_S + weight * _verifier_term(name, log_q_SW, p_SW)
    return total_S


def expected_length_loss(acceptance_AK: Tensor, mask_AK: Tensor) -> Tensor:
    """Supervised slots minus the expected number of accepted ones, [A]; 0 is perfect (arXiv 2607.25852).

    Drafting stops at the first rejection, so slot k is reached and accepted with probability prod_{i <= k} alpha_i:
    sum over supervised k of 1 - prod_{i <= k} alpha_i. Unsupervised slots are skipped, not counted as rejections
    (the DFlash layout's slot 0 predicts nothing). The gradient flows through every factor.
    """
    survival_AK = torch.where(mask_AK, acceptance_AK, 1.0).cumprod(1)
    return ((1 - survival_AK) * mask_AK).sum(1)


def reference_loss(
    draft_logits_SW: Tensor,
    draft_targets_S: Tensor,
    mask_AK: Tensor,
    terms: Mapping[str, float],
    *,
    sample_from_anchor: bool,
    p_SW: Tensor | None = None,
    gamma: float = 4.0,
    weighting: Weighting = "decay",
    dpace_alpha: float = 0.5,
) -> Tensor:
    """The loss of a step: terms, slot weights and reduction together; a float32 scalar.

    Args:
        draft_logits_SW: drafter logits after the Markov bias, blocks one after another.
        draft_targets_S: draft id of the data token; -1 where the draft vocabulary lacks it.
        mask_AK: bool, supervised slots, one run per block.
        terms: weight per name of `LOSS_TERMS`.
        sample_from_anchor: the anchor layout, see `slot_weights`.
        p_SW: the verifier's full distribution restricted to draft ids; needed by all terms but ce.
        gamma: decay length of "decay".
        weighting: `slot_weights` or `dpace_weights`, for every per-slot term; block terms have no weights.
        dpace_alpha: smoothing of "dpace".

    Raises:
        ValueError: unknown term, or a term that needs `p_SW` without it.
    """
    _check_terms(terms, LOSS_TERMS, p_SW)
    slot_terms = {name: weight for name, weight in terms.items() if name in SLOT_TERMS}
    losses_AK = slot_losses(draft_logits_SW, draft_targets_S, slot_terms, p_SW).view_as(mask_AK)
    if weighting == "dpace":
        log_q_SW = _at_least_float32(draft_logits_SW).log_softmax(-1)
        weights_AK = dpace_weights(_ce(log_q_SW, draft_targets_S).view_as(mask_AK), mask_AK, dpace_alpha)
    else:
        weights_K = slot_weights(mask_AK.shape[1], gamma, sample_from_anchor=sample_from_anchor)
        weights_AK = weights_K.to(mask_AK.device) * mask_AK
    total = (weights_AK * losses_AK).sum()
    if p_SW is not None and terms.get("expected_length"):
        q_SW = _at_least_float32(draft_logits_SW).softmax(-1)
        acceptance_AK = torch.minimum(p_SW, q_SW).sum(-1).view_as(mask_AK)
        total = total + terms["expected_length"] * expected_length_loss(acceptance_AK, mask_AK).sum()
    return total / mask_AK.sum().clamp(min=1)


def confidence_loss(confidence_logits_S: Tensor, acceptance_S: Tensor, weights_S: Tensor, count: Tensor) -> Tensor:
    """Binary cross-entropy against the (detached) analytic acceptance rate (paper, L_conf), reduced like the rest."""
    bce_S = F.binary_cross_entropy_with_logits(confidence_logits_S.float(), acceptance_S.detach(), reduction="none")
    return (bce_S * weights_S).sum() / count


def _check_terms(terms: Mapping[str, float], known: tuple[str, ...], p_SW: Tensor | None) -> None:
    unknown = set(terms) - set(known)
    if unknown:
        raise ValueError(f"unknown loss terms {sorted(unknown)}; known: {', '.join(known)}")
    if p_SW is None and needs_verifier_distribution(terms):
        needing = sorted(name for name, weight in terms.items() if weight and name != "ce")
        raise ValueError(f"loss terms {needing} need the verifier's distribution p_SW, which is None")


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _ce(log_q_SW: Tensor, draft_targets_S: Tensor) -> Tensor:
    """-log q[target] [S], inf for target -1."""
    picked_S = log_q_SW.gather(1, draft_targets_S.clamp(min=0)[:, None])[:, 0]
    return torch.where(draft_targets_S >= 0, -picked_S, math.inf)


def _verifier_term(name: str, log_q_SW: Tensor, p_SW: Tensor) -> Tensor:
    """One term [S] of those that read p; formulas at the top of the file."""
    q_SW = log_q_SW.exp()
    log_p_SW = p_SW.log().clamp(min=LOG_P_FLOOR)
    alpha_S = torch.minimum(p_SW, q_SW).sum(-1)
    if name == "tv":
        return 1 - alpha_S
    if name == "nla":
        return -alpha_S.clamp(min=NLA_FLOOR).log()
    if name == "rkl":
        return (q_SW * (log_q_SW - log_p_SW)).sum(-1)
    if name == "jsd":
        log_m_SW = torch.logaddexp(log_p_SW, log_q_SW) - math.log(2)
        outside_S = (1 - p_SW.sum(-1)).clamp(min=0) * math.log(2)
        inside_S = (p_SW * (log_p_SW - log_m_SW) + q_SW * (log_q_SW - log_m_SW)).sum(-1)
        return 0.5 * (inside_S + outside_S)
    kl_S = (p_SW * (log_p_SW - log_q_SW)).sum(-1)
    if name == "kl":
        return kl_S
    share_S = lk_hybrid_share(alpha_S)
    return share_S * kl_S + (1 - share_S) * (1 - alpha_S)
