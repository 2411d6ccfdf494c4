"""Draft vocabulary: which verifier ids the drafter may propose, and the two maps of the checkpoint contract.

`t2d` is a bool mask [V] (not an index map); `d2t` is an int64 offset [W]: verifier_id = draft_id + d2t[draft_id].
Draft ids follow ascending verifier ids. Shape letters: V verifier vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rank_tokens(counts_V: Tensor, always: tuple[int, ...] = ()) -> Tensor:
    """Verifier ids int64 [V] in the order in which a growing draft vocabulary takes them.

    `always` ids first, then the most frequent, ties and unseen ones by smallest id.

    Args:
        counts_V: occurrences of each verifier id among supervised tokens.
        always: ids kept whatever their count (special and end-of-turn tokens).
    """
    ranked = counts_V.clone().long()
    ranked[list(always)] = torch.iinfo(torch.int64).max
    return ranked.argsort(descending=True, stable=True)


def choose_draft_vocab(counts_V: Tensor, draft_vocab_size: int, always: tuple[int, ...] = ()) -> Tensor:
    """Bool t2d [V]: the first `draft_vocab_size` ids of `rank_tokens`.

    Raises:
        ValueError: size outside 1..V, or smaller than `always`.
    """
    size = counts_V.shape[0]
    if not max(1, len(set(always))) <= draft_vocab_size <= size:
        raise ValueError(
            f"draft_vocab_size={draft_vocab_size} must lie in {max(1, len(set(always)))}..{size}, "
            "from the tokens that are always kept to the verifier's vocabulary"
        )
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[rank_tokens(counts_V, always)[:draft_vocab_size]] = True
    return t2d


def draft_to_verifier_ids(t2d: Tensor) -> Tensor:
    """Verifier id of each draft id, int64 [W]."""
    return t2d.nonzero().flatten()


def verifier_to_draft_ids(t2d: Tensor) -> Tensor:
    """Draft id of each verifier id, int64 [V]; -1 where the draft vocabulary lacks it."""
    draft_V = t2d.long().cumsum(0) - 1
    return torch.where(t2d, draft_V, -1)


def coverage(counts_V: Tensor, t2d: Tensor) -> float:
    """Share of counted tokens that the draft vocabulary can propose; nan without tokens."""
    total = int(counts_V.sum())
    return int(counts_V[t2d].sum()) / total if total else float("nan")
