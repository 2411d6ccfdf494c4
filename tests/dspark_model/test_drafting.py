"""What the decoding loop drafts, against the training forward, the dense reference, and texts changed ahead of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark_model.batch import Document, pack
from dspark_model.decoding import Proposal, Sampler, propose, with_proposals
from dspark_model.drafter import DSparkDrafter
from dspark_model.metrics import propose_everywhere
from dspark_model.reference_forward import dense_forward
from tests.dspark_model.tiny import MASK, some_t2d, three_documents, tiny_config, tiny_drafter

GREEDY = Sampler(0.0, None)
KINDS = [("full", "full"), ("sliding", "sliding"), ("full", "sliding")]
LAYOUTS = pytest.mark.parametrize("anchored", [True, False], ids=["sample from anchor", "dflash layout"])


class Forced(Sampler):
    """Draws what it is told and keeps the logits it was shown."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(1.0, None)
        object.__setattr__(self, "left", list(tokens))
        object.__setattr__(self, "logits", [])

    def distribution(self, logits: Tensor) -> Tensor:
        self.logits.append(logits)
        return super().distribution(logits)

    def draw(self, probabilities: Tensor) -> int:
        return self.left.pop(0)


def drafted_at(drafter: DSparkDrafter, text: Document, p: int, sampler: Sampler = GREEDY) -> Proposal:
    """One block as the decoding loop drafts it: nothing of the document at or after the anchor but its token."""
    return propose(drafter, text.input_ids_T[: p + 1].tolist(), text.aux_hidden_TF[:p], sampler)


@torch.no_grad()
@LAYOUTS
@pytest.mark.parametrize("kinds", KINDS[:2])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
def test_training_and_decoding_see_equal_logits(head, kinds, anchored):
    """Blocks of a packed row, teacher-forced, against the loop with the same prefix made to draw the same tokens."""
    markov: dict[str, Any] = {"markov_rank": 0, "confidence_with_markov": False}
    if head != "none":
        markov = {"markov_head_type": head}
    drafter = tiny_drafter(tiny_config(layer_kinds=kinds, sample_from_anchor=anchored, **markov))
    documents = [dataclasses.replace(text, loss_mask_T=torch.ones_like(text.loss_mask_T)) for text in three_documents()]
    row, first, K = pack(documents), 0 if anchored else 1, drafter.config.block_size
    anchors = [(d, p) for d, text in enumerate(documents) for p in range(len(text.input_ids_T) - 1)]
    anchor_pos_A = torch.tensor([row.starts[d] + p for d, p in anchors])
    slots = drafter.slots(row, anchor_pos_A)
    output = drafter(row, anchor_pos_A, slots)
    logits_AKW = drafter.logits(output.hidden_SD, output.markov_SR).unflatten(0, (-1, K))
    tolerance, compared = 1e-5 * float(logits_AKW.abs().max()), 0
    for a, (d, p) in enumerate(anchors):
        known = documents[d].input_ids_T[p + 1 :].tolist()[: K - first]
        sampler = Forced(known + [0] * K)
        drafted_at(drafter, documents[d], p, sampler)
        assert int(slots.supervision_mask_AK[a].sum()) == len(known)
        for slot in range(len(known)):
            assert (sampler.logits[slot] - logits_AKW[a, first + slot]).abs().max() < tolerance
            compared += 1
    assert compared > 50


