"""Pictures: acceptance by position, how training went, and the canvas of all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot_acceptance(evaluation: Mapping[str, Any], path: Path) -> None:
    """Served survival per position, each subset a line, the overall bold, the walk's prediction as markers."""
    figure, axes = new_figure()
    positions = range(1, evaluation["num_speculative_tokens"] + 1)
    for name, row in evaluation["subsets"].items():
        label = f"{name} ({row['acceptance_length']:.2f})"
        axes.plot(positions, row["survival"], linewidth=1, alpha=0.7, label=label)
    overall = f"all ({evaluation['acceptance_length']:.2f})"
    axes.plot(positions, evaluation["positions"]["survival"], color="black", linewidth=2.5, label=overall)
    axes.plot(
        positions,
        evaluation["positions"]["walked_survival"],
        "x",
        color="black",
        markersize=8,
        label="predicted by the walk",
    )
    axes.set(
        xlabel="drafted token in the block",
        ylabel="share of steps that accepted it",
        title="Acceptance by position, served",
        xticks=list(positions),
        ylim=(0, None),
    )
    axes.legend(title="subset (acceptance_length)", fontsize=8)
    save_figure(figure, path)


def plot_training(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Loss per step (smoothed) and walked acceptance length at each validation."""
    figure, axes = new_figure()
    steps = [entry for entry in history if "loss" in entry]
    walks = [entry for entry in history if "walked_acceptance_length" in entry]
    axes.plot([e["step"] for e in steps], _smooth([e["loss"] for e in steps]), color="tab:blue")
    axes.set(xlabel="step", title="Training")
    axes.set_ylabel("loss (smoothed, log scale)", color="tab:blue")
    axes.set_yscale("log")
    right = axes.twinx()
    right.plot([e["step"] for e in walks], [e["walked_acceptance_length"] for e in walks], "o-", color="tab:orange")
    right.set_ylabel("walked acceptance length, held-out conversations", color="tab:orange")
    save_figure(figure, path)


def _smooth(values: Sequence[float], factor: float = 0.95) -> list[float]:
    """Exponential moving average, corrected for its start."""
    smoothed, average, weight = [], 0.0, 0.0
    for value in values:
        average = factor * average + (1 - factor) * value
        weight = factor * weight + (1 - factor)
        smoothed.append(average / weight)
    return smoothed


def new_figure() -> tuple[Any, Any]:
    """A figure and its axes, without a screen."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(8, 5), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a PNG and forget the figure."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
