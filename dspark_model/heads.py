"""Markov head (order inside the block) and confidence head (how far to verify).

Shape letters: S slots, D hidden, R Markov rank, V verifier vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark_model.config import DrafterConfig


class MarkovHead(nn.Module):
    """Low-rank logit bias from the previous token: W2 w1[prev] (DSpark paper, "vanilla").

    `markov_w1` is read with verifier ids, `markov_w2` writes draft ids.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.verifier_vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)
        # 0.01, not N(0, 1): https://github.com/vllm-project/speculators/pull/971
        nn.init.normal_(self.markov_w1.weight, std=0.01)

    def embed(self, prev_token_ids: Tensor) -> Tensor:
        """Embedding [..., R] of previous tokens (verifier ids)."""
        return self.markov_w1(prev_token_ids)

    def bias(self, embedding: Tensor) -> Tensor:
        """Logit bias [..., W]."""
        return self.markov_w2(embedding)


class ConfidenceHead(nn.Module):
    """Logit of P(slot accepted | prefix accepted), from the slot state and, by choice, the Markov embedding."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width = config.hidden_size + (config.markov_rank if config.confidence_with_markov else 0)
        self.with_markov = config.confidence_with_markov
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden_SD: Tensor, embedding_SR: Tensor | None) -> Tensor:
        """Float32 logits [S]."""
        features = (
            torch.cat([hidden_SD, embedding_SR], -1) if self.with_markov and embedding_SR is not None else hidden_SD
        )
        return self.proj(features.float()).squeeze(-1)
