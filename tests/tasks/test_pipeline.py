"""Plans: what would run and why, known before anything runs."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.build import build_artifact
from tasks.pipeline import PipelineError, PlanRow, plan, resolve
from tasks.recipe import Recipe
from tasks.stage import Stage
from tasks.store import ArtifactStore
from tests.toy_stages import RECIPE, Toy, ToyServers, with_learning_rate


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def build_all(stages: tuple[Stage, ...], recipe: Recipe, store: ArtifactStore) -> None:
    for step in resolve(recipe, stages).values():
        build_artifact(step, recipe, store, lambda: ToyServers(store.work))  # type: ignore[arg-type]


def reasons(rows: list[PlanRow]) -> dict[str, str]:
    return {row.stage: row.reason for row in rows}


def test_fresh_store_runs_everything(store: ArtifactStore) -> None:
    rows = plan(RECIPE, store, Toy().stages)
    assert reasons(rows) == dict.fromkeys(("verifier", "prompts", "drafter", "release"), "never run")
    assert not any(row.cached for row in rows)


def test_all_cached_after_a_run(store: ArtifactStore) -> None:
    toy = Toy()
    build_all(toy.stages, RECIPE, store)
    assert all(row.cached and row.reason == "cached" for row in plan(RECIPE, store, toy.stages))
    build_all(toy.stages, RECIPE, store)
    assert toy.built == ["verifier", "prompts", "drafter", "release"]


def test_changed_field_runs_exactly_its_stage_and_dependents(store: ArtifactStore) -> None:
    toy = Toy()
    build_all(toy.stages, RECIPE, store)
    rows = plan(with_learning_rate(0.0003), store, toy.stages)
    assert reasons(rows) == {
        "verifier": "cached",
        "prompts": "cached",
        "drafter": "field training.learning_rate changed: 0.001 -> 0.0003",
        "release": "depends on drafter, which changed",
    }
    assert [row.cached for row in rows] == [True, True, False, False]
    assert rows[2].bytes == len("drafter(prompts(verifier()))") + 256 * 64
    build_all(toy.stages, with_learning_rate(0.0003), store)
    assert all(row.cached for row in plan(RECIPE, store, toy.stages)), "going back is free"


def test_comparison_prefers_the_same_recipe(store: ArtifactStore) -> None:
    toy = Toy()
    build_all(toy.stages, RECIPE, store)
    other = with_learning_rate(0.5).model_copy(update={"name": "other"})
    assert reasons(plan(other, store, toy.stages))["drafter"].endswith("0.001 -> 0.5"), "the same verifier will do"
    build_all(toy.stages, other, store)
    assert reasons(plan(with_learning_rate(0.1), store, toy.stages))["drafter"].endswith("0.001 -> 0.1")


def test_another_verifier_and_recipe_never_ran(store: ArtifactStore) -> None:
    toy = Toy()
    build_all(toy.stages, RECIPE, store)
    other = Recipe.model_validate({"name": "other", "verifier": {"source": "path", "path": "/nowhere/else"}})
    assert set(reasons(plan(other, store, toy.stages)).values()) == {"never run"}


def test_format_version_is_a_reason(store: ArtifactStore) -> None:
    toy = Toy()
    build_all(toy.stages, RECIPE, store)
    newer = tuple(dataclasses.replace(s, format_version=2) if s.name == "drafter" else s for s in toy.stages)
    assert reasons(plan(RECIPE, store, newer))["drafter"] == "format version changed: 1 -> 2"


def test_damage_is_a_reason_and_is_repaired(store: ArtifactStore) -> None:
    toy = Toy()
    build_all(toy.stages, RECIPE, store)
    prompts = plan(RECIPE, store, toy.stages)[1]
    file = Path(store.ref("prompts", prompts.fingerprint).uri) / "deep" / "data.bin"
    file.write_bytes(b"\0" * file.stat().st_size)
    rows = plan(RECIPE, store, toy.stages)
    assert [row.cached for row in rows] == [True, False, True, True]
    assert rows[1].reason.startswith("artifact damaged: file deep/data.bin")
    build_all(toy.stages, RECIPE, store)
    assert all(row.cached for row in plan(RECIPE, store, toy.stages))
    assert toy.built[4:] == ["prompts"]


def test_deleted_artifact_runs_alone(store: ArtifactStore) -> None:
    toy = Toy()
    build_all(toy.stages, RECIPE, store)
    store.delete(store.ref("prompts", plan(RECIPE, store, toy.stages)[1].fingerprint))
    assert [row.cached for row in plan(RECIPE, store, toy.stages)] == [True, False, True, True]


def test_another_machine_goes_on_from_an_s3_store(s3_root: str, tmp_path: Path) -> None:
    toy, here = Toy(), ArtifactStore(s3_root, work=tmp_path / "here")
    build_all(toy.stages, RECIPE, here)
    release = resolve(RECIPE, toy.stages)["release"].fingerprint
    here.delete(here.ref("release", release))
    there = ArtifactStore(s3_root, work=tmp_path / "there")
    assert [row.cached for row in plan(RECIPE, there, toy.stages)] == [True, True, True, False]
    build_all(toy.stages, RECIPE, there)
    text = (there.localise(there.ref("release", release)) / "text.txt").read_text()
    assert text == "release(verifier(), drafter(prompts(verifier())))"
    downloaded = {path.parent.name for path in (tmp_path / "there" / "downloads").glob("*/*") if path.is_dir()}
    assert downloaded == {"verifier", "drafter", "release"}, "only what the stage reads"


def test_force_includes_dependents(store: ArtifactStore) -> None:
    toy = Toy()
    build_all(toy.stages, RECIPE, store)
    assert reasons(plan(RECIPE, store, toy.stages, force=["prompts"])) == {
        "verifier": "cached",
        "prompts": "--force",
        "drafter": "depends on prompts, which is forced",
        "release": "depends on drafter, which is forced",
    }
    with pytest.raises(PipelineError, match="--force prompt: no such stage; stages are verifier, prompts"):
        plan(RECIPE, store, toy.stages, force=["prompt"])


def test_stages_must_form_a_pipeline() -> None:
    verifier, prompts, *_ = Toy().stages
    with pytest.raises(PipelineError, match="must come before"):
        resolve(RECIPE, [prompts])
    with pytest.raises(PipelineError, match="two stages"):
        resolve(RECIPE, [verifier, verifier])


def test_planning_imports_nothing_heavy() -> None:
    code = (
        "import sys, tasks.pipeline, flows.cli; heavy = 'torch transformers prefect datasets s3fs scipy';"
        "print([name for name in heavy.split() if name in sys.modules])"
    )
    repo = Path(__file__).resolve().parents[2]
    shown = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
