"""Losses and gradients under a reduced draft vocabulary.

speculators renormalises the verifier's distribution over the draft vocabulary, which overstates acceptance by the mass
left out. Ours is compared with formulas written over the whole vocabulary on top of speculators' own forward; and with
speculators' losses where no mass is left out, because the verifier's other logits are set to -inf.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.speculators_peer import peer_of
from dspark_model.losses import SLOT_TERMS
from dspark_model.step_metrics import acceptance_metrics
from dspark_model.strip_loss import Objective
from tests.dspark_model.tiny import VOCAB, some_t2d, tiny_config, tiny_drafter, tiny_parts
from tests.peer.ours import OurStep, our_acceptance, our_confidence_loss, our_loss, our_step
from tests.peer.pair import (
    FEW_ANCHORS,
    PEER_TERMS,
    PeerStep,
    assert_same,
    assert_same_gradients,
    gradients,
    peer_step,
    two_document_row,
)

GAMMA, DRAFT_VOCAB = 3.0, 14
HEADS = ("vanilla", "gated", "rnn")
IMPLEMENTATIONS = ("reference", "fused")
LAYOUTS = (True, False)


def reduced_drafter(sample_from_anchor, head="vanilla"):
    config = tiny_config(
        draft_vocab_size=DRAFT_VOCAB,
        sample_from_anchor=sample_from_anchor,
        markov_head_type=head,
        layer_kinds=("sliding", "full"),
        sliding_window=64,
    )
    return tiny_drafter(config, some_t2d(DRAFT_VOCAB))


def honest_term(name: str, logits_W: Tensor, verifier_logits_V: Tensor, ids: list[int]) -> Tensor:
    """One slot's term, id by id over the whole vocabulary: what the drafter cannot propose has q = 0."""
    p_V, q_W = verifier_logits_V.softmax(-1), logits_W.softmax(-1)
    q = {vocab_id: q_W[draft_id] for draft_id, vocab_id in enumerate(ids)}
    alpha = sum(torch.minimum(p_V[v], q[v]) for v in ids)
    if name == "ce":
        best = max(range(len(ids)), key=lambda draft_id: float(verifier_logits_V[ids[draft_id]]))
        return -q_W[best].log()
    if name == "rkl":
        return sum(q[v] * (q[v] / p_V[v]).log() for v in ids)
    if name == "jsd":
        total = torch.zeros(())
        for v in range(VOCAB):
            middle = (p_V[v] + q.get(v, 0.0)) / 2
            total = total + 0.5 * p_V[v] * (p_V[v] / middle).log()
            total = total + (0.5 * q[v] * (q[v] / middle).log() if v in q else 0.0)
        return total
    tv, kl = 1 - alpha, sum(p_V[v] * (p_V[v] / q[v]).log() for v in ids)
    share = float(torch.exp(-3 * alpha.detach()))
    return {"tv": tv, "kl": kl, "nla": -alpha.log(), "lk_hybrid": share * kl + (1 - share) * tv}[name]


def honest_loss(name: str, logits_SW: Tensor, verifier_logits_SV: Tensor, ids: list[int], weights_S: Tensor) -> Tensor:
    """Slot weights, and the mean over the slots that count."""
    terms = [
        weight * honest_term(name, logits_SW[slot], verifier_logits_SV[slot], ids)
        for slot, weight in enumerate(weights_S.tolist())
        if weight
    ]
    return sum(terms) / len(terms)


