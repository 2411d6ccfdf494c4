"""Stage `prompts`: user turns to train on, and held-out ones to evaluate on.

`train.jsonl` comes from the built-in set, from the verifier itself or from a dataset; `evaluation.jsonl`
always comes from the held-out topics of the built-in set, so that drafters of all recipes are measured
alike. `report.json` tells what the filters dropped, with samples.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.builtin_prompts import (
    SUBSETS,
    BuiltinPrompt,
    builtin_digest,
    check_disjoint,
    evaluation_prompts,
    training_prompts,
)
from tasks.dataset_prompts import dataset_prompts, hub_dataset, is_local, local_file
from tasks.prompt_filters import REASONS, CountTokens, EvaluationGuard, FilterResult, filter_prompts
from tasks.prompt_rows import Message, PromptRow, PromptsError, row_text, write_rows
from tasks.recipe import Recipe, RecipeError
from tasks.source_files import source_sha256
from tasks.stage import Stage, StageContext
from tasks.verifier import verifier_folder


def identity(recipe: Recipe) -> dict[str, Any]:
    """The prompts section, what is evaluated, and the content of every data file behind them."""
    section = recipe.prompts.model_dump(mode="json")
    dataset = recipe.prompts.dataset
    if dataset is not None and is_local(dataset):
        # The content counts, not where the file lies.
        section["dataset"] = source_sha256(local_file(dataset))
    return {
        "prompts": section,
        "prompts_per_subset": recipe.evaluation.prompts_per_subset,
        "evaluation_seed": recipe.evaluation.seed,
        "builtin_sha256": builtin_digest(),
    }


def check_prompts(recipe: Recipe) -> None:
    """Refuse, before anything is spent, more prompts than there are or a dataset file that does not exist.

    Raises:
        RecipeError: naming the field, what is available and the remedy.
    """
    section, wanted = recipe.prompts, recipe.evaluation.prompts_per_subset
    smallest = min(len(found) for found in evaluation_prompts(recipe.evaluation.seed).values())
    if wanted > smallest:
        raise PromptsError(
            f"evaluation.prompts_per_subset={wanted}: there are {smallest} held-out prompts for the smallest "
            f"subset; use at most {smallest}"
        )
    if section.dataset is not None:
        local_file(section.dataset) if is_local(section.dataset) else hub_dataset(section.dataset)
    if section.source != "builtin":
        return
    available = len(training_prompts(section.seed))
    if section.num_prompts > available:
        raise PromptsError(
            f"prompts.num_prompts={section.num_prompts}: the built-in set has {available}; "
            "lower it, or use prompts.source=dataset or self"
        )


def build(context: StageContext) -> Mapping[str, int | float | str]:
    """Write train.jsonl, evaluation.jsonl and report.json; see the module's docstring.

    Raises:
        PromptsError: too few prompts passed the filters, or training and evaluation overlap.
    """
    recipe = context.recipe
    count_tokens = _token_counter(verifier_folder(context.parents["verifier"]))
    held_out = evaluation_prompts(recipe.evaluation.seed)
    evaluation = _choose_evaluation(recipe, held_out, count_tokens)
    # All held-out prompts are avoided, also those that this recipe does not use: asking for more of them
    # later leaves the training prompts as they are.
    all_held_out = [prompt for prompts in held_out.values() for prompt in prompts]
    guard = EvaluationGuard(
        (row_text(prompt.row) for prompt in all_held_out),
        (value for prompt in all_held_out for value in prompt.values),
    )
    result = filter_prompts(
        _candidates(context),
        limit=recipe.prompts.num_prompts,
        max_tokens=recipe.prompts.max_prompt_tokens,
        count_tokens=count_tokens,
        guard=guard,
    )
    _require_enough(recipe, result)
    disjoint = check_disjoint(result.kept, all_held_out) if recipe.prompts.source == "builtin" else {}
    write_rows(context.output / "train.jsonl", result.kept)
    write_rows(context.output / "evaluation.jsonl", evaluation)
    counts = _counts(result, evaluation, disjoint)
    _write_report(context.output / "report.json", counts, result)
    context.log.info(
        "prompts from %s: %s; %d to evaluate on", recipe.prompts.source, result.describe(), len(evaluation)
    )
    return counts


def _candidates(context: StageContext) -> Iterable[PromptRow | str]:
    section = context.recipe.prompts
    if section.source == "builtin":
        return (prompt.row for prompt in training_prompts(section.seed))
    if section.source == "dataset":
        if not is_local(str(section.dataset)) and hub_dataset(str(section.dataset))[1] is None:
            context.log.warning(
                "prompts.dataset=%r is not pinned, so a later version of it would go unnoticed: "
                "write owner/name@revision",
                section.dataset,
            )
        return dataset_prompts(section)
    from tasks.self_prompts import self_prompts

    return self_prompts(context)


def _choose_evaluation(
    recipe: Recipe, held_out: Mapping[str, Sequence[BuiltinPrompt]], count_tokens: CountTokens
) -> list[PromptRow]:
    wanted = recipe.evaluation.prompts_per_subset
    chosen: list[PromptRow] = []
    for subset in SUBSETS:
        result = filter_prompts(
            (prompt.row for prompt in held_out[subset]),
            limit=wanted,
            max_tokens=recipe.prompts.max_prompt_tokens,
            count_tokens=count_tokens,
            guard=None,
        )
        if len(result.kept) < wanted:
            raise PromptsError(
                f"evaluation.prompts_per_subset={wanted}, but subset {subset} has only "
                f"{len(result.kept)} held-out prompts ({result.describe()}): lower it, "
                f"or raise prompts.max_prompt_tokens={recipe.prompts.max_prompt_tokens}"
            )
        chosen += result.kept
    return chosen


def _require_enough(recipe: Recipe, result: FilterResult) -> None:
    section = recipe.prompts
    if len(result.kept) >= section.num_prompts:
        return
    remedy = {
        "builtin": "lower it, raise prompts.max_prompt_tokens, or use prompts.source=dataset or self",
        "self": "lower it, raise prompts.max_prompt_tokens, or use another prompts.source",
        "dataset": "lower it, raise prompts.max_prompt_tokens, or name a larger dataset",
    }[section.source]
    raise PromptsError(
        f"prompts.num_prompts={section.num_prompts}, but source {section.source} has only "
        f"{len(result.kept)} after the filters ({result.describe()}): {remedy}"
    )


def _token_counter(folder: Path) -> CountTokens:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise RecipeError(f"the tokenizer in {folder} has no chat template: name an instruction-tuned verifier")

    def count(messages: Sequence[Message]) -> tuple[int, int]:
        rendered = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        return len(rendered), len(tokenizer.encode(messages[-1]["content"], add_special_tokens=False))

    return count


def _counts(
    result: FilterResult, evaluation: Sequence[PromptRow], disjoint: Mapping[str, int]
) -> dict[str, int | float | str]:
    lengths = sorted(result.lengths)
    return {
        "candidates": result.candidates,
        "prompts": len(result.kept),
        **{f"dropped_{reason}": result.dropped[reason] for reason in REASONS},
        "evaluation_prompts": len(evaluation),
        "prompt_tokens": sum(lengths),
        "median_prompt_tokens": lengths[len(lengths) // 2],
        "longest_prompt_tokens": lengths[-1],
        **disjoint,
    }


def _write_report(path: Path, counts: Mapping[str, Any], result: FilterResult) -> None:
    report = {
        "counts": dict(counts),
        "by_subset": dict(sorted(Counter(row.subset for row in result.kept).items())),
        "dropped_samples": result.samples,
    }
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


STAGE = Stage(name="prompts", format_version=1, parents=("verifier",), identity=identity, build=build)
