"""The drafter's forward written a second time: one dense mask by double loop, plain softmax, complex rotations.

Slow and plain on purpose; shares nothing with `dspark_model.layers` but the checkpoint's names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_model.batch import PackedRow
from dspark_model.config import DrafterConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotate(x: Tensor, positions: list[int], theta: float) -> Tensor:
    """[n, heads, H]: the pair (i, i + H/2) is a complex number turned by position * theta^(-2i / H)."""
    half = x.shape[-1] // 2
    numbers = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous())
    out = []
    for number, position in zip(numbers, positions, strict=True):
        angles = torch.tensor([position * theta ** (-2 * i / (2 * half)) for i in range(half)])
        out.append(number * torch.polar(torch.ones(half), angles))
    turned = torch.stack(out)
    return torch.cat([turned.real, turned.imag], -1)


def dense_mask(row: PackedRow, anchors: list[int], config: DrafterConfig, kind: str) -> Tensor:
    """Bool [A K, T + A K], entry by entry."""
    T, K, A = row.input_ids_T.shape[0], config.block_size, len(anchors)
    mask = torch.zeros(A * K, T + A * K, dtype=torch.bool)
    for query in range(A * K):
        block, k = divmod(query, K)
        p = anchors[block]
        for s in range(T):
            same = row.document_ids_T[s] == row.document_ids_T[p]
            near = kind == "full" or s > p + k - config.sliding_window
            mask[query, s] = bool(same) and s < p and near
        for key in range(A * K):
            other, j = divmod(key, K)
            in_window = kind == "full" or (j <= k and j > k - config.sliding_window)
            mask[query, T + key] = other == block and in_window
    return mask


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """[queries, N, H] over [keys, M, H]: query head n reads key head n // (N / M)."""
    group = q.shape[1] // k.shape[1]
    heads = []
    for n in range(q.shape[1]):
        scores = q[:, n] @ k[:, n // group].T / q.shape[-1] ** 0.5
        heads.append(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v[:, n // group])
    return torch.cat(heads, -1)


def dense_forward(weights: dict[str, Tensor], config: DrafterConfig, row: PackedRow, anchors: list[int]) -> Tensor:
    """Slot states [A K, D] after the final norm; `weights` by checkpoint name, with `embed_tokens`."""
    K, H, eps = config.block_size, config.head_dim, config.rms_norm_eps
    context = rms_norm(row.aux_hidden_TF @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    ids = [int(row.input_ids_T[p]) if k == 0 else config.mask_token_id for p in anchors for k in range(K)]
    x = weights["embed_tokens"][ids]
    slot_positions = [int(row.position_ids_T[p]) + k for p in anchors for k in range(K)]
    positions = [*row.position_ids_T.tolist(), *slot_positions]
    for i, kind in enumerate(config.layer_kinds):
        w = {name.removeprefix(f"layers.{i}."): value for name, value in weights.items() if f"layers.{i}." in name}
        h = rms_norm(x, w["input_layernorm.weight"], eps)
        both = torch.cat([context, h])
        q = (h @ w["self_attn.q_proj.weight"].T).unflatten(-1, (-1, H))
        k = (both @ w["self_attn.k_proj.weight"].T).unflatten(-1, (-1, H))
        v = (both @ w["self_attn.v_proj.weight"].T).unflatten(-1, (-1, H))
        q = rotate(rms_norm(q, w["self_attn.q_norm.weight"], eps), slot_positions, config.rope_theta)
        k = rotate(rms_norm(k, w["self_attn.k_norm.weight"], eps), positions, config.rope_theta)
        attended = attend(q, k, v, dense_mask(row, anchors, config, kind))
        x = x + attended @ w["self_attn.o_proj.weight"].T
        h = rms_norm(x, w["post_attention_layernorm.weight"], eps)
        gate = h @ w["mlp.gate_proj.weight"].T
        x = x + (gate * gate.sigmoid() * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    return rms_norm(x, weights["norm.weight"], eps)
