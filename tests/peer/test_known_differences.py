"""Where we deliberately do otherwise than speculators 0.9.0: each rule of theirs and ours, side by side.

One more, acceptance under a reduced vocabulary, is in `test_reduced_vocab_parity.py`.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.speculators_peer import peer_of
from dspark_model.batch import pack
from dspark_model.losses import dpace_weights, reference_loss
from tests.dspark_model.tiny import answer, document, tiny_config, tiny_drafter, tiny_parts
from tests.peer.ours import our_step
from tests.peer.pair import FEW_ANCHORS, assert_same, peer_step, two_document_row

K = 4


def masks(row, anchors, sample_from_anchor=True):
    """Supervised slots [A, K], theirs and ours."""
    drafter = tiny_drafter(tiny_config(sample_from_anchor=sample_from_anchor))
    theirs = peer_step(peer_of(drafter, tiny_parts().norm_D), row, anchors).mask_S.view(-1, K)
    return theirs.int().tolist(), our_step(drafter, tiny_parts(), row, anchors).mask_AK.int().tolist()


def test_the_window_is_measured_from_each_query_where_speculators_measures_from_the_anchor():
    # One layer: what a slot sees of its own block does not depend on the window.
    def hidden(window, step):
        config = tiny_config(num_layers=1, layer_kinds=("sliding",), sliding_window=window)
        drafter = tiny_drafter(config)
        return step(drafter).unflatten(0, (-1, K))

    def theirs(drafter):
        return peer_step(peer_of(drafter, tiny_parts().norm_D), two_document_row(), FEW_ANCHORS).hidden_SD

    def ours(drafter):
        return our_step(drafter, tiny_parts(), two_document_row(), FEW_ANCHORS).output.hidden_SD

    window = 6
    ours_AKD, theirs_AKD = hidden(window, ours), hidden(window, theirs)
    for slot in range(K):
        # vLLM: slot k at position p + k sees keys after p + k - window, so window - 1 - k of them lie before p.
        assert_same(ours_AKD[:, slot], hidden(window - 1 - slot, theirs)[:, slot], f"slot {slot}")
        assert (ours_AKD[:, slot] - theirs_AKD[:, slot]).abs().max() > 1e-3


@pytest.mark.parametrize("anchor", [4, 7])
def test_supervision_is_read_at_the_predicted_token_where_speculators_reads_the_slots_own_position(anchor):
    row = pack([document([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0])])
    theirs, ours = masks(row, (anchor,))
    # The last prompt token predicts supervised 5..8; position 7 predicts 8 and 9, and 10 is not supervised.
    assert (theirs, ours) == {4: ([[0, 1, 1, 1]], [[1, 1, 1, 1]]), 7: ([[1, 1, 1, 0]], [[1, 1, 0, 0]])}[anchor]


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_a_block_ends_with_its_document_where_speculators_goes_on_into_the_next(sample_from_anchor):
    # Tokens 0..9, then a document supervised from its first token. The anchor is the last token but two.
    row = pack([answer(4, 6, seed=1), document([1] * 8, seed=2)])
    found = masks(row, (7,), sample_from_anchor)
    assert found == (([[1, 1, 1, 1]], [[1, 1, 0, 0]]) if sample_from_anchor else ([[0, 1, 1, 1]], [[0, 1, 1, 0]]))


def test_a_block_ends_at_the_first_unsupervised_target_where_speculators_skips_it():
    row = pack([document([0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1])])
    theirs, ours = masks(row, (2,), sample_from_anchor=False)
    assert theirs == [[0, 1, 0, 1]]
    assert ours == [[0, 1, 0, 0]]


def test_dpace_weights_come_from_ce_for_every_term_where_speculators_takes_each_terms_own_loss():
    drafter, parts, row = tiny_drafter(tiny_config()), tiny_parts(), two_document_row()
    theirs = peer_step(
        peer_of(drafter, parts.norm_D),
        row,
        FEW_ANCHORS,
        "tv",
        per_position_loss_weight="dpace",
        confidence_head_alpha=0.0,
    )
    ours = our_step(drafter, parts, row, FEW_ANCHORS)
    mask_AK, log_q_SW = ours.mask_AK, ours.logits_SW.log_softmax(-1)
    p_SW = ours.verifier_logits_SV.softmax(-1)
    tv_AK = (1 - torch.minimum(p_SW, log_q_SW.exp()).sum(-1)).view_as(mask_AK)
    ce_AK = -log_q_SW.gather(1, ours.labels_S[:, None]).view_as(mask_AK)
    loss = reference_loss(
        ours.logits_SW, ours.labels_S, mask_AK, {"tv": 1.0}, sample_from_anchor=True, p_SW=p_SW, weighting="dpace"
    )
    assert_same(theirs.loss, (tv_AK * dpace_weights(tv_AK, mask_AK)).sum() / mask_AK.sum(), "their D-PACE of tv")
    assert_same(loss, (tv_AK * dpace_weights(ce_AK, mask_AK)).sum() / mask_AK.sum(), "our D-PACE of tv")
