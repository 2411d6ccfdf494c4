"""What the answers of a stage are like: how they ended, how long they are, how many look like refusals."""

from __future__ import annotations

import json
import os
import re
from array import array
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.answer_rows import AnswerRow
    from tasks.conversation_turns import Conversation

REPORT = "report.json"
QUANTILES = (0.1, 0.5, 0.9, 0.99)
# How English refusals open; other languages are not recognised, so the count is an estimate.
REFUSAL = re.compile(
    r"(i'?m sorry,? but|i apologi[sz]e,? but|sorry,? (but )?i|i can(no|')t (assist|help|provide|comply|fulfil)"
    r"|i'?m (not able|unable) to|i am (not able|unable) to|as an ai\b|i won'?t)",
    re.IGNORECASE,
)


def looks_like_refusal(message: dict[str, Any], finish_reason: str) -> bool:
    """Whether an answer declines: marked by the server, or by how it opens."""
    if message.get("refusal") or finish_reason == "content_filter":
        return True
    text = re.sub(r"^.*</think>", "", str(message.get("content") or ""), flags=re.DOTALL)
    return REFUSAL.match(text.replace("\u2019", "'").lstrip()) is not None


def finished_counts(folder: Path) -> dict[str, int | float | str] | None:
    """Counts of answers that are complete: the report is written last."""
    path = folder / REPORT
    if not path.is_file():
        return None
    counts: dict[str, int | float | str] = json.loads(path.read_text())["counts"]
    return counts


class AnswerReport:
    """Counts rows as they are written."""

    def __init__(self) -> None:
        self.rows = self.conversations = self.refusals = 0
        self.prompt_tokens = 0
        self.lengths = array("i")
        self.finish_reasons: Counter[str] = Counter()
        self.modes: Counter[str] = Counter()
        self.turns: Counter[int] = Counter()
        self.tools: Counter[str] = Counter()

    def add(self, rows: list[AnswerRow], conversation: Conversation) -> None:
        """Count a conversation that has at least one answer."""
        self.conversations += 1
        self.turns[len(rows)] += 1
        self.tools["tool_results_by_name"] += conversation.tool_results_by_name
        self.tools["tool_results_missing"] += conversation.tool_results_missing
        for row in rows:
            self.rows += 1
            self.prompt_tokens += len(row.prompt_token_ids)
            self.lengths.append(len(row.token_ids))
            self.finish_reasons[row.finish_reason] += 1
            self.modes[row.mode] += 1
            self.refusals += looks_like_refusal(json.loads(row.message), row.finish_reason)

    def counts(self, failed: int, cut: int) -> dict[str, int | float | str]:
        """Flat figures for the manifest."""
        return {
            "rows": self.rows,
            "conversations": self.conversations,
            "failed": failed,
            "conversations_cut": cut,
            "prompt_tokens": self.prompt_tokens,
            "response_tokens": sum(self.lengths),
            "finished_by_length": self.finish_reasons["length"],
            "refusals_estimate": self.refusals,
        }

    def write(self, folder: Path, failed: int, cut: int) -> dict[str, int | float | str]:
        """Write report.json, whole or not at all; returns the manifest's counts."""
        counts = self.counts(failed, cut)
        report = {
            "counts": counts,
            "finish_reasons": dict(self.finish_reasons.most_common()),
            "modes": dict(sorted(self.modes.items())),
            "conversations_by_turns": {str(turns): self.turns[turns] for turns in sorted(self.turns)},
            **self.tools,
            "answer_tokens_quantiles": self.quantiles(),
            "answer_tokens_histogram": self.histogram(),
        }
        partial = folder / f"{REPORT}.partial"
        partial.write_text(json.dumps(report, indent=2) + "\n")
        os.replace(partial, folder / REPORT)
        return counts

    def quantiles(self) -> dict[str, int]:
        """Answer lengths in tokens: the smallest that so large a share does not exceed."""
        ordered = sorted(self.lengths)
        return {f"{share:g}": ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in QUANTILES}

    def histogram(self) -> dict[str, int]:
        """Answers by length, in classes up to powers of two."""
        classes = Counter(max(length - 1, 0).bit_length() for length in self.lengths)
        return {f"<={2**power}": classes[power] for power in sorted(classes)}

    def lines(self) -> list[str]:
        """For the log."""
        reasons = ", ".join(f"{count:,} {name}" for name, count in self.finish_reasons.most_common())
        lengths = ", ".join(f"{float(share):.0%} {tokens}" for share, tokens in self.quantiles().items())
        found = [f"{self.rows:,} answers of {self.conversations:,} conversations: {reasons}"]
        found.append(f"answer tokens, quantiles: {lengths}; refusals (estimate, English openings): {self.refusals:,}")
        if len(self.turns) > 1:
            found.append("conversations by turns: " + ", ".join(f"{n} {self.turns[n]:,}" for n in sorted(self.turns)))
        if len(self.modes) > 1:
            found.append("modes: " + ", ".join(f"{name} {count:,}" for name, count in sorted(self.modes.items())))
        if any(self.tools.values()):
            found.append(", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in self.tools.items()))
        return found
