"""FlexAttention over the packed row: the mask of `masks.py` as a function of indices, so that CUDA skips hidden blocks.

Shape letters: T row tokens, S slots (A anchors x K slots), N query heads, M key heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dspark_model.config import DrafterConfig, LayerKind

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_function(document_ids_T: Tensor, anchor_pos_A: Tensor, config: DrafterConfig, kind: LayerKind) -> MaskFunction:
    """FlexAttention's (batch, head, query, key) -> visible, for keys [context T ; slots S] of a packed row."""
    T, K, window = document_ids_T.shape[0], config.block_size, config.sliding_window
    full = kind == "full"

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        anchor, slot = anchor_pos_A[query // K], query % K
        context = key.clamp(max=T - 1)
        in_context = (key < T) & (context < anchor) & (document_ids_T[context] == document_ids_T[anchor])
        other = (key - T).clamp(min=0)
        in_block = (key >= T) & (other // K == query // K)
        if not full:
            in_context = in_context & (context > anchor + slot - window)
            in_block = in_block & (other % K <= slot) & (other % K > slot - window)
        return in_context | in_block

    return visible


class FlexPlan:
    """Block masks of a row, one per layer kind; see `dspark_model.attention.AttentionPlan`."""

    def __init__(self, document_ids_T: Tensor, anchor_pos_A: Tensor, config: DrafterConfig) -> None:
        slots = anchor_pos_A.shape[0] * config.block_size
        keys = document_ids_T.shape[0] + slots
        self._masks: dict[LayerKind, BlockMask] = {
            kind: create_block_mask(
                mask_function(document_ids_T, anchor_pos_A, config, kind),
                None, None, slots, keys, device=document_ids_T.device, _compile=document_ids_T.is_cuda,
            )
            for kind in dict.fromkeys(config.layer_kinds)
        }  # fmt: skip

    def attend(
        self, q_SNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, k_SMH: Tensor, v_SMH: Tensor, kind: LayerKind
    ) -> Tensor:
        """See `AttentionPlan`."""
        keys, values = torch.cat([k_TMH, k_SMH]), torch.cat([v_TMH, v_SMH])
        heads_first = [x.transpose(0, 1)[None] for x in (q_SNH, keys, values)]
        out_NSH = _kernel(q_SNH.is_cuda)(*heads_first, block_mask=self._masks[kind], enable_gqa=True)[0]
        return out_NSH.transpose(0, 1).flatten(1)


@cache
def _kernel(on_cuda: bool) -> Callable[..., Any]:
    # Row lengths and numbers of slots differ from step to step; without compiling it would hold every score.
    return torch.compile(flex_attention, dynamic=True) if on_cuda else cast("Callable[..., Any]", flex_attention)
