"""The verifier's distribution behind slots: each position once, each normaliser computed once and kept."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import dspark_model.verifier_targets as module
from dspark_model.batch import pack
from dspark_model.verifier_targets import Normalisers, log_normalisers, verifier_targets
from tests.dspark_model.tiny import answer, document, tiny_config, tiny_drafter, tiny_parts


def by_hand(parts, state):
    """log sum exp of head rows times the normed state, one row at a time."""
    normed = state / (state.pow(2).mean() + parts.norm_eps).sqrt() * parts.norm_D
    logits = torch.stack([row @ normed for row in parts.lm_head_VD])
    if parts.logit_softcap is not None:
        logits = parts.logit_softcap * torch.tanh(logits / parts.logit_softcap)
    return logits.exp().sum().log()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("at_once", [(1, 1), (3, 10), (99, 99)])
def test_normalisers_are_those_of_the_whole_vocabulary_whatever_is_held_at_once(softcap, at_once, monkeypatch):
    monkeypatch.setattr(module, "STATES_AT_ONCE", at_once[0])
    monkeypatch.setattr(module, "HEAD_ROWS_AT_ONCE", at_once[1])
    parts, states_TD = dataclasses.replace(tiny_parts(), logit_softcap=softcap), answer(3, 5).last_hidden_TD
    expected = torch.stack([by_hand(parts, state) for state in states_TD])
    torch.testing.assert_close(log_normalisers(parts, states_TD), expected)


def test_a_head_stored_in_low_precision_is_multiplied_in_the_dtype_asked_for():
    parts, states_TD = tiny_parts(), answer(3, 5).last_hidden_TD
    stored = dataclasses.replace(parts, lm_head_VD=parts.lm_head_VD.bfloat16())
    exact = dataclasses.replace(parts, lm_head_VD=stored.lm_head_VD.float())
    expected = torch.stack([by_hand(exact, state) for state in states_TD])
    torch.testing.assert_close(log_normalisers(stored, states_TD, torch.float32), expected)
    assert (log_normalisers(stored, states_TD) - expected).abs().max() > 1e-4, "rounding would show"


def test_each_document_is_computed_once_and_only_where_a_supervised_token_follows(monkeypatch):
    parts, one, two = tiny_parts(), answer(3, 4, seed=1), document([0, 1, 0, 0, 1, 1], seed=2)
    asked = []

    def counted(verifier, states_TD, dtype):
        asked.append(states_TD.shape[0])
        return log_normalisers(verifier, states_TD, dtype)

    monkeypatch.setattr(module, "log_normalisers", counted)
    kept = Normalisers(parts, [7, 6])
    for _epoch in range(3):
        found = [kept.of(i, d.last_hidden_TD, d.loss_mask_T) for i, d in enumerate((one, two))]
    assert asked == [4, 3], "once each, not once an epoch"
    for text, log_norm_T in zip((one, two), found, strict=True):
        for t in range(text.last_hidden_TD.shape[0]):
            follows = t + 1 < text.loss_mask_T.shape[0] and bool(text.loss_mask_T[t + 1])
            expected = by_hand(parts, text.last_hidden_TD[t]) if follows else torch.tensor(torch.inf)
            torch.testing.assert_close(log_norm_T[t], expected)


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_every_supervised_slot_finds_the_state_before_its_target(sample_from_anchor):
    parts = tiny_parts()
    documents = [answer(3, 9, seed=1), document([1] * 8, seed=2)]
    kept = Normalisers(parts, [12, 8])
    documents = [
        dataclasses.replace(d, log_norm_T=kept.of(i, d.last_hidden_TD, d.loss_mask_T)) for i, d in enumerate(documents)
    ]
    row, anchors = pack(documents), torch.tensor([2, 3, 8, 12, 17])
    config = tiny_config(sample_from_anchor=sample_from_anchor)
    slots = tiny_drafter(config).slots(row, anchors)
    found = verifier_targets(parts, row, slots.state_index_AK, reduced_vocab=True)
    for a, anchor in enumerate(anchors.tolist()):
        for k in range(config.block_size):
            if not slots.supervision_mask_AK[a, k]:
                continue
            state = row.last_hidden_TD[anchor + k if sample_from_anchor else anchor + k - 1]
            place = int(found.position_S[a * config.block_size + k])
            torch.testing.assert_close(found.normed_PD[place], parts.normed(state))
            torch.testing.assert_close(found.log_norm_P[place], by_hand(parts, state))
    positions = found.position_S.tolist()
    assert sorted(set(positions)) == list(range(found.normed_PD.shape[0])), "no position twice, none unused"


def test_a_reduced_vocabulary_without_normalisers_is_refused():
    row = pack([answer(3, 4)])
    with pytest.raises(ValueError, match="log_norm_T"):
        verifier_targets(tiny_parts(), row, torch.tensor([[3]]), reduced_vocab=True)
    assert verifier_targets(tiny_parts(), row, torch.tensor([[3]]), reduced_vocab=False).log_norm_P is None


def test_packing_keeps_normalisers_at_their_tokens_and_drops_them_where_one_document_has_none():
    parts, texts = tiny_parts(), [answer(3, 4, seed=1), document([1] * 5, seed=2)]
    kept = Normalisers(parts, [7, 5])
    known = [
        dataclasses.replace(d, log_norm_T=kept.of(i, d.last_hidden_TD, d.loss_mask_T)) for i, d in enumerate(texts)
    ]
    row = pack(known)
    for text, start in zip(known, row.starts, strict=False):
        length = text.log_norm_T.shape[0]
        assert torch.equal(row.log_norm_T[start : start + length], text.log_norm_T)
    assert pack([known[0], texts[1]]).log_norm_T is None
