"""Norm, rotation and heads against their formulas."""

from __future__ import annotations

import cmath
import dataclasses

import pytest
import torch

from dspark_model.drafter import DSparkDrafter
from dspark_model.heads import ConfidenceHead, MarkovHead
from dspark_model.layers import MLP, RMSNorm, apply_rope, rope_tables
from tests.dspark_model.tiny import HIDDEN, VOCAB, some_t2d, tiny_config, tiny_drafter, tiny_parts


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("theta", [100.0, 1e6])
def test_rope_turns_pairs_of_halves_as_complex_numbers(theta):
    positions = [0, 1, 7, 40, 3]
    x = randn(5, 3, 8)
    turned = apply_rope(x, rope_tables(torch.tensor(positions), 8, theta))
    expected = torch.empty_like(x)
    for n, position in enumerate(positions):
        for i in range(4):
            number = torch.complex(x[n, :, i], x[n, :, i + 4]) * cmath.exp(1j * position * theta ** (-2 * i / 8))
            expected[n, :, i], expected[n, :, i + 4] = number.real, number.imag
    torch.testing.assert_close(turned, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


def test_rope_scores_depend_on_the_distance_only():
    q, k = randn(1, 1, 8, seed=1), randn(1, 1, 8, seed=2)

    def score(at: int, key_at: int) -> float:
        a = apply_rope(q, rope_tables(torch.tensor([at]), 8, 100.0))
        return float((a * apply_rope(k, rope_tables(torch.tensor([key_at]), 8, 100.0))).sum())

    assert score(9, 4) == pytest.approx(score(25, 20), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_computed_in_float32_and_keeps_the_dtype(dtype):
    norm = RMSNorm(16, 1e-3)
    torch.nn.init.normal_(norm.weight)
    x = (randn(7, 16) * 1e-2).to(dtype)
    expected = norm.weight * x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-3).sqrt()
    assert norm(x).dtype == dtype
    torch.testing.assert_close(norm(x), expected.to(dtype))


def test_gradients_of_norm_and_mlp_are_those_of_their_formulas():
    """Both keep less than autograd would, and so make their gradients themselves."""
    norm, mlp, x = RMSNorm(HIDDEN, 1e-3), MLP(tiny_config()), randn(2, 3, HIDDEN).requires_grad_()
    torch.nn.init.normal_(norm.weight)
    towards = randn(2, 3, HIDDEN, seed=1)

    def plainly(x):
        normed = norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
        gate = normed @ mlp.gate_proj.weight.T
        return (gate * gate.sigmoid() * (normed @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T

    inputs = [x, *norm.parameters(), *mlp.parameters()]
    found = torch.autograd.grad((mlp(norm(x)) * towards).sum(), inputs)
    expected = torch.autograd.grad((plainly(x) * towards).sum(), inputs)
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 1e-2
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_low_precision_states_keep_their_dtype_and_come_near():
    norm, x = RMSNorm(64, 1e-6), randn(32, 64).bfloat16().requires_grad_()
    torch.nn.init.normal_(norm.weight, mean=1.0, std=0.2)
    towards = randn(32, 64, seed=1)
    grad_x, grad_weight = torch.autograd.grad((norm(x).float() * towards).sum(), (x, norm.weight))
    assert (grad_x.dtype, grad_weight.dtype) == (torch.bfloat16, torch.float32)
    exact = torch.autograd.grad((norm(x.detach().float().requires_grad_()) * towards).sum(), norm.weight)[0]
    torch.testing.assert_close(grad_weight, exact, rtol=2e-2, atol=2e-2)


def test_mlp_is_swiglu():
    mlp, x = MLP(tiny_config()), randn(3, HIDDEN)
    gate = x @ mlp.gate_proj.weight.T
    expected = (gate / (1 + (-gate).exp()) * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp(x), expected)


def test_markov_bias_reads_verifier_ids_and_writes_draft_ids():
    head = MarkovHead(tiny_config(draft_vocab_size=7))
    w1, w2 = head.markov_w1.weight.detach(), head.markov_w2.weight.detach()
    assert (w1.shape, w2.shape) == ((VOCAB, 5), (7, 5))
    bias = head.bias(head.embed(torch.tensor([VOCAB - 1, 0]))).detach()
    for i, prev in enumerate((VOCAB - 1, 0)):
        for w in range(7):
            assert float(bias[i, w]) == pytest.approx(sum(float(w1[prev, r] * w2[w, r]) for r in range(5)), abs=1e-6)


def test_markov_table_starts_small():
    # https://github.com/vllm-project/speculators/pull/971
    head = MarkovHead(tiny_config(markov_rank=512))
    assert head.markov_w1.weight.std().item() == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_is_linear_in_state_and_markov_embedding(with_markov):
    head = ConfidenceHead(tiny_config(confidence_with_markov=with_markov))
    hidden, markov = randn(6, HIDDEN), randn(6, 5, seed=1)
    weight, bias = head.proj.weight[0], head.proj.bias[0]
    assert weight.shape == (HIDDEN + 5 if with_markov else HIDDEN,)
    expected = hidden @ weight[:HIDDEN] + bias
    if with_markov:
        expected = expected + markov @ weight[HIDDEN:]
    torch.testing.assert_close(head(hidden, markov), expected)


def test_logits_are_the_draft_rows_of_the_head_plus_the_markov_bias():
    t2d = some_t2d(9)
    drafter = tiny_drafter(tiny_config(draft_vocab_size=9), t2d)
    hidden, prev = randn(4, HIDDEN), torch.tensor([0, 5, 11, 22])
    head, markov = tiny_parts().lm_head_VD, drafter.markov_head
    logits = drafter.logits(hidden, markov.embed(prev))
    kept = [v for v in range(VOCAB) if t2d[v]]
    for w, v in enumerate(kept):
        bias = (markov.markov_w1.weight[prev] * markov.markov_w2.weight[w]).sum(-1)
        torch.testing.assert_close(logits[:, w], hidden @ head[v] + bias)
    assert drafter.verifier_ids_W.tolist() == kept


def test_a_drafter_without_a_markov_head_has_plain_logits():
    config = tiny_config(markov_rank=0, confidence_with_markov=False)
    drafter, hidden = tiny_drafter(config), randn(4, HIDDEN)
    torch.testing.assert_close(drafter.logits(hidden, None), hidden @ tiny_parts().lm_head_VD.T)


def test_a_draft_vocabulary_of_another_size_is_refused():
    with pytest.raises(ValueError, match="9 ids set; the config says verifier_vocab_size=23, draft_vocab_size=8"):
        DSparkDrafter(tiny_config(draft_vocab_size=8), some_t2d(9))


def test_a_verifier_of_another_shape_is_refused():
    drafter = DSparkDrafter(tiny_config(mask_token_id=3, verifier_vocab_size=VOCAB + 1, draft_vocab_size=VOCAB + 1))
    with pytest.raises(ValueError, match=r"shape \(23, 12\), the drafter expects \(24, 12\)"):
        drafter.load_verifier(tiny_parts())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("reduced", [True, False])
def test_the_verifiers_tensors_are_held_once(tied, reduced):
    parts, t2d = tiny_parts(), some_t2d(9) if reduced else None
    stored = parts.embed_VD.bfloat16()
    parts = dataclasses.replace(parts, embed_VD=stored, lm_head_VD=stored if tied else parts.lm_head_VD.bfloat16())
    drafter = DSparkDrafter(tiny_config(draft_vocab_size=9 if reduced else VOCAB), t2d)
    kept = drafter.load_verifier(parts, torch.float32)
    assert drafter.lm_head.dtype == torch.float32, "multiplied in the dtype of the products"
    assert torch.equal(drafter.lm_head, parts.lm_head_VD[drafter.t2d].float())
    assert torch.equal(drafter.embed_tokens.float(), parts.embed_VD.float())
    held = [drafter.lm_head, drafter.embed_tokens, kept.lm_head_VD, kept.embed_VD]
    # Reduced: draft head and whole head (if tied, the embedding). Whole: one head, if tied for both.
    assert len({tensor.data_ptr() for tensor in held}) == {(1, 1): 2, (1, 0): 3, (0, 1): 1, (0, 0): 2}[reduced, tied]
    assert torch.equal(kept.logits(torch.ones(1, HIDDEN)).argmax(), parts.logits(torch.ones(1, HIDDEN)).argmax())


def test_the_final_norm_starts_as_the_verifiers():
    drafter = DSparkDrafter(tiny_config())
    drafter.load_verifier(tiny_parts())
    assert torch.equal(drafter.norm.weight, tiny_parts().norm_D)
    assert drafter.norm.weight.requires_grad
