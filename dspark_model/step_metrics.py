"""What the blocks of a training or validation step did, as (sum, weight) pairs that merge over steps and processes.

Every number here is **teacher forced**: slot k is judged with the data tokens before it, at anchors that were drawn,
not visited. None of them is served acceptance; `metrics.py` walks an answer as the server does, and reads lower.
Two kinds must not be mixed up:

- `..._sampling`: analytic, from alpha = sum min(p, q), the probability that speculative sampling accepts a token drawn
  from the drafter. No token is drawn.
- `..._greedy`: counted, from "the drafter's most likely token is the data token": drafting at temperature 0, where
  the data is the verifier's own greedy answer.

Rates of position i (the i-th proposed token; the DFlash layout's slot 0 proposes none and is left out):

- survival: share of blocks that accept positions 0..i. A block that its answer's end cuts short accepts nothing from
  there on, as a server counts it, so that expected_length = 1 + sum of survival (1 is the verifier's own token).
- conditional: share accepted at i among blocks that accepted all before i and are supervised at i. It equals
  survival_i / survival_{i-1} if no block is cut short; blocks that are do not count as rejections here.
- accuracy: matches at i whatever came before.

Calibration is that of the prefix product of confidences, which decides how far a block is verified (DSpark paper,
arXiv 2607.05147: 20 bins), against the prefix product of alpha in place of sampled outcomes.

Shape letters: A anchors, K block slots, P proposed tokens per block (K, or K - 1 in the DFlash layout), C bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CALIBRATION_BINS = 20
PREDICTED_BINS, OUTCOME_BINS = "confidence_bins", "outcome_bins"

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class StepMetrics:
    """Sums and weights; `a + b` merges steps, and joins metrics of different names. `StepMetrics()` is neutral."""

    pairs: Mapping[str, Pair] = field(default_factory=dict)
    """(sum, weight) in float64 on the step's device: scalars, [P] per position, [P, C] for the calibration bins."""

    def __add__(self, other: StepMetrics) -> StepMetrics:
        merged = dict(self.pairs)
        for name, (total, weight) in other.pairs.items():
            before = merged.get(name)
            merged[name] = (total, weight) if before is None else (before[0] + total, before[1] + weight)
        return StepMetrics(merged)

    def means(self) -> dict[str, Any]:
        """Sum / weight by name, a float or a list per position, nan where nothing was seen; waits for the device once.

        The calibration bins are reported as `confidence_ece` per position: sum over bins of
        |sum of predictions - sum of outcomes| / number of predictions.
        """
        bins = (PREDICTED_BINS, OUTCOME_BINS)
        rates = {name: total / weight for name, (total, weight) in self.pairs.items() if name not in bins}
        if PREDICTED_BINS in self.pairs:
            predicted_PC, count_PC = self.pairs[PREDICTED_BINS]
            outcome_PC, _ = self.pairs[OUTCOME_BINS]
            rates["confidence_ece"] = (predicted_PC - outcome_PC).abs().sum(1) / count_PC.sum(1)
        if not rates:
            return {}
        flat = iter(torch.cat([rate.flatten() for rate in rates.values()]).tolist())
        return {
            name: [next(flat) for _ in range(rate.shape[0])] if rate.dim() else next(flat)
            for name, rate in rates.items()
        }


@torch.no_grad()
def token_metrics(
    greedy_match_AK: Tensor, draft_targets_AK: Tensor, mask_AK: Tensor, *, sample_from_anchor: bool
) -> StepMetrics:
    """Metrics that need no verifier distribution.

    `accuracy`, `accuracy_per_position`, `expected_length_greedy`, `survival_greedy`, `conditional_greedy`, and
    `draft_vocab_coverage`: the share of supervised targets that the draft vocabulary has.

    Args:
        greedy_match_AK: bool, the drafter's most likely token is the data token.
        draft_targets_AK: draft id of the data token, -1 where the draft vocabulary lacks it.
        mask_AK: bool, supervised slots, one run per block.
        sample_from_anchor: whether slot 0 proposes a token.
    """
    match_AP, target_AP, mask_AP = _proposals(sample_from_anchor, greedy_match_AK, draft_targets_AK, mask_AK)
    hit_AP, slots_P = (match_AP & mask_AP).double(), mask_AP.double().sum(0)
    covered = ((target_AP >= 0) & mask_AP).double().sum()
    return StepMetrics(
        {
            "accuracy": (hit_AP.sum(), slots_P.sum()),
            "accuracy_per_position": (hit_AP.sum(0), slots_P),
            "draft_vocab_coverage": (covered, slots_P.sum()),
            **_length_pairs("greedy", hit_AP, mask_AP),
        }
    )


