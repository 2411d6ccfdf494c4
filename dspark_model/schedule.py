"""What happens at a step, as pure functions of (seed, step): nothing to save, nothing to restore on resume."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from dspark_model.batch import pack_longest_first


def learning_rate_factor(
    step: int, steps: int, warmup_share: float, schedule: Literal["cosine", "linear", "constant"]
) -> float:
    """Factor in (0, 1] for `step` in 0..steps-1: linear warm-up, then the schedule down towards 0."""
    warmup = max(1, round(warmup_share * steps))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1.0 - progress if schedule == "linear" else 1.0


class RowSampler:
    """Which documents form the packed row of a step.

    Each epoch packs every document once, longest first, and visits the rows in an order drawn from (seed, epoch).
    """

    def __init__(self, lengths: Sequence[int], capacity: int, seed: int) -> None:
        self.bins = pack_longest_first(lengths, capacity)
        self.seed = seed
        self._epoch, self._order = -1, [0]

    def row(self, step: int) -> list[int]:
        """Document indices of the row of `step`."""
        epoch, position = divmod(step, len(self.bins))
        if epoch != self._epoch:
            generator = generator_for(self.seed, epoch, stream=1)
            self._epoch, self._order = epoch, torch.randperm(len(self.bins), generator=generator).tolist()
        return self.bins[self._order[position]]


def generator_for(seed: int, index: int, stream: int) -> torch.Generator:
    """A generator of its own for each (seed, stream, index)."""
    return torch.Generator().manual_seed((seed * 1_000_003 + index) * 16 + stream)
