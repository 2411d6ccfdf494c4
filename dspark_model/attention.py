"""How block slots attend: one plan per packed row, shared by all layers.

On CPU anchors are attended in small groups of one document, so that no mask spans the row and no context after the
group's last anchor is touched. On CUDA FlexAttention skips what the same rule hides (`flex_attention.py`). The rule
itself stands in `masks.py`.

Shape letters: T row tokens, S slots (A anchors x K slots), N query heads, M key heads, H head dim, Q queries and C keys
of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark_model.batch import PackedRow
from dspark_model.config import DrafterConfig, LayerKind
from dspark_model.flex_attention import FlexPlan
from dspark_model.masks import block_mask, context_mask

ANCHORS_PER_CHUNK = 32
"""Anchors attended at once: bounds the mask to [32 K, context + 32 K] whatever the row's length."""


class AttentionPlan(Protocol):
    """What a layer needs: slots attend to their context and to their own block."""

    def attend(
        self, q_SNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, k_SMH: Tensor, v_SMH: Tensor, kind: LayerKind
    ) -> Tensor:
        """Attention output [S, N H] for slot queries over context (T) and slot (S) keys and values."""


def plan_attention(row: PackedRow, anchor_pos_A: Tensor, config: DrafterConfig) -> AttentionPlan:
    """The plan for the row's device; `anchor_pos_A` ascending."""
    if row.input_ids_T.is_cuda:
        return FlexPlan(row.document_ids_T, anchor_pos_A, config)
    return ChunkedPlan(row.starts, anchor_pos_A, config)


@dataclass(frozen=True)
class Chunk:
    """Anchors of one document attended together: query slots, the context they may see, and the masks."""

    slots: slice
    context: slice
    """Counted from the start of the document."""
    mask_QC: dict[LayerKind, Tensor]
    """Bool [queries, context + queries] per layer kind."""


class ChunkedPlan:
    """Anchors split by document, then into chunks; a chunk's context ends at its last anchor."""

    def __init__(self, starts: tuple[int, ...], anchor_pos_A: Tensor, config: DrafterConfig) -> None:
        self._config = config
        self._lengths = [stop - start for start, stop in pairwise(starts)]
        self.chunks: list[list[Chunk]] = []
        """By document; empty where it has no anchor."""
        anchors, first = anchor_pos_A.tolist(), 0
        for start, stop in pairwise(starts):
            end = first
            while end < len(anchors) and anchors[end] < stop:
                end += 1
            lows = range(first, end, ANCHORS_PER_CHUNK)
            self.chunks.append(
                [self._chunk(anchor_pos_A, low, min(low + ANCHORS_PER_CHUNK, end), start) for low in lows]
            )
            first = end
        self._slots = [chunk.slots.stop - chunk.slots.start for document in self.chunks for chunk in document]

    def _chunk(self, anchor_pos_A: Tensor, low: int, high: int, start: int) -> Chunk:
        config, K = self._config, self._config.block_size
        anchors_A = anchor_pos_A[low:high]
        first = start
        if "full" not in config.layer_kinds:  # no layer looks further back than its window
            first = max(start, int(anchors_A[0]) - config.sliding_window + 1)
        context = slice(first, int(anchors_A[-1]))
        masks = {kind: _chunk_mask(anchors_A, context, kind, config) for kind in dict.fromkeys(config.layer_kinds)}
        return Chunk(slice(low * K, high * K), slice(first - start, context.stop - start), masks)

    def attend(
        self, q_SNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, k_SMH: Tensor, v_SMH: Tensor, kind: LayerKind
    ) -> Tensor:
        """See `AttentionPlan`."""
        # Split, not sliced: the gradient of each slice would be as large as what it was cut from.
        slots = zip(*(x.split(self._slots) for x in (q_SNH, k_SMH, v_SMH)), strict=True)
        documents = zip(k_TMH.split(self._lengths), v_TMH.split(self._lengths), self.chunks, strict=True)
        outputs = []
        for k_document, v_document, chunks in documents:
            for chunk in chunks:
                q_QNH, k_QMH, v_QMH = next(slots)
                k_CMH, v_CMH = (
                    torch.cat([k_document[chunk.context], k_QMH]),
                    torch.cat([v_document[chunk.context], v_QMH]),
                )
                out_NQH = F.scaled_dot_product_attention(
                    q_QNH.transpose(0, 1)[None],
                    k_CMH.transpose(0, 1)[None],
                    v_CMH.transpose(0, 1)[None],
                    attn_mask=chunk.mask_QC[kind][None, None],
                    enable_gqa=True,
                )[0]
                outputs.append(out_NQH.transpose(0, 1).flatten(1))
        return torch.cat(outputs)


def _chunk_mask(anchor_pos_A: Tensor, context: slice, kind: LayerKind, config: DrafterConfig) -> Tensor:
    K, A, device = config.block_size, anchor_pos_A.shape[0], anchor_pos_A.device
    context_pos_C = torch.arange(context.start, context.stop, device=device)
    seen_AKC = context_mask(anchor_pos_A, context_pos_C, K, kind, config.sliding_window)
    own_QQ = torch.block_diag(*[torch.ones(K, K, device=device)] * A).bool()
    own_QQ &= block_mask(K, kind, config.sliding_window, device).repeat(A, A)
    return torch.cat([seen_AKC.reshape(A * K, -1), own_QQ], 1)
