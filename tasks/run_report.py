"""What a finished run shows in Prefect: a table of its stages and the release's summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from tasks.manifest import ArtifactRef
from tasks.recipe import Recipe
from tasks.store import ArtifactStore

SUMMARY_NAME = "summary.json"


def publish_report(
    recipe: Recipe, store: ArtifactStore, refs: Mapping[str, ArtifactRef], states: Mapping[str, str]
) -> None:
    """Create the Prefect artifacts `<recipe>-stages`, `<recipe>-<stage>` for each stage with a report, and a summary.

    A stage's report is its file `<stage>.md`; the summary is that of the last stage, if it wrote one.
    """
    key = recipe.name.replace(".", "-")
    rows = []
    for name, ref in refs.items():
        manifest = store.manifest(ref)
        rows.append(
            {
                "stage": name,
                "state": states[name],
                "fingerprint": ref.short,
                "built in": f"{manifest.seconds:.1f} s",
                "size": f"{manifest.total_bytes / 2**20:.1f} MiB",
                "made": manifest.created[:19].replace("T", " "),
                "location": ref.uri,
            }
        )
    create_table_artifact(rows, key=f"{key}-stages", description=f"Artifacts of recipe {recipe.name}")
    for name, ref in refs.items():
        if report := store.read_text(ref, f"{name}.md"):
            create_markdown_artifact(report, key=f"{key}-{name.replace('_', '-')}", description=f"Report of {name}")
    last = list(refs.values())[-1]
    summary = store.read_json(last, SUMMARY_NAME)
    if isinstance(summary, dict):
        create_markdown_artifact(summary_markdown(recipe, summary, last), key=f"{key}-summary", description="Result")


def summary_markdown(recipe: Recipe, summary: Mapping[str, Any], release: ArtifactRef) -> str:
    """The summary as a table of its single values, followed by the rest as JSON."""
    single = {key: value for key, value in summary.items() if not isinstance(value, (dict, list))}
    nested = {key: value for key, value in summary.items() if isinstance(value, (dict, list))}
    lines = [f"# {recipe.name}", "", recipe.description, "", "| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in single.items()]
    if nested:
        lines += ["", "```json", json.dumps(nested, indent=2, ensure_ascii=False), "```"]
    lines += ["", f"Release: `{release.uri}`"]
    return "\n".join(lines)
