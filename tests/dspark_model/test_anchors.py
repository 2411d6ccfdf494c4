"""Anchors: who may be one, and how a budget is shared among documents."""

from __future__ import annotations

import pytest
import torch

from dspark_model.anchors import anchor_candidates, draw_anchors
from dspark_model.batch import PackedRow, pack
from tests.dspark_model.tiny import answer, document, three_document_row, three_documents


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def many_documents() -> PackedRow:
    return pack([answer(2, length, seed=length) for length in (40, 3, 25, 10, 2, 60)])


def per_document(row: PackedRow, anchors: torch.Tensor) -> list[int]:
    return torch.bincount(row.document_ids_T[anchors], minlength=len(row.starts) - 1).tolist()


def test_candidates_are_the_positions_before_a_supervised_token_of_the_same_document():
    expected, start = [], 0
    for whole in three_documents():
        mask = whole.loss_mask_T.tolist()
        expected += [start + p for p in range(len(mask) - 1) if mask[p + 1]]
        start += len(mask)
    found = anchor_candidates(three_document_row()).nonzero().flatten().tolist()
    assert found == expected
    assert 1 in found, "the last prompt token is one"
    assert 9 not in found, "the next document's first token is no target"


def test_within_the_budget_every_candidate_is_an_anchor():
    row = three_document_row()
    everyone = anchor_candidates(row).nonzero().flatten().tolist()
    assert draw_anchors(row, len(everyone), generator()).tolist() == everyone
    assert draw_anchors(row, 10_000, generator()).tolist() == everyone


@pytest.mark.parametrize("budget", [1, 2, 5, 6, 37, 100, 139])
def test_quotas_sum_to_the_budget_and_follow_the_documents_shares(budget):
    row = many_documents()
    anchors = draw_anchors(row, budget, generator())
    assert anchors.shape == (budget,)
    assert (anchors.diff() > 0).all(), "ascending, none twice"
    assert anchor_candidates(row)[anchors].all()
    for got, length in zip(per_document(row, anchors), (40, 3, 25, 10, 2, 60), strict=True):
        assert abs(got - budget * length / 140) < 1


def test_coverage_is_even_for_short_and_long_documents():
    """Over many draws each candidate is an anchor equally often, wherever it stands."""
    row, draws, budget = many_documents(), 400, 35
    counts = torch.zeros(row.input_ids_T.shape[0])
    shared = generator(1)
    for _ in range(draws):
        counts[draw_anchors(row, budget, shared)] += 1
    rates = counts[anchor_candidates(row)] / draws
    # Binomial: a standard deviation of 0.022 around 1/4.
    assert (rates - 0.25).abs().max() < 0.09
    assert counts[~anchor_candidates(row)].sum() == 0


def test_no_short_document_is_left_out_of_every_draw():
    """Rows are packed alike in each epoch: a document whose share rounds to nothing must get its turn."""
    row = pack([answer(2, 3, seed=i) for i in range(40)])
    shared, seen = generator(2), torch.zeros(40)
    for _ in range(60):
        seen += torch.tensor(per_document(row, draw_anchors(row, 8, shared)))
    assert seen.sum() == 480
    assert seen.min() > 0
    assert seen.max() < 30


def test_the_draw_depends_on_the_generator_only():
    row = many_documents()
    torch.manual_seed(0)
    first = draw_anchors(row, 30, generator(5))
    torch.manual_seed(1)
    assert torch.equal(draw_anchors(row, 30, generator(5)), first)
    assert not torch.equal(draw_anchors(row, 30, generator(6)), first)


def test_a_row_without_supervised_tokens_has_no_anchor():
    assert draw_anchors(pack([document([0] * 6), document([1] + [0] * 5)]), 8, generator()).numel() == 0