@torch.no_grad()
def acceptance_metrics(
    acceptance_AK: Tensor, mask_AK: Tensor, *, sample_from_anchor: bool, confidence_AK: Tensor | None = None
) -> StepMetrics:
    """Metrics of the analytic acceptance rate, and of the confidence head against it.

    `acceptance_rate`, `expected_length_sampling`, `survival_sampling`, `conditional_sampling`; with confidences also
    `confidence_abs_error` (|confidence - alpha|), `confidence_prefix_bias` (prefix product of confidences minus that of
    alpha, so above 0 is overconfident) and the calibration bins.

    Args:
        acceptance_AK: alpha; anything, nan too, where unsupervised.
        mask_AK: bool, supervised slots, one run per block.
        sample_from_anchor: whether slot 0 proposes a token.
        confidence_AK: the confidence head's probabilities.
    """
    alpha_AP, mask_AP = _proposals(sample_from_anchor, acceptance_AK, mask_AK)
    alpha_AP, slots = _supervised(alpha_AP, mask_AP), mask_AP.double().sum()
    pairs = {"acceptance_rate": (alpha_AP.sum(), slots), **_length_pairs("sampling", alpha_AP, mask_AP)}
    if confidence_AK is not None:
        (confidence_AP,) = _proposals(sample_from_anchor, confidence_AK)
        confidence_AP = _supervised(confidence_AP, mask_AP)
        predicted_AP, outcome_AP = confidence_AP.cumprod(1), alpha_AP.cumprod(1)
        pairs["confidence_abs_error"] = ((confidence_AP - alpha_AP).abs().sum(), slots)
        pairs["confidence_prefix_bias"] = ((predicted_AP - outcome_AP).sum(), slots)
        pairs |= _calibration_pairs(predicted_AP, outcome_AP, mask_AP)
    return StepMetrics(pairs)


def _proposals(sample_from_anchor: bool, *slots_AK: Tensor) -> list[Tensor]:
    return [slot_AK[:, 0 if sample_from_anchor else 1 :] for slot_AK in slots_AK]


def _supervised(values_AP: Tensor, mask_AP: Tensor) -> Tensor:
    """Float64, 0 where unsupervised (there nan may stand, which a product would keep)."""
    return torch.where(mask_AP, values_AP.double(), 0.0)


def _length_pairs(kind: str, accepted_AP: Tensor, mask_AP: Tensor) -> dict[str, Pair]:
    """Expected length, survival and conditional rates from the probability of accepting each position (0 outside)."""
    prefix_AP = accepted_AP.cumprod(1)
    reached_AP = F.pad(prefix_AP[:, :-1], (1, 0), value=1.0) * mask_AP
    blocks, survivors_P = mask_AP.any(1).double().sum(), prefix_AP.sum(0)
    return {
        f"expected_length_{kind}": (blocks + survivors_P.sum(), blocks),
        f"survival_{kind}": (survivors_P, blocks.expand_as(survivors_P)),
        f"conditional_{kind}": (survivors_P, reached_AP.sum(0)),
    }


def _calibration_pairs(predicted_AP: Tensor, outcome_AP: Tensor, mask_AP: Tensor) -> dict[str, Pair]:
    """Sums of predictions and of outcomes per bin of equal width; a prediction of 1 falls into the last."""
    bin_AP = (predicted_AP * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    bins_C = torch.arange(CALIBRATION_BINS, device=bin_AP.device)
    member_APC = ((bin_AP[..., None] == bins_C) & mask_AP[..., None]).double()
    count_PC = member_APC.sum(0)
    return {
        PREDICTED_BINS: (torch.einsum("ap,apc->pc", predicted_AP, member_APC), count_PC),
        OUTCOME_BINS: (torch.einsum("ap,apc->pc", outcome_AP, member_APC), count_PC),
    }
