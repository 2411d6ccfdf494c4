"""Let vLLM's first-generation model runner accept `method="dspark"`."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"
REFUSED_FEATURE = "dspark speculative decoding"
_INSTALLED = "_dspark_cpu_installed"


def install_hook() -> None:
    """Drop the refusal now, and extend the runner as soon as its module is loaded."""
    from vllm.config import VllmConfig

    original: Callable[[Any], list[str]] = VllmConfig._get_v1_model_runner_unsupported_features
    if getattr(original, _INSTALLED, False):
        return

    def unsupported_features(config: VllmConfig) -> list[str]:
        return [feature for feature in original(config) if feature != REFUSED_FEATURE]

    setattr(unsupported_features, _INSTALLED, True)
    VllmConfig._get_v1_model_runner_unsupported_features = unsupported_features
    if RUNNER_MODULE in sys.modules:
        extend_runner(sys.modules[RUNNER_MODULE])
    else:
        # The runner takes seconds to import and only the worker process needs it, so wait for it to be
        # asked for.
        sys.meta_path.insert(0, _RunnerFinder())


def extend_runner(runner_module: ModuleType) -> None:
    """Give the runner a proposer for DSpark, leaving every other method's as it is."""
    from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
    from vllm.v1.spec_decode.dflash import DFlashProposer

    from dspark_vllm.compatibility import require_proposer_internals
    from dspark_vllm.proposer import DSparkProposer

    require_proposer_internals(DFlashProposer, runner_module, Qwen3DSparkForCausalLM)
    original_proposer: Any = runner_module.EagleProposer

    class EagleOrDSparkProposer(original_proposer):
        """The runner sends every method that reads verifier states here; DSpark gets its own proposer."""

        def __new__(cls, vllm_config: Any, device: Any, runner: Any = None) -> Any:
            if vllm_config.speculative_config.method == "dspark":
                return DSparkProposer(vllm_config, device, runner)
            return super().__new__(cls)

    runner_module.EagleProposer = EagleOrDSparkProposer
    _reserve_anchor_slot(runner_module.GPUModelRunner, DSparkProposer)


def _reserve_anchor_slot(runner_class: Any, proposer_class: type) -> None:
    """Near the end of the context, count the anchor's own slot of drafters that do not sample from it."""
    original = runner_class._input_fits_in_drafter

    def input_fits_in_drafter(runner: Any, metadata: Any) -> bool:
        fits: bool = original(runner, metadata)
        drafter = runner.drafter
        if not fits or not isinstance(drafter, proposer_class) or drafter.sample_from_anchor:
            return fits
        needed: int = metadata.max_seq_len + runner.num_spec_tokens + 1
        return needed <= runner.effective_drafter_max_model_len

    runner_class._input_fits_in_drafter = input_fits_in_drafter


class _RunnerFinder(importlib.abc.MetaPathFinder):
    """Finds the runner module once, as Python would, and extends it right after it is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != RUNNER_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_extend(module: ModuleType) -> None:
            execute(module)
            extend_runner(module)

        spec.loader.exec_module = execute_and_extend  # type: ignore[method-assign]
        return spec
