"""The drafter package stands alone: a GPU box needs torch, transformers, safetensors and numpy for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FOREIGN = ("prefect", "pydantic", "httpx", "datasets", "fsspec", "s3fs", "typer", "tasks", "flows", "vllm")


def modules_after(statement: str) -> set[str]:
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=120
    )
    return set(json.loads(found.stdout.splitlines()[-1]))


def test_the_package_pulls_in_neither_orchestration_nor_network():
    every = "import dspark_model, pkgutil, importlib; " + (
        "[importlib.import_module('dspark_model.' + m.name) for m in pkgutil.iter_modules(dspark_model.__path__)]"
    )
    # torch imports some of these itself when they are installed: what it brings is not ours.
    allowed = modules_after("import torch, safetensors.torch, torch.nn.functional, torch.optim")
    extra = {name.partition(".")[0] for name in modules_after(every) - allowed}
    assert "dspark_model" in extra
    assert extra.isdisjoint(FOREIGN)


def test_importing_the_package_alone_does_not_load_torch():
    loaded = {name.partition(".")[0] for name in modules_after("import dspark_model")}
    assert loaded.isdisjoint((*FOREIGN, "torch", "transformers"))
