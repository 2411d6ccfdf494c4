"""The verifier's own answers to the training prompts: exact token ids, never a re-tokenised text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.answers import AnswerPlan, answer_prompts
from tasks.recipe import Recipe
from tasks.response_modes import ignored_modes
from tasks.sampling import sampling_of
from tasks.server_specs import state_layer_ids, text_config
from tasks.stage import Stage, StageContext
from tasks.verifier import verifier_folder

STATE_BYTES = 2
TRUNCATED_WARNING_SHARE = 0.2


def identity(recipe: Recipe) -> dict[str, Any]:
    """How the verifier is asked; not how many failures are tolerated."""
    return recipe.responses.model_dump(mode="json", exclude={"max_failed_share"})


def build(context: StageContext) -> Mapping[str, int | float | str]:
    """Answer the training prompts with the verifier, turn by turn, served by vLLM."""
    responses = context.recipe.responses
    prompts = context.parents["prompts"] / "train.jsonl"
    sampling = sampling_of(responses, verifier_folder(context.parents["verifier"]))
    context.log.info("sampling: temperature %g, %s", sampling.temperature, dict(sampling.extra))
    if responses.modes:
        _warn_of_ignored_modes(context)
    plan = AnswerPlan(
        stage="responses",
        prompts=prompts,
        max_new_tokens=responses.max_new_tokens,
        max_turns=responses.max_turns,
        sampling=sampling,
        modes=responses.modes,
        seed=responses.seed,
        want_states=context.keep_states and _states_fit(context),
    )
    counts = answer_prompts(context, plan)
    truncated = float(counts["finished_by_length"]) / float(counts["rows"])
    if truncated > TRUNCATED_WARNING_SHARE:
        context.log.warning(
            "%.0f %% of the answers were cut off at responses.max_new_tokens=%d; raise it, or leave them out of "
            "training with examples.truncated_answers=drop",
            100 * truncated,
            responses.max_new_tokens,
        )
    return counts


def _states_fit(context: StageContext) -> bool:
    """Whether the hidden states of all answers are likely to fit into the spool."""
    config = text_config(verifier_folder(context.parents["verifier"]))
    prompts = context.manifests["prompts"].counts if "prompts" in context.manifests else {}
    tokens = float(prompts.get("prompt_tokens", 0)) + context.recipe.responses.max_new_tokens * float(
        prompts.get("prompts", 0)
    )
    estimate = tokens * len(state_layer_ids(context)) * config.get("hidden_size", 0) * STATE_BYTES
    fits = estimate <= context.recipe.serving.spool_gib * 2**30
    if not fits:
        context.log.info(
            "hidden states of all answers would take about %.0f GiB, more than serving.spool_gib=%g: "
            "they are extracted after answering",
            estimate / 2**30,
            context.recipe.serving.spool_gib,
        )
    return fits


def _warn_of_ignored_modes(context: StageContext) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(verifier_folder(context.parents["verifier"]))
    if ignored := ignored_modes(context.recipe.responses.modes, tokenizer):
        context.log.warning(
            "responses.modes %s: the verifier's chat template takes no notice of them, so they make no difference",
            ", ".join(ignored),
        )


STAGE = Stage("responses", 2, ("verifier", "prompts"), identity, build)
