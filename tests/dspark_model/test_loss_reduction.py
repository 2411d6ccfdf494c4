"""Slot weights, block terms and the reduction of the readable losses against loops and enumerated outcomes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from dspark_model.losses import (
    SLOT_TERMS,
    dpace_weights,
    expected_length_loss,
    reference_loss,
    slot_losses,
    slot_weights,
)
from tests.dspark_model.loss_problem import ANCHOR_MASK, BLOCKS, DFLASH_MASK, MIX, K, Problem, randn
from tests.dspark_model.tiny import VOCAB


def test_slot_weights_decay_from_the_first_predicted_token():
    anchor = [math.exp(-k / 4) for k in range(5)]
    assert slot_weights(5, 4.0, sample_from_anchor=True).tolist() == pytest.approx(anchor)
    dflash = [0.0, *[math.exp(-(k - 1) / 4) for k in range(1, 5)]]
    assert slot_weights(5, 4.0, sample_from_anchor=False).tolist() == pytest.approx(dflash)


def dpace_by_loop(ce: list[float], mask: list[bool], alpha: float) -> list[float]:
    weights = []
    for k in range(len(ce)):
        total = 0.0
        for m in range(k, len(ce)):
            if mask[m]:
                total += math.prod((1 - alpha) * math.exp(-ce[i]) + alpha for i in range(m + 1) if mask[i])
        weights.append(total if mask[k] else 0.0)
    return weights


@pytest.mark.parametrize("alpha", [0.5, 0.2, 0.0, 1.0])
@pytest.mark.parametrize("mask_AK", [ANCHOR_MASK, DFLASH_MASK], ids=["anchor", "dflash"])
def test_dpace_weights_equal_a_double_loop(mask_AK, alpha):
    ce_AK = randn(BLOCKS, K, seed=1).abs().requires_grad_()
    unknown = torch.zeros(BLOCKS, K, dtype=torch.bool)
    unknown[0, 1] = True
    ce_with_unknown_AK = torch.where(unknown, math.inf, torch.where(mask_AK, ce_AK, math.nan))
    found = dpace_weights(ce_with_unknown_AK, mask_AK, alpha)
    assert not found.requires_grad
    for block in range(BLOCKS):
        expected = dpace_by_loop(ce_with_unknown_AK[block].tolist(), mask_AK[block].tolist(), alpha)
        assert found[block].tolist() == pytest.approx(expected, abs=1e-6)


def accepted_by_enumeration(acceptance: list[float]) -> float:
    """Accepted tokens averaged over every outcome of accepting or rejecting each proposed token."""
    total = 0.0
    for outcome in itertools.product([True, False], repeat=len(acceptance)):
        probability = math.prod(a if yes else 1 - a for a, yes in zip(acceptance, outcome, strict=True))
        total += probability * len(list(itertools.takewhile(bool, outcome)))
    return total


@pytest.mark.parametrize("mask_AK", [ANCHOR_MASK, DFLASH_MASK], ids=["anchor", "dflash"])
def test_expected_length_loss_is_what_the_enumerated_outcomes_fall_short_of(mask_AK):
    acceptance_AK = randn(BLOCKS, K, seed=1, dtype=torch.float64).sigmoid()
    acceptance_AK[0, 2] = 0.0
    found = expected_length_loss(acceptance_AK, mask_AK)
    for block in range(BLOCKS):
        supervised = acceptance_AK[block][mask_AK[block]].tolist()
        assert found[block].item() == pytest.approx(len(supervised) - accepted_by_enumeration(supervised))
    acceptance_AK.requires_grad_()
    assert torch.autograd.gradcheck(lambda a: expected_length_loss(a, mask_AK), acceptance_AK)
    (gradient,) = torch.autograd.grad(expected_length_loss(acceptance_AK, mask_AK).sum(), acceptance_AK)
    assert not gradient[~mask_AK].any()


def step_by_loop(problem: Problem, mask_AK: Tensor, weighting: str, *, sample_from_anchor: bool) -> float:
    """The loss of MIX, block by block and slot by slot."""
    total = 0.0
    for block in range(BLOCKS):
        terms = [problem.terms_by_loop(block * K + k) for k in range(K)]
        mask = mask_AK[block].tolist()
        if weighting == "dpace":
            covered = [int(t) >= 0 for t in problem.targets[block * K : (block + 1) * K]]
            ce = [t["ce"] if known else math.inf for t, known in zip(terms, covered, strict=True)]
            weights = dpace_by_loop(ce, mask, 0.3)
        else:
            first = 0 if sample_from_anchor else 1
            weights = [math.exp(-(k - first) / 2.5) for k in range(K)]
        for k in range(K):
            if mask[k]:
                total += weights[k] * sum(MIX[name] * terms[k][name] for name in SLOT_TERMS)
        acceptance = [1 - t["tv"] for t, counts in zip(terms, mask, strict=True) if counts]
        total += MIX["expected_length"] * (len(acceptance) - accepted_by_enumeration(acceptance))
    return total / int(mask_AK.sum())


@pytest.mark.parametrize("size", [VOCAB, 9])
@pytest.mark.parametrize("weighting", ["decay", "dpace"])
@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_reference_loss_equals_loops_over_blocks_and_slots(sample_from_anchor, weighting, size):
    problem, mask_AK = Problem(size), ANCHOR_MASK if sample_from_anchor else DFLASH_MASK
    found = reference_loss(
        problem.draft, problem.targets, mask_AK, MIX, p_SW=problem.p_SW, gamma=2.5, weighting=weighting,
        dpace_alpha=0.3, sample_from_anchor=sample_from_anchor,
    )  # fmt: skip
    expected = step_by_loop(problem, mask_AK, weighting, sample_from_anchor=sample_from_anchor)
    assert found.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_the_gradient_of_the_expected_length_term_equals_finite_differences(sample_from_anchor):
    problem, mask_AK = Problem(9, torch.float64), ANCHOR_MASK if sample_from_anchor else DFLASH_MASK
    logits = problem.draft.requires_grad_()

    def loss(x: Tensor) -> Tensor:
        terms = {"tv": 0.5, "expected_length": 2.0}
        return reference_loss(
            x, problem.targets, mask_AK, terms, p_SW=problem.p_SW, sample_from_anchor=sample_from_anchor
        )

    assert torch.autograd.gradcheck(loss, logits)


def test_dpace_weights_come_from_the_data_token_without_gradient_and_weight_other_terms():
    problem, mask_AK = Problem(9, torch.float64), ANCHOR_MASK
    logits = problem.draft.requires_grad_()
    loss = reference_loss(
        logits, problem.targets, mask_AK, {"tv": 1.0}, p_SW=problem.p_SW, weighting="dpace", sample_from_anchor=True
    )
    log_q_SW = logits.detach().log_softmax(-1)
    ce = [-log_q_SW[s, t].item() if t >= 0 else math.inf for s, t in enumerate(problem.targets.tolist())]
    constant = dpace_weights(torch.tensor(ce, dtype=torch.float64).view(BLOCKS, K), mask_AK).flatten()
    expected = (slot_losses(logits, problem.targets, {"tv": 1.0}, problem.p_SW) * constant).sum() / mask_AK.sum()
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits))


def test_slots_without_supervision_have_neither_loss_nor_gradient():
    problem = Problem(9)
    logits = problem.draft.requires_grad_()
    for weighting, mask_AK in itertools.product(["decay", "dpace"], [ANCHOR_MASK, torch.zeros_like(ANCHOR_MASK)]):
        loss = reference_loss(
            logits, problem.targets, mask_AK, MIX, p_SW=problem.p_SW, weighting=weighting, sample_from_anchor=True
        )
        (gradient,) = torch.autograd.grad(loss, logits)
        assert torch.equal(gradient.any(1), mask_AK.flatten())
        assert bool(loss.detach()) == bool(mask_AK.any())
