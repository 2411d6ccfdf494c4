"""Run stages as Prefect tasks: one per stage, cached by fingerprint, retried on transient faults only."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from prefect import Task, task
from prefect.cache_policies import CacheKeyFnPolicy
from prefect.client.schemas.objects import State, TaskRun
from prefect.logging.handlers import APILogHandler
from prefect.states import Completed
from prefect.tasks import exponential_backoff

from tasks.build import build_artifact
from tasks.faults import is_transient
from tasks.manifest import ArtifactRef
from tasks.pipeline import PipelineError, PlanRow, StagePlan, artifact_is_whole, load_stages, plan, resolve
from tasks.progress_bar import ProgressBar
from tasks.recipe import Recipe
from tasks.run_report import publish_report
from tasks.stage import Stage
from tasks.store import ArtifactStore

if TYPE_CHECKING:
    from tasks.vllm_server import ServerPool

LOG = logging.getLogger("dspark")


def open_server_pool(log_dir: Path) -> ServerPool:
    """The vLLM servers of one run."""
    from tasks.vllm_server import ServerPool

    return ServerPool(log_dir)


class PipelineRun:
    """One pass over the pipeline inside a Prefect flow: call it with each stage's name, in order.

    Use it as a context manager: servers that stages started are stopped on the way out, whatever happened.

    Args:
        recipe: the validated recipe.
        store: where artifacts are.
        stages: the pipeline; the project's own by default.
        force: stages to make again, with those that depend on them.
        open_servers: makes the pool of vLLM servers, when the first stage really runs.
        retry_seconds: wait before the first retry; doubles, with jitter.

    Raises:
        PipelineError: `force` names an unknown stage.
    """

    def __init__(
        self,
        recipe: Recipe,
        store: ArtifactStore,
        *,
        stages: Sequence[Stage] | None = None,
        force: Iterable[str] = (),
        open_servers: Callable[[Path], ServerPool] = open_server_pool,
        retry_seconds: float = 5.0,
    ) -> None:
        stages = load_stages() if stages is None else stages
        self.recipe = recipe
        self.store = store
        self.steps = resolve(recipe, stages)
        self.rows = {row.stage: row for row in plan(recipe, store, stages, force)}
        self.refs: dict[str, ArtifactRef] = {}
        self.states: dict[str, str] = {}
        self._open_servers = open_servers
        self._retry_seconds = retry_seconds
        self._pool: ServerPool | None = None
        self._cleanup = ExitStack()

    def __enter__(self) -> PipelineRun:
        self._send_logs_to_prefect()
        waiting = [row.stage for row in self.rows.values() if not row.cached]
        LOG.info("recipe %s, store %s", self.recipe.name, self.store.root)
        LOG.info("%d of %d stages to run: %s", len(waiting), len(self.rows), ", ".join(waiting) or "none")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    def __call__(self, name: str) -> ArtifactRef:
        """Run a stage, or take its artifact from the store; returns the artifact.

        Raises:
            PipelineError: unknown stage, or a stage that it reads has not been called yet.
            Exception: whatever the stage raised, after retries if the fault was transient.
        """
        if name not in self.steps:
            raise PipelineError(f"no stage {name!r}; stages are {', '.join(self.steps)}")
        step, row = self.steps[name], self.rows[name]
        if missing := [parent for parent in step.stage.parents if parent not in self.refs]:
            raise PipelineError(f"stage {name!r} reads {missing}: call them first")
        # Prefect's record of a result says nothing about the files: ask the store before believing it.
        whole = row.cached and artifact_is_whole(self.store, self.store.ref(name, step.fingerprint))
        if not whole:
            reason = "its artifact vanished or was damaged since this run began" if row.cached else row.reason
            LOG.getChild(name).info("started: %s", reason)
        run = self._task(step, row).with_options(refresh_cache=not whole)
        parents = [self.refs[parent] for parent in step.stage.parents]
        state = cast("State[ArtifactRef]", run(step.fingerprint, parents, return_state=True))
        if not state.is_completed():
            LOG.getChild(name).error("failed (state %s)", state.name)
        ref = state.result()
        if state.name == "Cached":
            LOG.getChild(name).info("Cached %s", ref.short)
        self.refs[name], self.states[name] = ref, state.name or ""
        return ref

    def finish(self) -> dict[str, ArtifactRef]:
        """Publish the result as Prefect artifacts; returns the artifacts by stage.

        Raises:
            PipelineError: a stage was not called.
        """
        if missing := [name for name in self.steps if name not in self.refs]:
            raise PipelineError(f"stages {missing} were not called")
        publish_report(self.recipe, self.store, self.refs, self.states)
        return dict(self.refs)

    def _send_logs_to_prefect(self) -> None:
        """Stage logs appear in the run's page; a worker may have set up logging before it knew of ours."""
        LOG.setLevel(logging.INFO)
        if not any(isinstance(handler, APILogHandler) for handler in LOG.handlers):
            handler = APILogHandler()
            LOG.addHandler(handler)
            self._cleanup.callback(LOG.removeHandler, handler)

    def _servers(self) -> ServerPool:
        if self._pool is None:
            self._pool = self._open_servers(self.store.work / "logs")
            self._cleanup.callback(self._pool.close)
        return self._pool

    @property
    def _keep_states(self) -> bool:
        """Whether this run will want the hidden states of answers."""
        return "hidden_states" in self.rows and not self.rows["hidden_states"].cached

    def _task(self, step: StagePlan, row: PlanRow) -> Task[..., Any]:
        name = step.stage.name
        # Results are kept by machine, so the key also tells stores apart.
        place = hashlib.sha256(self.store.root.encode()).hexdigest()[:16]

        @task(
            name=name,
            task_run_name=f"{name}-{step.fingerprint[:8]}",
            description=(step.stage.build.__doc__ or "").strip().split("\n")[0],
            cache_policy=CacheKeyFnPolicy(cache_key_fn=lambda _, inputs: f"{name}-{inputs['fingerprint']}-{place}"),
            persist_result=True,
            result_serializer="json",
            retries=2,
            retry_delay_seconds=exponential_backoff(self._retry_seconds),
            retry_jitter_factor=0.5,
            retry_condition_fn=_worth_retrying,
        )
        def run_stage(fingerprint: str, parents: list[ArtifactRef]) -> Any:
            del fingerprint, parents  # they key the cache and draw the graph; the step holds them as well
            ref, made = build_artifact(
                step,
                self.recipe,
                self.store,
                self._servers,
                force=row.forced,
                progress=ProgressBar(f"{self.recipe.name}-{name}"),
                keep_states=self._keep_states,
            )
            return ref if made else Completed(name="Cached", message="found in the store", data=ref)

        return run_stage


def _worth_retrying(failed: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    error = state.data
    transient = isinstance(error, BaseException) and is_transient(error)
    if transient and run.run_count <= failed.retries:
        LOG.getChild(failed.name).warning("%s: %s; trying again", type(error).__name__, error)
    return transient
