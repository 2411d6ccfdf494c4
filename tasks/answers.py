"""Let the verifier answer conversations turn by turn; durable answer by answer.

Each answer is kept as soon as it arrives, with its hidden states in a spool where they come along. A killed run asks
only what is left: no answer is lost, none is there twice. The artifact is written in the order of the prompts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.answer_journal import Journal
from tasks.answer_report import AnswerReport, finished_counts
from tasks.answer_rows import AnswerRow, AnswerWriter
from tasks.answer_servers import AnswerServers, answer_servers
from tasks.conversation_turns import Conversation
from tasks.jsonl import read_jsonl, write_jsonl
from tasks.progress import Progress
from tasks.recipe_data import ResponseMode
from tasks.response_modes import choose_mode, mode_fields
from tasks.sampling import Sampling, request_seed
from tasks.stage import StageContext
from tasks.states_spool import StatesSpool
from tasks.vllm_client import Completion, Request, RequestRefused, generate

ERRORS = "errors.jsonl"
# What a server says of a conversation that it will not take. Other statuses (keys, limits, unknown models) are about
# the server, and a run in which they end conversations early must not pass for a good one.
REFUSED_CONTENT = frozenset({400, 413, 422})


class TooManyFailuresError(RuntimeError):
    """More conversations failed than the recipe allows."""


class PromptFileError(ValueError):
    """A prompts file that no run of the prompts stage would write."""


@dataclass(frozen=True)
class AnswerPlan:
    """How prompts are answered.

    Attributes:
        stage: whose artifact the answers become.
        prompts: JSON lines of the prompts stage.
        max_new_tokens: length limit of an answer.
        max_turns: answers per conversation.
        sampling: of every answer.
        modes: drawn by conversation.
        seed: of sampling and modes.
        want_states: keep hidden states in the spool, if the server gives them.
    """

    stage: str
    prompts: Path
    max_new_tokens: int
    max_turns: int
    sampling: Sampling
    modes: tuple[ResponseMode, ...] = ()
    seed: int = 0
    want_states: bool = True


def answer_prompts(context: StageContext, plan: AnswerPlan) -> dict[str, int | float | str]:
    """Write answer shards, errors.jsonl and report.json to the stage's output; states go to the stage's spool.

    What is written is final: after a kill, later parts of the stage continue from the same rows.

    Returns:
        Counts for the manifest.

    Raises:
        TooManyFailuresError: a larger share of conversations failed than `responses.max_failed_share`, or all did.
        PromptFileError: the prompts hold an id twice, or a row without user turn.
    """
    if (finished := finished_counts(context.output)) is not None:
        return finished
    total = check_prompt_file(plan.prompts)
    journal = Journal(context.scratch / "journal")
    asking = _Asking(context, plan, journal)
    try:
        asking.run(total)
    finally:
        journal.close()
    _check_failures(asking.failed, total, context.recipe.responses.max_failed_share)
    write_jsonl(context.output / ERRORS, read_jsonl(asking.errors))
    return _write(context, plan, journal, asking)


def check_prompt_file(path: Path) -> int:
    """Count the prompts of a file whose rows can all be asked.

    Raises:
        PromptFileError: names the line and what is wrong.
    """
    seen: set[str] = set()
    for number, row in enumerate(read_jsonl(path), start=1):
        where = f"{path} line {number}"
        for name in ("id", "subset", "messages", "source"):
            if not row.get(name):
                raise PromptFileError(f"{where}: {name!r} is missing or empty; delete the artifact and run again")
        if row["id"] in seen:
            raise PromptFileError(f"{where}: id {row['id']!r} occurs twice; delete the artifact and run again")
        if Conversation(row["messages"], 1).next_messages() is None:
            raise PromptFileError(
                f"{where}: {row['id']!r} has no user turn to answer; delete the artifact and run again"
            )
        seen.add(row["id"])
    if not seen:
        raise PromptFileError(f"{path} holds no prompts; delete the artifact and run again")
    return len(seen)


def replay(prompt: Mapping[str, Any], rows: Sequence[AnswerRow], max_turns: int) -> Conversation:
    """A prompt's conversation after the answers that it has so far."""
    conversation = Conversation(prompt["messages"], max_turns)
    for row in rows:
        conversation.take(json.loads(row.message))
    return conversation


