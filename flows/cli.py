"""Command line of the flows. Checks and plans before Prefect is imported."""

from __future__ import annotations

import importlib
import logging
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, NoReturn

import typer

from tasks import pipeline
from tasks.manifest import ArtifactRef
from tasks.pipeline import PlanRow
from tasks.preflight import open_recipe, open_store
from tasks.recipe_file import DEFAULT_RECIPE, list_recipes
from tasks.store import ArtifactStore

EPILOGUE = f"""
A recipe is one YAML file in deployments/recipes/ (default: {DEFAULT_RECIPE}, which needs no downloads). A run goes
through stages; each keeps its result in the store under a fingerprint of everything it depends on, so a second run, or
one that was interrupted, does only what is missing.

Exit codes: 0 done, 1 a stage failed, 2 wrong recipe, store or options (nothing was started), 130 interrupted.
"""


@dataclass(frozen=True)
class FlowCommand:
    """A flow as a command.

    Attributes:
        flow: `module:function` of a flow that takes (recipe, overrides, store, force) and returns the artifacts that it
            made or found, by stage; imported when it runs.
        stages: that it goes through, in order.
        help: what `--help` says; `EPILOGUE` follows.
        show: what is printed at the end, given the store and the artifacts by stage; its last line is for scripts.
    """

    flow: str
    stages: tuple[str, ...]
    help: str
    show: Callable[[ArtifactStore, Mapping[str, ArtifactRef]], str]


def run_command(command: FlowCommand) -> None:
    """Read the command line and do what it says; ends the process."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.command(help=command.help + EPILOGUE)
    def main(
        recipe: Annotated[str, typer.Option(metavar="NAME|FILE", help="Recipe to run.")] = DEFAULT_RECIPE,
        overrides: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Change one field; may be repeated."),
        ] = None,
        plan_only: Annotated[
            bool, typer.Option("--plan", help="Show which stages would run, and why; start nothing.")
        ] = False,
        store: Annotated[
            str | None,
            typer.Option(
                metavar="FOLDER|s3://BUCKET/PREFIX",
                help="Where artifacts are kept; default: $DSPARK_STORE, else .dspark/store in the checkout.",
            ),
        ] = None,
        force: Annotated[
            list[str] | None,
            typer.Option(metavar="STAGE", help="Make a stage again, and those that depend on it; may be repeated."),
        ] = None,
        show_recipes: Annotated[bool, typer.Option("--list-recipes", help="Show the recipes that ship here.")] = False,
    ) -> None:
        """Run the flow for one recipe."""
        if show_recipes:
            print("\n".join(list_recipes()))
            return
        request = _Request(recipe, tuple(overrides or ()), store, tuple(force or ()))
        rows = _checked_plan(command, request)
        if plan_only:
            print(_plan_table(rows))
            return
        _log_to_terminal()
        refs = _run(command, request)
        print(command.show(open_store(store), refs))

    app()


@dataclass(frozen=True)
class _Request:
    recipe: str
    overrides: tuple[str, ...]
    store: str | None
    force: tuple[str, ...]


def _checked_plan(command: FlowCommand, request: _Request) -> list[PlanRow]:
    """Refuse what cannot work, with exit code 2, before anything is started."""
    from tasks.recipe import RecipeError
    from tasks.store import StoreError

    try:
        recipe = open_recipe(request.recipe, request.overrides)
        return pipeline.plan(recipe, open_store(request.store), pipeline.load_stages(command.stages), request.force)
    except (RecipeError, StoreError, pipeline.PipelineError) as error:
        _stop(f"error: {error}", code=2)


def _run(command: FlowCommand, request: _Request) -> Mapping[str, ArtifactRef]:
    """Run the flow; returns its artifacts by stage."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        from flows.local_server import ensure_prefect_server

        module, _, name = command.flow.partition(":")
        flow = getattr(importlib.import_module(module), name)
        ensure_prefect_server()
        refs: Mapping[str, ArtifactRef] = flow(request.recipe, request.overrides, request.store, request.force)
        return refs
    except KeyboardInterrupt:
        _stop("interrupted; the next run continues from here", code=130)
    except Exception as error:
        if not type(error).__module__.startswith(("tasks.", "flows.")):  # ours say what to do; others need their trace
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/prefect/" not in frame.filename]
            print("".join(traceback.format_list(frames)), file=sys.stderr, end="")
        _stop(f"error: {type(error).__name__}: {error}", code=1)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """Leave through every `finally`, which the default action of SIGTERM does not."""
    raise SystemExit(128 + signum)


def _plan_table(rows: list[PlanRow]) -> str:
    width = max(len(row.stage) for row in rows)
    lines = [f"{row.stage:<{width}}  {_verdict(row)}  {row.fingerprint[:8]}  {row.reason}" for row in rows]
    waiting = [row for row in rows if not row.cached]
    lines.append(f"{len(waiting)} of {len(rows)} stages would run{_estimate(waiting)}")
    return "\n".join(lines)


def _verdict(row: PlanRow) -> str:
    return "cached  " if row.cached else "will run"


def _estimate(rows: list[PlanRow]) -> str:
    known = [row for row in rows if row.seconds is not None]
    if not known:
        return ""
    seconds = sum(row.seconds or 0.0 for row in known)
    size = sum(row.bytes or 0 for row in known)
    rest = "" if len(known) == len(rows) else f", without the {len(rows) - len(known)} that never ran"
    return f"; last time: {seconds:.0f} s, {size / 2**20:.0f} MiB{rest}"


def _log_to_terminal() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_StageFormatter())
    log = logging.getLogger("dspark")
    log.addHandler(handler)
    log.setLevel(logging.INFO)


class _StageFormatter(logging.Formatter):
    """`12:00:00  drafter        message`."""

    def format(self, record: logging.LogRecord) -> str:
        stage = record.name.removeprefix("dspark").lstrip(".")
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        return f"{clock}  {stage:<13}  {level}{super().format(record)}"


def _stop(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(code)
