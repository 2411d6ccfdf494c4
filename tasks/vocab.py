"""The draft vocabulary: which tokens the drafter may propose, and how much of held-out text that covers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.recipe import Recipe, RecipeError
from tasks.server_specs import verifier_config
from tasks.stage import Stage, StageContext
from tasks.verifier import verifier_folder

if TYPE_CHECKING:
    import torch

    from dspark_model.dataset import Examples


def identity(recipe: Recipe) -> dict[str, Any]:
    """The whole section."""
    return recipe.vocab.model_dump()


def build(context: StageContext) -> Mapping[str, int | float | str]:
    """Choose the draft vocabulary from the training answers and measure its coverage."""
    import torch
    from safetensors.torch import save_file

    from dspark_model.dataset import Examples
    from dspark_model.vocab import choose_draft_vocab, coverage, draft_to_verifier_ids

    folder = verifier_folder(context.parents["verifier"])
    size = verifier_config(folder)["vocab_size"]
    train = Examples(context.parents["examples"] / "train.safetensors")
    validation = Examples(context.parents["examples"] / "validation.safetensors")
    counts_V = _counts(train, size)
    wanted = context.recipe.vocab.draft_vocab_size
    if wanted == "full" or wanted == size:
        t2d = torch.ones(size, dtype=torch.bool)
    elif wanted > size:
        raise RecipeError(f"vocab.draft_vocab_size={wanted} is above the verifier's {size}: lower it, or say `full`")
    else:
        t2d = choose_draft_vocab(counts_V, wanted, always=end_tokens(folder))
    d2t = draft_to_verifier_ids(t2d) - torch.arange(int(t2d.sum()))
    save_file({"t2d": t2d, "d2t": d2t}, context.output / "vocab.safetensors")
    subsets = json.loads((context.parents["examples"] / "subsets.json").read_text())
    report = {
        "draft_vocab_size": int(t2d.sum()),
        "verifier_vocab_size": size,
        "train_coverage": coverage(counts_V, t2d),
        "validation_coverage": coverage(_counts(validation, size), t2d),
        "validation_coverage_by_subset": _by_subset(validation, subsets, size, t2d),
        "distinct_train_tokens": int((counts_V > 0).sum()),
    }
    (context.output / "coverage.json").write_text(json.dumps(report, indent=2) + "\n")
    return {key: value for key, value in report.items() if not isinstance(value, dict)}


def end_tokens(folder: Path) -> tuple[int, ...]:
    """End-of-turn ids: a drafter that cannot propose them loses the last step of every answer."""
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.is_file() else {}
    ids = generation.get("eos_token_id")
    if ids is None:
        ids = verifier_config(folder).get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _counts(examples: Examples, size: int, rows: list[int] | None = None) -> torch.Tensor:
    """Occurrences [V] of each id among supervised tokens."""
    import torch

    if rows is None:
        tokens = examples.input_ids[examples.loss_mask.bool()]
    else:
        tokens = torch.cat([ids[mask] for ids, mask in map(examples.row, rows)])
    return torch.bincount(tokens.long(), minlength=size)


def _by_subset(examples: Examples, subsets: dict[str, str], size: int, t2d: torch.Tensor) -> dict[str, float]:
    from dspark_model.vocab import coverage

    rows: dict[str, list[int]] = {}
    for index, name in enumerate(examples.ids):
        rows.setdefault(subsets[name], []).append(index)
    return {subset: coverage(_counts(examples, size, chosen), t2d) for subset, chosen in sorted(rows.items())}


STAGE = Stage("vocab", 1, ("verifier", "examples"), identity, build)
