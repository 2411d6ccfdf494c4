"""What the training rows are like: table, report.json, examples.md and a histogram of lengths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.stage import StageContext

if TYPE_CHECKING:
    import pyarrow as pa

QUANTILES = (0.5, 0.9, 0.99, 1.0)
LENGTHS = ("prompt_tokens", "supervised_tokens", "tokens")


def write_report(context: StageContext, tables: list[pa.Table], counts: Mapping[str, Any]) -> None:
    """Write rows.parquet and the reports, and show the table in the log."""
    import pyarrow as pa
    from pyarrow import parquet

    from tasks.examples import ROWS

    table = pa.concat_tables(tables)
    parquet.write_table(table, context.output / ROWS, compression="zstd")
    groups = {name: _by(table, name) for name in ("split", "source", "subset")}
    report = {"counts": dict(counts), **groups, "histogram": {name: _histogram(table, name) for name in LENGTHS}}
    (context.output / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    text = markdown(groups, counts)
    (context.output / "examples.md").write_text(text)
    for line in text.splitlines():
        if line:
            context.log.info("%s", line)
    plot_lengths(table, context.output / "lengths.png")


def markdown(groups: Mapping[str, Mapping[str, Mapping[str, Any]]], counts: Mapping[str, Any]) -> str:
    """A table with a row per split, source and subset."""
    lines = ["| | rows | conversations | supervised tokens | median prompt | median answer | longest row |"]
    lines.append("|---|---|---|---|---|---|---|")
    for kind, rows in groups.items():
        for name, row in rows.items():
            lengths = row["lengths"]
            lines.append(
                f"| {kind} {name} | {row['rows']:,} | {row['conversations']:,} | {row['supervised_tokens']:,} "
                f"| {lengths['prompt_tokens']['0.5']} | {lengths['supervised_tokens']['0.5']} "
                f"| {lengths['tokens']['1']} |"
            )
    told = [name for name in counts if name.startswith(("dropped", "clipped"))]
    lines += ["", ", ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in told)]
    return "\n".join(lines) + "\n"


def _by(table: pa.Table, column: str) -> dict[str, dict[str, Any]]:
    import pyarrow.compute as pc

    found = {}
    for value in sorted(pc.unique(table.column(column)).to_pylist()):
        part = table.filter(pc.equal(table.column(column), value))
        found[value] = {
            "rows": len(part),
            "conversations": pc.count_distinct(part.column("conversation")).as_py(),
            "tokens": pc.sum(part.column("tokens")).as_py(),
            "supervised_tokens": pc.sum(part.column("supervised_tokens")).as_py(),
            "lengths": {name: _quantiles(part, name) for name in LENGTHS},
        }
    return found


def _quantiles(table: pa.Table, column: str) -> dict[str, int]:
    import numpy as np

    values = np.quantile(table.column(column).to_numpy(), QUANTILES, method="inverted_cdf")
    return {f"{share:g}": int(value) for share, value in zip(QUANTILES, values, strict=True)}


def _histogram(table: pa.Table, column: str) -> dict[str, int]:
    """Rows by length, in classes up to powers of two."""
    import numpy as np

    powers = np.ceil(np.log2(np.maximum(table.column(column).to_numpy(), 1))).astype(int)
    return {f"<={2**power}": int(count) for power, count in enumerate(np.bincount(powers)) if count}


def plot_lengths(table: pa.Table, path: Path) -> None:
    """Histogram of prompt, answer and row lengths."""
    import numpy as np

    from tasks.plots import new_figure, save_figure

    figure, axes = new_figure()
    longest = int(table.column("tokens").to_numpy().max())
    bins = np.linspace(0, longest, min(longest, 60) + 1)
    for name, label in zip(LENGTHS, ("prompt", "answer (supervised)", "row"), strict=True):
        values = table.column(name).to_numpy()
        axes.hist(values, bins=bins, histtype="step", linewidth=2, label=f"{label}, median {np.median(values):.0f}")
    axes.set(xlabel="tokens", ylabel="rows", title=f"Lengths of {len(table):,} training rows", xlim=(0, longest))
    axes.legend()
    save_figure(figure, path)
