"""Speculative decoding without an engine: draft, verify in one pass, keep what is accepted. Batch 1, CPU or GPU.

The reference for what an engine should do, and a way to measure a drafter where none runs. One step:

1. The last committed token is the anchor; the drafter reads the verifier's states of all tokens before it (its own
   state does not exist yet) and proposes a block, token after token through the Markov head.
2. The verifier reads anchor and proposals in one pass; an acceptance rule (`verification.py`) keeps a prefix of them
   and adds one token of the verifier's own, which is the next anchor.

The prefill's token is the first anchor and counts in no step (as in vLLM and DeepSpec). Drafting calls the same
`DSparkDrafter.forward` as training, on a row of one document and one anchor.

Shape letters: T committed tokens, F fused aux width, K block slots, D hidden, R Markov rank, L proposed tokens,
C = L + 1, V verifier vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dspark_model.batch import Document, pack
from dspark_model.decoding_verifier import VerifierRun
from dspark_model.drafter import DSparkDrafter
from dspark_model.metrics import Acceptance
from dspark_model.verification import AcceptanceRule, accept_block, accept_greedy, accept_sampling

GREEDY_BELOW = 1e-5
"""Temperatures under this decode greedily, as in vLLM and DeepSpec: dividing by them overflows."""


@dataclass(frozen=True)
class Decoded:
    """What was emitted, and what each step proposed and accepted."""

    tokens: tuple[int, ...]
    """New tokens, the prompt not among them."""
    proposed_per_step: tuple[int, ...]
    """Tokens verified in each step: `num_speculative_tokens`, or fewer where the confidence threshold cut the block."""
    accepted_per_step: tuple[int, ...]
    """Accepted proposals that were emitted: none past a stop token or `max_new_tokens` (as `metrics.walk` counts)."""
    num_speculative_tokens: int

    @property
    def acceptance(self) -> Acceptance:
        """Counts over all steps.

        A step that the confidence threshold left without proposals is a draft that accepted nothing, so that
        acceptance_length stays tokens per verifier pass. vLLM's counters leave such steps out: to compare, drop the
        steps where `proposed_per_step` is 0.
        """
        positions = range(self.num_speculative_tokens)
        return Acceptance(
            drafts=len(self.accepted_per_step),
            accepted_per_position=tuple(sum(count > i for count in self.accepted_per_step) for i in positions),
        )


@dataclass(frozen=True)
class Sampler:
    """How verifier and drafter alike turn logits into tokens."""

    temperature: float
    generator: torch.Generator | None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    def distribution(self, logits: Tensor) -> Tensor:
        """Float32 probabilities over the last dimension; all on the most likely id when greedy."""
        if self.greedy:
            return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        return (logits.float() / self.temperature).softmax(-1)

    def draw(self, probabilities: Tensor) -> int:
        """One index of a distribution [n]. Every random choice of `decode` is a call of this."""
        return int(torch.multinomial(probabilities, 1, generator=self.generator))


@torch.no_grad()
def decode(
    verifier_model: PreTrainedModel,
    drafter: DSparkDrafter,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    num_speculative_tokens: int | None = None,
    confidence_threshold: float | None = None,
    block_verification: bool = False,
    stop_token_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
) -> Decoded:
    """Continue a prompt. Tokens are distributed as the verifier alone would emit them; greedy ones equal its own.

    Args:
        verifier_model: causal language model of transformers in eval mode.
        drafter: on the verifier's device, its frozen parts loaded.
        prompt_ids: at least one token.
        max_new_tokens: tokens to emit, the prefill's included. Steps draft whole blocks; what exceeds it is dropped.
        temperature: of verifier and drafts alike; 0 is greedy.
        num_speculative_tokens: proposals per step; None for all that a block has.
        confidence_threshold: end a block before its first slot of a confidence below this probability.
        block_verification: judge a block jointly instead of token by token; no effect on greedy decoding.
        stop_token_ids: the first of these ends the text, and is emitted.
        generator: source of all draws, on the models' device; None for torch's own.

    Raises:
        ValueError: an argument out of range, a drafter without its frozen parts or made for another verifier, or a
            verifier in training mode.
    """
    limit = drafter.config.proposals_per_block if num_speculative_tokens is None else num_speculative_tokens
    _check_arguments(drafter, len(prompt_ids), max_new_tokens, temperature, limit, confidence_threshold)
    sampler, prompt = Sampler(temperature, generator), [int(token) for token in prompt_ids]
    rule = accept_greedy if sampler.greedy else accept_block if block_verification else accept_sampling
    drafter, verifier = with_proposals(drafter, limit), VerifierRun(verifier_model, drafter.config)
    tokens = [sampler.draw(sampler.distribution(verifier.feed(prompt)[-1]))]
    proposed: list[int] = []
    accepted: list[int] = []
    while len(tokens) < max_new_tokens and tokens[-1] not in stop_token_ids:
        proposal = propose(drafter, prompt + tokens, verifier.aux_TF, sampler, confidence_threshold)
        emitted = _verify(verifier, tokens[-1], proposal, rule, sampler)
        kept = _until_end(emitted, stop_token_ids, max_new_tokens - len(tokens))
        tokens += kept
        proposed.append(len(proposal.tokens))
        accepted.append(min(len(emitted) - 1, len(kept)))
    return Decoded(tuple(tokens), tuple(proposed), tuple(accepted), limit)


@dataclass(frozen=True)
class Proposal:
    """A drafted block and the distributions it was drawn from."""

    tokens: list[int]
    """Verifier ids."""
    draft_LV: Tensor
    """Float32; zero outside the draft vocabulary."""


def propose(
    drafter: DSparkDrafter,
    ids: list[int],
    aux_hidden_TF: Tensor,
    sampler: Sampler,
    confidence_threshold: float | None = None,
) -> Proposal:
    """Draft one block after the last of `ids`, left to right.

    Whether a slot is proposed hangs on its own state and the token before it, known before it is drawn: deciding by
    later tokens would not be lossless (DSpark paper, appendix A, arXiv 2607.05147).

    Args:
        drafter: its config decides layout and number of proposals.
        ids: all committed tokens; the last one is the anchor.
        aux_hidden_TF: verifier states of all of them but the anchor.
        sampler: of the drafted tokens.
        confidence_threshold: see `decode`.
    """
    config, head, device = drafter.config, drafter.markov_head, drafter.fc.weight.device
    ids_T = torch.tensor(ids)
    text = Document(ids_T, torch.zeros_like(ids_T, dtype=torch.bool), aux_hidden_TF, aux_hidden_TF[:, :0])
    row, anchor_1 = pack([text]).to(device), torch.tensor([len(ids) - 1], device=device)
    hidden_KD = drafter(row, anchor_1, drafter.slots(row, anchor_1)).hidden_SD
    prev, state_1R = ids[-1], None
    tokens: list[int] = []
    draft_LV = torch.zeros(config.proposals_per_block, config.verifier_vocab_size, device=device)
    for slot, hidden_1D in enumerate(hidden_KD.split(1)):
        embedding_1R, factor_1R = None, None
        if head is not None:
            embedding_1R = head.embed(torch.tensor([prev], device=device))
            factor_1R, state_1R = head.step(embedding_1R, hidden_1D, state_1R)
        if slot < config.block_size - config.proposals_per_block:
            continue  # the DFlash layout's slot 0 proposes nothing; its Markov state still moves on
        if confidence_threshold is not None and _confidence(drafter, hidden_1D, embedding_1R) < confidence_threshold:
            break
        draft_V = draft_LV[len(tokens)]
        draft_V[drafter.verifier_ids_W] = sampler.distribution(drafter.logits(hidden_1D, factor_1R)[0])
        prev = sampler.draw(draft_V)
        tokens.append(prev)
    return Proposal(tokens, draft_LV[: len(tokens)])


def _confidence(drafter: DSparkDrafter, hidden_1D: Tensor, embedding_1R: Tensor | None) -> float:
    assert drafter.confidence_head is not None, "decode refuses a threshold without the head"
    return float(drafter.confidence_head(hidden_1D, embedding_1R).sigmoid())


def with_proposals(drafter: DSparkDrafter, num_speculative_tokens: int) -> DSparkDrafter:
    """The same weights with blocks of that many proposals.

    vLLM opens no slots beyond the tokens it speculates, and on full layers every slot of a block sees all others:
    proposals cut from a longer block would be other tokens.
    """
    config, shorter = drafter.config, copy.copy(drafter)
    silent = config.block_size - config.proposals_per_block
    shorter.config = dataclasses.replace(config, block_size=num_speculative_tokens + silent)
    return shorter


def _verify(
    verifier: VerifierRun, anchor: int, proposal: Proposal, rule: AcceptanceRule, sampler: Sampler
) -> list[int]:
    """Accepted proposals and the verifier's own token; the verifier keeps the states of all but that one."""
    target_CV = sampler.distribution(verifier.feed([anchor, *proposal.tokens]))
    tokens_L = torch.tensor(proposal.tokens, dtype=torch.long, device=target_CV.device)
    verdict = rule(target_CV, proposal.draft_LV, tokens_L)
    accepted = sampler.draw(verdict.count_C)
    verifier.rewind(len(proposal.tokens) - accepted)
    return [*proposal.tokens[:accepted], sampler.draw(verdict.next_CV[accepted])]


