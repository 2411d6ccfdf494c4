"""The readable losses against loops over probabilities, and the fused ones against the readable ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dspark_model import fused_loss as fused
from dspark_model.fused_loss import FusedTargets, chunked_acceptance_rate, fused_loss
from dspark_model.losses import acceptance_rate, confidence_loss, slot_losses, slot_weights
from dspark_model.vocab import draft_to_verifier_ids, verifier_to_draft_ids
from tests.dspark_model.tiny import HIDDEN, VOCAB, some_t2d, tiny_parts

SLOTS, RANK = 11, 5
MIXES = [{"ce": 1.0}, {"kl": 1.0}, {"tv": 1.0}, {"ce": 0.1, "tv": 0.9}, {"ce": 0.3, "kl": 0.5, "tv": 2.0}]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def probabilities(logits: list[float]) -> list[float]:
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


def losses_by_loop(draft: Tensor, verifier: Tensor, targets: list[int], ids: list[int]) -> dict[str, list[float]]:
    """ce, kl, tv of each slot in plain Python; `targets` are verifier ids."""
    found: dict[str, list[float]] = {"ce": [], "kl": [], "tv": []}
    for s, target in enumerate(targets):
        q = probabilities(draft[s].tolist())
        p = probabilities(verifier[s].tolist())
        found["ce"].append(-math.log(q[ids.index(target)]) if target in ids else 0.0)
        found["kl"].append(sum(p[v] * math.log(p[v] / q[w]) for w, v in enumerate(ids)))
        found["tv"].append(1 - sum(min(p[v], q[w]) for w, v in enumerate(ids)))
    return found


@pytest.mark.parametrize("size", [VOCAB, 9])
@pytest.mark.parametrize("terms", MIXES, ids=str)
def test_slot_losses_equal_their_formulas(terms, size):
    t2d = some_t2d(size)
    ids = draft_to_verifier_ids(t2d)
    draft, verifier = randn(SLOTS, size, seed=1), 2 * randn(SLOTS, VOCAB, seed=2)
    targets = torch.randint(0, VOCAB, (SLOTS,), generator=torch.Generator().manual_seed(3))
    found = slot_losses(draft, verifier_to_draft_ids(t2d)[targets], terms, verifier.softmax(-1)[:, ids])
    parts = losses_by_loop(draft, verifier, targets.tolist(), ids.tolist())
    expected = [sum(weight * parts[name][s] for name, weight in terms.items()) for s in range(SLOTS)]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_verifier_that_always_says_what_the_draft_vocabulary_lacks_is_never_accepted():
    t2d = torch.ones(VOCAB, dtype=torch.bool)
    t2d[4] = False
    ids, verifier = draft_to_verifier_ids(t2d), torch.zeros(1, VOCAB)
    verifier[0, 4] = 50.0
    draft = randn(1, VOCAB - 1, seed=1)
    assert float(acceptance_rate(draft, verifier, ids)) == pytest.approx(0.0, abs=1e-6)
    p_SW = verifier.softmax(-1)[:, ids]
    assert float(slot_losses(draft, torch.tensor([-1]), {"tv": 1.0}, p_SW)) == pytest.approx(1.0, abs=1e-6)


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


def test_slot_weights_decay_from_the_first_predicted_token():
    anchor = [math.exp(-k / 4) for k in range(5)]
    assert slot_weights(5, 4.0, sample_from_anchor=True).tolist() == pytest.approx(anchor)
    dflash = [0.0, *[math.exp(-(k - 1) / 4) for k in range(1, 5)]]
    assert slot_weights(5, 4.0, sample_from_anchor=False).tolist() == pytest.approx(dflash)


def test_unknown_terms_and_missing_distributions_are_refused():
    draft, targets = randn(2, 3, seed=0), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"unknown loss terms \['jsd'\]; known: ce, kl, tv"):
        slot_losses(draft, targets, {"jsd": 1.0})
    for name in ("kl", "tv"):
        with pytest.raises(ValueError, match="need the verifier's distribution"):
            slot_losses(draft, targets, {name: 1.0})
        with pytest.raises(ValueError, match="need the verifier's head and last states"):
            fused_loss(draft, None, draft, None, FusedTargets(targets, torch.ones(2), None), {name: 1.0})


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


class Problem:
    """Random slots of a drafter with `size` draft ids: leaves that want a gradient, and targets."""

    def __init__(self, size: int, markov: bool) -> None:
        self.parts, t2d = tiny_parts(), some_t2d(size)
        self.ids = draft_to_verifier_ids(t2d)
        self.head = self.parts.lm_head_VD[self.ids]
        self.hidden = randn(SLOTS, HIDDEN, seed=1).mul(0.3).requires_grad_()
        self.markov = randn(SLOTS, RANK, seed=2).requires_grad_() if markov else None
        self.w2 = randn(size, RANK, seed=3).mul(0.5).requires_grad_() if markov else None
        self.leaves = [leaf for leaf in (self.hidden, self.markov, self.w2) if leaf is not None]
        targets = torch.randint(0, VOCAB, (SLOTS,), generator=torch.Generator().manual_seed(4))
        weights = randn(SLOTS, seed=5).abs()
        weights[3] = 0.0
        last = randn(SLOTS, HIDDEN, seed=6)
        self.targets = FusedTargets(verifier_to_draft_ids(t2d)[targets], weights, last)
        self.verifier_logits = self.parts.logits(last)

    def logits(self) -> Tensor:
        base = self.hidden @ self.head.T
        return base if self.markov is None else base + self.markov @ self.w2.T

    def readable(self, terms: dict[str, float]) -> Tensor:
        p_SW = self.verifier_logits.softmax(-1)[:, self.ids]
        return (slot_losses(self.logits(), self.targets.draft_targets_S, terms, p_SW) * self.targets.weights_S).sum()


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 1000])
@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize("size", [VOCAB, 9])
@pytest.mark.parametrize("terms", MIXES, ids=str)
def test_fused_loss_equals_the_readable_one_in_value_and_gradient(terms, size, markov, rows_per_chunk, monkeypatch):
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", rows_per_chunk * VOCAB)
    problem = Problem(size, markov)
    loss, acceptance = fused_loss(
        problem.hidden, problem.markov, problem.head, problem.w2, problem.targets, terms, problem.parts, problem.ids
    )
    expected = problem.readable(terms)
    torch.testing.assert_close(loss, expected)
    # Scaled, so that a backward that ignores the incoming gradient shows.
    for found, wanted in zip(
        torch.autograd.grad(loss * 2.5, problem.leaves),
        torch.autograd.grad(expected * 2.5, problem.leaves),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    if set(terms) == {"ce"}:
        assert acceptance is None
    else:
        rates = acceptance_rate(problem.logits(), problem.verifier_logits, problem.ids)
        torch.testing.assert_close(acceptance, rates.detach())


@pytest.mark.parametrize("size", [VOCAB, 9])
def test_chunked_acceptance_rate_equals_the_plain_one(size, monkeypatch):
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", 2 * VOCAB)
    problem = Problem(size, markov=True)
    found = chunked_acceptance_rate(
        problem.hidden, problem.markov, problem.head, problem.w2, problem.targets.last_hidden_SD, problem.parts,
        problem.ids,
    )  # fmt: skip
    torch.testing.assert_close(found, acceptance_rate(problem.logits(), problem.verifier_logits, problem.ids).detach())


def test_a_slot_of_weight_zero_has_no_gradient():
    problem = Problem(9, markov=True)
    loss, _ = fused_loss(
        problem.hidden, problem.markov, problem.head, problem.w2, problem.targets, MIXES[-1], problem.parts, problem.ids
    )
    hidden, markov, _ = torch.autograd.grad(loss, problem.leaves)
    assert not hidden[3].any()
    assert not markov[3].any()
    assert hidden[2].any()
