"""What keeps a candidate prompt out of the training set, counted by reason and with samples; cheap checks first."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.builtin_prompts import OVERLAP_WORDS
from tasks.near_duplicates import NearDuplicates
from tasks.prompt_rows import Candidate, PromptRow, Unusable, ngrams, normalised, row_text, user_text, words_of

SAMPLES_PER_REASON = 5
SAMPLE_CHARACTERS = 300
# No tokenizer makes so few tokens of a text; longer ones need not be tokenised to be too long.
MOST_CHARACTERS_PER_TOKEN = 64
# Shorter evaluation prompts are recognised only where they are the whole text.
FEWEST_CONTAINED_WORDS = 4
# A request log's earlier request of a conversation that goes on in a later one.
SUPERSEDED = "superseded"
REASONS = (
    "unusable", SUPERSEDED, "duplicate", "too_short", "too_long", "refused_by_template", "language", "near_duplicate",
    "evaluation_overlap",
)  # fmt: skip

CountTokens = Callable[[PromptRow], tuple[int, int] | None]
"""Row -> (tokens of the rendered conversation, tokens of the last user turn alone); None: the template refuses it."""


@dataclass
class FilterResult:
    """What became of the candidates of one source."""

    kept: int = 0
    candidates: int = 0
    tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    unusable: Counter[str] = field(default_factory=Counter)
    overlaps: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[str]] = field(default_factory=dict)
    repeated_ids: int = 0
    licenses: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str, text: str) -> None:
        """Count a dropped candidate and keep the first few."""
        self.dropped[reason] += 1
        shown = self.samples.setdefault(reason, [])
        if len(shown) < SAMPLES_PER_REASON:
            shown.append(text[:SAMPLE_CHARACTERS])

    def describe(self) -> str:
        """Counts in one line, for messages."""
        dropped = ", ".join(f"{self.dropped[reason]:,} {reason}" for reason in REASONS if self.dropped[reason])
        inner = ", ".join(f"{number:,} {reason}" for reason, number in self.unusable.most_common())
        inner = f" (unusable: {inner})" if inner else ""
        return f"{self.candidates:,} candidates, {self.kept:,} kept, dropped: {dropped or 'none'}{inner}"


class EvaluationGuard:
    """Recognises prompts that an evaluation prompt, or a run of words of its content, occurs in.

    Args:
        prompts: (subset, whole prompt, its parts that are not template) of each evaluation prompt.
        words: length of a run.
    """

    def __init__(self, prompts: Iterable[tuple[str, str, Sequence[str]]], words: int = OVERLAP_WORDS) -> None:
        self._words = words
        self._texts: dict[str, str] = {}
        self._runs: dict[tuple[str, ...], str] = {}
        self._short: dict[tuple[str, ...], str] = {}
        for subset, text, contents in prompts:
            self._texts[normalised(text)] = subset
            for content in contents:
                self._runs |= dict.fromkeys(ngrams(content, words), subset)
            whole = tuple(words_of(text))
            if FEWEST_CONTAINED_WORDS <= len(whole) < words:
                self._short[whole] = subset

    def overlap(self, text: str) -> str | None:
        """The subset of an evaluation prompt that `text` must not be trained with, None if there is none."""
        if (subset := self._texts.get(normalised(text))) is not None:
            return subset
        for run in ngrams(text, self._words) & self._runs.keys():
            return self._runs[run]
        for length in {len(words) for words in self._short}:
            for run in ngrams(text, length) & self._short.keys():
                return self._short[run]
        return None


@dataclass(frozen=True)
class Limits:
    """What a prompt must be like: the fields of the recipe's prompts section."""

    min_prompt_tokens: int
    max_prompt_tokens: int
    languages: tuple[str, ...] | None = None
    near_duplicate_similarity: float | None = None


class Filters:
    """Applies all filters, over all sources: what one source gave is a duplicate in the next.

    Args:
        limits: of the recipe.
        count_tokens: the verifier's own measure.
        guard: evaluation prompts to stay away from; None while those themselves are chosen.
    """

    def __init__(self, limits: Limits, count_tokens: CountTokens, guard: EvaluationGuard | None) -> None:
        self.limits, self.count_tokens, self.guard = limits, count_tokens, guard
        self._seen: set[int] = set()
        similarity = limits.near_duplicate_similarity
        self._near = None if similarity is None else NearDuplicates(similarity)

    def passes(self, candidate: Candidate, result: FilterResult, *, alike: bool = False) -> bool:
        """Count a candidate in `result`, and say whether it is kept.

        Args:
            candidate: a prompt or a record that is none.
            result: of its source.
            alike: its source's prompts resemble each other by design; near duplicates stay.
        """
        result.candidates += 1
        if isinstance(candidate, Unusable):
            if candidate.reason == SUPERSEDED:
                result.drop(SUPERSEDED, candidate.text)
                return False
            result.unusable[candidate.reason] += 1
            result.drop("unusable", f"{candidate.where}: {candidate.reason}: {' '.join(candidate.text.split())}")
            return False
        text = row_text(candidate)
        key = _digest(normalised(text) + str(candidate.tools or ""))
        if key in self._seen:
            result.drop("duplicate", text)
            return False
        self._seen.add(key)
        reason, tokens = self._judge(candidate, text, result, alike)
        if reason is not None:
            result.drop(reason, text)
            return False
        result.kept += 1
        result.licenses[candidate.license] += 1
        result.tokens += tokens
        return True

    def _judge(self, row: PromptRow, text: str, result: FilterResult, alike: bool) -> tuple[str | None, int]:
        limits = self.limits
        if len(text) > MOST_CHARACTERS_PER_TOKEN * limits.max_prompt_tokens:
            return "too_long", 0
        counted = self.count_tokens(row)
        if counted is None:
            return "refused_by_template", 0
        total, user = counted
        if user < limits.min_prompt_tokens:
            return "too_short", 0
        if total > limits.max_prompt_tokens:
            return "too_long", 0
        if limits.languages is not None:
            from tasks.prompt_language import language_of

            if (found := language_of(user_text(row))) is not None and found not in limits.languages:
                return "language", 0
        if self.guard is not None and (subset := self.guard.overlap(text)) is not None:
            result.overlaps[subset] += 1
            return "evaluation_overlap", 0
        if self._near is not None and not alike and self._near.seen(user_text(row)):
            return "near_duplicate", 0
        return None, total


def _digest(text: str) -> int:
    """64 bits: among a million texts two are equal by chance with probability 3e-8."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def token_counter(tokenizer: Any) -> CountTokens:
    """Measure rows with a tokenizer and its chat template."""
    from jinja2 import TemplateError

    def plain(message: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of calls as templates expect them, and as vLLM gives them: parsed."""
        calls = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"] or "{}")}}
            for call in message.get("tool_calls") or []
        ]
        return {**message, **({"tool_calls": calls} if calls else {})}

    def count(row: PromptRow) -> tuple[int, int] | None:
        try:
            rendered = tokenizer.apply_chat_template(
                [plain(message) for message in row.messages],
                tools=list(row.tools) if row.tools else None,
                add_generation_prompt=True,
                return_dict=False,
            )
        except (TemplateError, ValueError, TypeError):  # roles out of turn, arguments that are no JSON, odd tools
            return None
        last = next(message for message in reversed(row.messages) if message["role"] == "user")
        return len(rendered), len(tokenizer.encode(last["content"], add_special_tokens=False))

    return count
