"""How far a stage is: a line every few seconds, and a progress bar in Prefect."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.stage import StageContext


class Progress:
    """Counts finished rows; tells at intervals how far, how fast and how long still.

    Args:
        context: of the stage, whose log and progress bar are used.
        total: rows in all.
        noun: what a row is, in the plural.
        done: rows finished by earlier attempts; they count as done, not towards the rate.
        every_seconds: between two lines.
    """

    def __init__(
        self, context: StageContext, total: int, noun: str, *, done: int = 0, every_seconds: float = 10.0
    ) -> None:
        self.context, self.total, self.noun, self.every_seconds = context, total, noun, every_seconds
        self.before = done
        self.done, self.tokens = done, 0
        self.started = self.last = time.monotonic()

    def add(self, tokens: int = 0, rows: int = 1) -> None:
        """Count finished rows and their tokens."""
        self.done += rows
        self.tokens += tokens
        now = time.monotonic()
        if now - self.last >= self.every_seconds or self.done == self.total:
            self.last = now
            text = self.describe(now)
            self.context.log.info("%s", text)
            self.context.progress(text, self.done / self.total if self.total else 1.0)

    def describe(self, now: float) -> str:
        """Such as `120 of 2,000 answers, 6.1 answers/s, 850 tokens/s, 0:05:08 left`."""
        elapsed = max(now - self.started, 1e-9)
        rate = (self.done - self.before) / elapsed
        parts = [f"{self.done:,} of {self.total:,} {self.noun}", f"{rate:.3g} {self.noun.split()[0]}/s"]
        if self.tokens:
            parts.append(f"{self.tokens / elapsed:,.0f} tokens/s")
        if rate > 0:
            parts.append(f"{timedelta(seconds=round((self.total - self.done) / rate))} left")
        return ", ".join(parts)