@torch.no_grad()
@LAYOUTS
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_nothing_at_or_after_the_anchor_and_no_other_document_changes_a_block(head, kinds, anchored):
    """At every anchor: the block alone among other documents and a future made up anew, against the block as it was."""
    drafter = tiny_drafter(tiny_config(layer_kinds=kinds, sample_from_anchor=anchored, markov_head_type=head))
    documents, g = three_documents(), torch.Generator().manual_seed(0)
    anchors = [(text, p) for text in documents for p in range(len(text.input_ids_T) - 1)]

    def blocks(texts: list[Document], points: list[int]) -> Tensor:
        row = pack(texts)
        anchor_pos_A = torch.tensor(points)
        return drafter(row, anchor_pos_A, drafter.slots(row, anchor_pos_A)).hidden_SD.unflatten(0, (len(points), -1))

    def one_each(texts: list[Document]) -> Tensor:
        starts = pack(texts).starts
        return blocks(texts, [start + p for start, (_, p) in zip(starts, anchors, strict=False)])

    def other_future(text: Document, p: int) -> Document:
        ids, aux = text.input_ids_T.clone(), text.aux_hidden_TF.clone()
        ids[p + 1 :] = torch.randint(0, MASK, ids[p + 1 :].shape, generator=g)
        aux[p:] = torch.randn(aux[p:].shape, generator=g)
        return dataclasses.replace(text, input_ids_T=ids, aux_hidden_TF=aux)

    def other_state(text: Document, at: int) -> Document:
        aux = text.aux_hidden_TF.clone()
        aux[at] += 1.0
        return dataclasses.replace(text, aux_hidden_TF=aux)

    before = torch.cat([blocks([text], [p for other, p in anchors if other is text]) for text in documents])
    futures = [other_future(text, p) for text, p in anchors]
    torch.testing.assert_close(one_each(futures), before, rtol=1e-5, atol=1e-5)
    drafts = propose_everywhere(drafter, documents[0], torch.arange(len(documents[0].input_ids_T) - 1))
    for p, tokens in enumerate(drafts):
        assert torch.equal(propose_everywhere(drafter, futures[p], torch.tensor([p]))[0], tokens)
    # The state just before the anchor does reach the block, and nothing else does where there is none.
    moved = one_each([other_state(text, max(p - 1, 0)) for text, p in anchors]) - before
    assert [bool(block.abs().max() > 1e-3) for block in moved] == [p > 0 for _, p in anchors]


@torch.no_grad()
@LAYOUTS
@pytest.mark.parametrize("n", [1, 2, 3])
def test_fewer_speculative_tokens_open_fewer_slots_as_the_engine_does(n, anchored):
    """On full layers a block's slots see each other: against the dense forward of a block that short."""
    drafter = tiny_drafter(tiny_config(sample_from_anchor=anchored))
    assert drafter.markov_head is not None
    text = three_documents()[0]
    short = dataclasses.replace(drafter.config, block_size=n if anchored else n + 1)
    for p in range(1, 9):
        row = pack([text])
        hidden = dense_forward(dict(drafter.named_parameters()), short, row, torch.tensor([p]))
        prev, expected = int(text.input_ids_T[p]), []
        for k in range(0 if anchored else 1, short.block_size):
            w1, w2 = drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight
            prev = int((drafter.lm_head @ hidden[k] + w2 @ w1[prev]).argmax())
            expected.append(prev)
        assert drafted_at(with_proposals(drafter, n), text, p).tokens == expected
    assert drafter.config.block_size == 4, "the drafter itself keeps its blocks"


@torch.no_grad()
@LAYOUTS
def test_a_doubtful_slot_ends_the_block_even_where_later_ones_are_sure(anchored):
    """Confidences of the slots' states alone, taken from the training forward, against each other as thresholds."""
    drafter = tiny_drafter(tiny_config(sample_from_anchor=anchored, confidence_with_markov=False))
    text, first, resumed = three_documents()[0], 0 if anchored else 1, 0
    assert drafter.confidence_head is not None
    for p in range(len(text.input_ids_T) - 1):
        row, anchor_1 = pack([text]), torch.tensor([p])
        output = drafter(row, anchor_1, drafter.slots(row, anchor_1))
        confidence_P = drafter.confidence_head(output.hidden_SD, None).sigmoid()[first:]
        for threshold in ((confidence_P - 1e-4).clamp(min=0)).tolist():
            sure = [bool(confidence >= threshold) for confidence in confidence_P]
            expected = sure.index(False) if False in sure else len(sure)
            proposal = propose(drafter, text.input_ids_T[: p + 1].tolist(), text.aux_hidden_TF[:p], GREEDY, threshold)
            assert len(proposal.tokens) == expected
            assert proposal.draft_LV.shape == (expected, drafter.config.verifier_vocab_size)
            resumed += sum(sure) > expected
    assert resumed > 3


def test_proposals_keep_the_distributions_they_were_drawn_from():
    t2d = some_t2d(9)
    drafter, text = tiny_drafter(tiny_config(draft_vocab_size=9), t2d), three_documents()[0]
    with torch.no_grad():
        proposal = drafted_at(drafter, text, 4, Sampler(0.7, torch.Generator().manual_seed(0)))
        forced = Forced(proposal.tokens)
        drafted_at(drafter, text, 4, forced)
    assert not proposal.draft_LV[:, ~t2d].any()
    torch.testing.assert_close(proposal.draft_LV[:, t2d], (torch.stack(forced.logits) / 0.7).softmax(-1))
    assert all(t2d[token] for token in proposal.tokens)
