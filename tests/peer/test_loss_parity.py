"""Losses, their gradients and expected lengths over the full vocabulary equal those of speculators 0.9.0.

ce is given speculators' labels: the verifier's most likely token in place of the data's.
"""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.speculators_peer import peer_of
from dspark_model.losses import SLOT_TERMS
from dspark_model.step_metrics import acceptance_metrics, token_metrics
from dspark_model.strip_loss import Objective
from tests.dspark_model.tiny import tiny_config, tiny_drafter, tiny_parts
from tests.peer.ours import our_acceptance, our_confidence_loss, our_fused, our_loss, our_step
from tests.peer.pair import (
    FEW_ANCHORS,
    PEER_TERMS,
    assert_same,
    assert_same_gradients,
    gradients,
    peer_step,
    two_document_row,
)

GAMMA = 3.0
IMPLEMENTATIONS = ("reference", "fused")
LAYOUTS = (True, False)
MIXES = ({"ce": 0.1, "tv": 0.9}, {"kl": 0.4, "rkl": 0.3, "jsd": 0.2, "nla": 0.5, "lk_hybrid": 0.7})
HEADS = ("vanilla", "gated", "rnn")


def both(sample_from_anchor, loss_fn, peer_choices=(), **config):
    """The two drafters and their steps on the same row."""
    config = tiny_config(sample_from_anchor=sample_from_anchor, sliding_window=64, **config)
    drafter, parts, row = tiny_drafter(config), tiny_parts(), two_document_row()
    peer = peer_of(drafter, parts.norm_D)
    choices = {"dflash_decay_gamma": GAMMA, "confidence_head_alpha": 0.0, **dict(peer_choices)}
    theirs = peer_step(peer, row, FEW_ANCHORS, loss_fn, **choices)
    return drafter, our_step(drafter, parts, row, FEW_ANCHORS), peer, theirs


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sample_from_anchor", LAYOUTS)
@pytest.mark.parametrize("term", SLOT_TERMS)
def test_each_term_and_its_gradients(term, sample_from_anchor, implementation):
    drafter, ours, peer, theirs = both(sample_from_anchor, PEER_TERMS[term])
    objective = Objective(terms={term: 1.0}, gamma=GAMMA, sample_from_anchor=sample_from_anchor)
    loss = our_loss(ours, objective, implementation)
    assert_same(loss, theirs.loss, term)
    assert_same_gradients(gradients(loss, drafter), gradients(theirs.loss, peer), unused=("confidence_head",))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kinds", [("sliding", "sliding"), ("sliding", "full")], ids="-".join)
@pytest.mark.parametrize("sample_from_anchor", LAYOUTS)
@pytest.mark.parametrize("terms", MIXES, ids="+".join)
def test_weighted_mixes_with_the_confidence_loss_and_all_gradients(
    terms, sample_from_anchor, kinds, head, implementation
):
    loss_fn = json.dumps({PEER_TERMS[name]: weight for name, weight in terms.items()})
    drafter, ours, peer, theirs = both(
        sample_from_anchor, loss_fn, {"confidence_head_alpha": 0.8}, layer_kinds=kinds, markov_head_type=head
    )
    for name in terms:
        single = Objective(terms={name: 1.0}, gamma=GAMMA, sample_from_anchor=sample_from_anchor)
        assert_same(our_loss(ours, single, implementation), theirs.metric(f"{PEER_TERMS[name]}_loss"), name)
    confidence = our_confidence_loss(ours, GAMMA)
    assert_same(confidence, theirs.metric("confidence_loss"), "confidence loss")
    objective = Objective(terms=terms, gamma=GAMMA, sample_from_anchor=sample_from_anchor)
    loss = our_loss(ours, objective, implementation) + 0.8 * confidence
    assert_same(loss, theirs.loss, "loss")
    assert_same_gradients(gradients(loss, drafter), gradients(theirs.loss, peer))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sample_from_anchor", LAYOUTS)
@pytest.mark.parametrize("alpha", [0.5, 0.2])
def test_dpace_weights_of_ce(alpha, sample_from_anchor, implementation):
    dpace = {"per_position_loss_weight": "dpace", "dpace_alpha": alpha, "confidence_head_alpha": 1.0}
    drafter, ours, peer, theirs = both(sample_from_anchor, "ce", dpace)
    objective = Objective(
        terms={"ce": 1.0}, gamma=GAMMA, weighting="dpace", dpace_alpha=alpha, sample_from_anchor=sample_from_anchor
    )
    loss = our_loss(ours, objective, implementation) + our_confidence_loss(ours, GAMMA)
    assert_same(loss, theirs.loss, "loss")
    assert_same_gradients(gradients(loss, drafter), gradients(theirs.loss, peer))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sample_from_anchor", LAYOUTS)
def test_acceptance_expected_lengths_and_calibration(sample_from_anchor, implementation):
    _, ours, _, theirs = both(sample_from_anchor, "kl_div")
    acceptance_S, match_S = our_acceptance(ours), ours.logits_SW.argmax(-1) == ours.labels_S
    if implementation == "fused":
        _, stats = our_fused(ours, Objective(terms={"tv": 1.0}, gamma=GAMMA, sample_from_anchor=sample_from_anchor))
        acceptance_S, match_S = stats.acceptance_S, stats.greedy_match_S
    match_AK = match_S.view_as(ours.mask_AK)
    assert 0 < match_AK[ours.mask_AK].float().mean() < 1
    blocks = {"mask_AK": ours.mask_AK, "sample_from_anchor": sample_from_anchor}
    metrics = token_metrics(match_AK, ours.labels_S.view_as(ours.mask_AK), **blocks) + acceptance_metrics(
        acceptance_S.view_as(ours.mask_AK),
        confidence_AK=ours.confidence_S.sigmoid().view_as(ours.mask_AK),
        **blocks,
    )
    means = metrics.means()
    for name, peer_name in (
        ("acceptance_rate", "accept_rate"),
        ("expected_length_sampling", "accept_len"),
        ("expected_length_greedy", "eal"),
        ("accuracy", "full_acc"),
        ("confidence_abs_error", "confidence_abs_error"),
        ("confidence_prefix_bias", "confidence_cumprod_bias"),
    ):
        assert_same(torch.tensor(means[name]), theirs.metric(peer_name), name)
    first = 0 if sample_from_anchor else 1
    for position, accuracy in enumerate(means["accuracy_per_position"]):
        assert accuracy == pytest.approx(float(theirs.metric(f"position_{position + first}_acc")))


@pytest.mark.parametrize("sample_from_anchor", LAYOUTS)
def test_the_expected_length_loss_is_what_lacks_to_speculators_expected_length(sample_from_anchor):
    drafter, ours, _, theirs = both(sample_from_anchor, "kl_div")
    proposals = drafter.config.proposals_per_block
    lacking = 1 + proposals - theirs.metric("accept_len")
    for implementation in IMPLEMENTATIONS:
        objective = Objective(terms={"expected_length": 1.0}, gamma=GAMMA, sample_from_anchor=sample_from_anchor)
        # Ours is a mean over slots, theirs over blocks.
        assert_same(our_loss(ours, objective, implementation) * proposals, lacking, implementation)
