"""The readable slot losses against loops over plain Python floats, their gradients against finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dspark_model.losses import (
    LOG_P_FLOOR,
    LOSS_TERMS,
    SLOT_TERMS,
    acceptance_rate,
    confidence_loss,
    needs_verifier_distribution,
    reference_loss,
    slot_losses,
)
from dspark_model.vocab import draft_to_verifier_ids
from tests.dspark_model.loss_problem import MIX, SLOTS, Problem, randn
from tests.dspark_model.tiny import VOCAB, some_t2d


@pytest.mark.parametrize("size", [VOCAB, 9])
@pytest.mark.parametrize("name", SLOT_TERMS)
def test_each_slot_term_equals_its_formula_over_the_whole_vocabulary(name, size):
    problem = Problem(size)
    found = slot_losses(problem.draft, problem.targets, {name: 1.0}, problem.p_SW)
    assert found.tolist() == pytest.approx([problem.terms_by_loop(s)[name] for s in range(SLOTS)], abs=1e-5)


def test_a_mix_of_slot_terms_is_their_weighted_sum():
    problem = Problem(9)
    terms = {name: MIX[name] for name in SLOT_TERMS}
    found = slot_losses(problem.draft, problem.targets, terms, problem.p_SW)
    by_loop = [problem.terms_by_loop(s) for s in range(SLOTS)]
    assert found.tolist() == pytest.approx([sum(terms[n] * one[n] for n in terms) for one in by_loop], abs=1e-5)


@pytest.mark.parametrize("size", [VOCAB, 9])
@pytest.mark.parametrize("name", [name for name in SLOT_TERMS if name != "lk_hybrid"])
def test_the_gradient_of_each_slot_term_equals_finite_differences(name, size):
    problem = Problem(size, torch.float64)
    logits = problem.draft.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: slot_losses(x, problem.targets, {name: 1.0}, problem.p_SW), logits)


def test_lk_hybrid_does_not_differentiate_its_share():
    problem = Problem(9, torch.float64)
    logits = problem.draft.requires_grad_()
    shares = torch.tensor([math.exp(-3 * (1 - problem.terms_by_loop(s)["tv"])) for s in range(SLOTS)])

    def gradient(name: str, weights: Tensor) -> Tensor:
        loss = slot_losses(logits, problem.targets, {name: 1.0}, problem.p_SW)
        return torch.autograd.grad((loss * weights).sum(), logits)[0]

    torch.testing.assert_close(
        gradient("lk_hybrid", torch.ones(SLOTS)), gradient("kl", shares) + gradient("tv", 1 - shares)
    )


def test_equal_distributions_have_no_divergence():
    problem = Problem(VOCAB)
    terms = {name: 1.0 for name in SLOT_TERMS if name != "ce"}
    found = slot_losses(problem.verifier, problem.targets, terms, problem.p_SW)
    torch.testing.assert_close(found, torch.zeros(SLOTS), atol=1e-5, rtol=0)


def test_probabilities_that_underflow_leave_every_loss_and_gradient_finite():
    problem = Problem(VOCAB)
    problem.verifier[:, 5], problem.verifier[:, 6] = -200.0, -92.0  # p is 0, and below the normal numbers
    draft = problem.draft
    draft[3, :5] = -300.0
    draft.requires_grad_()
    p_SW = problem.verifier.softmax(-1)
    assert not p_SW[:, 5].any()
    for name in SLOT_TERMS:
        loss = slot_losses(draft, problem.targets, {name: 1.0}, p_SW)
        (gradient,) = torch.autograd.grad(loss.sum(), draft)
        assert bool(loss.isfinite().all() and gradient.isfinite().all()), name


def test_rkl_and_jsd_of_underflown_probabilities_follow_from_log_p_and_its_floor():
    problem = Problem(VOCAB)
    problem.verifier[:, 5], problem.verifier[:, 6] = -200.0, -92.0
    p_SW, log_q_SW = problem.verifier.softmax(-1), problem.draft.log_softmax(-1)
    log_p_SW = problem.verifier.log_softmax(-1).clamp(min=LOG_P_FLOOR)
    rkl = slot_losses(problem.draft, problem.targets, {"rkl": 1.0}, p_SW)
    torch.testing.assert_close(rkl, (log_q_SW.exp() * (log_q_SW - log_p_SW)).sum(-1))
    # The floor does not show in jsd: q log(q / m) tends to q log 2.
    jsd = slot_losses(problem.draft, problem.targets, {"jsd": 1.0}, p_SW)
    assert jsd.tolist() == pytest.approx([problem.terms_by_loop(s)["jsd"] for s in range(SLOTS)], abs=1e-6)


def test_nla_is_capped_where_nothing_overlaps():
    draft, verifier = torch.zeros(1, 4), torch.zeros(1, 4)
    draft[0, 0] = verifier[0, 1] = 40.0
    draft.requires_grad_()
    loss = slot_losses(draft, torch.tensor([1]), {"nla": 1.0}, verifier.softmax(-1))
    assert loss.item() == pytest.approx(-math.log(1e-5), rel=1e-6)
    assert not torch.autograd.grad(loss.sum(), draft)[0].any()


def test_a_verifier_that_always_says_what_the_draft_vocabulary_lacks_is_never_accepted():
    t2d = torch.ones(VOCAB, dtype=torch.bool)
    t2d[4] = False
    ids, verifier = draft_to_verifier_ids(t2d), torch.zeros(1, VOCAB)
    verifier[0, 4] = 50.0
    draft, p_SW = randn(1, VOCAB - 1, seed=1), verifier.softmax(-1)[:, ids]
    assert float(acceptance_rate(draft, verifier, ids)) == pytest.approx(0.0, abs=1e-6)
    assert float(slot_losses(draft, torch.tensor([-1]), {"tv": 1.0}, p_SW)) == pytest.approx(1.0, abs=1e-6)
    assert float(slot_losses(draft, torch.tensor([-1]), {"jsd": 1.0}, p_SW)) == pytest.approx(math.log(2), abs=1e-6)


def test_acceptance_rate_is_what_speculative_sampling_accepts():
    """Draw from q, accept with probability min(1, p / q): 200,000 draws, four standard deviations."""
    t2d = some_t2d(9)
    ids, draft, verifier = draft_to_verifier_ids(t2d), randn(1, 9, seed=5), randn(1, VOCAB, seed=6)
    q, p = draft.softmax(-1)[0], verifier.softmax(-1)[0]
    g = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(q, 200_000, replacement=True, generator=g)
    accepted = torch.rand(200_000, generator=g) < p[ids[drawn]] / q[drawn]
    assert float(acceptance_rate(draft, verifier, ids)) == pytest.approx(float(accepted.double().mean()), abs=0.0045)


def test_equal_distributions_are_always_accepted():
    logits = randn(SLOTS, VOCAB, seed=1)
    torch.testing.assert_close(acceptance_rate(logits, logits, torch.arange(VOCAB)), torch.ones(SLOTS))


def test_logits_of_lower_precision_are_worked_on_in_float32():
    problem = Problem(9)
    terms = {name: MIX[name] for name in SLOT_TERMS}
    rough = problem.draft.bfloat16()
    found = slot_losses(rough, problem.targets, terms, problem.p_SW)
    torch.testing.assert_close(found, slot_losses(rough.float(), problem.targets, terms, problem.p_SW), rtol=0, atol=0)


def test_every_term_but_ce_reads_the_verifier_unless_its_weight_is_zero():
    assert [name for name in LOSS_TERMS if not needs_verifier_distribution({name: 1.0})] == ["ce"]
    assert not needs_verifier_distribution({"ce": 1.0, "tv": 0.0})


def test_unknown_terms_and_missing_distributions_are_refused():
    draft, targets, mask = randn(2, 3, seed=0), torch.tensor([0, 1]), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"unknown loss terms \['l2'\]; known: ce, kl, .*expected_length"):
        reference_loss(draft, targets, mask, {"l2": 1.0}, sample_from_anchor=True)
    with pytest.raises(ValueError, match=r"unknown loss terms \['expected_length'\]"):  # a term of blocks
        slot_losses(draft, targets, {"expected_length": 1.0}, draft.softmax(-1))
    for name in LOSS_TERMS[1:]:
        with pytest.raises(ValueError, match=rf"\['{name}'\] need the verifier's distribution p_SW"):
            reference_loss(draft, targets, mask, {"ce": 1.0, name: 1.0}, sample_from_anchor=True)


def test_confidence_loss_is_binary_cross_entropy_against_a_constant():
    logits = randn(6, seed=1).requires_grad_()
    acceptance, weights = randn(6, seed=2).sigmoid().requires_grad_(), randn(6, seed=3).abs()
    loss = confidence_loss(logits, acceptance, weights, torch.tensor(4))
    expected = 0.0
    for x, a, w in zip(logits.tolist(), acceptance.tolist(), weights.tolist(), strict=True):
        s = 1 / (1 + math.exp(-x))
        expected += -w * (a * math.log(s) + (1 - a) * math.log(1 - s)) / 4
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert acceptance.grad is None, "the target is detached"
    torch.testing.assert_close(logits.grad, (logits.sigmoid() - acceptance).detach() * weights / 4)
