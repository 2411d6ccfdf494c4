"""Which keys a block slot may see. One rule, stated once; `layers.py` applies it chunk by chunk.

Keys are the context (verifier states of the anchor's document) and the anchor's own block:

- context position s: same document and s < p, strictly: at serving time the anchor's own state does not exist yet.
  On sliding layers also s > p + k - window: the window is per query, as the engine applies it
  (speculators measures it from the anchor).
- own block, slot j: full layers see every j (bidirectional), sliding layers j <= k. Other blocks never.

Shape letters: A anchors, K block slots, C context positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_model.config import LayerKind


def context_mask(anchor_pos_A: Tensor, context_pos_C: Tensor, block_size: int, kind: LayerKind, window: int) -> Tensor:
    """Bool [A, K, C] for positions of one document."""
    visible_AC = context_pos_C < anchor_pos_A[:, None]
    offsets_K = torch.arange(block_size, device=anchor_pos_A.device)
    if kind == "full":
        return visible_AC[:, None].expand(-1, block_size, -1)
    query_AK = anchor_pos_A[:, None] + offsets_K
    return visible_AC[:, None] & (context_pos_C > query_AK[..., None] - window)


def block_mask(block_size: int, kind: LayerKind, window: int, device: torch.device) -> Tensor:
    """Bool [K, K] inside a block: query slot, key slot."""
    everything_KK = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
    if kind == "full":
        return everything_KK
    return everything_KK.tril() & everything_KK.triu(1 - window)