def _until_end(emitted: list[int], stop_token_ids: Collection[int], room: int) -> list[int]:
    """A step's tokens up to the first stop token, and no more than `room`."""
    stops = [i + 1 for i, token in enumerate(emitted) if token in stop_token_ids]
    return emitted[: min([room, *stops])]


def _check_arguments(
    drafter: DSparkDrafter,
    prompt_tokens: int,
    max_new_tokens: int,
    temperature: float,
    num_speculative_tokens: int,
    confidence_threshold: float | None,
) -> None:
    most = drafter.config.proposals_per_block
    if not prompt_tokens:
        raise ValueError("prompt_ids is empty: give at least one token for the verifier to continue")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must be 0 (greedy) or more")
    if not 1 <= num_speculative_tokens <= most:
        raise ValueError(
            f"num_speculative_tokens={num_speculative_tokens} must lie in 1..{most}, what a block proposes"
        )
    if confidence_threshold is not None and not 0 <= confidence_threshold <= 1:
        raise ValueError(
            f"confidence_threshold={confidence_threshold} must be a probability in 0..1, or None to draft whole blocks"
        )
    if confidence_threshold is not None and drafter.confidence_head is None:
        raise ValueError(
            f"confidence_threshold={confidence_threshold} needs a confidence head, which this drafter lacks: pass None"
        )
    if drafter.embed_tokens[0].isnan().any() or drafter.lm_head[0].isnan().any():
        raise ValueError("the drafter's embed_tokens or lm_head is NaN: fill them with load_verifier before decoding")
