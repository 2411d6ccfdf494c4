"""Ask a plain and a drafting server the same questions, subset by subset in turn, and count what each did.

Subsets alternate between the two servers, so that drift of the machine falls on both; counters are read around each
subset of the drafting server, so nothing else blends in.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dspark_model.metrics import Acceptance
from tasks.answer_rows import AnswerRow
from tasks.speculation_counters import SpecDecodeCounters, read_counters
from tasks.stage import StageContext
from tasks.vllm_client import Completion, Request, generate
from tasks.vllm_server import VllmServer

WARM_UP_TOKENS = 8


class ServedEvaluationError(RuntimeError):
    """A request of the evaluation failed, or the counters contradict each other."""


@dataclass(frozen=True)
class Answers:
    """One server's answers to one subset. `seconds` is wall time of the whole subset at the given concurrency."""

    token_ids: Mapping[str, list[int]]
    seconds: float

    @property
    def tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(len(ids) for ids in self.token_ids.values())


@dataclass(frozen=True)
class SubsetRound:
    """What both servers did on one subset."""

    subset: str
    plain: Answers
    drafted: Answers
    acceptance: Acceptance
    draft_tokens: int


def run_rounds(
    context: StageContext,
    plain: VllmServer,
    drafting: VllmServer,
    rows: Sequence[AnswerRow],
    *,
    max_new_tokens: int,
    concurrency: int,
) -> list[SubsetRound]:
    """Evaluate each subset on both servers.

    Args:
        context: for logging.
        plain: the verifier alone.
        drafting: the verifier with the drafter.
        rows: the verifier's answers, whose prompts are asked again.
        max_new_tokens: per answer, greedy.
        concurrency: requests in flight.

    Raises:
        ServedEvaluationError: a request failed or the server's counters are inconsistent.
    """
    subsets = list(dict.fromkeys(row.subset for row in rows))
    for server in (plain, drafting):
        _ask(server, rows[:1], WARM_UP_TOKENS, 1)
    rounds = []
    for subset in subsets:
        chosen = [row for row in rows if row.subset == subset]
        alone = _ask(plain, chosen, max_new_tokens, concurrency)
        before = read_counters(drafting)
        drafted = _ask(drafting, chosen, max_new_tokens, concurrency)
        counted = read_counters(drafting) - before
        acceptance = _checked(counted, context.recipe.num_speculative_tokens)
        context.log.info(
            "%s: acceptance length %.3f over %d steps, %.0f tokens/s with the drafter, %.0f alone",
            subset, acceptance.acceptance_length, acceptance.drafts,
            drafted.tokens / drafted.seconds, alone.tokens / alone.seconds,
        )  # fmt: skip
        rounds.append(SubsetRound(subset, alone, drafted, acceptance, counted.draft_tokens))
    return rounds


def _ask(server: VllmServer, rows: Sequence[AnswerRow], max_tokens: int, concurrency: int) -> Answers:
    answers: dict[str, list[int]] = {}

    def keep(request: Request, answer: Completion) -> None:
        answers[request.id] = answer.token_ids

    def fail(request: Request, error: Exception) -> None:
        raise ServedEvaluationError(f"evaluation request {request.id} failed: {error}") from error

    requests = [Request(row.id, prompt_token_ids=row.prompt_token_ids, max_tokens=max_tokens) for row in rows]
    started = time.perf_counter()
    generate(server, requests, concurrency=concurrency, on_completion=keep, on_failure=fail)
    return Answers(answers, time.perf_counter() - started)


def _checked(counted: SpecDecodeCounters, num_speculative_tokens: int) -> Acceptance:
    """Counters as rates' numerators, after the identities that catch blended or truncated counters.

    `acceptance_length == 1 + sum of per-position rates` fails where one engine's counters overwrite another's
    (https://github.com/vllm-project/speculators/issues/1095).
    """
    positions = counted.accepted_per_position
    if len(positions) > num_speculative_tokens:
        raise ServedEvaluationError(
            f"the server counts {len(positions)} positions, the recipe serves {num_speculative_tokens} tokens per step"
        )
    if counted.accepted_tokens > counted.draft_tokens or any(
        later > earlier for earlier, later in zip((counted.drafts, *positions), positions, strict=False)
    ):
        raise ServedEvaluationError(f"the server's counters are inconsistent: {counted}")
    padded = positions + (0,) * (num_speculative_tokens - len(positions))
    return Acceptance(counted.drafts, padded)
