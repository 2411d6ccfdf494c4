"""Coverage of draft vocabularies as a table and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def markdown(report: Mapping[str, Any]) -> str:
    """The whole report: a row per size, then coverage and ceiling of the chosen size by group."""
    own = next(row for row in report["sizes"] if row["chosen"])
    proposals = report["num_speculative_tokens"]
    lines = [
        "# Coverage of the draft vocabulary",
        "",
        report["reason"] + ".",
        "",
        "| draft_vocab_size | training answers | held-out answers | evaluation answers | acceptance_length at most | "
        "lm_head, MiB read per step | GFLOP per block |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["sizes"]:
        shares = [f"{100 * row['coverage'][name]:.3f} %" for name in ("train", "validation", "evaluation")]
        mark = "**" if row["chosen"] else ""
        lines.append(
            f"| {mark}{row['draft_vocab_size']:,}{mark} | {' | '.join(shares)} "
            f"| {row['acceptance_length_ceiling']['validation']:.3f} | {row['lm_head_mib']:,.1f} "
            f"| {row['lm_head_gflop_per_block']:.3f} |"
        )
    lines += [
        "",
        f"*acceptance_length at most*: held-out answers walked as in serving, {proposals} tokens per step, by a "
        "drafter that is right about every token of its vocabulary. Answers end, so it stays below "
        f"{proposals + 1} even with the whole vocabulary. lm_head: bfloat16 weights, one drafting step.",
        "",
        f"| with {own['draft_vocab_size']:,} | tokens | coverage | acceptance_length at most |",
        "|---|---|---|---|",
    ]
    for name, share in own["coverage"].items():
        ceiling = own["acceptance_length_ceiling"][name]
        lines.append(f"| {name} | {report['tokens'][name]:,} | {100 * share:.3f} % | {ceiling:.3f} |")
    return "\n".join(lines) + "\n"


def log_lines(report: Mapping[str, Any]) -> list[str]:
    """The same in a few aligned lines: sizes, then groups of the chosen size."""
    lines = [f"{'draft_vocab_size':>16}  {'held-out':>9}  {'evaluation':>10}  {'ceiling':>7}  {'lm_head MiB':>11}"]
    for row in report["sizes"]:
        shares = (100 * row["coverage"]["validation"], 100 * row["coverage"]["evaluation"])
        lines.append(
            f"{row['draft_vocab_size']:>16,}  {shares[0]:>8.3f}%  {shares[1]:>9.3f}%  "
            f"{row['acceptance_length_ceiling']['validation']:>7.3f}  {row['lm_head_mib']:>11,.1f}"
            f"{'  <- chosen' if row['chosen'] else ''}"
        )
    own = next(row for row in report["sizes"] if row["chosen"])
    for name, share in own["coverage"].items():
        lines.append(f"{name:<36} {100 * share:>8.3f}%  {own['acceptance_length_ceiling'][name]:>7.3f}")
    return lines


def plot_coverage(report: Mapping[str, Any], path: Path) -> None:
    """Coverage lost and acceptance ceiling over the size; the chosen size is marked."""
    from tasks.plots import new_figure, save_figure

    figure, axes = new_figure()
    sizes = [row["draft_vocab_size"] for row in report["sizes"]]
    groups = {"train": "training answers", "validation": "held-out answers", "evaluation": "evaluation answers"}
    for name, label in groups.items():
        lost = [100 * (1 - row["coverage"][name]) for row in report["sizes"]]
        axes.plot(sizes, lost, "o-", label=f"{label}: lost")
    chosen = next(row["draft_vocab_size"] for row in report["sizes"] if row["chosen"])
    axes.axvline(chosen, color="gray", linestyle="--", label=f"chosen: {chosen:,}")
    axes.set(xlabel="draft_vocab_size", title="Tokens that the drafter cannot propose", ylim=(0, None))
    axes.set_ylabel("answer tokens outside the draft vocabulary, %")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size / 1024:g}k" if size % 1024 == 0 else f"{size:,}" for size in sizes], rotation=45)
    axes.minorticks_off()
    right = axes.twinx()
    ceiling = [row["acceptance_length_ceiling"]["validation"] for row in report["sizes"]]
    right.plot(sizes, ceiling, "s:", color="black", label="held-out answers: acceptance_length at most")
    right.set_ylabel("acceptance_length of a perfect drafter")
    handles = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, fontsize=8, loc="center right")
    save_figure(figure, path)
