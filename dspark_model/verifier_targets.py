"""The verifier's distribution at the positions that slots are judged by: each position once, normalisers kept.

Under a reduced draft vocabulary an honest overlap needs the normaliser of the verifier's whole vocabulary at every
position. It depends on the state alone, so it is computed once per token, kept as one float (`Normalisers`), and
later epochs pay nothing for it.

Shape letters: T tokens, D hidden, S slots, P distinct positions, V verifier vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_model.batch import PackedRow
from dspark_model.verifier import VerifierParts

STATES_AT_ONCE, HEAD_ROWS_AT_ONCE = 1 << 10, 1 << 14
"""What `log_normalisers` multiplies at once: logits of 64 MiB."""


@dataclass(frozen=True)
class VerifierTargets:
    """States behind the slots' targets."""

    normed_PD: Tensor
    """After the final norm, in the dtype of the products, in ascending order of position."""
    position_S: Tensor
    """Index into P of each slot."""
    log_norm_P: Tensor | None
    """Log-normaliser over the whole vocabulary; None when the draft vocabulary is the whole one."""
    logit_softcap: float | None


def verifier_targets(
    verifier: VerifierParts,
    row: PackedRow,
    state_index_AK: Tensor,
    *,
    reduced_vocab: bool,
    dtype: torch.dtype | None = None,
) -> VerifierTargets:
    """Gather what slots of a row need.

    Args:
        verifier: on the row's device.
        row: packed documents.
        state_index_AK: `Slots.state_index_AK` of ascending anchors.
        reduced_vocab: whether the draft vocabulary is a part of the verifier's.
        dtype: of the head that the states will be multiplied with; None for the verifier's.

    Raises:
        ValueError: the vocabulary is reduced and the row carries no normalisers.
    """
    if reduced_vocab and row.log_norm_T is None:
        raise ValueError("a reduced vocabulary needs the row's log_norm_T: fill Document.log_norm_T (`Normalisers`)")
    index_P, position_S = state_index_AK.flatten().unique(return_inverse=True)
    return VerifierTargets(
        normed_PD=verifier.normed(row.last_hidden_TD[index_P], dtype),
        position_S=position_S,
        log_norm_P=row.log_norm_T[index_P] if reduced_vocab and row.log_norm_T is not None else None,
        logit_softcap=verifier.logit_softcap,
    )


@torch.no_grad()
def log_normalisers(verifier: VerifierParts, last_hidden_TD: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Float32 log sum exp of the verifier's logits [T] at states before the final norm.

    Args:
        verifier: on the states' device.
        last_hidden_TD: before the final norm.
        dtype: of the products; None for that of the head as stored.
    """
    head_VD, found = verifier.lm_head_VD, []
    for states in last_hidden_TD.split(STATES_AT_ONCE):
        normed = verifier.normed(states, dtype)
        log_norm = torch.full(states.shape[:1], -torch.inf, device=states.device)
        for rows in head_VD.split(HEAD_ROWS_AT_ONCE):
            logits = verifier.capped(normed @ rows.to(normed.dtype).T)
            log_norm = torch.logaddexp(log_norm, logits.logsumexp(-1))
        found.append(log_norm)
    return torch.cat(found) if found else last_hidden_TD.new_zeros(0, dtype=torch.float32)


class Normalisers:
    """Log-normalisers of a split's documents, computed on first use: one float per token."""

    def __init__(self, verifier: VerifierParts, lengths: list[int], dtype: torch.dtype | None = None) -> None:
        """Nothing is computed yet; `dtype` is that of the products, None for that of the head."""
        self._verifier, self._dtype = verifier, dtype
        self._kept: list[Tensor | None] = [None] * len(lengths)

    def of(self, index: int, last_hidden_TD: Tensor, loss_mask_T: Tensor) -> Tensor:
        """Float32 [states] of document `index`, on CPU; inf (p = 0) where the next token is unsupervised."""
        kept = self._kept[index]
        if kept is None:
            states = last_hidden_TD.shape[0]
            judged_T = torch.zeros(states, dtype=torch.bool)
            follows = loss_mask_T[1:][:states]
            judged_T[: follows.shape[0]] = follows
            kept = torch.full((states,), torch.inf)
            device = self._verifier.lm_head_VD.device
            kept[judged_T] = log_normalisers(self._verifier, last_hidden_TD[judged_T].to(device), self._dtype).cpu()
            self._kept[index] = kept
        return kept
