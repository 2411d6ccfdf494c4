"""Served evaluation: acceptance from vLLM's own counters, losslessness, speed, and whether training predicted them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tasks.answer_rows import read_answers
from tasks.recipe import Recipe
from tasks.references import SPLIT
from tasks.server_spec import engine_name
from tasks.server_specs import dspark_spec, plain_spec
from tasks.stage import Stage, StageContext
from tasks.verifier import verifier_folder

if TYPE_CHECKING:
    from dspark_model.metrics import Acceptance
    from tasks.served_rounds import SubsetRound

RESULT = "evaluation.json"


class ReconciliationError(RuntimeError):
    """Serving accepts otherwise than the drafter's walk over the same answers."""


def identity(recipe: Recipe) -> dict[str, Any]:
    """What is asked and how it is judged; concurrency enters because speed depends on it."""
    return {**recipe.evaluation.model_dump(), "num_speculative_tokens": recipe.num_speculative_tokens}


def build(context: StageContext) -> Mapping[str, int | float | str]:
    """Serve the drafter with vLLM and measure it on held-out prompts."""
    from tasks.served_rounds import run_rounds

    settings = context.recipe.evaluation
    walked = walk_references(context)
    drafter = context.parents["drafter"] / "drafter"
    specs = [plain_spec(context), dspark_spec(context, drafter)]
    plain, drafting = context.servers.acquire_many(specs)
    rows = list(read_answers(context.parents["references"]))
    rounds = run_rounds(
        context,
        plain,
        drafting,
        rows,
        max_new_tokens=settings.max_new_tokens,
        concurrency=settings.concurrency,
    )
    context.servers.close()
    result = {
        "engine": engine_name(specs[0].python),
        "num_speculative_tokens": context.recipe.num_speculative_tokens,
        "concurrency": settings.concurrency,
        "max_new_tokens": settings.max_new_tokens,
        **summarise(rounds, walked),
    }
    (context.output / RESULT).write_text(json.dumps(result, indent=2) + "\n")
    reconcile(result, settings.reconciliation_tolerance)
    names = ("acceptance_length", "walked_acceptance_length", "greedy_equal_share", "drafts")
    return {name: result[name] for name in names}


def walk_references(context: StageContext) -> dict[str, Acceptance]:
    """Walked acceptance of each reference answer, by id."""
    import torch

    from dspark_model.checkpoint import load_checkpoint
    from dspark_model.dataset import Documents
    from dspark_model.metrics import walk_documents
    from dspark_model.verifier import load_verifier_parts

    verifier = load_verifier_parts(verifier_folder(context.parents["verifier"]))
    drafter = load_checkpoint(context.parents["drafter"] / "drafter", verifier).eval()
    documents = Documents(context.parents["references"], context.parents["references"], SPLIT)
    # As the engine computes: bfloat16 products, float32 norms.
    low = context.recipe.verifier.dtype != "float32"
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
        walked = walk_documents(drafter, documents, context.recipe.num_speculative_tokens)
    return dict(zip(documents.examples.ids, walked, strict=True))


def summarise(rounds: Sequence[SubsetRound], walked: Mapping[str, Acceptance]) -> dict[str, Any]:
    """Every figure of the evaluation as plain data.

    Rates per subset come from the counters of that subset; overall rates are weighted by verification steps (sums of
    counters, not means of rates). The interval resamples requests, whose own counts only the walk knows: it is an
    estimate for the served length and named so.
    """
    from dspark_model.metrics import total

    positions = len(rounds[0].acceptance.accepted_per_position)
    overall = total([r.acceptance for r in rounds], positions)
    predicted = total(walked.values(), positions)
    equal = {r.subset: [r.plain.token_ids[i] == r.drafted.token_ids[i] for i in r.plain.token_ids] for r in rounds}
    requests = sum(len(flags) for flags in equal.values())
    return {
        "acceptance_length": overall.acceptance_length,
        "acceptance_length_interval_estimated_by_walk": walked_interval(list(walked.values())),
        "walked_acceptance_length": predicted.acceptance_length,
        "drafts": overall.drafts,
        "accepted": overall.accepted,
        "accepted_share_of_drafted": overall.accepted / max(1, sum(r.draft_tokens for r in rounds)),
        "requests": requests,
        "positions": {
            "survival": overall.survival,
            # Nothing reached a position: null, as JSON has no NaN.
            "conditional": [None if rate != rate else rate for rate in overall.conditional],
            "walked_survival": predicted.survival,
        },
        "greedy_equal_share": sum(map(sum, equal.values())) / requests,
        "tokens_per_second": {
            "verifier_alone": sum(r.plain.tokens for r in rounds) / sum(r.plain.seconds for r in rounds),
            "with_drafter": sum(r.drafted.tokens for r in rounds) / sum(r.drafted.seconds for r in rounds),
        },
        "subsets": {r.subset: _subset(r, equal[r.subset], walked) for r in rounds},
    }


def _subset(r: SubsetRound, equal: list[bool], walked: Mapping[str, Acceptance]) -> dict[str, Any]:
    from dspark_model.metrics import total

    predicted = total([walked[i] for i in r.plain.token_ids], len(r.acceptance.accepted_per_position))
    return {
        "acceptance_length": r.acceptance.acceptance_length,
        "walked_acceptance_length": predicted.acceptance_length,
        "survival": r.acceptance.survival,
        "drafts": r.acceptance.drafts,
        "requests": len(equal),
        "greedy_equal_share": sum(equal) / len(equal),
        "tokens_per_second_verifier_alone": r.plain.tokens / r.plain.seconds,
        "tokens_per_second_with_drafter": r.drafted.tokens / r.drafted.seconds,
    }


def walked_interval(walked: list[Acceptance], confidence: float = 0.95) -> tuple[float, float]:
    """Bootstrap interval of the acceptance length over requests (ratio of sums, 2,000 resamples, seeded).

    One request says nothing about others: the interval is then all that is possible.
    """
    import numpy as np
    from scipy.stats import bootstrap

    accepted = np.array([a.accepted for a in walked], dtype=float)
    drafts = np.array([a.drafts for a in walked], dtype=float)
    if len(walked) < 2:
        return 1.0, 1.0 + max((len(a.accepted_per_position) for a in walked), default=0)

    def length(accepted: Any, drafts: Any, axis: int = -1) -> Any:
        return 1 + accepted.sum(axis=axis) / drafts.sum(axis=axis)

    interval = bootstrap(
        (accepted, drafts), length, paired=True, vectorized=True, n_resamples=2000, confidence_level=confidence,
        method="percentile", rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return float(interval.low), float(interval.high)


def reconcile(result: Mapping[str, Any], tolerance: float) -> None:
    """Compare walked and served acceptance length.

    Raises:
        ReconciliationError: they differ by more than the tolerance; gives both, position by position.
    """
    served, predicted = result["acceptance_length"], result["walked_acceptance_length"]
    if not abs(served - predicted) <= tolerance:
        table = "\n".join(
            f"  position {i}: served {a:.3f}, walked {b:.3f}"
            for i, (a, b) in enumerate(
                zip(result["positions"]["survival"], result["positions"]["walked_survival"], strict=True)
            )
        )
        raise ReconciliationError(
            f"served acceptance length {served:.3f}, walked {predicted:.3f}: they differ by more than "
            f"evaluation.reconciliation_tolerance={tolerance:g}, so the engine runs another drafter than the one "
            f"trained (layer ids, slot layout, vocabulary maps, rope or masks)\n{table}"
        )


STAGE = Stage("evaluation", 1, ("verifier", "references", "drafter"), identity, build)
