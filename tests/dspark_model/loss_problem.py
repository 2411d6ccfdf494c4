"""Random blocks of slots and their loss terms in plain Python floats."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dspark_model.vocab import draft_to_verifier_ids, verifier_to_draft_ids
from tests.dspark_model.tiny import VOCAB, some_t2d

BLOCKS, K = 5, 4
SLOTS = BLOCKS * K
MIX = {"ce": 0.3, "kl": 0.5, "rkl": 0.2, "jsd": 1.5, "tv": 2.0, "nla": 0.7, "lk_hybrid": 0.4, "expected_length": 1.3}
# Whole block, cut short, one slot, nothing supervised, all but slot 0 (the DFlash layout).
ANCHOR_MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
DFLASH_MASK = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def probabilities(logits: list[float]) -> list[float]:
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


class Problem:
    """Random slots of a drafter with `size` draft ids: its logits, the verifier's distribution, data tokens."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        t2d = some_t2d(size)
        self.ids = draft_to_verifier_ids(t2d)
        self.draft = randn(SLOTS, size, seed=1, dtype=dtype)
        self.verifier = 2 * randn(SLOTS, VOCAB, seed=2, dtype=dtype)
        self.data = torch.randint(0, VOCAB, (SLOTS,), generator=torch.Generator().manual_seed(3))
        self.targets = verifier_to_draft_ids(t2d)[self.data]
        self.p_SW = self.verifier.softmax(-1)[:, self.ids]

    def terms_by_loop(self, slot: int) -> dict[str, float]:
        """Each term over the whole vocabulary with q = 0 outside the draft's; kl over draft ids, it is inf outside."""
        ids = self.ids.tolist()
        q = dict.fromkeys(range(VOCAB), 0.0) | dict(zip(ids, probabilities(self.draft[slot].tolist()), strict=True))
        p = probabilities(self.verifier[slot].tolist())
        m = [(p[v] + q[v]) / 2 for v in range(VOCAB)]
        tv = sum(abs(p[v] - q[v]) for v in range(VOCAB)) / 2
        kl = sum(p[v] * math.log(p[v] / q[v]) for v in ids)
        share = math.exp(-3 * (1 - tv))
        data = int(self.data[slot])
        return {
            "ce": -math.log(q[data]) if data in ids else 0.0,
            "kl": kl,
            "rkl": sum(q[v] * math.log(q[v] / p[v]) for v in ids),
            "jsd": 0.5 * sum(x[v] * math.log(x[v] / m[v]) for x in (p, q) for v in range(VOCAB) if x[v]),
            "tv": tv,
            "nla": -math.log(1 - tv),
            "lk_hybrid": share * kl + (1 - share) * tv,
        }
