"""Run in the serving environment: load drafters with vLLM's own DSpark loader and write down what it made of them.

Usage: python vllm_loader.py VERIFIER OUTPUT DRAFTER...
Each drafter DIR gives OUTPUT/<its name>.safetensors (parameters and what the heads compute) and .json (what is set).
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import vllm.config.vllm
from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import base_loader, get_model
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model

PROBES = 6


def engine_config(verifier: str, drafter: str, proposals: int) -> VllmConfig:
    """What `vllm serve` would be configured with."""
    return EngineArgs(
        model=verifier,
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        speculative_config={"method": "dspark", "model": drafter, "num_speculative_tokens": proposals},
    ).create_engine_config()


def load(target: Any, config: VllmConfig) -> tuple[Any, dict[str, torch.Tensor]]:
    """The drafter, and its parameters as loaded: on CPU vLLM then repacks them for its kernels."""
    parameters: dict[str, torch.Tensor] = {}
    original = base_loader.process_weights_after_loading

    def remember(model: Any, *args: Any) -> None:
        parameters.update((name, value.detach().clone()) for name, value in model.named_parameters())
        original(model, *args)

    base_loader.process_weights_after_loading = remember
    try:
        return load_dspark_model(target, config), parameters
    finally:
        base_loader.process_weights_after_loading = original


def facts(model: Any, target: Any) -> dict[str, Any]:
    """What decides how the drafter is run, beside its weights."""
    config = model.config
    return {
        "causal": model.get_draft_attn_causal(),
        "sliding_window": [getattr(layer.self_attn.attn, "sliding_window", None) for layer in model.model.layers],
        "sample_from_anchor": config.sample_from_anchor,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": list(config.eagle_aux_hidden_state_layer_ids),
        "confidence_head": model.model.confidence_head is not None,
        "shares_embedding": model.model.embed_tokens is target.model.embed_tokens,
        "shares_head": model.lm_head is target.lm_head,
    }


@torch.inference_mode()
def computed(model: Any) -> dict[str, torch.Tensor]:
    """What the heads and the fusion make of random states, for the first few previous tokens."""
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    hidden = torch.randn(PROBES, model.config.hidden_size, generator=generator).to(device)
    num_states = len(model.config.eagle_aux_hidden_state_layer_ids)
    fused = torch.randn(PROBES, num_states * model.config.hidden_size, generator=generator).to(device)
    markov = model.markov_embed(torch.arange(PROBES, device=device))
    outputs = {
        "hidden": hidden,
        "fused": fused,
        "combined": model.combine_hidden_states(fused),
        "logits": model.compute_draft_logits(hidden) + model.markov_bias(markov),
        "target_ids": model.map_draft_to_target(torch.arange(model.config.draft_vocab_size, device=device)),
    }
    if model.model.confidence_head is not None:
        outputs["confidence"] = model.compute_confidence(hidden, markov)
    return {f"computed.{name}": value for name, value in outputs.items()}


def main() -> None:
    verifier, output, *drafters = sys.argv[1:]
    load_general_plugins()
    if current_platform.is_cpu():  # as vLLM's CPU runner does before it loads a model
        torch.accelerator.empty_cache = lambda: None
        # The runner that this loader belongs to needs Triton, which has no CPU build; loading itself does not.
        vllm.config.vllm.HAS_TRITON = True
    target = None
    for drafter in drafters:
        proposals = json.loads((Path(drafter) / "config.json").read_text())["speculators_config"]["proposal_methods"][0]
        config = engine_config(verifier, drafter, proposals["speculative_tokens"])
        with set_current_vllm_config(config):
            if target is None:
                with tempfile.NamedTemporaryFile() as rendezvous:
                    init_distributed_environment(
                        1, 0, f"file://{rendezvous.name}", 0, backend=current_platform.dist_backend
                    )
                    initialize_model_parallel(1, 1)
                target = get_model(vllm_config=config)
            config.compilation_config.static_forward_context.clear()
            model, parameters = load(target, config)
        tensors = {**parameters, **computed(model)}
        name = Path(drafter).name
        save_file({key: value.contiguous().clone() for key, value in tensors.items()}, f"{output}/{name}.safetensors")
        (Path(output) / f"{name}.json").write_text(json.dumps(facts(model, target)))


if __name__ == "__main__":
    main()
