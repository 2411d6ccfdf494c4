"""Decoding against the verifier alone, against the walk, and with drafters rigged to be right or wrong."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dspark_model.batch import Document, PackedRow, Slots
from dspark_model.decoding import Decoded, decode
from dspark_model.decoding_verifier import VerifierRun
from dspark_model.drafter import DrafterOutput, DSparkDrafter
from dspark_model.metrics import Acceptance, walk_documents
from tests.dspark_model.decoding_models import (
    LAYERS,
    VERIFIERS,
    chain_drafter,
    chain_verifier,
    half_right_drafter,
    llama_verifier,
)
from tests.dspark_model.tiny import VOCAB, some_t2d, tiny_config, tiny_drafter

PROMPT = [3, 1, 4, 1, 5]
LAYOUTS = pytest.mark.parametrize("anchored", [True, False], ids=["sample from anchor", "dflash layout"])


def alone(verifier: PreTrainedModel, prompt: list[int], n: int) -> list[int]:
    """Greedy decoding without cache and without a drafter."""
    text = list(prompt)
    for _ in range(n):
        text.append(int(verifier(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


NEW = 24


@functools.cache
def verifier_and_text(family: str) -> tuple[PreTrainedModel, list[int]]:
    """A verifier and what it writes by itself: `NEW` tokens, some of them followed by different ones."""
    verifier = VERIFIERS[family]()
    with torch.no_grad():
        text = alone(verifier, PROMPT, NEW)
    following: dict[int, set[int]] = {}
    for token, after in itertools.pairwise(text):
        following.setdefault(token, set()).add(after)
    assert sum(len(after) > 1 for after in following.values()) > 3, "hanging on the last token alone, it proves little"
    return verifier, text


CHOICES: list[dict[str, Any]] = [{}, {"num_speculative_tokens": 2}, {"confidence_threshold": 0.5}]
# What is drafted and how a verifier keeps its states do not meet: all choices on one family, one on each of the others.
GREEDY_CASES = [
    *(("llama", anchored, choices) for choices in CHOICES for anchored in (True, False)),
    *((family, True, {"confidence_threshold": 0.5}) for family in VERIFIERS if family != "llama"),
]


@torch.no_grad()
@pytest.mark.parametrize(("family", "anchored", "choices"), GREEDY_CASES)
def test_greedy_decoding_equals_the_verifier_token_by_token(family, anchored, choices):
    verifier, text = verifier_and_text(family)
    result = decode(
        verifier, half_right_drafter(text, sample_from_anchor=anchored), PROMPT, max_new_tokens=NEW, **choices
    )
    assert list(result.tokens) == text
    assert len(set(result.accepted_per_step)) > 1, "right sometimes, wrong sometimes"
    assert 1.2 < result.acceptance.acceptance_length < 0.8 * (result.num_speculative_tokens + 1)
    assert (len(set(result.proposed_per_step)) > 1) == ("confidence_threshold" in choices)
    # Each step emits one more than it accepts, but for a last one cut right after an accepted token.
    assert sum(result.accepted_per_step) + len(result.accepted_per_step) in {NEW - 1, NEW}


@torch.no_grad()
def test_greedy_decoding_equals_generate():
    verifier, text = verifier_and_text("qwen3")
    reference = verifier.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    result = decode(verifier, half_right_drafter(text), PROMPT, max_new_tokens=NEW, temperature=1e-6)
    assert list(result.tokens) == reference[0, len(PROMPT) :].tolist()


def verifier_document(verifier: PreTrainedModel, drafter: DSparkDrafter, result: Decoded) -> Document:
    """The decoded text with states taken by hooks on the verifier's layers, in one pass over the whole."""
    text, outputs = torch.tensor([*PROMPT, *result.tokens]), []
    hooks = [
        layer.register_forward_hook(lambda *call: outputs.append(call[2] if torch.is_tensor(call[2]) else call[2][0]))
        for layer in verifier.model.layers
    ]
    verifier(input_ids=text[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    aux = torch.cat([outputs[i - 1][0] for i in drafter.config.aux_hidden_state_layer_ids], -1)
    supervised = torch.arange(len(text)) >= len(PROMPT)
    return Document(text, supervised, aux[:-1], aux[:-1, :0])


@torch.no_grad()
@pytest.mark.parametrize(("family", "anchored"), [("llama", False), *((family, True) for family in VERIFIERS)])
def test_walking_the_decoded_text_counts_what_decoding_counted(family, anchored, monkeypatch):
    """States by layer hooks, blocks at all anchors at once: shares neither loop nor cache with decoding."""
    verifier, text = verifier_and_text(family)
    drafter = half_right_drafter(text, sway=0.7, sample_from_anchor=anchored, layer_kinds=("full", "sliding"))
    forward, read = DSparkDrafter.forward, []

    def recorded(self: DSparkDrafter, row: PackedRow, anchor_pos_A: Tensor, slots: Slots) -> DrafterOutput:
        read.append((row, anchor_pos_A.tolist()))
        return forward(self, row, anchor_pos_A, slots)

    for new in (2, NEW):
        read.clear()
        with monkeypatch.context() as patch:
            patch.setattr(DSparkDrafter, "forward", recorded)
            result = decode(verifier, drafter, PROMPT, max_new_tokens=new)
        document = verifier_document(verifier, drafter, result)
        assert walk_documents(drafter, [document]) == [result.acceptance]
        assert len(read) == result.acceptance.drafts
        for row, anchors in read:
            p = len(row.input_ids_T) - 1
            assert anchors == [p]
            assert torch.equal(row.input_ids_T, document.input_ids_T[: p + 1])
            torch.testing.assert_close(row.aux_hidden_TF[:p], document.aux_hidden_TF[:p], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("family", VERIFIERS)
def test_rewinding_leaves_no_trace(family):
    verifier = VERIFIERS[family]()
    run, fresh = (VerifierRun(verifier, tiny_config(verifier_num_layers=LAYERS)) for _ in range(2))
    run.feed([1, 2, 3])
    run.feed([4, 5, 6, 7])
    run.rewind(3)
    run.rewind(0)
    found, expected = run.feed([8, 9]), fresh.feed([1, 2, 3, 4, 8, 9])[-2:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(run.aux_TF, fresh.aux_TF, rtol=1e-4, atol=1e-4)
    assert (run._cache is None) == (family in {"windowed", "hybrid"})


def successors(seed: int = 0) -> Tensor:
    """A cycle through the vocabulary."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))
    following = torch.empty_like(order)
    following[order] = order.roll(-1)
    return following


def chain(following: Tensor) -> Tensor:
    return 50.0 * torch.nn.functional.one_hot(following, len(following)).float()


@LAYOUTS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("block", [False, True])
def test_a_drafter_that_is_the_verifier_emits_whole_blocks_and_one_more(block, temperature, anchored):
    logits = chain(successors())
    drafter = chain_drafter(logits, sample_from_anchor=anchored, block_size=4 if anchored else 5)
    result = decode(
        chain_verifier(logits), drafter, PROMPT, max_new_tokens=1 + 5 * 6, temperature=temperature,
        block_verification=block,
    )  # fmt: skip
    assert result.acceptance == Acceptance(6, (6, 6, 6, 6))
    assert result.acceptance.acceptance_length == 5


@pytest.mark.parametrize("block", [False, True])
def test_a_drafter_with_the_verifiers_distribution_is_always_accepted(block):
    logits = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    result = decode(
        chain_verifier(logits), chain_drafter(logits), PROMPT, max_new_tokens=1 + 5 * 20, temperature=0.7,
        block_verification=block, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert result.acceptance.acceptance_length == 5
    assert len(set(result.tokens)) > 15


@LAYOUTS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("block", [False, True])
def test_a_drafter_that_is_never_right_emits_one_token_per_step(block, temperature, anchored):
    following = successors()
    wrong = chain_drafter(chain(following[following]), sample_from_anchor=anchored)
    result = decode(
        chain_verifier(chain(following)), wrong, PROMPT, max_new_tokens=12, temperature=temperature,
        block_verification=block,
    )  # fmt: skip
    assert result.acceptance.acceptance_length == 1
    assert result.acceptance.drafts == 11
    assert all(b == following[a] for a, b in zip([PROMPT[-1], *result.tokens], result.tokens, strict=False))


def test_tokens_outside_the_draft_vocabulary_are_never_proposed():
    following = successors()
    t2d = some_t2d(12)
    whole = chain_drafter(chain(following))
    config = dataclasses.replace(whole.config, draft_vocab_size=12)
    reduced = DSparkDrafter(config, t2d)
    state = whole.state_dict()
    state["lm_head"], state["markov_head.markov_w2.weight"] = state["lm_head"][t2d], chain(following).T[t2d]
    reduced.load_state_dict(state)
    result = decode(chain_verifier(chain(following)), reduced, PROMPT, max_new_tokens=24)
    expected, text = [], [int(following[PROMPT[-1]])]
    while len(text) < 24:
        kept = 0
        while kept < 4 and t2d[following[text[-1]]] and len(text) < 24:
            text.append(int(following[text[-1]]))
            kept += 1
        text += [int(following[text[-1]])] * (len(text) < 24)
        expected.append(kept)
    assert list(result.tokens) == text
    assert list(result.accepted_per_step) == expected
    assert 0 < sum(expected) < 4 * len(expected)


@pytest.mark.parametrize("at", range(1, 11))
def test_a_stop_token_ends_the_text_wherever_it_falls(at):
    """With whole blocks accepted: position 0 is the prefill's, 1..4 and 6..9 proposals, 5 and 10 the verifier's own."""
    logits = chain(successors())
    verifier, drafter = chain_verifier(logits), chain_drafter(logits)
    text = decode(verifier, drafter, PROMPT, max_new_tokens=20).tokens
    result = decode(verifier, drafter, PROMPT, max_new_tokens=20, stop_token_ids={text[at]})
    assert result.tokens == text[: at + 1]
    assert result.accepted_per_step == ((min(at, 4),) if at <= 5 else (4, min(at - 5, 4)))
    assert set(result.proposed_per_step) == {4}


@pytest.mark.parametrize("new", range(1, 12))
def test_the_last_step_is_cut_at_max_new_tokens(new):
    logits = chain(successors())
    verifier, drafter = chain_verifier(logits), chain_drafter(logits)
    result = decode(verifier, drafter, PROMPT, max_new_tokens=new)
    assert len(result.tokens) == new
    assert sum(result.accepted_per_step) == sum(n % 5 != 0 for n in range(1, new))


def test_a_stop_token_from_the_prefill_drafts_nothing():
    logits = chain(successors())
    first = int(logits[PROMPT[-1]].argmax())
    result = decode(chain_verifier(logits), chain_drafter(logits), PROMPT, max_new_tokens=9, stop_token_ids=[first])
    assert result == Decoded((first,), (), (), 4)
    assert result.acceptance.drafts == 0


def test_a_prompt_of_one_token_is_enough():
    logits = chain(successors())
    assert decode(chain_verifier(logits), chain_drafter(logits), [7], max_new_tokens=11).acceptance.drafts == 2


@LAYOUTS
def test_a_block_ends_before_the_first_slot_of_low_confidence(anchored):
    """Slot by slot: the confidence that counts is that after the token before."""
    following = successors()
    text = [int(following[PROMPT[-1]])]
    for _ in range(11):
        text.append(int(following[text[-1]]))
    # First anchor text[0]: sure. Doubt after text[2] leaves two proposals; then text[3] is the verifier's own and the
    # next anchor; doubt after it leaves none; then a whole block from text[4].
    drafter = chain_drafter(
        chain(following), doubts={text[2], text[3]}, sample_from_anchor=anchored, block_size=4 if anchored else 5
    )
    result = decode(chain_verifier(chain(following)), drafter, PROMPT, max_new_tokens=10, confidence_threshold=0.5)
    assert list(result.tokens) == text[:10]
    assert result.proposed_per_step == (2, 0, 4)
    assert result.accepted_per_step == (2, 0, 4)
    assert result.acceptance == Acceptance(3, (2, 2, 1, 1)), "a step without proposals counts as a draft"


def test_the_threshold_is_a_probability():
    logits = chain(successors())
    drafter, verifier = chain_drafter(logits), chain_verifier(logits)  # sigmoid(3) = 0.953
    lengths = {
        threshold: decode(verifier, drafter, PROMPT, max_new_tokens=6, confidence_threshold=threshold).proposed_per_step
        for threshold in (0.0, 0.95, 0.96)
    }
    assert lengths == {0.0: (4,), 0.95: (4,), 0.96: (0,) * 5}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty prompt": ({"prompt_ids": []}, "prompt_ids is empty"),
    "nothing to emit": ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
    "negative temperature": ({"temperature": -1.0}, r"temperature=-1.0 must be 0 \(greedy\) or more"),
    "no proposals": ({"num_speculative_tokens": 0}, r"num_speculative_tokens=0 must lie in 1\.\.4"),
    "threshold above 1": ({"confidence_threshold": 1.5}, r"confidence_threshold=1.5 must be a probability in 0\.\.1"),
    "too many proposals": ({"num_speculative_tokens": 5}, r"num_speculative_tokens=5 must lie in 1\.\.4"),
}


@pytest.mark.parametrize(("wrong", "message"), BAD.values(), ids=BAD.keys())
def test_arguments_out_of_range_are_refused(wrong, message):
    arguments = {"prompt_ids": PROMPT, "max_new_tokens": 4, **wrong}
    with pytest.raises(ValueError, match=message):
        decode(llama_verifier(), tiny_drafter(tiny_config()), **arguments)


def test_a_threshold_without_a_confidence_head_is_refused():
    drafter = tiny_drafter(tiny_config(confidence_head=False, confidence_with_markov=False))
    with pytest.raises(ValueError, match=r"confidence_threshold=0.5 needs a confidence head"):
        decode(llama_verifier(), drafter, PROMPT, max_new_tokens=4, confidence_threshold=0.5)


def test_another_verifiers_drafter_is_refused():
    drafter = tiny_drafter(tiny_config(verifier_num_layers=7))
    with pytest.raises(ValueError, match="the verifier has num_hidden_layers=4, the drafter was made for 7"):
        decode(llama_verifier(), drafter, PROMPT, max_new_tokens=4)


def test_a_drafter_whose_frozen_parts_were_never_loaded_is_refused():
    with pytest.raises(ValueError, match="embed_tokens or lm_head is NaN: fill them with load_verifier"):
        decode(llama_verifier(), DSparkDrafter(tiny_config(verifier_num_layers=LAYERS)), PROMPT, max_new_tokens=4)


def test_a_verifier_in_training_mode_is_refused():
    drafter = tiny_drafter(tiny_config(verifier_num_layers=LAYERS))
    with pytest.raises(ValueError, match="the verifier is in training mode"):
        decode(llama_verifier().train(), drafter, PROMPT, max_new_tokens=4)
