"""The verifier's greedy answers to the held-out evaluation prompts, with their hidden states.

They tell what serving should accept (walked acceptance) before anything is served, and what greedy output must be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.answers import ANSWERS, answer_prompts, read_jsonl
from tasks.extraction import store_states
from tasks.recipe import Recipe
from tasks.stage import Stage, StageContext
from tasks.states_spool import StatesSpool

SPLIT = "evaluation"


def identity(recipe: Recipe) -> dict[str, Any]:
    """Length of the answers and the layers whose states are kept."""
    return {
        "max_new_tokens": recipe.evaluation.max_new_tokens,
        "aux_hidden_state_layer_ids": recipe.drafter.aux_hidden_state_layer_ids,
    }


def build(context: StageContext) -> Mapping[str, int | float | str]:
    """Answer the evaluation prompts greedily and keep the hidden states of the answers."""
    from dspark_model.dataset import Examples, write_examples

    prompts = read_jsonl(context.parents["prompts"] / "evaluation.jsonl")
    counts = answer_prompts(
        context,
        "references",
        prompts,
        max_new_tokens=context.recipe.evaluation.max_new_tokens,
        temperature=0.0,
        seed=0,
    )
    rows = read_jsonl(context.output / ANSWERS)
    examples = context.output / f"{SPLIT}.safetensors"
    write_examples(examples, [example_row(row) for row in rows])
    extracted = store_states(context, Examples(examples), SPLIT, owner="references")
    StatesSpool.of(context, "references").discard()
    return {**counts, "extracted_again": extracted}


def example_row(row: Mapping[str, Any]) -> tuple[str, list[int], list[int]]:
    """(id, input_ids, loss_mask) of an answer: the loss is on the verifier's own tokens."""
    prompt, answer = row["prompt_token_ids"], row["token_ids"]
    return row["id"], [*prompt, *answer], [0] * len(prompt) + [1] * len(answer)


STAGE = Stage("references", 1, ("verifier", "prompts"), identity, build)
