"""Let the verifier answer prompts, with its hidden states in the same request; durable row by row.

Each answer is appended to a journal as soon as its states lie in the spool, so a killed run asks only what is left:
no row is lost, none is written twice. The result is rewritten in the order of the prompts, whatever the order of
arrival.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tasks.server_specs import extract_spec
from tasks.stage import StageContext
from tasks.states_spool import StatesSpool
from tasks.vllm_client import Completion, Request, generate

ANSWERS = "responses.jsonl"
ERRORS = "errors.jsonl"


class TooManyFailuresError(RuntimeError):
    """More rows failed than the recipe allows."""


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows so that the file either is whole or does not exist."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(partial, path)


class Journal:
    """Append-only rows that survive kill -9: a torn last line is cut off when the journal is opened again."""

    def __init__(self, path: Path) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        if path.is_file():
            whole = path.read_bytes()
            whole = whole[: whole.rfind(b"\n") + 1]
            with path.open("r+b") as file:
                file.truncate(len(whole))
            self.rows = {row["id"]: row for row in map(json.loads, whole.splitlines())}
        self._file = path.open("a")

    def append(self, row: dict[str, Any]) -> None:
        """Add a row; it is handed to the operating system before this returns."""
        self.rows[row["id"]] = row
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Make the rows durable against power loss as well."""
        os.fsync(self._file.fileno())
        self._file.close()


class Progress:
    """A line every few seconds: how far, how fast, how long still."""

    def __init__(self, context: StageContext, total: int, noun: str, every_seconds: float = 10.0) -> None:
        self.log, self.total, self.noun, self.every_seconds = context.log, total, noun, every_seconds
        self.done = self.tokens = 0
        self.started = self.last = time.monotonic()

    def add(self, tokens: int) -> None:
        """Count a finished row."""
        self.done += 1
        self.tokens += tokens
        now = time.monotonic()
        if now - self.last >= self.every_seconds or self.done == self.total:
            self.last = now
            elapsed = max(now - self.started, 1e-9)
            left = (self.total - self.done) * elapsed / self.done
            self.log.info(
                "%d of %d %s, %.0f tokens/s, %.0f s left",
                self.done,
                self.total,
                self.noun,
                self.tokens / elapsed,
                left,
            )


def answer_prompts(
    context: StageContext,
    stage: str,
    prompts: list[dict[str, Any]],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> dict[str, int | float]:
    """Write `responses.jsonl` (and `errors.jsonl`) to the stage's output; states go to the stage's spool.

    What is written is final: after a kill, later parts of the stage continue from the same rows.

    Returns:
        Counts for the manifest.

    Raises:
        TooManyFailuresError: a larger share of rows failed than `responses.max_failed_share`; says the commonest error.
    """
    if (context.output / ERRORS).is_file():  # written last
        return _counts(read_jsonl(context.output / ANSWERS), len(read_jsonl(context.output / ERRORS)))
    journal = Journal(context.scratch / "journal.jsonl")
    left = [prompt for prompt in prompts if prompt["id"] not in journal.rows]
    if len(left) < len(prompts):
        context.log.info("%d of %d answers are there already", len(prompts) - len(left), len(prompts))
    requests = [
        Request(
            prompt["id"],
            messages=prompt["messages"],
            max_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed if temperature else None,
            with_states=True,
        )
        for prompt in left
    ]
    subsets = {prompt["id"]: prompt["subset"] for prompt in prompts}
    errors = _ask(context, requests, subsets, StatesSpool.of(context, stage), journal) if requests else []
    journal.close()
    rows = [journal.rows[prompt["id"]] for prompt in prompts if prompt["id"] in journal.rows]
    _check_failures(errors, len(prompts), context.recipe.responses.max_failed_share)
    write_jsonl(context.output / ANSWERS, rows)
    write_jsonl(context.output / ERRORS, errors)
    return _counts(rows, len(errors))


def _ask(
    context: StageContext,
    requests: list[Request],
    subsets: Mapping[str, str],
    spool: StatesSpool,
    journal: Journal,
) -> list[dict[str, str]]:
    """Ask the verifier; answers go to the journal once their states lie in the spool. Returns what failed for good."""
    errors: list[dict[str, str]] = []
    server = context.servers.acquire(extract_spec(context))
    progress = Progress(context, len(requests), "answers")

    def keep(request: Request, answer: Completion) -> None:
        assert answer.states_path is not None
        spool.adopt(request.id, answer.states_path, [*answer.prompt_token_ids, *answer.token_ids][:-1])
        journal.append(
            {
                "id": request.id,
                "subset": subsets[request.id],
                "prompt_token_ids": answer.prompt_token_ids,
                "token_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
            }
        )
        progress.add(len(answer.token_ids))

    def fail(request: Request, error: Exception) -> None:
        errors.append({"id": request.id, "error": f"{type(error).__name__}: {error}"})
        context.log.warning("prompt %s failed: %s", request.id, error)

    generate(
        server,
        requests,
        concurrency=context.recipe.serving.concurrency,
        on_completion=keep,
        on_failure=fail,
    )
    return errors


def _check_failures(errors: list[dict[str, str]], total: int, allowed: float) -> None:
    if len(errors) > allowed * total:
        commonest, times = Counter(error["error"] for error in errors).most_common(1)[0]
        raise TooManyFailuresError(
            f"{len(errors)} of {total} prompts failed, more than responses.max_failed_share={allowed:g}; the commonest "
            f"error ({times} times): {commonest}. Finished answers are kept: run again to ask only the rest"
        )


def _counts(rows: list[dict[str, Any]], failed: int) -> dict[str, int | float]:
    return {
        "rows": len(rows),
        "failed": failed,
        "prompt_tokens": sum(len(row["prompt_token_ids"]) for row in rows),
        "response_tokens": sum(len(row["token_ids"]) for row in rows),
        "finished_by_length": sum(row["finish_reason"] == "length" for row in rows),
    }