class _Asking:
    """The conversations in flight, and what becomes of their answers."""

    def __init__(self, context: StageContext, plan: AnswerPlan, journal: Journal) -> None:
        self.context, self.plan, self.journal = context, plan, journal
        self.errors = context.scratch / ERRORS
        self.errors.write_text("")  # what failed in an earlier run is asked again
        self.failed: list[str] = []
        self.cut = 0
        self._active: dict[str, tuple[Conversation, Mapping[str, Any]]] = {}

    def run(self, total: int) -> None:
        """Ask whatever is not answered yet."""
        done = sum(self.resumed(prompt).next_messages() is None for prompt in read_jsonl(self.plan.prompts))
        if self.journal.rows:
            self.context.log.info(
                "%d answers are there already, %d of %d conversations are complete", self.journal.rows, done, total
            )
        if done == total:
            return
        found = answer_servers(self.context, want_states=self.plan.want_states)
        self.context.log.info("asking %s", ", ".join(server.url for server in found.servers))
        self._spool = StatesSpool.of(self.context, self.plan.stage) if found.with_states else None
        self.progress = Progress(self.context, total, "conversations", done=done)
        self._ask(found)

    def _ask(self, found: AnswerServers) -> None:
        generate(
            found.servers,
            self._requests(),
            concurrency=self.context.recipe.serving.concurrency,
            on_completion=self._keep,
            on_failure=self._fail,
        )

    def resumed(self, prompt: Mapping[str, Any]) -> Conversation:
        """A conversation with the answers that the journal holds already."""
        return replay(prompt, self.journal.turns(prompt["id"]), self.plan.max_turns)

    def _requests(self) -> Iterator[Request]:
        for prompt in read_jsonl(self.plan.prompts):
            conversation = self.resumed(prompt)
            if (request := self._request(prompt, conversation)) is not None:
                self._active[prompt["id"]] = conversation, prompt
                yield request

    def _request(self, prompt: Mapping[str, Any], conversation: Conversation) -> Request | None:
        messages = conversation.next_messages()
        if messages is None:
            return None
        plan, name, turn = self.plan, prompt["id"], conversation.turn
        extra = {**plan.sampling.extra, **mode_fields(choose_mode(plan.modes, plan.seed, name))}
        tools = prompt.get("tools") or None
        if tools and not (self.context.recipe.responses.tool_call_parser or self.context.recipe.serving.urls):
            extra["tool_choice"] = "none"  # vLLM refuses "auto" without a parser
        return Request(
            f"{name}/{turn}",
            messages=messages,
            max_tokens=plan.max_new_tokens,
            temperature=plan.sampling.temperature,
            seed=None if plan.sampling.is_greedy else request_seed(plan.seed, name, turn),
            with_states=self._spool is not None,
            tools=tools,
            extra=extra,
        )

    def _keep(self, request: Request, answer: Completion) -> Request | None:
        name, _, turn = request.id.rpartition("/")
        conversation, prompt = self._active[name]
        message = answer.message or {"role": "assistant", "content": ""}
        if self._spool is not None:
            assert answer.states_path is not None
            self._spool.adopt(request.id, answer.states_path, [*answer.prompt_token_ids, *answer.token_ids][:-1])
        mode = choose_mode(self.plan.modes, self.plan.seed, name).name if self.plan.modes else ""
        self.journal.append(
            AnswerRow(
                request.id, name, int(turn), prompt["subset"], prompt["source"], mode,
                answer.prompt_token_ids, answer.token_ids, answer.finish_reason, json.dumps(message),
            )
        )  # fmt: skip
        conversation.take(message)
        following = self._request(prompt, conversation)
        if following is None:
            del self._active[name]
        self.progress.add(len(answer.token_ids), rows=following is None)
        return following

    def _fail(self, request: Request, error: Exception) -> None:
        name, _, turn = request.id.rpartition("/")
        cause = f"{type(error).__name__}: {error}"
        with self.errors.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"id": name, "turn": int(turn), "error": cause}) + "\n")
        del self._active[name]
        if int(turn) and isinstance(error, RequestRefused) and error.status in REFUSED_CONTENT:
            self.cut += 1  # usually: the conversation has become longer than the server takes
        else:
            self.failed.append(cause)
            self.context.log.warning("prompt %s failed: %s", name, cause)
        self.progress.add(rows=1)


def _write(context: StageContext, plan: AnswerPlan, journal: Journal, asking: _Asking) -> dict[str, int | float | str]:
    """Write the shards in the order of the prompts, and last the report."""
    report, writer = AnswerReport(), AnswerWriter(context.output)
    for prompt in read_jsonl(plan.prompts):
        rows = journal.turns(prompt["id"])
        for row in rows:
            writer.add(row)
        if rows:
            report.add(rows, replay(prompt, rows, plan.max_turns))
    writer.close()
    for line in report.lines():
        context.log.info("%s", line)
    return report.write(context.output, len(asking.failed), asking.cut)


def _check_failures(failed: list[str], total: int, allowed: float) -> None:
    if len(failed) <= allowed * total and len(failed) < total:
        return
    # Errors that differ in numbers only are one error.
    masked = Counter(re.sub(r"\d+", "#", cause) for cause in failed)
    commonest, times = masked.most_common(1)[0]
    example = next(cause for cause in failed if re.sub(r"\d+", "#", cause) == commonest)
    raise TooManyFailuresError(
        f"{len(failed)} of {total} conversations failed, more than responses.max_failed_share={allowed:g}; the "
        f"commonest error ({times} times): {example}. Finished answers are kept: run again to ask only the rest"
    )
