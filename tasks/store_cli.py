"""The artifact store for people: `python -m tasks.store ls|show|verify|gc`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer

from tasks.manifest import ArtifactRef, Manifest
from tasks.store import ArtifactDamagedError, ArtifactMissingError, ArtifactStore, StoreError

Root = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER|s3://BUCKET/PREFIX",
        help="The store; default: $DSPARK_STORE, else .dspark/store in the checkout.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="""
Look at, check and clean a store of artifacts.

An artifact is the result of one stage, at STAGE/FINGERPRINT in the store: whole, or not there. The first digits of a
fingerprint are enough.

Examples:

  python -m tasks.store ls --recipe smollm2-135m

  python -m tasks.store show drafter/3fa9

  python -m tasks.store verify --deep --root s3://bucket/dspark

  python -m tasks.store gc --keep 2           (lists what would go; --yes removes it)

Exit codes: 0 fine, 1 damaged or not found, 2 wrong usage or a store that cannot be reached.
""",
)


@app.command()
def ls(
    root: Root = None,
    stage: Annotated[str | None, typer.Option(help="Only this stage.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Only artifacts made by this recipe.")] = None,
    as_json: AsJson = False,
) -> None:
    """List artifacts, newest first."""
    store = _open(root)
    found = [made for made in _manifests(store, stage) if recipe in (None, made.recipe)]
    if as_json:
        print(json.dumps([_facts(made) for made in found], indent=2))
        return
    rows: list[tuple[str, ...]] = [("stage", "fingerprint", "recipe", "made", "MiB", "files", "counts")]
    for made in found:
        counts = ", ".join(f"{name}={value}" for name, value in made.counts.items())
        size, date = f"{made.total_bytes / 2**20:.1f}", made.created[:16].replace("T", " ")
        rows.append((made.stage, made.fingerprint[:8], made.recipe, date, size, str(len(made.files)), counts[:60]))
    _print_table(rows)
    print(f"{len(found)} artifacts, {sum(made.total_bytes for made in found) / 2**20:.1f} MiB in {store.root}")


@app.command()
def show(
    artifact: Annotated[str, typer.Argument(metavar="STAGE/FINGERPRINT")], root: Root = None, as_json: AsJson = False
) -> None:
    """Show what an artifact holds and what it was made from."""
    store = _open(root)
    made = store.manifest(_one(store, artifact))
    if as_json:
        print(made.model_dump_json(indent=2))
        return
    print(f"{made.stage} {made.fingerprint}\nat {store.ref(made.stage, made.fingerprint).uri}")
    print(f"made {made.created} by recipe {made.recipe} in {made.seconds:.1f} s; git {made.git_sha or 'unknown'}")
    sections: dict[str, dict[str, Any]] = {"counts": made.counts, "made from": made.parents, "versions": made.versions}
    for title, values in sections.items():
        print(f"\n{title}")
        _print_table([(f"  {name}", str(value)) for name, value in values.items()])
    print(f"\nidentity\n{json.dumps(made.identity, indent=2)}\n\nfiles")
    _print_table([(f"  {entry.path}", f"{entry.size:,} bytes", entry.sha256[:16]) for entry in made.files])


@app.command()
def verify(
    artifact: Annotated[str | None, typer.Argument(metavar="[STAGE[/FINGERPRINT]]")] = None,
    root: Root = None,
    deep: Annotated[bool, typer.Option(help="Read every file, also remote ones, and compare its sha256.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare artifacts with their manifests: sizes, and sha256 of local files that changed since (--deep: of all)."""
    store = _open(root)
    refs = [_one(store, artifact)] if artifact and "/" in artifact else _refs(store, artifact)
    results = []
    for ref in refs:
        try:
            store.verify(ref, deep=deep)
            results.append((ref, "whole"))
        except (ArtifactDamagedError, ArtifactMissingError) as error:
            results.append((ref, str(error)))
        if not as_json:
            print(f"{ref.stage:<13}  {ref.short}  {results[-1][1]}", flush=True)
    damaged = sum(verdict != "whole" for _, verdict in results)
    if as_json:
        print(
            json.dumps([{"stage": r.stage, "fingerprint": r.fingerprint, "verdict": v} for r, v in results], indent=2)
        )
    else:
        print(f"{len(results)} artifacts, {damaged} damaged")
    raise typer.Exit(1 if damaged else 0)


@app.command()
def gc(
    root: Root = None,
    keep: Annotated[int, typer.Option(min=1, help="Artifacts to keep per recipe and stage, with all ancestors.")] = 1,
    older_than: Annotated[
        float, typer.Option("--older-than", min=0, metavar="DAYS", help="Younger artifacts stay.")
    ] = 0.0,
    abandoned: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="Unfinished work untouched for so long goes.")
    ] = 7.0,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it; without this nothing changes.")] = False,
) -> None:
    """List what nobody needs any more, and remove it with --yes. What a run is working on is never touched."""
    from tasks.store_gc import collect, find_garbage

    store = _open(root)
    found = find_garbage(store, keep=keep, older_than_days=older_than, abandoned_days=abandoned)
    for garbage in found:
        if yes:
            collect(store, garbage)
        print(f"{'removed' if yes else 'would go'}  {garbage.size / 2**20:>9.1f} MiB  {garbage.what}: {garbage.reason}")
    total = sum(garbage.size for garbage in found) / 2**20
    print(f"{len(found)} finds, {total:.1f} MiB{'' if yes or not found else '; run again with --yes to remove them'}")


def _open(root: str | None) -> ArtifactStore:
    """The store, which must exist: looking at one makes none."""
    with _refusing():
        store = ArtifactStore(root)
        if not store.is_there():
            raise StoreError(f"store={store.root!r} does not exist: name one with --root, or run a pipeline first")
    return store


def _manifests(store: ArtifactStore, stage: str | None) -> list[Manifest]:
    known = store.stages()
    if stage is not None and stage not in known:
        _fail(f"{store.root} has no artifacts of stage {stage!r}; it has {', '.join(known) or 'none at all'}", code=1)
    found = [made for name in known if stage in (None, name) for made in store.manifests(name)]
    return sorted(found, key=lambda made: made.created, reverse=True)


def _refs(store: ArtifactStore, stage: str | None) -> list[ArtifactRef]:
    """Every artifact, those with an unreadable manifest included."""
    known = [name for name in store.stages() if stage in (None, name)]
    if stage is not None and not known:
        _fail(f"{store.root} has no artifacts of stage {stage!r}", code=1)
    return [ref for name in known for ref in store.refs(name)]


def _one(store: ArtifactStore, artifact: str) -> ArtifactRef:
    stage, _, prefix = artifact.partition("/")
    found = [ref for ref in store.refs(stage) if ref.fingerprint.startswith(prefix)]
    if not found:
        _fail(f"{store.root} has no artifact {artifact!r}; `ls` lists them", code=1)
    if len(found) > 1:
        _fail(f"{artifact!r} means {', '.join(f'{ref.stage}/{ref.short}' for ref in found)}: give more digits", code=2)
    return found[0]


def _facts(made: Manifest) -> dict[str, Any]:
    facts = made.model_dump(mode="json", include={"stage", "fingerprint", "recipe", "created", "counts", "seconds"})
    return facts | {"bytes": made.total_bytes, "files": len(made.files)}


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        _fail(str(error), code=2)


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def run() -> None:
    """Entry of `python -m tasks.store`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for name in ("botocore", "aiobotocore", "s3fs", "fsspec", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with _refusing():
        app()
