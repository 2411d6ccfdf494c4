"""What became of every source's records: report.json for machines, prompts.md and the log for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tasks.prompt_filters import REASONS, FilterResult
from tasks.prompt_sources import Stream
from tasks.stage import StageContext


def write_report(
    context: StageContext, streams: Mapping[str, Stream], evaluation: int, disjoint: Mapping[str, int]
) -> dict[str, int | float | str]:
    """Write both files and log a table; returns the manifest's counts."""
    results = {name: stream.result for name, stream in streams.items()}
    counts: dict[str, int | float | str] = {
        "candidates": sum(result.candidates for result in results.values()),
        "prompts": sum(result.kept for result in results.values()),
        **{f"dropped_{reason}": sum(result.dropped[reason] for result in results.values()) for reason in REASONS},
        "evaluation_prompts": evaluation,
        "prompt_tokens": sum(result.tokens for result in results.values()),
        **disjoint,
        # For the model card, which sees manifests only.
        "sources": "; ".join(f"{name} ({result.kept:,}, {_licenses(result)})" for name, result in results.items()),
    }
    report = {"counts": counts, "sources": {name: _facts(name, stream) for name, stream in streams.items()}}
    (context.output / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=True) + "\n")
    text = markdown(results)
    (context.output / "prompts.md").write_text(text)
    for line in text.splitlines():
        context.log.info("%s", line)
    return counts


def _licenses(result: FilterResult) -> str:
    return ", ".join(result.licenses) or "none kept"


def _facts(name: str, stream: Stream) -> dict[str, Any]:
    result = stream.result
    return {
        "weight": stream.source.weight,
        "licenses": dict(result.licenses.most_common()),
        "candidates": result.candidates,
        "kept": result.kept,
        "prompt_tokens": result.tokens,
        "ran_dry": stream.dry,
        "dropped": dict(result.dropped),
        "unusable": dict(result.unusable.most_common()),
        "evaluation_overlap_by_subset": dict(result.overlaps.most_common()),
        "repeated_ids": result.repeated_ids,
        "dropped_samples": result.samples,
    }


def markdown(results: Mapping[str, FilterResult]) -> str:
    """A table with a row per source; only reasons that occurred have a column."""
    used = [reason for reason in REASONS if any(result.dropped[reason] for result in results.values())]
    lines = ["| source | records read | kept | prompt tokens | " + "".join(f"{reason} | " for reason in used)]
    lines[0] = lines[0].rstrip()
    lines.append("|---" * (4 + len(used)) + "|")
    for name, result in results.items():
        cells = [name, f"{result.candidates:,}", f"{result.kept:,}", f"{result.tokens:,}"]
        cells += [f"{result.dropped[reason]:,}" for reason in used]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
