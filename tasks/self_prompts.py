"""Prompts that the verifier writes itself: it continues the beginning of a user turn, as in Magpie.

An instruction-tuned model that is shown its chat template up to where a user would speak goes on as a user
would. Turn number i is sampled at temperature 1 with a seed of its own, and kept on disk at once, so that an
interrupted stage goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.prompt_rows import Candidate, PromptRow, PromptsError, Unusable
from tasks.server_specs import plain_spec
from tasks.stage import StageContext
from tasks.verifier import verifier_folder

if TYPE_CHECKING:
    from tasks.vllm_client import Completion, Request

BATCH = 256
LICENSE = "verifier-output"
# Small verifiers repeat themselves; asking for much more than this means that they have nothing else to say.
MAX_CANDIDATES_PER_PROMPT = 4
_MARK = "\u241funtil here\u241f"


def self_prompts(context: StageContext, wanted: int) -> Iterator[Candidate]:
    """Yield user turns in the order of their seeds, until many more than `wanted` were asked for.

    The server starts with the first turn that is not on disk yet.

    Raises:
        PromptsError: the chat template has no place where a user turn begins.
        ServingError: the server cannot be started or asked.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(verifier_folder(context.parents["verifier"]))
    prefix = user_prefix(tokenizer)
    most = MAX_CANDIDATES_PER_PROMPT * wanted + BATCH
    shard = context.scratch / "self-prompts.jsonl"
    for start in range(0, most, BATCH):
        indices = range(start, min(start + BATCH, most))
        turns = _read(shard)
        missing = [index for index in indices if index not in turns]
        if missing:
            _ask(context, tokenizer, prefix, missing, shard)
            turns = _read(shard)
        for index in indices:
            turn = turns.get(index)
            if turn is None:  # the request failed for good; `_ask` has logged it
                continue
            if turn["finished"] and turn["text"]:
                message: Any = {"role": "user", "content": turn["text"]}
                yield PromptRow.create("self", [message], source="self", license_name=LICENSE)
            else:
                yield Unusable("unfinished" if turn["text"] else "empty_turn", f"turn {index}", turn["text"][:300])


def user_prefix(tokenizer: Any) -> list[int]:
    """Token ids of the chat template up to the first character that a user would write.

    Raises:
        PromptsError: the template does not contain the user's text as it was given.
    """
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    before, found, _ = rendered.partition(_MARK)
    if not found or not before:
        raise PromptsError(
            "prompts.sources: 'self': the verifier's chat template has no text before a user turn, so there is nothing "
            "to continue; use another source"
        )
    ids: list[int] = tokenizer.encode(before, add_special_tokens=False)
    return ids


def _ask(context: StageContext, tokenizer: Any, prefix: list[int], indices: list[int], shard: Path) -> None:
    from tasks.vllm_client import Request, generate

    recipe = context.recipe
    server = context.servers.acquire(plain_spec(context))
    requests = [
        Request(
            id=str(index),
            prompt_token_ids=prefix,
            max_tokens=recipe.prompts.max_prompt_tokens,
            temperature=1.0,
            seed=recipe.prompts.seed * 1_000_003 + index,
        )
        for index in indices
    ]
    context.log.info("asking the verifier for user turns %d to %d", indices[0], indices[-1])
    with shard.open("a", encoding="utf-8") as stream:

        def keep(request: Request, completion: Completion) -> None:
            text = tokenizer.decode(completion.token_ids, skip_special_tokens=True).strip()
            turn = {"index": int(request.id), "text": text, "finished": completion.finish_reason == "stop"}
            stream.write(json.dumps(turn, ensure_ascii=False) + "\n")
            stream.flush()

        def give_up(request: Request, error: Exception) -> None:
            context.log.warning("no user turn %s: %s", request.id, error)

        generate(
            server,
            requests,
            concurrency=recipe.serving.concurrency,
            on_completion=keep,
            on_failure=give_up,
        )


def _read(shard: Path) -> dict[int, dict[str, Any]]:
    """Turns on disk by number; a last line that a kill cut short is left out."""
    if not shard.is_file():
        return {}
    content = shard.read_bytes()
    whole, _, rest = content.rpartition(b"\n")
    if rest:
        shard.write_bytes(whole + b"\n" if whole else b"")
    # Not splitlines(): a turn may hold U+2028, which JSON leaves as it is.
    turns = [json.loads(line) for line in whole.decode("utf-8").split("\n") if line]
    return {turn["index"]: turn for turn in turns}
