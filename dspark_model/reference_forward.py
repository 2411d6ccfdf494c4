"""The drafter's forward written a second time, readable: one dense mask, plain softmax, rotations of complex numbers.

What `drafter.py`, `layers.py` and the attention plans are compared with. Slow and large on purpose (scores of every
slot with the whole row); shares nothing with them but the checkpoint's names.

Shape letters: T row tokens, A anchors, K block slots, S = A K slots, D hidden, N query heads, M key heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dspark_model.batch import PackedRow
from dspark_model.config import DrafterConfig


def dense_forward(weights: Mapping[str, Tensor], config: DrafterConfig, row: PackedRow, anchor_pos_A: Tensor) -> Tensor:
    """Slot states [S, D] after the final norm, of blocks at ascending anchors.

    Args:
        weights: by checkpoint name, the verifier's embedding as `embed_tokens`; states of the row have their dtype.
        config: shapes and masks.
        row: packed documents.
        anchor_pos_A: row positions.
    """
    K, eps, theta = config.block_size, config.rms_norm_eps, config.rope_theta
    slot_S = torch.arange(K, device=anchor_pos_A.device).repeat(anchor_pos_A.shape[0])
    anchor_S = anchor_pos_A.repeat_interleave(K)
    ids_S = torch.where(slot_S == 0, row.input_ids_T[anchor_S], config.mask_token_id)
    x_SD = weights["embed_tokens"][ids_S]
    context_TD = rms_norm(row.aux_hidden_TF @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    query_pos_S = row.position_ids_T[anchor_S] + slot_S
    key_pos = torch.cat([row.position_ids_T, query_pos_S])
    for i, kind in enumerate(config.layer_kinds):
        layer = {name.removeprefix(f"layers.{i}."): value for name, value in weights.items() if f"layers.{i}." in name}
        h_SD = rms_norm(x_SD, layer["input_layernorm.weight"], eps)
        q_SNH = _heads(h_SD, layer["self_attn.q_proj.weight"], config.head_dim)
        both = torch.cat([context_TD, h_SD])  # the context takes no part in input_layernorm
        k_MH, v_MH = (_heads(both, layer[f"self_attn.{name}_proj.weight"], config.head_dim) for name in ("k", "v"))
        q_SNH = _rotate(rms_norm(q_SNH, layer["self_attn.q_norm.weight"], eps), query_pos_S, theta)
        k_MH = _rotate(rms_norm(k_MH, layer["self_attn.k_norm.weight"], eps), key_pos, theta)
        attended = _attend(q_SNH, k_MH, v_MH, dense_mask(row, anchor_pos_A, config, kind))
        x_SD = x_SD + attended @ layer["self_attn.o_proj.weight"].T
        h_SD = rms_norm(x_SD, layer["post_attention_layernorm.weight"], eps)
        gate = h_SD @ layer["mlp.gate_proj.weight"].T
        up = h_SD @ layer["mlp.up_proj.weight"].T
        x_SD = x_SD + (gate * gate.sigmoid() * up) @ layer["mlp.down_proj.weight"].T
    return rms_norm(x_SD, weights["norm.weight"], eps)


def dense_mask(row: PackedRow, anchor_pos_A: Tensor, config: DrafterConfig, kind: str) -> Tensor:
    """Bool [S, T + S]: which slot sees which token of the row and which other slot."""
    K, device = config.block_size, anchor_pos_A.device
    anchor_S1 = anchor_pos_A.repeat_interleave(K)[:, None]
    slot_S = torch.arange(K, device=device).repeat(anchor_pos_A.shape[0])
    position_T = torch.arange(row.input_ids_T.shape[0], device=device)
    context_ST = (row.document_ids_T == row.document_ids_T[anchor_S1]) & (position_T < anchor_S1)
    block_SS = anchor_S1 == anchor_S1.T
    if kind == "sliding":
        context_ST &= anchor_S1 + slot_S[:, None] - position_T < config.sliding_window
        behind_SS = slot_S[:, None] - slot_S
        block_SS &= (behind_SS >= 0) & (behind_SS < config.sliding_window)
    return torch.cat([context_ST, block_SS], 1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square, times the gain."""
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def _heads(x: Tensor, weight: Tensor, head_dim: int) -> Tensor:
    return (x @ weight.T).unflatten(-1, (-1, head_dim))


def _rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """[n, heads, H]: the pair (i, i + H/2) is a complex number turned by position * theta^(-2i / H)."""
    half = x.shape[-1] // 2
    exponents = -2 * torch.arange(half, device=x.device, dtype=torch.float32) / (2 * half)
    angles = positions[:, None, None] * theta**exponents
    turned = torch.complex(x[..., :half].float(), x[..., half:].float()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


def _attend(q_SNH: Tensor, k_MH: Tensor, v_MH: Tensor, mask: Tensor) -> Tensor:
    """[S, N H] over keys [keys, M, H]: query head n reads key head n // (N / M)."""
    group = q_SNH.shape[1] // k_MH.shape[1]
    heads = []
    for n in range(q_SNH.shape[1]):
        scores = q_SNH[:, n] @ k_MH[:, n // group].T / q_SNH.shape[-1] ** 0.5
        heads.append(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v_MH[:, n // group])
    return torch.cat(heads, -1)
