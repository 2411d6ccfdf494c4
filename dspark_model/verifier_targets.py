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

LOGITS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class VerifierTargets:
    """States behind the slots' targets."""

    normed_PD: Tensor
    """After the final norm, in the head's dtype, in ascending order of position."""
    position_S: Tensor
    """Index into P of each slot."""
    log_norm_P: Tensor | None
    """Log-normaliser over the whole vocabulary; None when the draft vocabulary is the whole one."""
    logit_softcap: float | None


def verifier_targets(
    verifier: VerifierParts, row: PackedRow, state_index_AK: Tensor, *, reduced_vocab: bool
) -> VerifierTargets:
    """Gather what slots of a row need; `state_index_AK` are `Slots.state_index_AK` of ascending anchors.

    Raises:
        ValueError: the vocabulary is reduced and the row carries no normalisers.
    """
    if reduced_vocab and row.log_norm_T is None:
        raise ValueError("a reduced vocabulary needs the row's log_norm_T: fill Document.log_norm_T (`Normalisers`)")
    index_P, position_S = state_index_AK.flatten().unique(return_inverse=True)
    return VerifierTargets(
        normed_PD=verifier.normed(row.last_hidden_TD[index_P]),
        position_S=position_S,
        log_norm_P=row.log_norm_T[index_P] if reduced_vocab and row.log_norm_T is not None else None,
        logit_softcap=verifier.logit_softcap,
    )


@torch.no_grad()
def log_normalisers(verifier: VerifierParts, last_hidden_TD: Tensor) -> Tensor:
    """Float32 log sum exp of the verifier's logits [T] at states before the final norm."""
    rows = max(1, LOGITS_AT_ONCE // verifier.lm_head_VD.shape[0])
    parts = [verifier.logits(states).logsumexp(-1) for states in last_hidden_TD.split(rows)]
    return torch.cat(parts) if parts else last_hidden_TD.new_zeros(0, dtype=torch.float32)


class Normalisers:
    """Log-normalisers of a split's documents, computed on first use: one float per token."""

    def __init__(self, verifier: VerifierParts, lengths: list[int]) -> None:
        self._verifier = verifier
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
            kept[judged_T] = log_normalisers(self._verifier, last_hidden_TD[judged_T].to(device)).cpu()
            self._kept[index] = kept
        return kept
