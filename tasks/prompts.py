"""Stage `prompts`: user turns to train on, and held-out ones to evaluate on.

`train.jsonl` is mixed from the recipe's sources; `evaluation.jsonl` always comes from the held-out topics of the
built-in set, so that drafters of all recipes are measured alike. `report.json` and `prompts.md` tell what the filters
dropped, with samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
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
from tasks.prompt_filters import CountTokens, EvaluationGuard, FilterResult, Filters, Limits, token_counter
from tasks.prompt_report import write_report
from tasks.prompt_rows import PromptRow, PromptsError, row_text, write_rows
from tasks.prompt_sources import Stream, mix, open_stream, source_identity, source_names
from tasks.recipe import Recipe, RecipeError
from tasks.stage import Stage, StageContext
from tasks.verifier import verifier_folder

# Decide whether a run goes on, not what it holds.
_PATIENCE = {"min_prompts", "max_unusable_share"}


def identity(recipe: Recipe) -> dict[str, Any]:
    """The prompts section, what is evaluated, and the content of every data file behind them."""
    return {
        "prompts": recipe.prompts.model_dump(mode="json", exclude={"sources", *_PATIENCE}),
        "sources": [source_identity(source) for source in recipe.prompts.sources],
        "prompts_per_subset": recipe.evaluation.prompts_per_subset,
        "evaluation_seed": recipe.evaluation.seed,
        "builtin_sha256": builtin_digest(),
    }


def check_prompts(recipe: Recipe) -> None:
    """Refuse, before anything is spent, more prompts than there are, files that do not exist and unknown languages.

    Raises:
        RecipeError: naming the field, what is available and the remedy.
    """
    from tasks.prompt_language import check_languages

    section, wanted = recipe.prompts, recipe.evaluation.prompts_per_subset
    smallest = min(len(found) for found in evaluation_prompts(recipe.evaluation.seed).values())
    if wanted > smallest:
        raise PromptsError(
            f"evaluation.prompts_per_subset={wanted}: there are {smallest} held-out prompts for the smallest "
            f"subset; use at most {smallest}"
        )
    if section.languages:
        check_languages(section.languages)
    kinds = [source.kind for source in section.sources]
    if "self" in kinds and section.num_prompts == "all":
        raise PromptsError("prompts.num_prompts='all' with the source 'self', which has no end: give a number")
    for source in section.sources:
        source_identity(source)
    if kinds == ["builtin"] and section.num_prompts != "all":
        available = len(training_prompts(section.seed))
        if section.num_prompts > available:
            raise PromptsError(
                f"prompts.num_prompts={section.num_prompts}: the built-in set has {available}; lower it, or add a "
                "source to prompts.sources, such as `self`"
            )


def build(context: StageContext) -> Mapping[str, int | float | str]:
    """Write train.jsonl, evaluation.jsonl and the reports; see the module's docstring.

    Raises:
        PromptsError: too few prompts passed the filters, or training and evaluation overlap.
    """
    recipe, section = context.recipe, context.recipe.prompts
    count_tokens = _token_counter(verifier_folder(context.parents["verifier"]))
    held_out = evaluation_prompts(recipe.evaluation.seed)
    evaluation = _choose_evaluation(recipe, held_out, count_tokens)
    # All held-out prompts are avoided, also those that this recipe does not use: asking for more of them
    # later leaves the training prompts as they are.
    all_held_out = [prompt for prompts in held_out.values() for prompt in prompts]
    guard = EvaluationGuard(
        ((prompt.row.subset, row_text(prompt.row), prompt.values) for prompt in all_held_out),
        section.decontamination_words,
    )
    limits = Limits(
        section.min_prompt_tokens, section.max_prompt_tokens, section.languages, section.near_duplicate_similarity
    )
    streams = _open_streams(context)
    limit = None if section.num_prompts == "all" else section.num_prompts
    rows = mix(list(streams.values()), Filters(limits, count_tokens, guard), limit, context.log)
    write_rows(context.output / "train.jsonl", rows)
    _check_results(context, streams)
    builtin = _builtin_rows(context.output / "train.jsonl")
    disjoint = check_disjoint(builtin, all_held_out) if builtin else {}
    write_rows(context.output / "evaluation.jsonl", evaluation)
    return write_report(context, streams, len(evaluation), disjoint)


def _open_streams(context: StageContext) -> dict[str, Stream]:
    from tasks.self_prompts import self_prompts

    section = context.recipe.prompts
    names = source_names(section.sources)
    return {
        name: open_stream(source, name, section, context.scratch, partial(self_prompts, context))
        for name, source in zip(names, section.sources, strict=True)
    }


def _builtin_rows(path: Path) -> Sequence[PromptRow]:
    from tasks.jsonl import read_jsonl

    return [
        PromptRow(**{**row, "messages": tuple(row["messages"])})
        for row in read_jsonl(path)
        if row["source"] == "builtin"
    ]


def _choose_evaluation(
    recipe: Recipe, held_out: Mapping[str, Sequence[BuiltinPrompt]], count_tokens: CountTokens
) -> list[PromptRow]:
    wanted = recipe.evaluation.prompts_per_subset
    limits = Limits(min_prompt_tokens=1, max_prompt_tokens=recipe.prompts.max_prompt_tokens)
    chosen: list[PromptRow] = []
    for subset in SUBSETS:
        filters, result = Filters(limits, count_tokens, guard=None), FilterResult()
        for prompt in held_out[subset]:
            if result.kept == wanted:
                break
            if filters.passes(prompt.row, result):
                chosen.append(prompt.row)
        if result.kept < wanted:
            raise PromptsError(
                f"evaluation.prompts_per_subset={wanted}, but subset {subset} has only "
                f"{result.kept} held-out prompts ({result.describe()}): lower it, "
                f"or raise prompts.max_prompt_tokens={recipe.prompts.max_prompt_tokens}"
            )
    return chosen


def _check_results(context: StageContext, streams: Mapping[str, Stream]) -> None:
    """Raise when a source is mostly unusable, or when too few prompts are left over all."""
    section = context.recipe.prompts
    results = {name: stream.result for name, stream in streams.items()}
    for name, result in results.items():
        unusable = result.dropped["unusable"]
        is_file = streams[name].source.kind in ("file", "hub")  # a verifier may well leave its own turns unfinished
        if is_file and unusable > section.max_unusable_share * result.candidates:
            commonest, times = result.unusable.most_common(1)[0]
            first = "; ".join(text[:120] for text in result.samples["unusable"][:3])
            raise PromptsError(
                f"prompts.sources: {unusable} of {result.candidates} records of {name} hold no usable conversation, "
                f"more than prompts.max_unusable_share={section.max_unusable_share:g}; the commonest fault "
                f"({times} times): {commonest}. First: {first}. Correct the file, name its `column`, or raise the share"
            )
        if unusable:
            context.log.warning(
                "%d records of %s hold no usable conversation and are left out: %s; first: %s",
                unusable,
                name,
                ", ".join(f"{number} {reason}" for reason, number in result.unusable.most_common()),
                result.samples["unusable"][0][:120],
            )
        if result.repeated_ids:
            context.log.warning(
                "%d records of %s repeat the `id` of another one; ids do not matter here, equal content does",
                result.repeated_ids,
                name,
            )
    kept = sum(result.kept for result in results.values())
    told = "; ".join(f"{name}: {result.describe()}" for name, result in results.items())
    if kept < section.fewest:
        raise PromptsError(
            f"prompts.num_prompts={section.num_prompts}, but only {kept} prompts are left after the filters, fewer "
            f"than {section.fewest} (prompts.min_prompts, by default half). {told}. Lower it, raise "
            f"prompts.max_prompt_tokens={section.max_prompt_tokens}, or add a source"
        )
    if section.num_prompts != "all" and kept < section.num_prompts:
        context.log.warning("only %d of prompts.num_prompts=%d prompts were found", kept, section.num_prompts)


def _token_counter(folder: Path) -> CountTokens:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise RecipeError(f"the tokenizer in {folder} has no chat template: name an instruction-tuned verifier")
    return token_counter(tokenizer)


STAGE = Stage(name="prompts", format_version=2, parents=("verifier",), identity=identity, build=build)
