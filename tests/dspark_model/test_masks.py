"""The mask functions against their sentence, position by position."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from dspark_model.attention import ChunkedPlan
from dspark_model.batch import pack
from dspark_model.flex_attention import mask_function
from dspark_model.masks import block_mask, context_mask
from dspark_model.reference_forward import dense_mask
from tests.dspark_model.tiny import answer, tiny_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [1, 3, 5, 100])
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_the_readable_mask_is_its_sentence_entry_by_entry(kind, window):
    config = tiny_config(layer_kinds=("full", "sliding"), sliding_window=window)
    row, anchors = pack([answer(2, 6, seed=1), answer(1, 4, seed=2)]), [0, 3, 4, 8, 11]
    mask, T, K = dense_mask(row, torch.tensor(anchors), config, kind), row.input_ids_T.shape[0], config.block_size
    assert mask.shape == (len(anchors) * K, T + len(anchors) * K)
    for query in range(len(anchors) * K):
        block, k = divmod(query, K)
        p = anchors[block]
        for s in range(T):
            same = row.document_ids_T[s] == row.document_ids_T[p]
            near = kind == "full" or s > p + k - window
            assert bool(mask[query, s]) == (bool(same) and s < p and near)
        for key in range(len(anchors) * K):
            other, j = divmod(key, K)
            seen = kind == "full" or (j <= k and j > k - window)
            assert bool(mask[query, T + key]) == (other == block and seen)


@pytest.mark.parametrize("window", [1, 3, 6, 100])
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_context_is_strictly_before_the_anchor_and_windowed_per_query(kind, window):
    anchors, context = torch.tensor([10, 13, 19]), torch.arange(10, 25)
    mask = context_mask(anchors, context, 4, kind, window)
    assert mask.shape == (3, 4, 15)
    for a, p in enumerate(anchors.tolist()):
        for k in range(4):
            for c, s in enumerate(context.tolist()):
                visible = s < p and (kind == "full" or p + k - s < window)
                assert bool(mask[a, k, c]) == visible


@pytest.mark.parametrize("window", [1, 2, 100])
def test_block_is_bidirectional_when_full_and_causal_when_sliding(window):
    assert block_mask(4, "full", window, CPU).all()
    sliding = block_mask(4, "sliding", window, CPU)
    for k in range(4):
        for j in range(4):
            assert bool(sliding[k, j]) == (0 <= k - j < window)


def test_every_query_sees_at_least_itself():
    for kind in ("full", "sliding"):
        assert block_mask(5, kind, 1, CPU).diagonal().all()


@pytest.mark.parametrize("kinds", [("full", "sliding"), ("sliding", "sliding")])
def test_chunks_cut_the_dense_mask_and_cut_away_nothing_visible(kinds, monkeypatch):
    monkeypatch.setattr("dspark_model.attention.ANCHORS_PER_CHUNK", 3)
    config = tiny_config(layer_kinds=kinds)
    row = pack([answer(2, 12, seed=1), answer(1, 4, seed=2), answer(2, 9, seed=3)])
    anchors = [1, 3, 4, 5, 9, 12, 20, 22, 27]
    total = row.input_ids_T.shape[0]
    by_document = ChunkedPlan(row.starts, torch.tensor(anchors), config).chunks
    chunks = [chunk for document in by_document for chunk in document]
    assert [chunk.slots.stop - chunk.slots.start for chunk in chunks] == [12, 12, 12]
    assert [chunk.slots.start for chunk in chunks] == [0, 12, 24], "slots in order, none twice"
    for kind in dict.fromkeys(kinds):
        dense = dense_mask(row, torch.tensor(anchors), config, kind)
        rebuilt = torch.zeros_like(dense)
        for start, document in zip(row.starts, by_document, strict=False):
            for chunk in document:
                seen, slots = chunk.context.stop - chunk.context.start, chunk.slots
                rebuilt[slots, start + chunk.context.start : start + chunk.context.stop] = chunk.mask_QC[kind][:, :seen]
                rebuilt[slots, total + slots.start : total + slots.stop] = chunk.mask_QC[kind][:, seen:]
        assert torch.equal(rebuilt, dense)


def test_documents_without_anchors_make_no_chunk():
    row = pack([answer(2, 3), answer(2, 3), answer(2, 3)])
    plan = ChunkedPlan(row.starts, torch.tensor([7]), tiny_config())
    found = [[(chunk.slots, chunk.context) for chunk in document] for document in plan.chunks]
    assert found == [[], [(slice(0, 4), slice(0, 2))], []]


def test_context_that_no_layer_can_see_is_cut_off():
    """Window 5: slot 0 of the first anchor (9) sees 5..8, nothing of the chunk sees 4."""
    row = pack([answer(2, 3), answer(2, 12)])
    config = tiny_config(layer_kinds=("sliding", "sliding"), sliding_window=5)
    (chunk,) = ChunkedPlan(row.starts, torch.tensor([14, 16]), config).chunks[1]
    assert chunk.context == slice(5, 11)


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_the_flex_attention_rule_is_the_dense_mask(kind):
    config = tiny_config(layer_kinds=("full", "sliding"))
    row = pack([answer(2, 12, seed=1), answer(1, 4, seed=2), answer(2, 9, seed=3)])
    anchors = [1, 3, 4, 5, 9, 12, 14, 20, 22, 27]
    slots, keys = len(anchors) * config.block_size, row.input_ids_T.shape[0] + len(anchors) * config.block_size
    rule = mask_function(row.document_ids_T, torch.tensor(anchors), config, kind)
    mask = create_mask(rule, None, None, slots, keys, device="cpu")[0, 0]
    assert torch.equal(mask, dense_mask(row, torch.tensor(anchors), config, kind))
