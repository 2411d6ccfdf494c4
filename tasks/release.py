"""What is published: the checkpoint, its model card, plots, and `summary.json` for machines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tasks.evaluation import RESULT
from tasks.jsonl import read_jsonl
from tasks.provenance import software_versions
from tasks.recipe import HubVerifier, Recipe, WheelVerifier
from tasks.server_spec import shell_command
from tasks.server_specs import plain_spec
from tasks.stage import Stage, StageContext
from tasks.summary_text import summary_text
from tasks.verifier import verifier_folder

TEMPLATES = Path(__file__).with_name("templates")
SUMMARY = "summary.json"
SERVE_PORT = 8000


def identity(recipe: Recipe) -> dict[str, Any]:
    """The release section and the names that the card shows."""
    return {**recipe.release.model_dump(), "name": recipe.name, "description": recipe.description}


def build(context: StageContext) -> Mapping[str, int | float | str]:
    """Assemble the release folder."""
    from tasks.plots import plot_acceptance, plot_training

    evaluation = json.loads((context.parents["evaluation"] / RESULT).read_text())
    drafter = context.output / "drafter"
    shutil.copytree(context.parents["drafter"] / "drafter", drafter, dirs_exist_ok=True)
    point_at_verifier(drafter, context)
    plot_acceptance(evaluation, context.output / "plots" / "acceptance.png")
    plot_training(
        list(read_jsonl(context.parents["drafter"] / "history.jsonl")), context.output / "plots" / "training.png"
    )
    (context.output / "README.md").write_text(model_card(context, evaluation))
    recipe = context.recipe.model_dump(mode="json")
    (context.output / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    summary = {
        "recipe": context.recipe.name,
        "recipe_fingerprint": context.fingerprints["release"],
        **evaluation,
        "seconds_by_stage": {name: manifest.seconds for name, manifest in context.manifests.items()},
        "serve_command": serve_command(context),
    }
    (context.output / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
    (context.output / "summary.txt").write_text(summary_text(summary) + "\n")
    return {"acceptance_length": evaluation["acceptance_length"]}


def point_at_verifier(drafter: Path, context: StageContext) -> None:
    """Write where the verifier is, and how many tokens to propose, into the checkpoint: `vllm serve <drafter>` obeys.

    A hub id where there is one, else an absolute folder of this machine (vLLM takes nothing else).
    """
    path = drafter / "config.json"
    config = json.loads(path.read_text())
    verifier = context.recipe.verifier
    name = verifier.repo_id if isinstance(verifier, HubVerifier) else str(_folder(context))
    config["speculators_config"]["verifier"]["name_or_path"] = name
    # What was measured, which may be fewer than a block proposes.
    method = config["speculators_config"]["proposal_methods"][0]
    method["speculative_tokens"] = context.recipe.num_speculative_tokens
    path.write_text(json.dumps(config, indent=2) + "\n")


def verifier_name(recipe: Recipe) -> str:
    """The verifier as people know it."""
    verifier = recipe.verifier
    if isinstance(verifier, HubVerifier):
        return verifier.repo_id
    if isinstance(verifier, WheelVerifier):
        return f"{Path(verifier.file).stem} ({verifier.distribution})"
    return verifier.path.name


def serve_command(context: StageContext) -> str:
    """How to serve the release on this machine's engine, from its folder.

    The drafter's config names its verifier and how many tokens to propose, so the drafter is the model to serve.
    """
    spec = replace(plain_spec(context), model=Path("drafter"))
    return shell_command(spec, SERVE_PORT)


def model_card(context: StageContext, evaluation: Mapping[str, Any]) -> str:
    """README.md of the release, every figure from an artifact."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True)
    recipe = context.recipe
    return environment.get_template("model_card.md.j2").render(
        title=recipe.release.title or f"{recipe.name} DSpark drafter",
        license=recipe.release.license,
        verifier_name=verifier_name(recipe),
        # The hub refuses a card whose base_model is no hub id.
        base_model=recipe.verifier.repo_id if isinstance(recipe.verifier, HubVerifier) else None,
        evaluation=evaluation,
        config=json.loads((context.output / "drafter" / "config.json").read_text()),
        counts={name: manifest.counts for name, manifest in context.manifests.items()},
        recipe=recipe,
        fingerprint=context.fingerprints["release"],
        versions=software_versions(),
        serve_command=serve_command(context),
    )


def _folder(context: StageContext) -> Path:
    return verifier_folder(context.parents["verifier"]).resolve()


STAGE = Stage("release", 1, ("verifier", "drafter", "evaluation"), identity, build)