def decay(sample_from_anchor: bool, mask_S: Tensor) -> Tensor:
    first = 0 if sample_from_anchor else 1
    weights = [math.exp(-(slot % 4 - first) / GAMMA) for slot in range(mask_S.shape[0])]
    return torch.tensor(weights) * mask_S


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sample_from_anchor", LAYOUTS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("term", SLOT_TERMS)
def test_each_term_is_the_honest_formula_on_top_of_speculators_forward(term, head, sample_from_anchor, implementation):
    drafter, parts, row = reduced_drafter(sample_from_anchor, head), tiny_parts(), two_document_row()
    peer = peer_of(drafter, parts.norm_D)
    theirs = peer_step(peer, row, FEW_ANCHORS)
    ours = our_step(drafter, parts, row, FEW_ANCHORS)
    ids, weights_S = drafter.t2d.nonzero().flatten().tolist(), decay(sample_from_anchor, theirs.mask_S)
    expected = honest_loss(term, theirs.logits_SW, ours.verifier_logits_SV, ids, weights_S)
    objective = Objective(terms={term: 1.0}, gamma=GAMMA, sample_from_anchor=sample_from_anchor)
    loss = our_loss(ours, objective, implementation)
    assert_same(loss, expected, term)
    assert_same_gradients(gradients(loss, drafter), gradients(expected, peer), unused=("confidence_head",))


def honest_overlap(theirs: PeerStep, ours: OurStep) -> Tensor:
    """Acceptance rate [S] of speculators' logits under the verifier's whole distribution."""
    ids = ours.drafter.t2d.nonzero().flatten().tolist()
    pairs = zip(theirs.logits_SW, ours.verifier_logits_SV, strict=True)
    return torch.stack([1 - honest_term("tv", logits_W, verifier_V, ids) for logits_W, verifier_V in pairs])


@pytest.mark.parametrize("sample_from_anchor", LAYOUTS)
def test_expected_lengths_are_those_of_the_honest_overlap(sample_from_anchor):
    """As a metric and as a loss with gradients: 1 + a_1 + a_1 a_2 + ... per block, from slot 1 in the DFlash layout."""
    drafter, parts, row = reduced_drafter(sample_from_anchor), tiny_parts(), two_document_row()
    peer = peer_of(drafter, parts.norm_D)
    theirs = peer_step(peer, row, FEW_ANCHORS)
    ours = our_step(drafter, parts, row, FEW_ANCHORS)
    overlap_S, lengths = honest_overlap(theirs, ours), []
    for block in range(len(FEW_ANCHORS)):
        length, prefix = torch.ones(()), torch.ones(())
        for slot in range(4 * block, 4 * block + 4):
            if theirs.mask_S[slot]:
                prefix = prefix * overlap_S[slot]
                length = length + prefix
        lengths.append(length)
    expected = sum(lengths) / len(lengths)
    blocks = {"mask_AK": ours.mask_AK, "sample_from_anchor": sample_from_anchor}
    found = acceptance_metrics(our_acceptance(ours).view_as(ours.mask_AK), **blocks).means()["expected_length_sampling"]
    assert_same(torch.tensor(found), expected, "expected length")
    assert found < 0.95 * theirs.metric("accept_len"), "speculators overstates it by the mass left out"
    proposals = drafter.config.proposals_per_block
    objective = Objective(terms={"expected_length": 1.0}, gamma=GAMMA, sample_from_anchor=sample_from_anchor)
    for implementation in IMPLEMENTATIONS:
        lacking = our_loss(ours, objective, implementation) * proposals  # ours is a mean over slots
        assert_same(lacking, 1 + proposals - expected, implementation)
        assert_same_gradients(gradients(lacking, drafter), gradients(-expected, peer), unused=("confidence_head",))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sample_from_anchor", LAYOUTS)
def test_dpace_weights_of_ce_do_not_hang_on_the_mass_left_out(sample_from_anchor, implementation):
    drafter, parts, row = reduced_drafter(sample_from_anchor), tiny_parts(), two_document_row()
    peer = peer_of(drafter, parts.norm_D)
    choices = {"per_position_loss_weight": "dpace", "dpace_alpha": 0.4, "confidence_head_alpha": 0.0}
    theirs = peer_step(peer, row, FEW_ANCHORS, "ce", **choices)
    objective = Objective(
        terms={"ce": 1.0}, gamma=GAMMA, weighting="dpace", dpace_alpha=0.4, sample_from_anchor=sample_from_anchor
    )
    loss = our_loss(our_step(drafter, parts, row, FEW_ANCHORS), objective, implementation)
    assert_same(loss, theirs.loss, "loss")
    assert_same_gradients(gradients(loss, drafter), gradients(theirs.loss, peer), unused=("confidence_head",))


