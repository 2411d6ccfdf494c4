"""The verifier's greedy answers to the held-out evaluation prompts, with their hidden states.

They tell what serving should accept (walked acceptance) before anything is served, and what greedy output must be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.answer_rows import read_answers
from tasks.answers import AnswerPlan, answer_prompts
from tasks.example_rows import example_row
from tasks.extraction import store_states
from tasks.recipe import Recipe
from tasks.sampling import GREEDY
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

    plan = AnswerPlan(
        stage="references",
        prompts=context.parents["prompts"] / "evaluation.jsonl",
        max_new_tokens=context.recipe.evaluation.max_new_tokens,
        max_turns=1,
        sampling=GREEDY,
    )
    counts = answer_prompts(context, plan)
    examples = context.output / f"{SPLIT}.safetensors"
    write_examples(examples, [example_row(row) for row in read_answers(context.output)])
    extracted = store_states(context, Examples(examples), SPLIT, owner="references")
    StatesSpool.of(context, "references").discard()
    return {**counts, "extracted_again": extracted}


STAGE = Stage("references", 2, ("verifier", "prompts"), identity, build)
