"""Build one stage's artifact: a plain function, resumable, without an orchestrator."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
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
    progress: Callable[[str, float], None] = lambda text, share: None,
    keep_states: bool = True,
) -> tuple[ArtifactRef, bool]:
    """Make the artifact of a stage unless the store has it.

    The stage works in `<work>/<stage>/<fingerprint>/{output,scratch}`, which survive a kill, so that the next
    attempt continues; a lock (and, on S3, a lease) keeps two runs from doing the same work at once.

    Args:
        step: the stage with its fingerprints.
        recipe: the validated recipe.
        store: where artifacts are.
        servers: called only if the stage really runs.
        force: make it again even if the store has it.
        progress: see StageContext.
        keep_states: see StageContext.

    Returns:
        The artifact, and whether this call made it.
    """
    name, fingerprint = step.stage.name, step.fingerprint
    log = logging.getLogger(f"dspark.{name}")
    room = store.work / name / fingerprint
    ref = store.ref(name, fingerprint)
    with (
        exclusive(room.with_suffix(".lock"), log, f"another run builds {name} {ref.short}"),
        store.lease(ref, log) as lease,
    ):
        if not force and artifact_is_whole(store, ref):
            return ref, False
        context = _context(step, recipe, store, room, log, servers(), progress, keep_states)
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
        made = not (lease is not None and lease.lost and artifact_is_whole(store, ref))
        if made:
            store.commit(name, fingerprint, context.output, fields)
        shutil.rmtree(room, ignore_errors=True)
    shown = ", ".join(f"{key}={value}" for key, value in counts.items())
    log.info("done in %s%s", _duration(fields.seconds), f": {shown}" if shown else "")
    return ref, made


def _context(
    step: StagePlan,
    recipe: Recipe,
    store: ArtifactStore,
    room: Path,
    log: logging.Logger,
    servers: ServerPool,
    progress: Callable[[str, float], None],
    keep_states: bool,
) -> StageContext:
    """What the stage may touch; its folders are those of an earlier attempt, if there was one."""
    ancestors = {name: digest for name, digest in step.fingerprints.items() if name != step.stage.name}
    context = StageContext(
        recipe=recipe,
        output=room / "output",
        scratch=room / "scratch",
        parents={parent: store.localise(store.ref(parent, digest)) for parent, digest in step.parents.items()},
        log=log,
        servers=servers,
        work=store.work,
        fingerprints=step.fingerprints,
        manifests={name: store.manifest(store.ref(name, digest)) for name, digest in ancestors.items()},
        progress=progress,
        keep_states=keep_states,
    )
    context.output.mkdir(parents=True, exist_ok=True)
    context.scratch.mkdir(parents=True, exist_ok=True)
    return context


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
