"""Build one stage's artifact: a plain function, resumable, without an orchestrator."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tasks.lock import exclusive
from tasks.manifest import ArtifactRef, ManifestFields
from tasks.pipeline import StagePlan, artifact_is_whole
from tasks.recipe import Recipe
from tasks.stage import StageContext
from tasks.store import ArtifactStore

if TYPE_CHECKING:
    from tasks.vllm_server import ServerPool


def build_artifact(
    step: StagePlan,
    recipe: Recipe,
    store: ArtifactStore,
    servers: Callable[[], ServerPool],
    *,
    force: bool = False,
) -> tuple[ArtifactRef, bool]:
    """Make the artifact of a stage unless the store has it.

    The stage works in `<work>/<stage>/<fingerprint>/{output,scratch}`, which survive a kill, so that the next
    attempt continues; a lock keeps two runs from doing the same work at once.

    Args:
        step: the stage with its fingerprints.
        recipe: the validated recipe.
        store: where artifacts are.
        servers: called only if the stage really runs.
        force: make it again even if the store has it.

    Returns:
        The artifact, and whether this call made it.
    """
    name, fingerprint = step.stage.name, step.fingerprint
    log = logging.getLogger(f"dspark.{name}")
    room = store.work / name / fingerprint
    ref = store.ref(name, fingerprint)
    with exclusive(room.with_suffix(".lock"), log, f"another run builds {name} {ref.short}"):
        if not force and artifact_is_whole(store, ref):
            return ref, False
        context = StageContext(
            recipe=recipe,
            output=room / "output",
            scratch=room / "scratch",
            parents={parent: store.localise(store.ref(parent, digest)) for parent, digest in step.parents.items()},
            log=log,
            servers=servers(),
            work=store.work,
            fingerprints=step.fingerprints,
            manifests={
                ancestor: store.manifest(store.ref(ancestor, digest))
                for ancestor, digest in step.fingerprints.items()
                if ancestor != name
            },
        )
        context.output.mkdir(parents=True, exist_ok=True)
        context.scratch.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        counts = dict(step.stage.build(context))
        fields = ManifestFields(
            format_version=step.stage.format_version,
            identity=dict(step.identity),
            parents=step.parents,
            fingerprints=dict(step.fingerprints),
            recipe=recipe.name,
            counts=counts,
            seconds=round(time.monotonic() - started, 3),
        )
        store.commit(name, fingerprint, context.output, fields)
        shutil.rmtree(room, ignore_errors=True)
    shown = ", ".join(f"{key}={value}" for key, value in counts.items())
    log.info("done in %s%s", _duration(fields.seconds), f": {shown}" if shown else "")
    return ref, True


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
