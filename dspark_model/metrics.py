"""Walked acceptance: what serving would accept, computed from stored states without a server.

Draft at every position of a verifier's answer in one batched forward, then walk as the server does: at a position,
accept the longest prefix that equals the answer, jump past it and the verifier's own (bonus) token. Only positions
that serving visits count; random anchors and teacher-forced estimates count others and read high.

Shape letters: T tokens, A anchors, K block slots, P proposals per block, D hidden, R Markov rank, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_model.batch import Document, pack
from dspark_model.drafter import DSparkDrafter

ROWS_PER_CHUNK = 256
"""Anchors whose block logits [rows, K, W] are held at once."""


@dataclass(frozen=True)
class Acceptance:
    """Counts of verification steps, mergeable: rates are formed last, so batching cannot change them."""

    drafts: int
    accepted_per_position: tuple[int, ...]
    """Steps that accepted at least i + 1 drafted tokens."""

    @property
    def accepted(self) -> int:
        """Drafted tokens accepted."""
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per verification: 1 (the verifier's own) + accepted / drafts; nan without drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else float("nan")

    @property
    def survival(self) -> tuple[float, ...]:
        """Share of steps that accepted position i."""
        return tuple(count / self.drafts if self.drafts else float("nan") for count in self.accepted_per_position)

    @property
    def conditional(self) -> tuple[float, ...]:
        """Share of steps that accepted position i among those that accepted i - 1; nan where there are none."""
        reached = (self.drafts, *self.accepted_per_position)
        return tuple(
            count / before if before else float("nan")
            for before, count in zip(reached, self.accepted_per_position, strict=False)
        )

    def __add__(self, other: Acceptance) -> Acceptance:
        if not self.drafts:
            return other
        if not other.drafts:
            return self
        pairs = zip(self.accepted_per_position, other.accepted_per_position, strict=True)
        return Acceptance(self.drafts + other.drafts, tuple(a + b for a, b in pairs))


def walk(answer: Sequence[int], proposals: Sequence[Sequence[int]], num_speculative_tokens: int) -> Acceptance:
    """Walk one answer.

    Args:
        answer: the verifier's tokens; answer[0] comes from the prefill and is the first anchor.
        proposals: proposals[i] are the tokens drafted after answer[i], for i in 0..len(answer) - 2.
        num_speculative_tokens: tokens proposed per step.
    """
    drafts, accepted_per_position, position = 0, [0] * num_speculative_tokens, 0
    while position < len(answer) - 1:
        drafts += 1
        accepted = 0
        for token, truth in zip(proposals[position][:num_speculative_tokens], answer[position + 1 :], strict=False):
            if token != truth:
                break
            accepted_per_position[accepted] += 1
            accepted += 1
        position += accepted + 1
    return Acceptance(drafts, tuple(accepted_per_position))


@torch.no_grad()
def propose_everywhere(drafter: DSparkDrafter, document: Document, anchor_pos_A: Tensor) -> Tensor:
    """Greedy proposals [A, P] (verifier ids) of blocks at ascending anchors, the Markov chain reading its own picks."""
    config, device = drafter.config, drafter.fc.weight.device
    row = pack([document]).to(device)
    anchor_pos_A = anchor_pos_A.to(device)
    slots = drafter.slots(row, anchor_pos_A)
    output = drafter(row, anchor_pos_A, slots)
    hidden_AKD = output.hidden_SD.unflatten(0, (-1, config.block_size))
    chunks = zip(hidden_AKD.split(ROWS_PER_CHUNK), row.input_ids_T[anchor_pos_A].split(ROWS_PER_CHUNK), strict=True)
    return torch.cat([_greedy_chain(drafter, hidden, anchors) for hidden, anchors in chunks])


def _greedy_chain(drafter: DSparkDrafter, hidden_AKD: Tensor, anchor_ids_A: Tensor) -> Tensor:
    config, head = drafter.config, drafter.markov_head
    prev_A, state_AR, picks = anchor_ids_A, None, []
    for slot in range(config.block_size):
        factor_AR = None
        if head is not None:
            factor_AR, state_AR = head.step(head.embed(prev_A), hidden_AKD[:, slot], state_AR)
        if slot < config.block_size - config.proposals_per_block:
            continue  # the DFlash layout's slot 0 proposes nothing; its Markov state still moves on
        draft_A = drafter.logits(hidden_AKD[:, slot], factor_AR).argmax(-1)
        prev_A = drafter.verifier_ids_W[draft_A]
        picks.append(prev_A)
    return torch.stack(picks, 1)


@torch.no_grad()
def walk_documents(
    drafter: DSparkDrafter, documents: Iterable[Document], num_speculative_tokens: int | None = None
) -> list[Acceptance]:
    """Walked acceptance of each document; its answer is the supervised tail.

    Raises:
        ValueError: a document's supervised tokens are not one run up to its end.
    """
    results = []
    for document in documents:
        length = document.input_ids_T.shape[0]
        supervised = document.loss_mask_T.nonzero().flatten()
        first = int(supervised[0]) if supervised.numel() else length
        if supervised.numel() != length - first:
            raise ValueError("walked acceptance needs the supervised tokens to be the document's tail")
        anchors = torch.arange(first, max(first, length - 1))
        limit = num_speculative_tokens or drafter.config.proposals_per_block
        proposals = propose_everywhere(drafter, document, anchors).tolist() if anchors.numel() else []
        results.append(walk(document.input_ids_T[first:].tolist(), proposals, limit))
    return results


def perfect_acceptance(
    tokens_T: Tensor, offsets: Sequence[int], t2d: Tensor, num_speculative_tokens: int
) -> Acceptance:
    """What a drafter that is always right would have accepted, were it not for its vocabulary: the ceiling.

    Each answer is walked as by `walk`: its first token comes from the prefill, then a step accepts
    tokens up to the first one outside the draft vocabulary, and the verifier supplies one more.

    Args:
        tokens_T: verifier ids of all answers, end to end.
        offsets: places of the answers in tokens_T, one more than there are answers.
        t2d: bool [V] mask of the draft vocabulary.
        num_speculative_tokens: tokens proposed per step.
    """
    starts_A, ends_A = torch.tensor(offsets[:-1]), torch.tensor(offsets[1:])
    total = tokens_T.shape[0]
    # Place of the next token that cannot be proposed, at the latest the answer's end.
    stops_T = torch.where(t2d[tokens_T.long()], total, torch.arange(total))
    if total:
        ends_T = torch.repeat_interleave(ends_A, ends_A - starts_A)
        stops_T = torch.minimum(stops_T.flip(0).cummin(0).values.flip(0), ends_T)
    accepted_per_position = torch.zeros(num_speculative_tokens, dtype=torch.int64)
    drafts, position_A = 0, starts_A.clone()
    while (going := position_A < ends_A - 1).any():
        position_A, ends_A = position_A[going], ends_A[going]
        accepted_A = (stops_T[position_A + 1] - position_A - 1).clamp(max=num_speculative_tokens)
        drafts += position_A.shape[0]
        accepted_per_position += (accepted_A[:, None] > torch.arange(num_speculative_tokens)).sum(0)
        position_A = position_A + accepted_A + 1
    return Acceptance(drafts, tuple(accepted_per_position.tolist()))


def total(results: Iterable[Acceptance], num_positions: int) -> Acceptance:
    """Sum over documents."""
    return sum(results, Acceptance(0, (0,) * num_positions))
