"""The pipeline as data: its stages in order, their fingerprints, and what a run would do and why.

Nothing here starts anything or imports anything heavy.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.fingerprint import changed_fields, fingerprint
from tasks.manifest import ArtifactRef, Manifest
from tasks.recipe import Recipe
from tasks.stage import Stage
from tasks.store import ArtifactDamagedError, ArtifactMissingError, ArtifactStore

STAGE_NAMES = (
    "verifier",
    "prompts",
    "references",
    "responses",
    "examples",
    "vocab",
    "coverage",
    "hidden_states",
    "drafter",
    "evaluation",
    "release",
)
# What comes before a drafter: flows/regenerate.py.
DATA_STAGES = STAGE_NAMES[: STAGE_NAMES.index("hidden_states")]


class PipelineError(ValueError):
    """Stages that do not form a pipeline, or the name of a stage that is not in it."""


def load_stages(names: Sequence[str] = STAGE_NAMES) -> tuple[Stage, ...]:
    """Stages of the pipeline in order, each the `STAGE` of the module of its name."""
    return tuple(importlib.import_module(f"tasks.{name}").STAGE for name in names)


@dataclass(frozen=True)
class StagePlan:
    """A stage with what identifies its artifact for one recipe.

    `fingerprints` covers the stage and all its ancestors, by stage name.
    """

    stage: Stage
    identity: Mapping[str, Any]
    fingerprints: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        """Of this stage's artifact."""
        return self.fingerprints[self.stage.name]

    @property
    def parents(self) -> dict[str, str]:
        """Fingerprints of the artifacts it reads, by stage name."""
        return {name: self.fingerprints[name] for name in self.stage.parents}


@dataclass(frozen=True)
class PlanRow:
    """What a run would do with one stage, and why.

    `seconds` and `bytes` are those of the newest artifact of the stage, None if there is none.
    """

    stage: str
    fingerprint: str
    cached: bool
    reason: str
    forced: bool = False
    seconds: float | None = None
    bytes: int | None = None


def resolve(recipe: Recipe, stages: Sequence[Stage]) -> dict[str, StagePlan]:
    """Fingerprint every stage, in order; parents enter by fingerprint, so nothing has to run first.

    Raises:
        PipelineError: a name occurs twice, or a stage reads one that does not come before it.
        FingerprintError: an identity holds a value without stable serialisation.
    """
    plans: dict[str, StagePlan] = {}
    for stage in stages:
        if stage.name in plans:
            raise PipelineError(f"two stages are named {stage.name!r}")
        if missing := [name for name in stage.parents if name not in plans]:
            raise PipelineError(f"stage {stage.name!r} reads {missing}, which must come before it")
        identity = stage.identity(recipe)
        known = {name: value for parent in stage.parents for name, value in plans[parent].fingerprints.items()}
        own = fingerprint(
            stage=stage.name,
            format_version=stage.format_version,
            identity=identity,
            parents={name: known[name] for name in stage.parents},
        )
        plans[stage.name] = StagePlan(stage, identity, {**known, stage.name: own})
    return plans


def plan(recipe: Recipe, store: ArtifactStore, stages: Sequence[Stage], force: Iterable[str] = ()) -> list[PlanRow]:
    """Say for each stage whether its artifact is there or why it will be made.

    A forced stage is made again, and so are those that depend on it. A stage whose artifact exists stays
    cached even if a parent's artifact has to be made again: equal fingerprints promise equal content.

    Raises:
        PipelineError: `force` names an unknown stage.
    """
    plans = resolve(recipe, stages)
    if unknown := sorted(set(force) - plans.keys()):
        raise PipelineError(f"--force {unknown[0]}: no such stage; stages are {', '.join(plans)}")
    forced: set[str] = set()
    rows = []
    for name, step in plans.items():
        causes = [parent for parent in step.stage.parents if parent in forced]
        if name in force or causes:
            forced.add(name)
            reason: str | None = "--force" if name in force else f"depends on {causes[0]}, which is forced"
        else:
            reason = _why_missing(step, recipe, store)
        rows.append(_row(step, reason, name in forced, store))
    return rows


def artifact_is_whole(store: ArtifactStore, ref: ArtifactRef) -> bool:
    """Whether the artifact is there and its files agree with the manifest."""
    try:
        store.verify(ref)
    except (ArtifactMissingError, ArtifactDamagedError):
        return False
    return True


def _row(step: StagePlan, reason: str | None, forced: bool, store: ArtifactStore) -> PlanRow:
    name = step.stage.name
    if reason is None:
        return PlanRow(name, step.fingerprint, cached=True, reason="cached")
    latest = store.latest(name)
    return PlanRow(
        name,
        step.fingerprint,
        cached=False,
        reason=reason,
        forced=forced,
        seconds=latest.seconds if latest else None,
        bytes=latest.total_bytes if latest else None,
    )


def _why_missing(step: StagePlan, recipe: Recipe, store: ArtifactStore) -> str | None:
    """None when the artifact is there and whole."""
    try:
        store.verify(store.ref(step.stage.name, step.fingerprint))
    except ArtifactDamagedError as error:
        return str(error)
    except ArtifactMissingError:
        return _why_new(step, recipe, store)
    return None


def _why_new(step: StagePlan, recipe: Recipe, store: ArtifactStore) -> str:
    """Compare with the artifact that this recipe, or else this verifier, had last."""
    stage = step.stage
    candidates = store.manifests(stage.name)
    verifier = step.fingerprints.get("verifier")
    same_recipe = [made for made in candidates if made.recipe == recipe.name]
    same_verifier = [made for made in candidates if verifier and made.fingerprints.get("verifier") == verifier]
    last = next(iter(same_recipe or same_verifier), None)
    if last is None:
        return "never run"
    return "; ".join(_differences(step, last)) or "never run"


def _differences(step: StagePlan, last: Manifest) -> list[str]:
    lines = changed_fields(last.identity, step.identity)
    if last.format_version != step.stage.format_version:
        lines.append(f"format version changed: {last.format_version} -> {step.stage.format_version}")
    changed = [name for name, value in step.parents.items() if last.parents.get(name) != value]
    if changed:
        lines.append(f"depends on {', '.join(changed)}, which changed")
    return lines
