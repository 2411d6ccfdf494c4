"""The verifier's own answers to the training prompts: exact token ids, never a re-tokenised text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.answers import answer_prompts, read_jsonl
from tasks.recipe import Recipe
from tasks.stage import Stage, StageContext


def identity(recipe: Recipe) -> dict[str, Any]:
    """How the verifier samples."""
    return recipe.responses.model_dump(exclude={"max_failed_share"})


def build(context: StageContext) -> Mapping[str, int | float | str]:
    """Answer the training prompts with the verifier, served by vLLM."""
    responses = context.recipe.responses
    prompts = read_jsonl(context.parents["prompts"] / "train.jsonl")
    return answer_prompts(
        context,
        "responses",
        prompts,
        max_new_tokens=responses.max_new_tokens,
        temperature=responses.temperature,
        seed=responses.seed,
    )


STAGE = Stage("responses", 1, ("verifier", "prompts"), identity, build)
