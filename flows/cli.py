"""Command line of the pipeline. Checks and plans before Prefect is imported."""

from __future__ import annotations

import logging
import signal
import sys
import time
import traceback
from types import FrameType
from typing import Annotated, NoReturn

import typer

from tasks import pipeline
from tasks.manifest import ArtifactRef
from tasks.pipeline import PlanRow
from tasks.preflight import open_recipe, open_store
from tasks.recipe_file import DEFAULT_RECIPE, list_recipes

_HELP = f"""
Train, measure and package a DSpark drafter: a small model with which vLLM gives the same answers faster.

Without options it runs the embedded recipe ({DEFAULT_RECIPE}) on this machine, no downloads needed.

A recipe is one YAML file in deployments/recipes/. A run goes through stages (verifier, prompts, ... drafter,
evaluation, release); each keeps its result in the store under a fingerprint of everything it depends on, so a
second run, or one that was interrupted, does only what is missing.

Examples:

  python flows/full_pipeline.py --list-recipes

  python flows/full_pipeline.py --set training.learning_rate=3e-4 --plan

  python flows/full_pipeline.py --recipe my-model.yaml --store s3://bucket/dspark

  python flows/full_pipeline.py --force evaluation

The last line printed is the path of the release's summary.json. Exit codes: 0 done, 1 a stage failed, 2 wrong
recipe, store or options (nothing was started), 130 interrupted.
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(help=_HELP)
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
    """Run the pipeline for one recipe."""
    if show_recipes:
        print("\n".join(list_recipes()))
        return
    rows = _checked_plan(recipe, tuple(overrides or ()), store, tuple(force or ()))
    if plan_only:
        print(_plan_table(rows))
        return
    _log_to_terminal()
    release = _run(recipe, tuple(overrides or ()), store, tuple(force or ()))
    print(open_store(store).read_text(release, "summary.txt") or "")
    print(f"{release.uri}/summary.json")


def _checked_plan(recipe: str, overrides: tuple[str, ...], store: str | None, force: tuple[str, ...]) -> list[PlanRow]:
    """Refuse what cannot work, with exit code 2, before anything is started."""
    from tasks.recipe import RecipeError
    from tasks.store import StoreError

    try:
        return pipeline.plan(open_recipe(recipe, overrides), open_store(store), pipeline.load_stages(), force)
    except (RecipeError, StoreError, pipeline.PipelineError) as error:
        _stop(f"error: {error}", code=2)


def _run(recipe: str, overrides: tuple[str, ...], store: str | None, force: tuple[str, ...]) -> ArtifactRef:
    """Run the flow; returns the release."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        from flows.full_pipeline import full_pipeline
        from flows.local_server import ensure_prefect_server

        ensure_prefect_server()
        return full_pipeline(recipe, overrides, store, force)
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
