"""A four-stage pipeline of text files, and what a test needs to run it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tasks.pipeline import STAGE_NAMES
from tasks.recipe import Recipe
from tasks.stage import Counts, Stage, StageContext

RECIPE = Recipe.model_validate(
    {
        "name": "toy",
        "verifier": {"source": "path", "path": "/nowhere/toy"},
        "training": {"learning_rate": 0.001},
    }
)


def with_learning_rate(value: float) -> Recipe:
    return RECIPE.model_copy(update={"training": RECIPE.training.model_copy(update={"learning_rate": value})})


class Toy:
    """Stages that count their builds; `before[name]` runs inside the build of that stage."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.before: dict[str, Callable[[StageContext], None]] = {}
        self.stages = (
            self.stage("verifier", (), lambda r: {"verifier": r.verifier.model_dump(mode="json")}),
            self.stage("prompts", ("verifier",), lambda r: {"prompts": r.prompts.model_dump(mode="json")}),
            self.stage("drafter", ("prompts",), lambda r: {"training": r.training.model_dump(mode="json")}),
            self.stage("release", ("verifier", "drafter"), lambda r: {"release": r.release.model_dump(mode="json")}),
        )

    def stage(self, name: str, parents: tuple[str, ...], identity: Callable[[Recipe], dict]) -> Stage:
        def build(context: StageContext) -> Counts:
            self.built.append(name)
            self.before.get(name, lambda _: None)(context)
            texts = [(folder / "text.txt").read_text() for folder in context.parents.values()]
            (context.output / "text.txt").write_text(f"{name}({', '.join(texts)})")
            (context.output / "deep").mkdir(exist_ok=True)
            (context.output / "deep" / "data.bin").write_bytes(bytes(range(256)) * 64)
            if name == "release":
                (context.output / "summary.json").write_text('{"acceptance_length": 2.5}')
            return {"files": 2}

        return Stage(name=name, format_version=1, parents=parents, identity=identity, build=build)


class ToyServers:
    """Stands where the pool of vLLM servers goes."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def whole_pipeline(toy: Toy) -> tuple[Stage, ...]:
    """Toys under the names of the real stages, each reading the one before; training decides the drafter."""
    stages: list[Stage] = []
    for name in STAGE_NAMES:
        parents = (stages[-1].name,) if stages else ()
        section = "training" if name == "drafter" else name
        stages.append(toy.stage(name, parents, lambda r, s=section: {s: r.model_dump(mode="json").get(s)}))
    return tuple(stages)