@pytest.mark.parametrize("sample_from_anchor", LAYOUTS)
def test_the_confidence_head_learns_the_honest_overlap(sample_from_anchor):
    drafter, parts, row = reduced_drafter(sample_from_anchor), tiny_parts(), two_document_row()
    peer = peer_of(drafter, parts.norm_D)
    theirs = peer_step(peer, row, FEW_ANCHORS)
    ours = our_step(drafter, parts, row, FEW_ANCHORS)
    weights_S, overlap_S = decay(sample_from_anchor, theirs.mask_S), honest_overlap(theirs, ours).detach()
    logit_S = theirs.confidence_S
    bce_S = -overlap_S * F.logsigmoid(logit_S) - (1 - overlap_S) * F.logsigmoid(-logit_S)
    expected = (weights_S * bce_S).sum() / theirs.mask_S.sum()
    loss = our_confidence_loss(ours, GAMMA)
    assert_same(loss, expected, "confidence loss")
    assert_same_gradients(gradients(loss, drafter), gradients(expected, peer), unused=("markov_head.markov_w2",))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sample_from_anchor", LAYOUTS)
@pytest.mark.parametrize("head", HEADS)
def test_all_terms_and_gradients_are_speculators_where_no_mass_lies_outside(head, sample_from_anchor, implementation):
    drafter, parts, row = reduced_drafter(sample_from_anchor, head), tiny_parts(), two_document_row()
    peer = peer_of(drafter, parts.norm_D)
    terms = {name: 0.2 + 0.1 * i for i, name in enumerate(SLOT_TERMS)}
    loss_fn = json.dumps({PEER_TERMS[name]: weight for name, weight in terms.items()})
    theirs = peer_step(peer, row, FEW_ANCHORS, loss_fn, dflash_decay_gamma=GAMMA, confidence_head_alpha=1.0)
    ours = our_step(drafter, parts, row, FEW_ANCHORS, mask_outside=True)
    for name in terms:
        single = Objective(terms={name: 1.0}, gamma=GAMMA, sample_from_anchor=sample_from_anchor)
        assert_same(our_loss(ours, single, implementation), theirs.metric(f"{PEER_TERMS[name]}_loss"), name)
    objective = Objective(terms=terms, gamma=GAMMA, sample_from_anchor=sample_from_anchor)
    loss = our_loss(ours, objective, implementation) + our_confidence_loss(ours, GAMMA)
    assert_same(loss, theirs.loss, "loss")
    assert_same_gradients(gradients(loss, drafter), gradients(theirs.loss, peer))


@pytest.mark.parametrize("sample_from_anchor", LAYOUTS)
def test_speculators_overstates_acceptance_by_the_mass_left_out(sample_from_anchor):
    drafter, parts, row = reduced_drafter(sample_from_anchor), tiny_parts(), two_document_row()
    theirs = peer_step(peer_of(drafter, parts.norm_D), row, FEW_ANCHORS)
    honest = our_step(drafter, parts, row, FEW_ANCHORS)
    without = our_step(drafter, parts, row, FEW_ANCHORS, mask_outside=True)
    mask_S = honest.mask_S
    assert_same(our_acceptance(without)[mask_S].mean(), theirs.metric("accept_rate"), "acceptance rate")
    kept_S = honest.verifier_logits_SV.softmax(-1)[:, drafter.t2d].sum(-1)
    assert kept_S.max() < 1
    assert (our_acceptance(honest) <= torch.minimum(kept_S, our_acceptance(without))).all()
    assert our_acceptance(honest)[mask_S].mean() < 0.95 * theirs.metric("accept_rate")
