"""Training rows: token ids with the loss on the verifier's own tokens, split by conversation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tasks.answers import ANSWERS, read_jsonl
from tasks.recipe import Recipe
from tasks.references import example_row
from tasks.stage import Stage, StageContext


class TooFewExamplesError(ValueError):
    """Not enough usable conversations for a training and a validation split."""


def identity(recipe: Recipe) -> dict[str, Any]:
    """The whole section."""
    return recipe.examples.model_dump()


def build(context: StageContext) -> Mapping[str, int | float | str]:
    """Turn answers into examples and hold out conversations for validation."""
    from dspark_model.dataset import write_examples

    settings = context.recipe.examples
    rows = read_jsonl(context.parents["responses"] / ANSWERS)
    usable, subsets, clipped = [], {}, 0
    for row in rows:
        name, ids, mask = example_row(row)
        clipped += len(ids) > settings.max_length
        ids, mask = ids[: settings.max_length], mask[: settings.max_length]
        if sum(mask) >= settings.min_supervised_tokens:
            usable.append((name, ids, mask))
            subsets[name] = row["subset"]
    held_out = held_out_ids([name for name, _, _ in usable], settings.validation_share, settings.seed)
    splits = {
        "train": [row for row in usable if row[0] not in held_out],
        "validation": [row for row in usable if row[0] in held_out],
    }
    if not all(splits.values()):
        raise TooFewExamplesError(
            f"{len(usable)} of {len(rows)} answers have at least examples.min_supervised_tokens="
            f"{settings.min_supervised_tokens} tokens: too few to train and validate; raise prompts.num_prompts"
        )
    for split, split_rows in splits.items():
        write_examples(context.output / f"{split}.safetensors", split_rows)
    (context.output / "subsets.json").write_text(json.dumps(subsets, indent=1) + "\n")
    return {
        **{f"{split}_documents": len(split_rows) for split, split_rows in splits.items()},
        **{
            f"{split}_supervised_tokens": sum(sum(row[2]) for row in split_rows) for split, split_rows in splits.items()
        },
        "dropped": len(rows) - len(usable),
        "clipped": clipped,
    }


def held_out_ids(conversation_ids: list[str], share: float, seed: int) -> set[str]:
    """The conversations held out: those with the smallest keyed hashes, so that adding data moves few.

    At least one, and never all.
    """
    ranked = sorted(set(conversation_ids), key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).hexdigest())
    count = min(max(1, round(share * len(ranked))), len(ranked) - 1) if ranked else 0
    return set(ranked[:count])


STAGE = Stage("examples", 1, ("responses",), identity, build)
