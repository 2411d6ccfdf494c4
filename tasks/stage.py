"""What a stage is: a plain function from artifacts to one artifact, and what identifies it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.manifest import Manifest
from tasks.recipe import Recipe

if TYPE_CHECKING:
    from tasks.vllm_server import ServerPool

Counts = Mapping[str, int | float | str]


@dataclass(frozen=True)
class StageContext:
    """Everything a stage may touch while it builds.

    Attributes:
        recipe: the validated recipe of the run.
        output: files written here become the artifact; they survive kill -9 until the commit.
        scratch: survives kill -9 too and is discarded after the commit (partial shards, checkpoints).
        parents: stage name -> local folder of its artifact, verified.
        log: lines appear on the terminal and in Prefect.
        servers: vLLM servers that live as long as the flow run.
        work: local working folder of the run's store (spools and caches).
        fingerprints: of this stage and all its ancestors, by stage name.
        manifests: of all ancestors, by stage name: what they hold and what they cost.
        progress: shows a text and how much is done (0..1), in Prefect where there is one.
        keep_states: whether a later stage of this run wants the hidden states of answers.
    """

    recipe: Recipe
    output: Path
    scratch: Path
    parents: Mapping[str, Path]
    log: logging.Logger
    servers: ServerPool
    work: Path
    fingerprints: Mapping[str, str]
    manifests: Mapping[str, Manifest]
    progress: Callable[[str, float], None] = lambda text, share: None
    keep_states: bool = True


@dataclass(frozen=True)
class Stage:
    """One step of the pipeline.

    Attributes:
        name: also the name of the Prefect task and of the folder in the store.
        format_version: raise it when the artifact's files change meaning; the stage is then rebuilt.
        parents: names of the stages whose artifacts it reads.
        identity: the part of the recipe that affects its files, JSON-able; no paths, ports or concurrency.
        build: does the work and returns counts for the manifest.
    """

    name: str
    format_version: int
    parents: tuple[str, ...]
    identity: Callable[[Recipe], Mapping[str, Any]]
    build: Callable[[StageContext], Counts]
