"""Markov head (order inside the block) and confidence head (how far to verify).

The Markov bias of a slot is W2 f, where the factor f [R] comes from e = w1[previous token] (DSpark paper, section on
sequential heads, arXiv 2607.05147; gated and rnn as in DeepSpec and speculators):

- vanilla: f = e
- gated:   f = sigmoid(G [h ; e] + b) * e, h the slot's state
- rnn:     [a, c, o] = J [s ; e ; h] + b;  f = tanh(o);  next s = sigmoid(a) * s + (1 - sigmoid(a)) * tanh(c);  s_0 = 0

W2 f is the same product for all three, so losses fuse it with the language-model head.

Shape letters: A anchors, K block slots, S slots, D hidden, R Markov rank, V verifier vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark_model.config import DrafterConfig


class MarkovHead(nn.Module):
    """Low-rank logit bias from the previous token.

    `markov_w1` is read with verifier ids, `markov_w2` writes draft ids.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.kind, self.rank = config.markov_head_type, config.markov_rank
        self.markov_w1 = nn.Embedding(config.verifier_vocab_size, self.rank)
        self.markov_w2 = nn.Linear(self.rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + self.rank, self.rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * self.rank + config.hidden_size, 3 * self.rank)
        # 0.01, not N(0, 1): https://github.com/vllm-project/speculators/pull/971
        nn.init.normal_(self.markov_w1.weight, std=0.01)

    def embed(self, prev_token_ids: Tensor) -> Tensor:
        """Embedding [..., R] of previous tokens (verifier ids)."""
        return self.markov_w1(prev_token_ids)

    def step(self, embedding_AR: Tensor, hidden_AD: Tensor, state_AR: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Factor [A, R] of the next slot, left to right.

        Args:
            embedding_AR: `embed` of the token before the slot's prediction.
            hidden_AD: the slot's state after the final norm.
            state_AR: what the previous slot's call returned; None at slot 0.

        Returns:
            The factor, and the state to pass on (None unless the head is an rnn).
        """
        if self.kind == "vanilla":
            return embedding_AR, None
        if self.kind == "gated":
            gate_AR = self.gate_proj(torch.cat([hidden_AD, embedding_AR], -1)).sigmoid()
            return gate_AR * embedding_AR, None
        state_AR = torch.zeros_like(embedding_AR) if state_AR is None else state_AR
        joint = self.joint_proj(torch.cat([state_AR, embedding_AR, hidden_AD], -1))
        keep_AR, candidate_AR, output_AR = joint.chunk(3, -1)
        keep_AR = keep_AR.sigmoid()
        return output_AR.tanh(), keep_AR * state_AR + (1 - keep_AR) * candidate_AR.tanh()

    def factors(self, embedding_AKR: Tensor, hidden_AKD: Tensor) -> Tensor:
        """Factors [A, K, R] of whole blocks whose previous tokens are known (teacher forcing)."""
        if self.kind != "rnn":
            return self.step(embedding_AKR, hidden_AKD, None)[0]
        state_AR, found = None, []
        for slot in range(embedding_AKR.shape[1]):
            factor_AR, state_AR = self.step(embedding_AKR[:, slot], hidden_AKD[:, slot], state_AR)
            found.append(factor_AR)
        return torch.stack(found, 1)

    def bias(self, factor: Tensor) -> Tensor:
        """Logit bias [..., W] of factors [..., R]."""
        return self.markov_w2(factor)


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
