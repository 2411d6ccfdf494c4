"""Block slots against a loop over documents that never packs anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark_model.batch import Document, make_slots, pack
from tests.dspark_model.tiny import HIDDEN, MASK, answer, document, three_documents

K = 4


def slots_by_loop(documents: list[Document], anchors: list[tuple[int, int]], from_anchor: bool) -> list[dict[str, Any]]:
    """One dict per slot of each (document, position) anchor, with document-local indices."""
    slots = []
    for d, p in anchors:
        ids, mask = documents[d].input_ids_T.tolist(), documents[d].loss_mask_T.tolist()
        alive = True
        for k in range(K):
            target = p + k + (1 if from_anchor else 0)
            predicts = from_anchor or k > 0
            if predicts:
                alive = alive and target < len(ids) and bool(mask[target])
            slots.append(
                {
                    "document": d,
                    "input": ids[p] if k == 0 else MASK,
                    "position": p + k,
                    "supervised": alive and predicts,
                    "target": target,
                    "target_id": ids[target] if target < len(ids) else None,
                    "prev_id": ids[target - 1] if predicts and target <= len(ids) else ids[p],
                }
            )
    return slots


@pytest.mark.parametrize("from_anchor", [True, False])
def test_every_anchor_of_a_packed_row_agrees_with_a_loop_over_documents(from_anchor):
    documents = three_documents()
    row = pack(documents)
    anchors = [(d, p) for d, document in enumerate(documents) for p in range(len(document.input_ids_T))]
    starts = [0, 10, 19]
    rows_A = torch.tensor([starts[d] + p for d, p in anchors])
    slots = make_slots(row, rows_A, block_size=K, mask_token_id=MASK, sample_from_anchor=from_anchor)
    expected = slots_by_loop(documents, anchors, from_anchor)
    assert sum(slot["supervised"] for slot in expected) > 20
    for i, slot in enumerate(expected):
        at = divmod(i, K)
        assert slots.input_ids_AK[at] == slot["input"]
        assert slots.position_ids_AK[at] == slot["position"]
        assert bool(slots.supervision_mask_AK[at]) == slot["supervised"], slot
        if slot["supervised"]:
            assert slots.target_ids_AK[at] == slot["target_id"]
            assert slots.prev_token_ids_AK[at] == slot["prev_id"]
            assert slots.state_index_AK[at] == starts[slot["document"]] + slot["target"] - 1


def test_markov_reads_the_token_before_the_target_in_both_layouts():
    # https://github.com/vllm-project/speculators/pull/806: it was shifted by one although slot 0 predicts p + 1.
    row = pack([answer(1, 7)])
    ids = row.input_ids_T.tolist()
    anchor = torch.tensor([2])
    dspark = make_slots(row, anchor, block_size=K, mask_token_id=MASK, sample_from_anchor=True)
    dflash = make_slots(row, anchor, block_size=K, mask_token_id=MASK, sample_from_anchor=False)
    assert dspark.prev_token_ids_AK[0].tolist() == [ids[2], ids[3], ids[4], ids[5]]
    assert dspark.target_ids_AK[0].tolist() == [ids[3], ids[4], ids[5], ids[6]]
    assert dflash.prev_token_ids_AK[0].tolist() == [ids[2], ids[2], ids[3], ids[4]]
    assert dflash.target_ids_AK[0, 1:].tolist() == [ids[3], ids[4], ids[5]]
    assert not dflash.supervision_mask_AK[0, 0]


@pytest.mark.parametrize("from_anchor", [True, False])
def test_no_supervised_slot_needs_a_state_that_the_engine_never_computed(from_anchor):
    documents = three_documents()
    row = pack(documents)
    rows_A = torch.arange(row.input_ids_T.shape[0])
    slots = make_slots(row, rows_A, block_size=K, mask_token_id=MASK, sample_from_anchor=from_anchor)
    used = row.last_hidden_TD[slots.state_index_AK[slots.supervision_mask_AK]]
    assert (used.abs().sum(-1) > 0).all(), "a zero row that stands for a missing last state was read"


def test_a_packed_row_holds_each_document_whole_and_restarts_positions():
    documents = three_documents()
    row = pack(documents)
    assert row.starts == (0, 10, 19, 24)
    for d, whole in enumerate(documents):
        part = slice(row.starts[d], row.starts[d + 1])
        states = whole.aux_hidden_TF.shape[0]
        assert torch.equal(row.input_ids_T[part], whole.input_ids_T)
        assert torch.equal(row.loss_mask_T[part], whole.loss_mask_T)
        assert torch.equal(row.aux_hidden_TF[part][:states], whole.aux_hidden_TF)
        assert torch.equal(row.last_hidden_TD[part][:states], whole.last_hidden_TD)
        assert row.position_ids_T[part].tolist() == list(range(len(whole.input_ids_T)))
        assert (row.document_ids_T[part] == d).all()


@pytest.mark.parametrize("rows", [5, 8])
def test_states_of_another_length_are_refused(rows):
    whole = document([1] * 7, states_missing=0)
    with pytest.raises(ValueError, match=f"aux_hidden_TF has {rows} rows for 7 tokens"):
        Document(whole.input_ids_T, whole.loss_mask_T, torch.zeros(rows, HIDDEN), whole.last_hidden_TD)


def test_a_loss_mask_of_another_length_is_refused():
    whole = document([1] * 7)
    with pytest.raises(ValueError, match="loss_mask has 6 entries for 7 tokens"):
        Document(whole.input_ids_T, whole.loss_mask_T[:-1], whole.aux_hidden_TF, whole.last_hidden_TD)
