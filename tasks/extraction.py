"""Bring documents' hidden states into an artifact: from the spool of their answers, else from a server."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.progress import Progress
from tasks.server_specs import extract_spec, state_layer_ids
from tasks.stage import StageContext
from tasks.states_file import read_states
from tasks.states_spool import StatesSpool
from tasks.vllm_client import Completion, Request, generate

if TYPE_CHECKING:
    import torch

    from dspark_model.dataset import Examples

# Documents asked of the server at a time: bounds the files on disk and what a kill can lose.
BATCH = 128
# An answer's states are read right after it arrives.
LEFTOVER_SECONDS = 600.0


class ExtractionError(RuntimeError):
    """The server could not give a document's states."""


def store_states(context: StageContext, examples: Examples, split: str, owner: str) -> int:
    """Write the states of all documents of a split to the stage's output, in shards; continues where a kill left it.

    A document of T tokens gets the states of its first T - 1 tokens: the last token's state is never needed.

    Args:
        context: of the stage being built.
        examples: the documents.
        split: name that the shards carry.
        owner: stage whose answers the documents are made of.

    Returns:
        How many documents were not in the spool and had to be extracted (again).

    Raises:
        ExtractionError: the server refused a document.
    """
    from dspark_model.dataset import StatesWriter

    writer = StatesWriter(context.output, split, documents_per_shard=BATCH)
    spool = StatesSpool.of(context, owner)
    progress = Progress(context, len(examples), f"documents with states, {split}", done=writer.next_document)
    extracted = 0
    for first in range(writer.next_document, len(examples), BATCH):
        batch = range(first, min(first + BATCH, len(examples)))
        ids = {index: examples.row(index)[0][:-1].tolist() for index in batch}
        states = {index: spool.read(examples.ids[index], ids[index]) for index in batch}
        missing = [index for index in batch if states[index] is None]
        if missing:
            context.log.info("%d documents to extract", len(missing))
            states.update(_extract(context, {index: ids[index] for index in missing}))
        extracted += len(missing)
        for index in batch:
            states_TLD, token_ids_T = states[index], examples.row(index)[0][:-1]
            assert states_TLD is not None
            writer.add(states_TLD[:, :-1].flatten(1), states_TLD[:, -1].contiguous(), token_ids_T)
            progress.add(len(token_ids_T))
        writer.flush()
    return extracted


def _extract(context: StageContext, documents: dict[int, list[int]]) -> dict[int, torch.Tensor]:
    """States [tokens, layers, hidden] of token ids, by a prefill on an extracting server."""
    num_states = len(state_layer_ids(context))
    found: dict[int, torch.Tensor] = {}

    def keep(request: Request, answer: Completion) -> None:
        assert answer.states_path is not None
        index = int(request.id)
        # One token has to be generated; its prompt is all that the states cover.
        states, _ = read_states(answer.states_path, documents[index], num_states=num_states, delete=True)
        found[index] = states

    def fail(request: Request, error: Exception) -> None:
        raise ExtractionError(f"hidden states of document {request.id} failed: {error}") from error

    server = context.servers.acquire(extract_spec(context))
    requests = (
        Request(str(index), prompt_token_ids=ids, max_tokens=1, with_states=True) for index, ids in documents.items()
    )
    generate(server, requests, concurrency=context.recipe.serving.concurrency, on_completion=keep, on_failure=fail)
    return found


def remove_leftovers(folder: Path) -> None:
    """Delete state files of requests that nobody waits for any more (after a kill); other runs' are younger."""
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > LEFTOVER_SECONDS:
                path.unlink()
