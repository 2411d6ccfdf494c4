"""What keeps a candidate prompt out of the training set, counted by reason and with samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tasks.builtin_prompts import OVERLAP_WORDS
from tasks.prompt_rows import Message, PromptRow, ngrams, normalised, row_text

MIN_USER_TOKENS = 2
SAMPLES_PER_REASON = 5
SAMPLE_CHARACTERS = 300
REASONS = ("unusable", "duplicate", "too_short", "too_long", "evaluation_overlap")

CountTokens = Callable[[Sequence[Message]], tuple[int, int]]
"""Messages -> (tokens of the rendered prompt, tokens of the last user turn alone)."""


@dataclass
class FilterResult:
    """Rows that passed, and what happened to the others."""

    kept: list[PromptRow] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Tokens of each kept prompt, chat template included."""
    candidates: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, text: str) -> None:
        """Count a dropped candidate and keep the first few."""
        self.dropped[reason] += 1
        shown = self.samples.setdefault(reason, [])
        if len(shown) < SAMPLES_PER_REASON:
            shown.append(text[:SAMPLE_CHARACTERS])

    def describe(self) -> str:
        """Counts in one line, for messages."""
        dropped = ", ".join(f"{self.dropped[reason]} {reason}" for reason in REASONS if self.dropped[reason])
        return f"{self.candidates} candidates, {len(self.kept)} kept, dropped: {dropped or 'none'}"


class EvaluationGuard:
    """Recognises prompts that an evaluation prompt, or eight words of its content in a row, occurs in."""

    def __init__(self, texts: Iterable[str], contents: Iterable[str]) -> None:
        """Take whole evaluation prompts (`texts`) and their parts that are not template (`contents`)."""
        self._texts = {normalised(text) for text in texts}
        self._runs = {run for content in contents for run in ngrams(content, OVERLAP_WORDS)}

    def overlaps(self, text: str) -> bool:
        """True when `text` must not be trained on."""
        return normalised(text) in self._texts or not self._runs.isdisjoint(ngrams(text, OVERLAP_WORDS))


def filter_prompts(
    candidates: Iterable[PromptRow | str],
    *,
    limit: int,
    max_tokens: int,
    count_tokens: CountTokens,
    guard: EvaluationGuard | None,
) -> FilterResult:
    """Take candidates in order until `limit` have passed; a text stands for a record that held no prompt.

    Args:
        candidates: rows, in the order of preference.
        limit: rows to keep at most.
        max_tokens: longest rendered prompt, chat template included.
        count_tokens: the verifier's own measure.
        guard: evaluation prompts to stay away from; None while those themselves are chosen.
    """
    result = FilterResult()
    seen: set[str] = set()
    for row in candidates:
        if len(result.kept) == limit:
            break
        result.candidates += 1
        if isinstance(row, str):
            result.drop("unusable", row)
            continue
        text = row_text(row)
        key = normalised(text)
        if key in seen:
            result.drop("duplicate", text)
            continue
        seen.add(key)
        total, user = count_tokens(row.messages)
        if user < MIN_USER_TOKENS:
            result.drop("too_short", text)
        elif total > max_tokens:
            result.drop("too_long", text)
        elif guard is not None and guard.overlaps(text):
            result.drop("evaluation_overlap", text)
        else:
            result.kept.append(row)
            result.lengths.append(total)
    return result
