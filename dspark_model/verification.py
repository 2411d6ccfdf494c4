"""Which drafted tokens a verifier keeps, as exact probabilities: the decoder only draws from what is returned here.

Every rule answers two questions about one drafted block: how many of its tokens are accepted, and from which
distribution the verifier's own next token comes. A rule is lossless when draft, count and next token together are
distributed as the verifier alone would emit them.

Shape letters: L drafted tokens (0 is allowed), C = L + 1 possible counts, V verifier vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """The law of one verification, before anything is drawn."""

    count_C: Tensor
    """Probability that exactly n drafted tokens are accepted."""
    next_CV: Tensor
    """Distribution of the verifier's own token after exactly n accepted ones."""


AcceptanceRule = Callable[[Tensor, Tensor, Tensor], Verdict]
"""(target_CV, draft_LV, tokens_L) -> Verdict. Row i of both distributions is that of the block's token i, given the
tokens before it; the last row of target_CV follows a fully accepted block."""


def accept_greedy(target_CV: Tensor, draft_LV: Tensor, tokens_L: Tensor) -> Verdict:
    """Accept the longest prefix that equals the verifier's most likely tokens; its own next token follows.

    Args:
        target_CV: the verifier's distributions, or its logits.
        draft_LV: not looked at: what greedy decoding emits does not depend on how the draft was made.
        tokens_L: drafted verifier ids.
    """
    best_C = target_CV.argmax(-1)
    accepted = int((best_C[:-1] == tokens_L).long().cumprod(0).sum())
    count_C = torch.zeros_like(target_CV[:, 0])
    count_C[accepted] = 1
    return Verdict(count_C, torch.zeros_like(target_CV).scatter_(1, best_C[:, None], 1.0))


def accept_sampling(target_CV: Tensor, draft_LV: Tensor, tokens_L: Tensor) -> Verdict:
    """Accept token by token with probability min(1, p / q); at the first rejection draw from max(p - q, 0).

    Speculative sampling, arXiv 2211.17192 and 2302.01318; DSpark paper, arXiv 2607.05147.

    Args:
        target_CV: the verifier's distributions p.
        draft_LV: the distributions q that the drafted tokens were drawn from, zero outside the draft vocabulary.
        tokens_L: drafted verifier ids; q of each is above zero.
    """
    p_L, q_L = _of_tokens(target_CV[:-1], tokens_L), _of_tokens(draft_LV, tokens_L)
    accept_L = (p_L / q_L).clamp(max=1)
    reached_C = _with_first(accept_L.cumprod(0), 1.0)
    stopped_C = torch.cat([1 - accept_L, accept_L.new_ones(1)])
    excess_LV = (target_CV[:-1] - draft_LV).clamp(min=0)
    return Verdict(reached_C * stopped_C, _residual_or_bonus(excess_LV, target_CV))


def accept_block(target_CV: Tensor, draft_LV: Tensor, tokens_L: Tensor) -> Verdict:
    """Block verification: judge prefixes jointly, so that a likely later token can rescue an unlikely earlier one.

    With w_0 = 1, w_i = min(1, w_(i-1) p_i / q_i) and the excess E_i = sum of max(w_i p - q, 0) over token i + 1, the
    accepted count is the largest i that passes a coin of probability h_i = E_i / (E_i + 1 - w_i), where h_0 = 1 and
    h_L = w_L. After n < L tokens the next one is drawn from max(w_n p - q, 0). (arXiv 2403.10444, algorithm 2.) It
    accepts n tokens or more of a drafted prefix of n with probability w_n exactly, never less than token by token,
    whatever later slots hold; so a block may end wherever the drafter, not knowing later tokens, chose to end it.

    Arguments as in `accept_sampling`.
    """
    p_L, q_L = _of_tokens(target_CV[:-1], tokens_L), _of_tokens(draft_LV, tokens_L)
    weights = [target_CV.new_ones(())]
    for p, q in zip(p_L, q_L, strict=True):
        weights.append((weights[-1] * p / q).clamp(max=1))  # in this order: w = 0 stays 0 where p / q overflows
    weight_C = torch.stack(weights)
    excess_LV = (weight_C[:-1, None] * target_CV[:-1] - draft_LV).clamp(min=0)
    excess_L = excess_LV.sum(-1)
    rest_L = 1 - weight_C[:-1]
    # 0 / 0: nothing is in excess and the prefix is certain, so a longer count passes anyway. h_0 comes out as 1.
    coin_L = torch.where(excess_L + rest_L > 0, excess_L / (excess_L + rest_L), 1.0)
    pass_C = torch.cat([coin_L, weight_C[-1:]])
    later_fail_C = (1 - pass_C[1:]).flip(0).cumprod(0).flip(0)
    return Verdict(pass_C * torch.cat([later_fail_C, pass_C.new_ones(1)]), _residual_or_bonus(excess_LV, target_CV))


def _of_tokens(probabilities_LV: Tensor, tokens_L: Tensor) -> Tensor:
    return probabilities_LV.gather(1, tokens_L[:, None]).squeeze(1)


def _with_first(values_L: Tensor, first: float) -> Tensor:
    return torch.cat([values_L.new_full((1,), first), values_L])


def _residual_or_bonus(excess_LV: Tensor, target_CV: Tensor) -> Tensor:
    """Next-token distributions: the normalised excess after a rejection, the verifier's last row after none."""
    mass_L1 = excess_LV.sum(-1, keepdim=True)
    # Where q covers p everywhere a rejection has probability zero; the row only has to be a distribution.
    residual_LV = torch.where(mass_L1 > 0, excess_LV / mass_L1, target_CV[:-1])
    return torch.cat([residual_LV, target_CV[-1:]])
