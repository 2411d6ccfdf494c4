"""The verifier's own answers to the training prompts: exact token ids, never a re-tokenised text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tasks.answers import AnswerPlan, answer_prompts
from tasks.jsonl import read_jsonl
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
    counts = context.manifests["prompts"].counts
    tokens = tokens_estimate(
        read_jsonl(context.parents["prompts"] / "train.jsonl"),
        tokens_per_prompt=float(counts["prompt_tokens"]) / float(counts["prompts"]),
        max_new_tokens=context.recipe.responses.max_new_tokens,
        max_turns=context.recipe.responses.max_turns,
    )
    estimate = tokens * len(state_layer_ids(context)) * config["hidden_size"] * STATE_BYTES
    fits = estimate <= context.recipe.serving.spool_gib * 2**30
    if not fits:
        context.log.info(
            "hidden states of all answers would take about %.0f GiB, more than serving.spool_gib=%g: "
            "they are extracted after answering",
            estimate / 2**30,
            context.recipe.serving.spool_gib,
        )
    return fits


def tokens_estimate(
    prompts: Iterable[Mapping[str, Any]], *, tokens_per_prompt: float, max_new_tokens: int, max_turns: int
) -> float:
    """Tokens of all answers with all that they follow, if every answer is as long as it may be.

    Each answer is a row of its own, with the whole conversation before it: states grow with the square of the turns.
    """
    total = 0.0
    for prompt in prompts:
        messages = prompt.get("messages") or []  # a bad row is named by who asks
        turns = min(max_turns, sum(message["role"] == "user" for message in messages))
        total += turns * tokens_per_prompt + max_new_tokens * turns * (turns + 1) / 2
    return total


def _warn_of_ignored_modes(context: StageContext) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(verifier_folder(context.parents["verifier"]))
    if ignored := ignored_modes(context.recipe.responses.modes, tokenizer):
        context.log.warning(
            "responses.modes %s: the verifier's chat template takes no notice of what they say; correct or remove them",
            ", ".join(ignored),
        )


STAGE = Stage("responses", 2, ("verifier", "prompts"), identity, build)
