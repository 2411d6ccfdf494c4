"""Slot losses, readable: the reference that `fused_loss.py` is compared with in value and gradient.

q is the drafter's distribution over draft ids, p the verifier's **full** distribution restricted to draft ids, so p
may sum to less than 1: what the draft vocabulary lacks can never be accepted and counts as rejected.

- ce: -log q[target], the data token (DSpark paper, equation of L_ce; for greedy data it is the verifier's argmax)
- kl: sum p log(p / q)
- tv: 1 - sum min(p, q), the rejection probability of speculative sampling (paper: L1 / 2 at full vocabulary)

A loss is sum(weight_k * loss) / sum(mask), weight_k = exp(-k / gamma) over prediction slots (speculators' reduction).
Shape letters: S slots, V verifier vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

LOSS_TERMS = ("ce", "kl", "tv")


def needs_verifier_distribution(terms: Mapping[str, float]) -> bool:
    """Whether any weighted term reads p, which costs a pass through the verifier's whole head."""
    return any(terms.get(name, 0.0) for name in ("kl", "tv"))


def slot_weights(block_size: int, gamma: float, *, sample_from_anchor: bool) -> Tensor:
    """Float32 [K]: exp(-i / gamma) for the i-th predicted token; 0 for the DFlash layout's slot 0."""
    index_K = torch.arange(block_size, dtype=torch.float32) - (0 if sample_from_anchor else 1)
    return torch.where(index_K < 0, 0.0, torch.exp(-index_K / gamma))


def acceptance_rate(draft_logits_SW: Tensor, verifier_logits_SV: Tensor, verifier_ids_W: Tensor) -> Tensor:
    """Analytic acceptance probability sum min(p, q) of each slot, float32 [S]."""
    q_SW = draft_logits_SW.float().softmax(-1)
    p_SW = verifier_logits_SV.float().softmax(-1)[:, verifier_ids_W]
    return torch.minimum(p_SW, q_SW).sum(-1)


def slot_losses(
    draft_logits_SW: Tensor,
    draft_targets_S: Tensor,
    terms: Mapping[str, float],
    p_SW: Tensor | None = None,
) -> Tensor:
    """Weighted sum of the loss terms per slot, float32 [S].

    Args:
        draft_logits_SW: drafter logits after the Markov bias.
        draft_targets_S: draft id of the data token; -1 where the draft vocabulary lacks it (no ce signal).
        terms: weight per term name.
        p_SW: the verifier's full distribution restricted to draft ids; needed by kl and tv.

    Raises:
        ValueError: unknown term, or a term that needs `p_SW` without it.
    """
    unknown = set(terms) - set(LOSS_TERMS)
    if unknown:
        raise ValueError(f"unknown loss terms {sorted(unknown)}; known: {', '.join(LOSS_TERMS)}")
    log_q_SW = draft_logits_SW.float().log_softmax(-1)
    total_S = log_q_SW.new_zeros(log_q_SW.shape[0])
    if terms.get("ce"):
        picked_S = log_q_SW.gather(1, draft_targets_S.clamp(min=0)[:, None])[:, 0]
        total_S = total_S + terms["ce"] * torch.where(draft_targets_S >= 0, -picked_S, 0.0)
    if needs_verifier_distribution(terms):
        if p_SW is None:
            raise ValueError("loss terms kl and tv need the verifier's distribution p_SW")
        if terms.get("kl"):
            entropy_S = torch.xlogy(p_SW, p_SW).sum(-1)
            total_S = total_S + terms["kl"] * (entropy_S - (p_SW * log_q_SW).sum(-1))
        if terms.get("tv"):
            total_S = total_S + terms["tv"] * (1 - torch.minimum(p_SW, log_q_SW.exp()).sum(-1))
    return total_S


def confidence_loss(confidence_logits_S: Tensor, acceptance_S: Tensor, weights_S: Tensor, count: Tensor) -> Tensor:
    """Binary cross-entropy against the (detached) analytic acceptance rate (paper, L_conf), reduced like the rest."""
    bce_S = F.binary_cross_entropy_with_logits(confidence_logits_S.float(), acceptance_S.detach(), reduction="none")
    return (bce_S * weights_S).sum() / count
