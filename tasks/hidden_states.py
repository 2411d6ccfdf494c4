"""The verifier's hidden states of every training and validation token, checked against a plain forward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.extraction import remove_leftovers, store_states
from tasks.recipe import Recipe
from tasks.server_specs import aux_layer_ids
from tasks.stage import Stage, StageContext
from tasks.states_check import check_states
from tasks.states_spool import StatesSpool
from tasks.verifier import verifier_folder


def identity(recipe: Recipe) -> dict[str, Any]:
    """The layers whose states are kept (the last one always is)."""
    return {"aux_hidden_state_layer_ids": recipe.drafter.aux_hidden_state_layer_ids}


def build(context: StageContext) -> Mapping[str, int | float | str]:
    """Collect the hidden states of all examples from vLLM and compare a few with transformers."""
    from dspark_model.dataset import SPLITS, Documents, Examples

    folder = context.parents["examples"]
    extracted, tokens = 0, 0
    for split in SPLITS:
        examples = Examples(folder / f"{split}.safetensors")
        extracted += store_states(context, examples, split, owner="responses")
        tokens += sum(length - 1 for length in examples.lengths)
    StatesSpool.of(context, "responses").discard()
    remove_leftovers(context.work / "states")
    documents = Documents(folder, context.output, "validation")
    errors = check_states(
        verifier_folder(context.parents["verifier"]),
        documents,
        aux_layer_ids(context),
        context.recipe.verifier.dtype,
    )
    context.log.info(
        "states agree with transformers: largest relative error %.4f over layers %s",
        max(errors.values()),
        list(errors),
    )
    size = sum(path.stat().st_size for path in Path(context.output).iterdir())
    return {
        "tokens": tokens,
        "bytes": size,
        "extracted_again": extracted,
        "largest_relative_error": round(max(errors.values()), 5),
    }


STAGE = Stage("hidden_states", 1, ("verifier", "responses", "examples"), identity, build)
