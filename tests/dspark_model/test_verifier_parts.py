"""The verifier's frozen parts against transformers' own forward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_model.verifier import load_verifier_parts, transformers_state

CASES = ["qwen3-untied", "qwen3-tied", "llama-untied", "llama-tied"]


def make_model(name: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    family, tying = name.split("-")
    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    config = config_class(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=1e-3,
        tie_word_embeddings=tying == "tied",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).eval()
        with torch.no_grad():
            model.model.norm.weight.normal_(1.0, 0.5)
    return model


def states(model: torch.nn.Module, ids: torch.Tensor):
    """Logits, transformers' tuple of states, and the input of the final norm."""
    kept = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
    hook.remove()
    return output.logits, output.hidden_states, kept[0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shard", [None, "4KB"])
def test_logits_from_the_state_before_the_norm_equal_transformers(name, shard, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path, **({"max_shard_size": shard} if shard else {}))
    assert (tmp_path / "model.safetensors.index.json").exists() == bool(shard)
    parts = load_verifier_parts(tmp_path)
    logits, _, prenorm = states(model, torch.arange(9)[None])
    torch.testing.assert_close(parts.logits(prenorm), logits)
    assert torch.equal(parts.embed_VD, model.model.embed_tokens.weight)
    tied = torch.equal(parts.embed_VD, parts.lm_head_VD)
    assert tied == name.endswith("-tied")


def test_the_last_state_of_transformers_is_on_the_wrong_side_of_the_norm(tmp_path):
    """https://github.com/vllm-project/speculators/pull/313: targets without, or with twice, the final norm."""
    model = make_model("qwen3-untied")
    model.save_pretrained(tmp_path)
    parts = load_verifier_parts(tmp_path)
    logits, hidden_states, prenorm = states(model, torch.arange(9)[None])
    assert not torch.allclose(hidden_states[-1], prenorm)
    assert not torch.allclose(parts.logits(hidden_states[-1]), logits, atol=1e-2)
    torch.testing.assert_close(parts.logits(transformers_state(hidden_states, 3, prenorm)), logits)


def test_state_i_is_the_residual_stream_after_i_layers():
    model = make_model("llama-untied")
    ids = torch.arange(9)[None]
    inputs = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, kwargs: inputs.append((args or (kwargs["hidden_states"],))[0]),
                                        with_kwargs=True)
        for layer in model.model.layers
    ]  # fmt: skip
    _, hidden_states, prenorm = states(model, ids)
    for hook in hooks:
        hook.remove()
    for i, expected in enumerate([*inputs, prenorm]):
        assert torch.equal(transformers_state(hidden_states, i, prenorm), expected), i
    assert torch.equal(transformers_state(hidden_states, 0, prenorm), model.model.embed_tokens(ids))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("qwen3-untied").save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, **tensors: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    kept = {**load_file(path), **tensors}
    save_file({name: value for name, value in kept.items() if value is not None}, path)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named(folder, name):
    rewrite(folder, **{name: None})
    with pytest.raises(ValueError, match=f"no tensor '{name}'"):
        load_verifier_parts(folder)


def test_a_tensor_missing_from_the_index_is_named(tmp_path):
    make_model("llama-untied").save_pretrained(tmp_path, max_shard_size="4KB")
    index = tmp_path / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    del raw["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"no tensor 'lm_head\.weight'"):
        load_verifier_parts(tmp_path)


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="needs safetensors weights"):
        load_verifier_parts(folder)


def test_quantised_heads_are_refused(folder):
    rewrite(folder, **{"lm_head.weight": torch.zeros(31, 16, dtype=torch.int8)})
    with pytest.raises(ValueError, match=r"lm_head.weight is stored as torch.int8; a quantised tensor"):
        load_verifier_parts(folder)


def test_padded_rows_that_the_config_does_not_know_are_refused(folder):
    rewrite(folder, **{"lm_head.weight": torch.zeros(40, 16)})
    with pytest.raises(ValueError, match=r"lm_head.weight has 40 rows, config.json says 31"):
        load_verifier_parts(folder)


def test_moving_to_a_dtype_keeps_the_norm_in_full(folder):
    parts = load_verifier_parts(folder).to(torch.device("cpu"), torch.bfloat16)
    assert (parts.embed_VD.dtype, parts.lm_head_VD.dtype) == (torch.bfloat16, torch.bfloat16)
    assert parts.norm_D.dtype == torch.float32
    assert parts.logits(torch.zeros(2, 16)).dtype == torch.float32
