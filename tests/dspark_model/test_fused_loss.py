"""The fused losses against the readable ones, in value and gradient, however the work is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark_model import fused_loss as fused
from dspark_model.fused_loss import SlotTargets, acceptance_rates, fused_loss
from dspark_model.losses import LOSS_TERMS, acceptance_rate, reference_loss
from dspark_model.strip_loss import Objective, strip_loss
from dspark_model.verifier_targets import VerifierTargets
from dspark_model.vocab import draft_to_verifier_ids, verifier_to_draft_ids
from tests.dspark_model.tiny import HIDDEN, VOCAB, some_t2d, tiny_parts

BLOCKS, K, RANK, CAP = 7, 3, 5, 2.0
MIXES = [*({name: 1.0} for name in LOSS_TERMS), {"ce": 0.1, "tv": 0.9}, dict.fromkeys(LOSS_TERMS, 0.5)]
# One block per strip and per panel; strips that do not divide their panel; everything at once.
CUTS = [(1, 1), (5 * K * VOCAB, 2 * K * VOCAB), (1 << 20, 1 << 20)]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Problem:
    """Overlapping blocks of a drafter with `size` draft ids: leaves that want a gradient, and targets."""

    def __init__(self, size: int, markov: bool = True, softcap: float | None = None) -> None:
        self.parts, t2d = tiny_parts(), some_t2d(size)
        self.ids = draft_to_verifier_ids(t2d)
        self.head = self.parts.lm_head_VD[self.ids]
        slots = BLOCKS * K
        self.hidden = randn(slots, HIDDEN, seed=1).mul(0.3).requires_grad_()
        self.markov = randn(slots, RANK, seed=2).requires_grad_() if markov else None
        self.w2 = randn(size, RANK, seed=3).mul(0.5).requires_grad_() if markov else None
        self.leaves = [leaf for leaf in (self.hidden, self.markov, self.w2) if leaf is not None]
        targets = torch.randint(0, VOCAB, (slots,), generator=torch.Generator().manual_seed(4))
        mask_AK = torch.ones(BLOCKS, K, dtype=torch.bool)
        mask_AK[1, 2], mask_AK[3, 1:], mask_AK[5] = False, False, False
        # Blocks start two positions apart, so neighbours share one of their three positions.
        position_S = (2 * torch.arange(BLOCKS)[:, None] + torch.arange(K)).flatten()
        normed_PD = randn(int(position_S[-1]) + 1, HIDDEN, seed=6)
        logits_PV = normed_PD @ self.parts.lm_head_VD.T
        if softcap is not None:
            logits_PV = softcap * torch.tanh(logits_PV / softcap)
        self.verifier_logits_SV = logits_PV[position_S]
        log_norm_P = None if size == VOCAB else logits_PV.logsumexp(-1)
        self.targets = SlotTargets(
            verifier_to_draft_ids(t2d)[targets], mask_AK, VerifierTargets(normed_PD, position_S, log_norm_P, softcap)
        )

    def logits(self) -> Tensor:
        base = self.hidden @ self.head.T
        return base if self.markov is None else base + self.markov @ self.w2.T

    def readable(self, objective: Objective) -> Tensor:
        return reference_loss(
            self.logits(),
            self.targets.draft_targets_S,
            self.targets.mask_AK,
            objective.terms,
            sample_from_anchor=objective.sample_from_anchor,
            p_SW=self.verifier_logits_SV.softmax(-1)[:, self.ids],
            gamma=objective.gamma,
            weighting=objective.weighting,
            dpace_alpha=objective.dpace_alpha,
        )

    def fused(self, objective: Objective, targets: SlotTargets | None = None) -> tuple:
        return fused_loss(self.hidden, self.markov, self.head, self.w2, targets or self.targets, objective)


def assert_agree(problem: Problem, objective: Objective) -> None:
    loss, _ = problem.fused(objective)
    expected = problem.readable(objective)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    # Scaled, so that a backward that ignores the incoming gradient shows.
    found = torch.autograd.grad(loss * 2.5, problem.leaves)
    wanted = torch.autograd.grad(expected * 2.5, problem.leaves)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cut", CUTS, ids=["block by block", "uneven", "at once"])
@pytest.mark.parametrize("weighting", ["decay", "dpace"])
@pytest.mark.parametrize("size", [VOCAB, 9])
@pytest.mark.parametrize("terms", MIXES, ids=str)
def test_values_and_gradients_equal_the_readable_loss(terms, size, weighting, cut, monkeypatch):
    monkeypatch.setattr(fused, "PANEL_BYTES", 4 * cut[0])
    monkeypatch.setattr(fused, "STRIP_ELEMENTS", cut[1])
    assert_agree(Problem(size), Objective(terms=terms, gamma=2.0, weighting=weighting, dpace_alpha=0.3))


@pytest.mark.parametrize("size", [VOCAB, 9])
@pytest.mark.parametrize("terms", [MIXES[-1], {"tv": 1.0}], ids=str)
def test_without_a_markov_head_with_a_soft_cap_and_in_the_dflash_layout(terms, size):
    assert_agree(Problem(size, markov=False), Objective(terms=terms, gamma=4.0))
    assert_agree(Problem(size, softcap=CAP), Objective(terms=terms, gamma=4.0))
    assert_agree(Problem(size), Objective(terms=terms, gamma=4.0, sample_from_anchor=False))


@pytest.mark.parametrize("size", [VOCAB, 9])
def test_what_each_slot_did_is_reported(size):
    problem = Problem(size)
    _, stats = problem.fused(Objective(terms={"tv": 1.0}, gamma=4.0))
    logits = problem.logits().detach()
    rates = acceptance_rate(logits, problem.verifier_logits_SV, problem.ids)
    torch.testing.assert_close(stats.acceptance_S, rates)
    targets = problem.targets.draft_targets_S
    for slot, target in enumerate(targets.tolist()):
        assert bool(stats.greedy_match_S[slot]) == (int(logits[slot].argmax()) == target)
        expected = -logits[slot].log_softmax(-1)[target] if target >= 0 else torch.tensor(torch.inf)
        torch.testing.assert_close(stats.ce_S[slot], expected)
    found = acceptance_rates(
        problem.hidden, problem.markov, problem.head, problem.w2, problem.targets.verifier, block_size=K
    )
    torch.testing.assert_close(found, rates)


def test_plain_cross_entropy_needs_no_verifier_and_reports_no_acceptance():
    problem = Problem(9)
    targets = SlotTargets(problem.targets.draft_targets_S, problem.targets.mask_AK, None)
    objective = Objective(terms={"ce": 1.0}, gamma=4.0)
    loss, stats = problem.fused(objective, targets)
    torch.testing.assert_close(loss, problem.readable(objective))
    assert stats.acceptance_S.isnan().all()
    with pytest.raises(ValueError, match="need the verifier's states"):
        problem.fused(Objective(terms={"tv": 1.0}, gamma=4.0), targets)


@pytest.mark.parametrize("terms", MIXES, ids=str)
def test_an_unsupervised_slot_has_no_gradient_even_where_its_normaliser_is_unknown(terms):
    problem = Problem(9)
    verifier = problem.targets.verifier
    lonely = problem.targets.verifier.position_S[5 * K + 1]  # read by the unsupervised block alone
    log_norm_P = verifier.log_norm_P.clone()
    log_norm_P[lonely] = torch.inf
    targets = SlotTargets(
        problem.targets.draft_targets_S,
        problem.targets.mask_AK,
        VerifierTargets(verifier.normed_PD, verifier.position_S, log_norm_P, None),
    )
    loss, _ = problem.fused(Objective(terms=terms, gamma=4.0), targets)
    torch.testing.assert_close(loss, problem.readable(Objective(terms=terms, gamma=4.0)), rtol=1e-4, atol=1e-5)
    hidden, markov, w2 = torch.autograd.grad(loss, problem.leaves)
    supervised = problem.targets.mask_AK.flatten()
    assert not hidden[~supervised].any()
    assert not markov[~supervised].any()
    assert w2.isfinite().all()


def test_a_supervised_slot_with_an_unknown_normaliser_shows_as_nan():
    problem = Problem(9)
    verifier = problem.targets.verifier
    wrong = VerifierTargets(verifier.normed_PD, verifier.position_S, verifier.log_norm_P * torch.nan, None)
    targets = SlotTargets(problem.targets.draft_targets_S, problem.targets.mask_AK, wrong)
    assert problem.fused(Objective(terms={"tv": 1.0}, gamma=4.0), targets)[0].isnan()


def test_extreme_logits_stay_finite_and_equal():
    """Probabilities that underflow, and a saturated draft, as after long training."""
    problem = Problem(VOCAB)
    with torch.no_grad():
        problem.hidden *= 400
    for terms in MIXES:
        loss, _ = problem.fused(Objective(terms=terms, gamma=4.0))
        grads = torch.autograd.grad(loss, problem.leaves)
        assert loss.isfinite()
        assert all(grad.isfinite().all() for grad in grads)
        torch.testing.assert_close(loss, problem.readable(Objective(terms=terms, gamma=4.0)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [VOCAB, 9])
def test_bfloat16_products_stay_near_float32(size):
    """Eight bits of mantissa give about a percent, and a few probabilities change sides in tv's 1[q <= p]."""
    problem, objective = Problem(size), Objective(terms={"ce": 0.1, "tv": 0.9}, gamma=4.0)
    expected_loss = problem.readable(objective)
    expected = torch.autograd.grad(expected_loss, problem.leaves)
    problem.head = problem.head.bfloat16()
    verifier = problem.targets.verifier
    low = VerifierTargets(verifier.normed_PD.bfloat16(), verifier.position_S, verifier.log_norm_P, None)
    targets = SlotTargets(problem.targets.draft_targets_S, problem.targets.mask_AK, low)
    loss, _ = problem.fused(objective, targets)
    torch.testing.assert_close(loss, expected_loss, rtol=0.02, atol=0.0)
    for found, wanted in zip(torch.autograd.grad(loss, problem.leaves), expected, strict=True):
        assert found.dtype == torch.float32
        assert (found - wanted).norm() < 0.15 * wanted.norm()


def test_the_inside_compiles_without_a_graph_break():
    """What CUDA runs: traced here, not generated, so no C++ compiler is needed."""
    problem, objective = Problem(9), Objective(terms=dict.fromkeys(LOSS_TERMS, 0.5), gamma=4.0)
    verifier = problem.targets.verifier
    logits = problem.logits().detach()
    strip = fused.Strip(logits, verifier.normed_PD[verifier.position_S] @ problem.head.T,
                        verifier.log_norm_P[verifier.position_S, None], None)  # fmt: skip
    arguments = (strip, problem.targets.draft_targets_S, problem.targets.mask_AK, objective, torch.tensor(9))
    compiled = torch.compile(strip_loss, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(compiled(*arguments), strip_loss(*arguments), strict=True):
        torch.testing.assert_close(found, wanted, equal_nan=True)
