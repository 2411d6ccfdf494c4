"""One training row: whole documents packed end to end, and the block slots that anchors open in it.

Shape letters: T tokens in the row, F fused aux width, D hidden, A anchors, K block slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Document:
    """One conversation: token ids, what is supervised, and the verifier's states.

    `aux_hidden_TF` and `last_hidden_TD` may be one row shorter than `input_ids_T`: an engine never computes the
    state of the last token it samples, and no slot needs it (a target's distribution comes from the token before).
    """

    input_ids_T: Tensor
    loss_mask_T: Tensor
    aux_hidden_TF: Tensor
    last_hidden_TD: Tensor
    log_norm_T: Tensor | None = None
    """Log-normaliser of the verifier's distribution at each state (`dspark_model.verifier_targets`), where needed."""

    def __post_init__(self) -> None:
        length = self.input_ids_T.shape[0]
        for name in ("aux_hidden_TF", "last_hidden_TD"):
            if getattr(self, name).shape[0] not in {length, length - 1}:
                raise ValueError(
                    f"{name} has {getattr(self, name).shape[0]} rows for {length} tokens: states and tokens belong "
                    "to different documents; extract the hidden states again"
                )
        if self.loss_mask_T.shape != self.input_ids_T.shape:
            raise ValueError(f"loss_mask has {self.loss_mask_T.shape[0]} entries for {length} tokens")


@dataclass(frozen=True)
class PackedRow:
    """Documents packed end to end. Positions restart at 0 in each document."""

    input_ids_T: Tensor
    loss_mask_T: Tensor
    document_ids_T: Tensor
    position_ids_T: Tensor
    aux_hidden_TF: Tensor
    last_hidden_TD: Tensor
    starts: tuple[int, ...]
    """First row index of each document, plus the row's length at the end."""
    log_norm_T: Tensor | None = None
    """Float32, inf (p = 0) where the next token is unsupervised; None unless every document carries it."""

    def to(self, device: torch.device) -> PackedRow:
        """The same row on another device."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **moved)


def pack(documents: Sequence[Document]) -> PackedRow:
    """Concatenate documents into one row; missing last states become zero rows that nothing reads."""
    lengths = [document.input_ids_T.shape[0] for document in documents]
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    total = starts[-1]
    first = documents[0]
    aux_TF = first.aux_hidden_TF.new_zeros(total, first.aux_hidden_TF.shape[1])
    last_TD = first.last_hidden_TD.new_zeros(total, first.last_hidden_TD.shape[1])
    log_norm_T = torch.full((total,), torch.inf) if all(d.log_norm_T is not None for d in documents) else None
    for document, start in zip(documents, starts, strict=False):
        aux_TF[start : start + document.aux_hidden_TF.shape[0]] = document.aux_hidden_TF
        last_TD[start : start + document.last_hidden_TD.shape[0]] = document.last_hidden_TD
        if log_norm_T is not None and document.log_norm_T is not None:
            log_norm_T[start : start + document.log_norm_T.shape[0]] = document.log_norm_T
    return PackedRow(
        input_ids_T=torch.cat([document.input_ids_T.long() for document in documents]),
        loss_mask_T=torch.cat([document.loss_mask_T.bool() for document in documents]),
        document_ids_T=torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(lengths)),
        position_ids_T=torch.cat([torch.arange(length) for length in lengths]),
        aux_hidden_TF=aux_TF,
        last_hidden_TD=last_TD,
        starts=tuple(starts),
        log_norm_T=log_norm_T,
    )


@dataclass(frozen=True)
class Slots:
    """What each slot of each block reads, predicts and is judged by. Row indices are clamped where invalid."""

    input_ids_AK: Tensor
    """Token ids entering the drafter: the anchor's, then the mask token's."""
    position_ids_AK: Tensor
    """RoPE positions: the anchor's + k."""
    target_ids_AK: Tensor
    """Verifier ids to predict."""
    prev_token_ids_AK: Tensor
    """Verifier ids of the token before each target, which the Markov head reads."""
    state_index_AK: Tensor
    """Row index of the verifier state whose distribution the target was drawn from (the token before it)."""
    supervision_mask_AK: Tensor
    """True where the slot counts: a contiguous run of supervised targets inside the anchor's document."""


def make_slots(
    row: PackedRow, anchor_pos_A: Tensor, *, block_size: int, mask_token_id: int, sample_from_anchor: bool
) -> Slots:
    """Lay out blocks at anchors. Slot k of anchor p predicts p + k + 1 (sample_from_anchor) or p + k.

    A block ends at its document's end and at the first unsupervised target (DeepSpec's contiguous prefix rule;
    speculators lets blocks cross into the next document, https://github.com/vllm-project/speculators/pull/901).
    """
    last = row.input_ids_T.shape[0] - 1
    offsets_K = torch.arange(block_size, device=anchor_pos_A.device)
    slot_AK = anchor_pos_A[:, None] + offsets_K
    target_AK = slot_AK + 1 if sample_from_anchor else slot_AK
    safe_target_AK = target_AK.clamp(max=last)
    counts_AK = (
        (target_AK <= last)
        & (row.document_ids_T[safe_target_AK] == row.document_ids_T[anchor_pos_A][:, None])
        & row.loss_mask_T[safe_target_AK]
    )
    if not sample_from_anchor:  # slot 0 repeats the anchor: no prediction, but it must not end the prefix
        counts_AK[:, 0] = True
    supervision_AK = counts_AK.long().cumprod(1).bool()
    if not sample_from_anchor:
        supervision_AK[:, 0] = False
    # The token before the target; the DFlash layout's slot 0 predicts nothing and reads the anchor itself.
    prev_AK = torch.maximum(safe_target_AK - 1, anchor_pos_A[:, None])
    input_ids_AK = torch.full_like(slot_AK, mask_token_id)
    input_ids_AK[:, 0] = row.input_ids_T[anchor_pos_A]
    return Slots(
        input_ids_AK=input_ids_AK,
        position_ids_AK=row.position_ids_T[anchor_pos_A][:, None] + offsets_K,
        target_ids_AK=row.input_ids_T[safe_target_AK],
        prev_token_ids_AK=row.input_ids_T[prev_AK],
        state_index_AK=(safe_target_AK - 1).clamp(min=0),
        supervision_mask_AK=supervision_AK,
    )


def pack_longest_first(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of document indices whose lengths sum to at most `capacity` (first-fit decreasing).

    Raises:
        ValueError: a document is longer than the capacity; documents are never split.
    """
    # A tree of the room left: leaf b is bin b (unopened ones are empty), a parent the larger of its children. The first
    # bin with room is found in log n steps, as data sets have hundreds of thousands of documents.
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(
                f"document {index} has {length} tokens, more than tokens_per_step={capacity}: "
                "raise training.tokens_per_step or lower examples.max_length"
            )
        node = 1
        while node < leaves:
            node *= 2
            node += room[node] < length
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins
