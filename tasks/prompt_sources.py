"""The sources of a recipe as streams of candidates, and how they are mixed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tasks.builtin_prompts import training_prompts
from tasks.conversation_layouts import COLUMNS, UnusableError, is_request_log, known_columns, read_conversation
from tasks.prompt_files import Record, content_identity, list_files, shuffled_records
from tasks.prompt_filters import SUPERSEDED, FilterResult, Filters
from tasks.prompt_rows import Candidate, PromptRow, PromptsError, Unusable, row_text
from tasks.recipe_data import PromptSource, PromptsSection

# Records whose form decides whether a source has a conversation at all.
FIRST_RECORDS = 20


@dataclass
class Stream:
    """A source while it is read.

    Attributes:
        source: as in the recipe.
        candidates: what it yields, in seeded order.
        result: what became of them.
        dry: whether it has no more.
    """

    source: PromptSource
    candidates: Iterator[Candidate]
    result: FilterResult = field(default_factory=FilterResult)
    dry: bool = False


def source_identity(source: PromptSource) -> dict[str, Any]:
    """What decides a source's rows: content, never place.

    Raises:
        PromptsError: it cannot be found.
    """
    facts = source.model_dump(mode="json", exclude={"streaming"} if source.kind != "hub" else None)
    if source.kind == "file":
        return {**facts, "source": [content_identity(path) for path in list_files(source)]}
    if source.kind == "hub":
        from tasks.hub_prompts import commit_of, preset_of

        preset = preset_of(source)
        return {**facts, "source": preset.repo_id, "split": preset.split, "revision": commit_of(source)}
    return facts


def source_names(sources: tuple[PromptSource, ...]) -> list[str]:
    """Short names for reports, one per source, without places on this machine; equal ones are numbered."""
    names: list[str] = []
    for source in sources:
        name = source.source.rsplit("/", 1)[-1]
        taken = sum(other == name or other.startswith(f"{name}#") for other in names)
        names.append(f"{name}#{taken + 1}" if taken else name)
    return names


def open_stream(
    source: PromptSource,
    name: str,
    section: PromptsSection,
    scratch: Path,
    self_prompts: Callable[[int], Iterator[Candidate]],
) -> Stream:
    """Open a source.

    Args:
        source: of the recipe.
        name: of `source_names`.
        section: the recipe's.
        scratch: for copies of remote and compressed files.
        self_prompts: gives the verifier's own user turns, when told how many are wanted.

    Raises:
        PromptsError: it cannot be read, is empty, or has no column with conversations.
    """
    if source.kind == "builtin":
        return Stream(source, (prompt.row for prompt in training_prompts(section.seed)))
    if source.kind == "self":
        wanted = section.num_prompts
        assert wanted != "all"  # check_prompts refuses it
        weights = sum(other.weight for other in section.sources)
        return Stream(source, self_prompts(max(2, round(wanted * source.weight / weights))))
    if source.kind == "file":
        paths = list_files(source)
        records, license_name = partial(shuffled_records, paths, section.seed, scratch), source.license or "unknown"
        origin = name
    else:
        from tasks.hub_prompts import commit_of, hub_records, license_of, preset_of

        records, license_name = partial(hub_records, source, section.seed), license_of(source)
        origin = f"{preset_of(source).repo_id}@{commit_of(source)}"
    result = FilterResult()
    create = partial(PromptRow.create, name, source=origin, license_name=license_name)
    return Stream(source, _rows(source, records, create, result), result)


def _rows(
    source: PromptSource,
    records: Callable[[], Iterator[tuple[str, Record]]],
    create: Callable[..., PromptRow],
    result: FilterResult,
) -> Iterator[Candidate]:
    first = [record for _, record in islice(records(), FIRST_RECORDS)]
    _check_columns(source, first)
    superseded: set[str] = set()
    if any(is_request_log(record) for record in first if not isinstance(record, Unusable)):
        superseded = _beginnings(source, records())
    seen_ids: set[int] = set()
    for where, record in records():
        if isinstance(record, Unusable):
            yield Unusable(record.reason, where, record.text)
            continue
        if (own := record.get("id")) is not None:
            result.repeated_ids += hash(own) in seen_ids
            seen_ids.add(hash(own))
        try:
            messages, tools = read_conversation(record, source.column)
        except UnusableError as error:
            yield Unusable(error.reason, where, str(dict(record))[:300])
            continue
        row = create(messages, tools=tools)
        if superseded and _user_turns(messages)[-1] in superseded:
            yield Unusable(SUPERSEDED, where, row_text(row))
        else:
            yield row


def _beginnings(source: PromptSource, records: Iterator[tuple[str, Record]]) -> set[str]:
    """Digests of what users had said before the last turn of each conversation.

    A service that logs requests logs a conversation once per turn, each time whole: only the longest is answered.
    """
    found: set[str] = set()
    for _, record in records:
        with contextlib.suppress(UnusableError):
            if not isinstance(record, Unusable):
                found.update(_user_turns(read_conversation(record, source.column)[0])[:-1])
    return found


def _user_turns(messages: list[dict[str, Any]]) -> list[str]:
    """A digest after each turn that is not the assistant's, of all such turns so far."""
    digest, found = hashlib.blake2b(digest_size=12), []
    for message in messages:
        if message["role"] in ("system", "user"):
            digest.update(json.dumps([message["role"], message["content"]]).encode())
        if message["role"] == "user":
            found.append(digest.hexdigest())
    return found


def _check_columns(source: PromptSource, records: list[Record]) -> None:
    if not records:
        raise PromptsError(f"prompts.sources: {source.source!r} holds no records: name another file or data set")
    usable = [record for record in records if not isinstance(record, Unusable)]
    fits = [source.column in record if source.column else known_columns(record) for record in usable]
    if usable and not any(fits):
        found = ", ".join(sorted({str(name) for record in usable for name in record}))
        expected = repr(source.column) if source.column else f"any of {', '.join(COLUMNS)} or of a request log's body"
        raise PromptsError(
            f"prompts.sources: {source.source!r} has no column {expected}; it has {found}. "
            "Name the one that holds the conversation as `column` of the source"
        )


def mix(streams: list[Stream], filters: Filters, limit: int | None, log: logging.Logger) -> Iterator[PromptRow]:
    """Yield prompts that pass, so that any beginning of them follows the weights; stops at `limit`.

    The next prompt comes from the source that is furthest behind its share (Webster's rule). A source that runs dry
    leaves its share to the others.
    """
    total = 0
    while total != limit and (live := [stream for stream in streams if not stream.dry]):
        stream = min(live, key=lambda one: (one.result.kept + 0.5) / one.source.weight)
        for candidate in stream.candidates:
            if filters.passes(candidate, stream.result, alike=stream.source.kind == "builtin"):
                assert isinstance(candidate, PromptRow)
                total += 1
                yield candidate
                break
        else:
            stream.dry = True
            if limit is not None and len(streams) > 1:
                log.warning(
                    "source %s has no more prompts after %d: the others fill its share",
                    stream.source.source,
                    stream.result.kept,
                )
