"""Stages as Prefect tasks, with a real Prefect server."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    TaskRunFilter,
    TaskRunFilterFlowRunId,
)
from prefect.context import get_run_context
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, PREFECT_HOME, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from tasks.build import build_artifact
from tasks.pipeline import resolve
from tasks.recipe import RecipeError
from tasks.run import PipelineRun
from tasks.stage import StageContext
from tasks.store import ArtifactStore
from tests.toy_stages import RECIPE, Toy, ToyServers

NAMES = ["verifier", "prompts", "drafter", "release"]


@pytest.fixture(scope="module", autouse=True)
def prefect_server() -> Iterator[None]:
    with (
        prefect_test_harness(server_startup_timeout=120),
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
    ):
        yield


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


class Outcome:
    def __init__(self, toy: Toy, store: ArtifactStore, **options) -> None:
        self.pools: list[ToyServers] = []
        self.states: dict[str, str] = {}
        self.flow_run_id = None

        def open_servers(log_dir: Path) -> ToyServers:
            self.pools.append(ToyServers(log_dir))
            return self.pools[-1]

        @flow(name="toy")
        def toy_flow() -> None:
            self.flow_run_id = get_run_context().flow_run.id
            run = PipelineRun(
                RECIPE, store, stages=toy.stages, open_servers=open_servers, retry_seconds=0.01, **options
            )
            with run:
                for name in NAMES:
                    run(name)
                run.finish()
            self.states = run.states

        try:
            self.error = None
            toy_flow()
        except Exception as error:
            self.error = error


def test_second_run_is_cached_in_prefect(store: ArtifactStore) -> None:
    toy = Toy()
    first, second = Outcome(toy, store), Outcome(toy, store)
    assert first.states == dict.fromkeys(NAMES, "Completed")
    assert second.states == dict.fromkeys(NAMES, "Cached")
    assert toy.built == NAMES
    assert [pool.closed for pool in first.pools] == [1]
    assert second.pools == [], "no server pool for a run that has nothing to do"
    text = Path(store.ref("release", resolve(RECIPE, toy.stages)["release"].fingerprint).uri, "text.txt").read_text()
    assert text == "release(verifier(), drafter(prompts(verifier())))"


def test_prefect_shows_names_states_and_graph(store: ArtifactStore) -> None:
    toy = Toy()
    Outcome(toy, store)
    second = Outcome(toy, store)
    with get_client(sync_client=True) as client:
        wanted = TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[second.flow_run_id]))
        for _ in range(100):  # the server records task runs a moment later
            runs = client.read_task_runs(task_run_filter=wanted)
            if len(runs) == 4 and all(run.state_name == "Cached" for run in runs):
                break
            threading.Event().wait(0.1)
        shown_by_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[second.flow_run_id]))
        artifacts = {each.key: each.data for each in client.read_artifacts(artifact_filter=shown_by_run)}
    shown = {run.name.rsplit("-", 1)[0]: run for run in runs}
    fingerprints = {name: step.fingerprint for name, step in resolve(RECIPE, toy.stages).items()}
    assert {name: (run.name, run.state_name) for name, run in shown.items()} == {
        name: (f"{name}-{fingerprints[name][:8]}", "Cached") for name in NAMES
    }
    parents = {source.id for source in shown["release"].task_inputs["parents"]}
    assert parents == {shown["verifier"].id, shown["drafter"].id}
    assert "| acceptance_length | 2.5 |" in artifacts["toy-summary"]
    assert [row["state"] for row in json.loads(artifacts["toy-stages"])] == ["Cached"] * 4


def test_store_hit_without_prefects_record_is_cached_too(store: ArtifactStore) -> None:
    toy = Toy()
    Outcome(toy, store)
    shutil.rmtree(PREFECT_HOME.value() / "storage")
    assert Outcome(toy, store).states == dict.fromkeys(NAMES, "Cached")
    assert toy.built == NAMES


def test_prefects_record_of_a_deleted_artifact_is_not_believed(store: ArtifactStore) -> None:
    toy = Toy()
    Outcome(toy, store)
    step = resolve(RECIPE, toy.stages)["prompts"]
    store.delete(store.ref("prompts", step.fingerprint))
    expected = dict.fromkeys(NAMES, "Cached") | {"prompts": "Completed"}
    assert Outcome(toy, store).states == expected
    assert toy.built[4:] == ["prompts"]


def test_force_runs_the_stage_and_its_dependents(store: ArtifactStore) -> None:
    toy = Toy()
    Outcome(toy, store)
    assert Outcome(toy, store, force=["drafter"]).states == {
        "verifier": "Cached",
        "prompts": "Cached",
        "drafter": "Completed",
        "release": "Completed",
    }
    assert toy.built[4:] == ["drafter", "release"]


def test_transient_fault_is_retried_and_work_continues(store: ArtifactStore) -> None:
    toy, seen = Toy(), []

    def fail_once(context: StageContext) -> None:
        seen.append(sorted(path.name for path in context.output.iterdir()))
        (context.output / "shard-0").write_text("")
        if len(seen) == 1:
            raise ConnectionResetError("the server went away")

    toy.before["drafter"] = fail_once
    outcome = Outcome(toy, store)
    assert outcome.error is None
    assert seen == [[], ["shard-0"]], "the second attempt finds the work of the first"


@pytest.mark.parametrize("error", [RecipeError("wrong"), ValueError("wrong"), RuntimeError("wrong")])
def test_other_faults_fail_at_once_and_servers_are_closed(store: ArtifactStore, error: Exception) -> None:
    toy = Toy()

    def fail(_: StageContext) -> None:
        raise error

    toy.before["drafter"] = fail
    outcome = Outcome(toy, store)
    assert type(outcome.error) is type(error)
    assert toy.built == ["verifier", "prompts", "drafter"]
    assert [pool.closed for pool in outcome.pools] == [1]
    assert not store.exists(store.ref("drafter", resolve(RECIPE, toy.stages)["drafter"].fingerprint))


def test_two_builders_of_one_artifact_do_the_work_once(store: ArtifactStore) -> None:
    toy, entered, leave = Toy(), threading.Event(), threading.Event()
    step = resolve(RECIPE, toy.stages)["verifier"]

    def hold(_: StageContext) -> None:
        entered.set()
        leave.wait(30)

    toy.before["verifier"] = hold
    made: list[bool] = []

    def build() -> None:
        made.append(build_artifact(step, RECIPE, store, lambda: ToyServers(store.work))[1])  # type: ignore[arg-type]

    threads = [threading.Thread(target=build) for _ in range(2)]
    threads[0].start()
    entered.wait(30)
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join(30)
    assert sorted(made) == [False, True]
    assert toy.built == ["verifier"]
