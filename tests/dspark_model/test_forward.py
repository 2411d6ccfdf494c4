"""The whole forward against the dense reference, and what a slot must not be able to see."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark_model import attention
from dspark_model.attention import ChunkedPlan
from dspark_model.batch import PackedRow, make_slots
from dspark_model.drafter import DrafterOutput, DSparkDrafter
from dspark_model.flex_attention import FlexPlan
from dspark_model.layers import rope_tables
from dspark_model.reference_forward import dense_forward
from tests.dspark_model.tiny import three_document_row, tiny_config, tiny_drafter

# Document starts at 0, 10, 19: the second document's first position has no context at all.
ANCHORS = torch.tensor([1, 2, 6, 8, 10, 12, 17, 21, 22])
KINDS = [("full", "full"), ("sliding", "sliding"), ("full", "sliding")]


def run(drafter: DSparkDrafter, row: PackedRow, anchors: Tensor = ANCHORS) -> DrafterOutput:
    config = drafter.config
    slots = make_slots(
        row,
        anchors,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        sample_from_anchor=config.sample_from_anchor,
    )
    return drafter(row, anchors, slots)


def replace(row: PackedRow, **columns: Any) -> PackedRow:
    return dataclasses.replace(row, **columns)


@pytest.mark.parametrize("per_chunk", [1, 2, 64])
@pytest.mark.parametrize("kinds", KINDS)
def test_values_and_parameter_gradients_equal_a_dense_forward(kinds, per_chunk, monkeypatch):
    monkeypatch.setattr(attention, "ANCHORS_PER_CHUNK", per_chunk)
    drafter, row = tiny_drafter(tiny_config(layer_kinds=kinds)), three_document_row()
    output = run(drafter, row).hidden_SD
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    (output * probe).sum().backward()
    weights = {name: value.detach().clone().requires_grad_() for name, value in drafter.named_parameters()}
    expected = dense_forward(weights, drafter.config, row, ANCHORS)
    (expected * probe).sum().backward()
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    for name, parameter in drafter.trainable_state().items():
        if not name.startswith(("markov_head", "confidence_head")):
            torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("kinds", KINDS)
def test_flex_attention_gives_the_same(kinds, monkeypatch):
    """CUDA's plan, here through FlexAttention's own uncompiled path."""
    drafter, row = tiny_drafter(tiny_config(layer_kinds=kinds)), three_document_row()
    expected = run(drafter, row).hidden_SD
    monkeypatch.setattr("dspark_model.drafter.plan_attention", lambda row, *rest: FlexPlan(row.document_ids_T, *rest))
    with torch.no_grad():
        torch.testing.assert_close(run(drafter, row).hidden_SD, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 3, 9])
def test_narrow_windows_too(window):
    drafter = tiny_drafter(tiny_config(layer_kinds=("sliding", "sliding"), sliding_window=window))
    row = three_document_row()
    expected = dense_forward(dict(drafter.named_parameters()), drafter.config, row, ANCHORS)
    torch.testing.assert_close(run(drafter, row).hidden_SD, expected, rtol=1e-4, atol=1e-5)


def changed_blocks(before: Tensor, after: Tensor) -> list[int]:
    difference = (before - after).abs().unflatten(0, (len(ANCHORS), -1)).amax((1, 2))
    return (difference > 1e-6).nonzero().flatten().tolist()


@pytest.mark.parametrize("kinds", KINDS)
def test_context_reaches_exactly_the_later_blocks_of_its_document(kinds):
    """Perturb each context state in turn; a wide window, so that every kind sees it."""
    drafter = tiny_drafter(tiny_config(layer_kinds=kinds, sliding_window=40))
    row = three_document_row()
    with torch.no_grad():
        before = run(drafter, row).hidden_SD
        for s in range(row.input_ids_T.shape[0]):
            aux = row.aux_hidden_TF.clone()
            aux[s] += 1.0
            after = run(drafter, replace(row, aux_hidden_TF=aux)).hidden_SD
            sees = [i for i, p in enumerate(ANCHORS) if s < p and row.document_ids_T[s] == row.document_ids_T[p]]
            assert changed_blocks(before, after) == sees, f"context position {s}"


def test_a_window_hides_far_context_per_query():
    """One sliding layer of window 5: slot k of anchor p sees s > p + k - 5."""
    drafter = tiny_drafter(tiny_config(num_layers=1, layer_kinds=("sliding",), sliding_window=5))
    row, p = three_document_row(), 8
    with torch.no_grad():
        before = run(drafter, row, torch.tensor([p])).hidden_SD
        for s in range(p):
            aux = row.aux_hidden_TF.clone()
            aux[s] += 1.0
            after = run(drafter, replace(row, aux_hidden_TF=aux), torch.tensor([p])).hidden_SD
            changed = ((before - after).abs().amax(-1) > 1e-6).tolist()
            assert changed == [s > p + k - 5 for k in range(4)]


def test_a_block_sees_its_own_anchor_token_and_no_other_token():
    drafter, row = tiny_drafter(tiny_config()), three_document_row()
    with torch.no_grad():
        before = run(drafter, row).hidden_SD
        for s in range(row.input_ids_T.shape[0]):
            ids = row.input_ids_T.clone()
            ids[s] = (ids[s] + 1) % 22
            after = run(drafter, replace(row, input_ids_T=ids)).hidden_SD
            assert changed_blocks(before, after) == [i for i, p in enumerate(ANCHORS) if p == s]


def test_a_block_does_not_depend_on_which_other_anchors_were_drawn():
    drafter, row = tiny_drafter(tiny_config(layer_kinds=("full", "sliding"))), three_document_row()
    with torch.no_grad():
        together = run(drafter, row).hidden_SD.unflatten(0, (len(ANCHORS), -1))
        for i, p in enumerate(ANCHORS):
            torch.testing.assert_close(run(drafter, row, p[None]).hidden_SD, together[i], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "causal"), [("full", False), ("sliding", True)])
def test_sliding_layers_are_causal_inside_the_block_and_full_layers_are_not(kind, causal):
    """Which slot inputs have a gradient from which slot output of one layer."""
    config = tiny_config(num_layers=1, layer_kinds=(kind,), sliding_window=40)
    layer, K = tiny_drafter(config).layers[0], config.block_size
    g = torch.Generator().manual_seed(3)
    context_TD, x_SD = torch.randn(9, 12, generator=g), torch.randn(K, 12, generator=g, requires_grad=True)
    rope = [rope_tables(torch.arange(n) + first, config.head_dim, 100.0) for n, first in ((K, 6), (9, 0))]
    output = layer(x_SD, context_TD, ChunkedPlan((0, 9), torch.tensor([6]), config), *rope)
    reach = torch.stack(
        [torch.autograd.grad(out.pow(2).sum(), x_SD, retain_graph=True)[0].abs().sum(-1) for out in output]
    )
    everything = torch.ones(K, K, dtype=torch.bool)
    assert torch.equal(reach > 1e-7, everything.tril() if causal else everything)


def test_frozen_weights_are_nan_until_the_verifier_is_loaded():
    drafter = DSparkDrafter(tiny_config())
    assert run(drafter, three_document_row()).hidden_SD.isnan().any()
    assert drafter.lm_head.isnan().all()


def test_training_touches_no_verifier_weight():
    drafter = tiny_drafter(tiny_config())
    assert {"embed_tokens", "lm_head"}.isdisjoint(drafter.trainable_state())
    assert set(drafter.trainable_state()) | {"embed_tokens", "lm_head"} == set(dict(drafter.named_parameters()))
