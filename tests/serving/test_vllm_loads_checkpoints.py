"""Checkpoints that we write, loaded by the installed vLLM's own DSpark loader: every tensor, mask and head is ours.

One subprocess of the serving environment loads all of them (`vllm_loader.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspark_model.checkpoint import save_checkpoint
from dspark_model.config import DrafterConfig
from dspark_model.drafter import DSparkDrafter
from dspark_model.verifier import VerifierParts, load_verifier_parts
from tasks.server_spec import ServerSpec, serve_environment, serving_python
from tests.tiny_verifier import HIDDEN, NUM_LAYERS, VOCAB, make_tiny_verifier

pytestmark = pytest.mark.serve

LOADER = Path(__file__).with_name("vllm_loader.py")
BASE = DrafterConfig(
    hidden_size=HIDDEN,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    verifier_vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    verifier_num_layers=NUM_LAYERS,
    block_size=4,
    aux_hidden_state_layer_ids=(1, 3),
    mask_token_id=VOCAB - 1,
    markov_rank=16,
    confidence_head=True,
    confidence_with_markov=True,
    sample_from_anchor=True,
    layer_kinds=("full", "full"),
    sliding_window=48,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=256,
)
CHOICES = {
    "full_vocabulary": {},
    "reduced_vocabulary": {"draft_vocab_size": 200},
    "sliding_then_full": {"layer_kinds": ("sliding", "full")},
    "all_sliding": {"layer_kinds": ("sliding", "sliding"), "draft_vocab_size": 200},
    "no_confidence_head": {"confidence_head": False, "confidence_with_markov": False},
    "confidence_without_markov": {"confidence_with_markov": False},
    "dflash_layout": {"sample_from_anchor": False, "draft_vocab_size": 200},
}


def make_drafter(choices: dict, parts: VerifierParts) -> DSparkDrafter:
    """Random weights that bfloat16 holds exactly, so that what is loaded can be compared exactly."""
    config = DrafterConfig.from_dict({**BASE.to_dict(), **choices})
    generator = torch.Generator().manual_seed(0)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[torch.randperm(VOCAB, generator=generator)[: config.draft_vocab_size]] = True
    drafter = DSparkDrafter(config, t2d)
    drafter.load_verifier(parts, torch.float32)
    with torch.no_grad():
        for value in drafter.trainable_state().values():
            value.copy_(torch.randn(value.shape, generator=generator).bfloat16())
    return drafter


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Per choice: our drafter, what vLLM's parameters are, and what it set."""
    folder = tmp_path_factory.mktemp("vllm")
    verifier = make_tiny_verifier(folder / "verifier")
    parts = load_verifier_parts(verifier)
    drafters = {name: make_drafter(choices, parts) for name, choices in CHOICES.items()}
    for name, drafter in drafters.items():
        save_checkpoint(
            folder / name,
            drafter,
            verifier_name_or_path=str(verifier),
            verifier_architectures=["Qwen3ForCausalLM"],
        )
    python = serving_python()
    spec = ServerSpec(python, verifier, "float32", 128, 4, 0.25, "plain")
    (folder / "out").mkdir()
    done = subprocess.run(
        [str(python), str(LOADER), str(verifier), str(folder / "out"), *(str(folder / name) for name in drafters)],
        env={**os.environ, **serve_environment(spec)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return {
        name: (
            drafter,
            load_file(folder / "out" / f"{name}.safetensors"),
            json.loads((folder / "out" / f"{name}.json").read_text()),
        )
        for name, drafter in drafters.items()
    }


def vllm_parameters(drafter: DSparkDrafter) -> dict[str, torch.Tensor]:
    """Our weights under vLLM's names, its projections stacked."""
    expected: dict[str, torch.Tensor] = {}
    for name, value in drafter.trainable_state().items():
        for part, whole in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("gate", "gate_up"), ("up", "gate_up")):
            if f".{part}_proj." in name and name.startswith("layers."):
                name = name.replace(f".{part}_proj.", f".{whole}_proj.")
                break
        name = f"model.{name}"
        expected[name] = torch.cat([expected[name], value]) if name in expected else value
    if drafter.config.reduced_vocab:
        expected["lm_head.weight"] = drafter.lm_head
        expected["draft_id_to_target_id"] = drafter.d2t
    return {name: value.detach() for name, value in expected.items()}


@pytest.mark.parametrize("name", CHOICES)
def test_vllm_holds_our_tensors_and_no_others(loaded, name):
    drafter, tensors, _ = loaded[name]
    expected = vllm_parameters(drafter)
    found = {key: value for key, value in tensors.items() if not key.startswith("computed.")}
    # The verifier's own are put in place of the first two; the last is a placeholder that DSpark does not use.
    not_read = {"model.embed_tokens.weight", "lm_head.weight", "model.mask_embedding"} - set(expected)
    assert set(found) - not_read == set(expected)
    for key, value in expected.items():
        rows = found[key][: value.shape[0]]  # vLLM pads vocabularies to a multiple of 64
        torch.testing.assert_close(rows.to(value.dtype), value, rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("name", CHOICES)
def test_vllm_computes_our_context_logits_and_confidence(loaded, name):
    drafter, tensors, _ = loaded[name]
    given = {key.removeprefix("computed."): value for key, value in tensors.items() if key.startswith("computed.")}
    previous = torch.arange(given["hidden"].shape[0])
    embedding = drafter.markov_head.embed(previous)
    expected = {
        "combined": drafter.fc(given["fused"]),
        "logits": drafter.logits(given["hidden"], embedding),
        "target_ids": drafter.verifier_ids_W,
    }
    if drafter.confidence_head is not None:
        expected["confidence"] = drafter.confidence_head(given["hidden"], embedding).sigmoid()
    assert set(given) == {"hidden", "fused", *expected}
    for key, value in expected.items():
        torch.testing.assert_close(given[key], value.detach(), rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.parametrize("name", CHOICES)
def test_vllm_runs_the_layers_and_slots_that_we_trained(loaded, name):
    drafter, _, facts = loaded[name]
    config = drafter.config
    sliding = [kind == "sliding" for kind in config.layer_kinds]
    assert facts["causal"] == sliding
    assert facts["sliding_window"] == [config.sliding_window if one else None for one in sliding]
    assert facts["sample_from_anchor"] == config.sample_from_anchor
    assert facts["block_size"] == config.block_size
    assert facts["mask_token_id"] == config.mask_token_id
    assert tuple(facts["aux_hidden_state_layer_ids"]) == config.aux_hidden_state_layer_ids
    assert facts["confidence_head"] == config.confidence_head
    assert facts["shares_embedding"]
    assert facts["shares_head"] == (not config.reduced_vocab)
