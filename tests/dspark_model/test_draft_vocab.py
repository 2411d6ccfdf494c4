"""The draft vocabulary and its two maps."""

from __future__ import annotations

import math
import random

import pytest
import torch

from dspark_model.drafter import DSparkDrafter
from dspark_model.vocab import choose_draft_vocab, coverage, draft_to_verifier_ids, verifier_to_draft_ids
from tests.dspark_model.tiny import VOCAB, some_t2d, tiny_config


@pytest.mark.parametrize("seed", range(4))
def test_the_most_frequent_ids_are_kept_and_ties_go_to_the_smallest_id(seed):
    draw = random.Random(seed)
    counts = [draw.choice([0, 0, 1, 1, 2, 5, 9]) for _ in range(40)]
    always = tuple(draw.sample(range(40), 3))
    t2d = choose_draft_vocab(torch.tensor(counts), 12, always)
    ranked = sorted(range(40), key=lambda i: (i not in always, -counts[i], i))
    assert t2d.nonzero().flatten().tolist() == sorted(ranked[:12])
    assert t2d.dtype == torch.bool


def test_padding_takes_unseen_ids_from_the_smallest():
    counts = torch.zeros(10, dtype=torch.long)
    counts[7] = 3
    assert choose_draft_vocab(counts, 4).nonzero().flatten().tolist() == [0, 1, 2, 7]


@pytest.mark.parametrize("size", [0, 2, 11])
def test_sizes_that_cannot_be_are_refused(size):
    with pytest.raises(ValueError, match=f"draft_vocab_size={size} must lie in 3..10"):
        choose_draft_vocab(torch.zeros(10), size, always=(1, 2, 3))


@pytest.mark.parametrize("size", [1, 9, VOCAB])
def test_the_maps_are_inverse_of_each_other(size):
    t2d = some_t2d(size)
    to_verifier, to_draft = draft_to_verifier_ids(t2d), verifier_to_draft_ids(t2d)
    kept = [v for v in range(VOCAB) if t2d[v]]
    assert to_verifier.tolist() == kept, "draft ids follow ascending verifier ids"
    assert to_draft[to_verifier].tolist() == list(range(size))
    assert [v for v in range(VOCAB) if to_draft[v] == -1] == [v for v in range(VOCAB) if v not in kept]


def test_d2t_is_an_offset():
    t2d = some_t2d(9)
    drafter = DSparkDrafter(tiny_config(draft_vocab_size=9), t2d)
    assert [i + int(offset) for i, offset in enumerate(drafter.d2t)] == t2d.nonzero().flatten().tolist()
    assert drafter.d2t.dtype == torch.int64
    assert not DSparkDrafter(tiny_config()).d2t.any(), "the whole vocabulary has no offsets"


def test_coverage_is_the_share_of_counted_tokens():
    counts = torch.tensor([4, 0, 3, 1])
    t2d = torch.tensor([True, True, False, True])
    assert coverage(counts, t2d) == 5 / 8
    assert coverage(counts, torch.ones(4, dtype=torch.bool)) == 1
    assert math.isnan(coverage(torch.zeros(4), t2d))
