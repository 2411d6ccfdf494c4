"""Walked acceptance against an independent simulator of speculative decoding, and drafting one block at a time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from dspark_model import metrics
from dspark_model.batch import Document, make_slots, pack
from dspark_model.drafter import DSparkDrafter
from dspark_model.metrics import Acceptance, propose_everywhere, total, walk, walk_documents
from tests.dspark_model.tiny import MASK, answer, document, some_t2d, tiny_config, tiny_drafter

Draft = Callable[[list[int]], list[int]]


def speculative_decoding(truth: list[int], draft: Draft, n: int) -> tuple[list[int], list[int]]:
    """Serve `truth` with a verifier that always continues it; returns the text and the accepted count of each step.

    Tokens past the end of the answer do not exist: the request has stopped.
    """
    text, steps = truth[:1], []
    while len(text) < len(truth):
        accepted = 0
        for token in draft(text)[:n]:
            if len(text) == len(truth) or token != truth[len(text)]:
                break
            text.append(token)
            accepted += 1
        if len(text) < len(truth):
            text.append(truth[len(text)])  # the verifier's correction, or its bonus token
        steps.append(accepted)
    return text, steps


def simulated(truth: list[int], proposals: list[list[int]], n: int) -> Acceptance:
    text, steps = speculative_decoding(truth, lambda text: proposals[len(text) - 1], n)
    assert text == truth, "the simulator itself must be lossless"
    return Acceptance(len(steps), tuple(sum(step > i for step in steps) for i in range(n)))


def oracle(truth: list[int], n: int) -> list[list[int]]:
    return [truth[i + 1 : i + 1 + n] for i in range(len(truth) - 1)]


def test_never_accepting_takes_one_step_per_token():
    truth = list(range(10))
    result = walk(truth, [[-1] * 3] * 9, 3)
    assert result == Acceptance(9, (0, 0, 0))
    assert result.acceptance_length == 1


def test_always_accepting_emits_n_plus_one_tokens_per_step():
    truth = list(range(13))
    result = walk(truth, oracle(truth, 3), 3)
    assert result == Acceptance(3, (3, 3, 3))
    assert result.acceptance_length == 4


@pytest.mark.parametrize("seed", range(30))
def test_sometimes_accepting_equals_the_simulator(seed):
    draw = random.Random(seed)
    n, truth = draw.randint(1, 5), [draw.randint(0, 5) for _ in range(draw.randint(1, 60))]
    right = draw.random()
    proposals = [
        [truth[i + 1 + j] if i + 1 + j < len(truth) and draw.random() < right else draw.randint(0, 5) for j in range(n)]
        for i in range(len(truth) - 1)
    ]
    result = walk(truth, proposals, n)
    assert result == simulated(truth, proposals, n)
    if result.drafts:
        assert result.acceptance_length == pytest.approx(1 + sum(result.survival))
        assert list(result.survival) == sorted(result.survival, reverse=True)
        reached = sum(rate > 0 for rate in result.survival)
        chained = [math.prod(result.conditional[: i + 1]) for i in range(reached)]
        assert list(result.survival[:reached]) == pytest.approx(chained)


def test_the_first_token_comes_from_the_prefill():
    assert walk([5], [], 3) == Acceptance(0, (0, 0, 0))
    assert walk([5, 6], [[6, 7, 8]], 3) == Acceptance(1, (1, 0, 0))
    assert walk([], [], 3).drafts == 0


def test_fewer_speculative_tokens_cut_the_proposals():
    truth = list(range(9))
    assert walk(truth, oracle(truth, 4), 1) == Acceptance(4, (4,))


def test_conditional_rates():
    result = Acceptance(10, (6, 3, 0, 0))
    assert result.survival == (0.6, 0.3, 0.0, 0.0)
    assert result.conditional[:3] == (0.6, 0.5, 0.0)
    assert math.isnan(result.conditional[3])
    assert result.acceptance_length == pytest.approx(1.9)


def test_no_drafts_have_no_rate():
    nothing = Acceptance(0, (0, 0))
    assert math.isnan(nothing.acceptance_length)
    assert all(math.isnan(rate) for rate in (*nothing.survival, *nothing.conditional))


def test_sums_are_of_counts_so_batching_changes_nothing():
    parts = [Acceptance(3, (2, 1)), Acceptance(0, (0, 0)), Acceptance(5, (1, 0)), Acceptance(2, (2, 2))]
    assert total(parts, 2) == Acceptance(10, (5, 3))
    assert total(parts[:2], 2) + total(parts[2:], 2) == total(parts, 2)
    assert total([], 2) == Acceptance(0, (0, 0))


def draft_once(drafter: DSparkDrafter, whole: Document, p: int) -> list[int]:
    """Draft at one anchor in a forward of its own, picking token after token."""
    config = drafter.config
    row, anchors = pack([whole]), torch.tensor([p])
    slots = make_slots(
        row, anchors, block_size=config.block_size, mask_token_id=MASK, sample_from_anchor=config.sample_from_anchor
    )
    hidden, prev, tokens = drafter(row, anchors, slots).hidden_SD, int(whole.input_ids_T[p]), []
    kept = drafter.t2d.nonzero().flatten().tolist()
    for k in range(0 if config.sample_from_anchor else 1, config.block_size):
        scores = drafter.lm_head @ hidden[k]
        if drafter.markov_head is not None:
            scores = scores + drafter.markov_head.markov_w2.weight @ drafter.markov_head.markov_w1.weight[prev]
        prev = kept[int(scores.argmax())]
        tokens.append(prev)
    return tokens


CASES = {
    "dspark": {},
    "dflash layout": {"sample_from_anchor": False},
    "sliding": {"layer_kinds": ("sliding", "sliding")},
    "reduced": {"draft_vocab_size": 9},
    "no markov": {"markov_rank": 0, "confidence_with_markov": False},
}


@torch.no_grad()
@pytest.mark.parametrize("choices", CASES.values(), ids=CASES.keys())
def test_drafting_everywhere_at_once_equals_one_anchor_at_a_time(choices, monkeypatch):
    monkeypatch.setattr(metrics, "ROWS_PER_CHUNK", 3)
    t2d = some_t2d(choices["draft_vocab_size"]) if "draft_vocab_size" in choices else None
    drafter, whole = tiny_drafter(tiny_config(**choices), t2d), answer(3, 12)
    anchors = torch.arange(2, 14)
    proposals = propose_everywhere(drafter, whole, anchors)
    assert proposals.shape == (12, drafter.config.proposals_per_block)
    assert proposals.tolist() == [draft_once(drafter, whole, int(p)) for p in anchors]
    assert len(set(map(tuple, proposals.tolist()))) > 1, "a drafter that says one thing proves nothing"


@torch.no_grad()
def test_walking_documents_equals_serving_them_with_the_drafter():
    drafter, documents = tiny_drafter(tiny_config()), [answer(3, 15, seed=s) for s in range(3)]
    # Make acceptance likely: let each answer follow the drafter's own taste at some positions.
    taught = []
    for whole in documents:
        ids = whole.input_ids_T.clone()
        for p in range(3, 12, 4):
            draft = draft_once(drafter, Document(ids, whole.loss_mask_T, whole.aux_hidden_TF, whole.last_hidden_TD), p)
            ids[p + 1 : p + 3] = torch.tensor(draft[:2])
        taught.append(Document(ids, whole.loss_mask_T, whole.aux_hidden_TF, whole.last_hidden_TD))
    results = walk_documents(drafter, taught, 3)
    for whole, result in zip(taught, results, strict=True):
        truth = whole.input_ids_T[3:].tolist()
        _, steps = speculative_decoding(truth, lambda text, d=whole: draft_once(drafter, d, 2 + len(text)), 3)
        assert result == Acceptance(len(steps), tuple(sum(step > i for step in steps) for i in range(3)))
    assert total(results, 3).accepted > 3


def test_walking_counts_all_a_block_proposes_unless_told():
    assert len(walk_documents(tiny_drafter(tiny_config()), [answer(2, 5)])[0].accepted_per_position) == 4


def test_answers_of_less_than_two_tokens_draft_nothing():
    results = walk_documents(tiny_drafter(tiny_config()), [answer(4, 1), answer(4, 0)], 2)
    assert [result.drafts for result in results] == [0, 0]


def test_supervised_tokens_must_be_the_tail():
    with pytest.raises(ValueError, match="the document's tail"):
        walk_documents(tiny_drafter(tiny_config()), [document([0, 1, 1, 0, 1])])
