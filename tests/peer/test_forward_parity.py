"""Hidden states, logits and targets of a training forward equal those of speculators 0.9.0."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.speculators_peer import peer_of
from tests.dspark_model.tiny import some_t2d, tiny_config, tiny_drafter, tiny_parts
from tests.peer.pair import FEW_ANCHORS, MANY_ANCHORS, assert_same, peer_step, two_document_row

DRAFT_VOCAB = 15
HEADS: tuple[dict[str, Any], ...] = (
    {"markov_head_type": "vanilla"},
    {"markov_head_type": "gated"},
    {"markov_head_type": "rnn"},
    {"markov_rank": 0, "confidence_with_markov": False},
)


@pytest.mark.parametrize("sample_from_anchor", [True, False])
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: heads.get("markov_head_type", "none"))
@pytest.mark.parametrize("kinds", [("full", "full"), ("sliding", "sliding"), ("sliding", "full")], ids="-".join)
@pytest.mark.parametrize("draft_vocab", [None, DRAFT_VOCAB], ids=["full_vocab", "reduced_vocab"])
def test_a_training_forward_equals_that_of_speculators(draft_vocab, kinds, heads, sample_from_anchor):
    config = tiny_config(
        layer_kinds=kinds,
        sliding_window=64,
        sample_from_anchor=sample_from_anchor,
        **({"draft_vocab_size": draft_vocab} if draft_vocab else {}),
        **heads,
    )
    drafter, parts = tiny_drafter(config, some_t2d(draft_vocab) if draft_vocab else None), tiny_parts()
    row = two_document_row()
    for anchors in (FEW_ANCHORS, MANY_ANCHORS):
        theirs = peer_step(peer_of(drafter, parts.norm_D), row, anchors)
        anchor_pos_A = torch.tensor(anchors)
        slots = drafter.slots(row, anchor_pos_A)
        output = drafter(row, anchor_pos_A, slots)
        mask_S = slots.supervision_mask_AK.flatten()
        assert_same(output.hidden_SD, theirs.hidden_SD, "hidden states")
        assert_same(drafter.logits(output.hidden_SD, output.markov_SR), theirs.logits_SW, "logits")
        confidence_S = drafter.confidence_head(output.hidden_SD, output.prev_embedding_SR)
        assert_same(confidence_S, theirs.confidence_S, "confidence logits")
        assert torch.equal(mask_S, theirs.mask_S)
        states_SD = row.last_hidden_TD[slots.state_index_AK.flatten()]
        targets_SW = parts.logits(states_SD)[:, drafter.verifier_ids_W]
        assert_same(targets_SW[mask_S], theirs.targets_SW[mask_S], "verifier logits")
